"""Attention over heads that kept unequal numbers of rows, with what it takes to merge it with a dense tail."""

from kvbench.kernels.ragged_attention.torch import Partial, dense_partial, merge_partials, ragged_partial

__all__ = ["Partial", "dense_partial", "merge_partials", "ragged_partial"]
