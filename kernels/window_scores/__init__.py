"""Attention mass that the last queries put on every row: the score of SnapKV and its family."""

from kvbench.kernels.window_scores.torch import window_scores

__all__ = ["window_scores"]
