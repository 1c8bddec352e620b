"""Attention of new queries over one dense block of entries, with the causal mask aligned to the last entry."""

from kvbench.kernels.choice import operation
from kvbench.kernels.dense_attention import torch

__all__ = ["dense_attention"]

dense_attention = operation(torch.dense_attention)
