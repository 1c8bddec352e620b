"""What every query gave every row: in all, the score of H2O and its family, and at most, the score of KVzip."""

from kvbench.kernels.choice import operation
from kvbench.kernels.column_sums import torch

__all__ = ["column_maxima", "column_sums"]

column_maxima = operation(torch.column_maxima)
column_sums = operation(torch.column_sums)
