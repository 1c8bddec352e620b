"""Partial attention over codes of uneven levels, to be merged with that over exact entries."""

from kvbench.kernels.choice import operation
from kvbench.kernels.level_attention import torch
from kvbench.kernels.level_attention.torch import Levels, decode_levels

__all__ = ["Levels", "decode_levels", "level_partial"]

level_partial = operation(torch.level_partial)
