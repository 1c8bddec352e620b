"""Partial attention over heads with unequal numbers of entries, and merging of partial results."""

from kvbench.kernels.choice import operation
from kvbench.kernels.ragged_attention import torch
from kvbench.kernels.ragged_attention.torch import Partial

__all__ = ["Partial", "dense_partial", "merge_partials", "ragged_partial"]

dense_partial = operation(torch.dense_partial)
merge_partials = operation(torch.merge_partials)
ragged_partial = operation(torch.ragged_partial)
