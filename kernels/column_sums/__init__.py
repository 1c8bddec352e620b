"""Attention mass that every query put on every row: the score of H2O and its family."""

from kvbench.kernels.column_sums.torch import column_sums

__all__ = ["column_sums"]
