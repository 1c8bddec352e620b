"""Attention over the pages that each query selected: they are gathered, nothing else is read."""

from kvbench.kernels.page_attention.torch import page_attention

__all__ = ["page_attention"]
