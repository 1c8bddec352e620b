"""Attention of new queries over one dense block of rows, causal from the bottom right."""

from kvbench.kernels.dense_attention.torch import dense_attention

__all__ = ["dense_attention"]
