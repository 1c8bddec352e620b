"""Partial attention over packed entries, to be merged with that over exact entries."""

from kvbench.kernels.choice import operation
from kvbench.kernels.packed_attention import torch

__all__ = ["packed_partial"]

packed_partial = operation(torch.packed_partial)
