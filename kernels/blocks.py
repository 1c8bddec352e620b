"""The size of the blocks in which a matrix that is too large for memory is computed."""

from __future__ import annotations

from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Elements in memory at a time, on a CPU."""
GPU_BLOCKS = 16
"""Times as many on a GPU, where small blocks cost millions of launches for a long prompt."""


def fit_block(elements: int, like: Tensor) -> int:
    """How many items of so many elements each make a block on the tensor's device; at least one."""
    return max(1, BLOCK_ELEMENTS * (GPU_BLOCKS if like.is_cuda else 1) // max(1, elements))
