"""Keys of all heads of a layer as one low-rank product, and some of them back."""

from kvbench.kernels.lowrank_keys.torch import factor_keys, rebuild_keys

__all__ = ["factor_keys", "rebuild_keys"]
