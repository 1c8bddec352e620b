"""Attention of tokens at any positions of a prompt, each over the entries up to its own position."""

from kvbench.kernels.choice import operation
from kvbench.kernels.scattered_attention import torch

__all__ = ["scattered_attention"]

scattered_attention = operation(torch.scattered_attention)
