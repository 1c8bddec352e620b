"""Attention over packed rows, with what it takes to merge it with rows held exactly."""

from kvbench.kernels.packed_attention.torch import packed_partial

__all__ = ["packed_partial"]
