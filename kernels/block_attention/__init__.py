"""Attention of a prompt over the blocks and the single columns that were chosen; no other entry is read."""

from kvbench.kernels.block_attention import torch
from kvbench.kernels.choice import operation

__all__ = ["block_attention"]

block_attention = operation(torch.block_attention)
