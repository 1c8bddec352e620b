"""Attention mass that the last queries put on every entry: the score of SnapKV and similar methods."""

from kvbench.kernels.choice import operation
from kvbench.kernels.window_scores import torch

__all__ = ["window_scores"]

window_scores = operation(torch.window_scores)
