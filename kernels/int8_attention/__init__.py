"""Attention over entries in 8 bits, with one scale per token and head."""

from kvbench.kernels.choice import operation
from kvbench.kernels.int8_attention import torch

__all__ = ["int8_attention", "quantize_rows"]

int8_attention = operation(torch.int8_attention)
quantize_rows = operation(torch.quantize_rows)
