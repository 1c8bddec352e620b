"""Low-rank factors of a layer's keys over all heads, and selected keys rebuilt where attention reads them."""

from kvbench.kernels.choice import operation
from kvbench.kernels.lowrank_keys import torch

__all__ = ["factor_keys", "restore_keys"]

factor_keys = operation(torch.factor_keys)
restore_keys = operation(torch.restore_keys, writes="block")
