"""Attention over rows of which only the largest elements were kept, with what it takes to merge it with others."""

from kvbench.kernels.bitmap_attention import torch
from kvbench.kernels.bitmap_attention.torch import SparseRows
from kvbench.kernels.choice import operation

__all__ = ["SparseRows", "bitmap_partial", "compress"]

bitmap_partial = operation(torch.bitmap_partial)
compress = operation(torch.compress)
