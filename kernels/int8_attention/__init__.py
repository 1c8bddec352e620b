"""Attention over rows in 8 bits, one scale per token and head."""

from kvbench.kernels.int8_attention.torch import int8_attention, quantise_rows

__all__ = ["int8_attention", "quantise_rows"]
