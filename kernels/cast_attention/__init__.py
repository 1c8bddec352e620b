"""Partial attention over entries in 8-bit floating point, to be merged with that over exact entries."""

from kvbench.kernels.cast_attention import torch
from kvbench.kernels.choice import operation

__all__ = ["cast_partial"]

cast_partial = operation(torch.cast_partial)
