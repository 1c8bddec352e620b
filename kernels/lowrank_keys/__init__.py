"""Keys of all heads of a layer as one low-rank product, and some of them back where attention reads them."""

from kvbench.kernels.choice import operation
from kvbench.kernels.lowrank_keys import torch

__all__ = ["factor_keys", "restore_keys"]

factor_keys = operation(torch.factor_keys)
restore_keys = operation(torch.restore_keys)
