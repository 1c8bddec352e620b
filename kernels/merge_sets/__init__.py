"""Neighbouring rows that were joined become one: a Gaussian-weighted mean around the row with the most attention."""

from kvbench.kernels.merge_sets.torch import MergedSets, merge_sets

__all__ = ["MergedSets", "merge_sets"]
