"""The blocks in which a matrix that is too large for memory is computed: their size, and products in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Elements in memory at a time, on a CPU."""
GPU_BLOCKS = 16
"""Times as many on a GPU, where small blocks cost millions of launches for a long prompt."""


def fit_block(elements: int, like: Tensor) -> int:
    """How many items of so many elements each make a block on the tensor's device; at least one."""
    return max(1, BLOCK_ELEMENTS * (GPU_BLOCKS if like.is_cuda else 1) // max(1, elements))


def float_products(query: Tensor, keys: Tensor) -> Tensor:
    """Products of queries and keys in float32; of 16 bits, in blocks of keys. [..., n, N] float32

    query: [..., n, D]. keys: [..., N, D].

    A product in 16 bits is rounded to them: 800 in bfloat16 to a multiple of 4, which a softmax of logits that large
    turns into other weights. In blocks, because a float32 copy of all keys takes twice their memory.
    """
    if keys.itemsize > 2:
        return (query @ keys.mT).float()
    if keys.dim() == query.dim() > 2 and keys.shape[-3] == 1:  # heads of a group, which would take a copy each
        shared: Tensor = float_products(query.flatten(-3, -2), keys.squeeze(-3)).unflatten(-2, query.shape[-3:-1])
        return shared
    query = query.float()
    size = fit_block(keys.shape[:-2].numel() * keys.shape[-1], keys)
    if keys.shape[-2] <= size:
        return query @ keys.float().mT
    leading = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
    products = query.new_empty((*leading, query.shape[-2], keys.shape[-2]))
    for low in range(0, keys.shape[-2], size):
        part = slice(low, low + size)
        products[..., part] = query @ keys[..., part, :].float().mT
    return products
