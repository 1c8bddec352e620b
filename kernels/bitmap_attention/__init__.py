"""Partial attention over entries that kept only their largest elements, to be merged with other partial results."""

from kvbench.kernels.bitmap_attention import torch
from kvbench.kernels.bitmap_attention.torch import SparseEntries
from kvbench.kernels.choice import operation

__all__ = ["SparseEntries", "bitmap_partial", "compress"]

bitmap_partial = operation(torch.bitmap_partial)
compress = operation(torch.compress)
