"""Merges runs of adjacent entries: a Gaussian-weighted mean around the entry with the most attention (KVMerger)."""

from kvbench.kernels.choice import operation
from kvbench.kernels.merge_sets import torch
from kvbench.kernels.merge_sets.torch import MergedSets

__all__ = ["MergedSets", "merge_sets"]

merge_sets = operation(torch.merge_sets)
