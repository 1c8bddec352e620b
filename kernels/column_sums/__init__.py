"""Attention mass that all queries put on every entry.

The sum is the score of H2O and similar methods, the maximum that of KVzip.
"""

from kvbench.kernels.choice import operation
from kvbench.kernels.column_sums import torch

__all__ = ["column_maxima", "column_sums"]

column_maxima = operation(torch.column_maxima)
column_sums = operation(torch.column_sums)
