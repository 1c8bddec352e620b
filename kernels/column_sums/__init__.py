"""What every query gave every row.

In all, the score of H2O and its family; at most, that of KVzip; and squared, of which variances over queries are made.
"""

from kvbench.kernels.choice import operation
from kvbench.kernels.column_sums import torch

__all__ = ["column_maxima", "column_squares", "column_sums"]

column_maxima = operation(torch.column_maxima)
column_squares = operation(torch.column_squares)
column_sums = operation(torch.column_sums)
