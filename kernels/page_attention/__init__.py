"""Attention over the pages that each query selected; no other page is read."""

from kvbench.kernels.choice import operation
from kvbench.kernels.page_attention import torch

__all__ = ["page_attention"]

page_attention = operation(torch.page_attention)
