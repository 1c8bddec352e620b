"""Online softmax over blocks of codes; the scales go into logits and weights, so no exact copy of a row exists."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention.torch import QUERY_BLOCK, visible_rows

ROW_BLOCK = 2048
LEVELS = 127
SHIFT = 128
"""Queries are divided by it and scales multiplied: a power of two, so nothing is rounded, and codes of up to 127 do not
take float16's logits out of range."""


def quantize_rows(key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Codes and scales of new rows. [B, H, T, D] int8 and [B, H, T] float16"""
    rows: dict[str, Tensor] = {}
    for name, x in (("key", key), ("value", value)):
        scale = (x.abs().amax(-1).float() / LEVELS).to(torch.float16)
        divisor = scale.float().masked_fill(scale == 0, 1.0)  # rows of zeros stay zeros
        rows[name] = (x.float() / divisor[..., None]).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        rows[f"{name}_scale"] = scale
    return rows


def int8_attention(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Tensor:
    """Attention of the last T rows over all N rows of codes. [B, H_q, T, D_v]

    query: [B, H_q, T, D]. key, value: [B, H_kv, N, D] int8. scales: [B, H_kv, N].
    length: rows written so far, on the device, where the block is read whole so that shapes never change.
    """
    kv_heads = key.shape[1]
    blocks = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = query[:, :, start : start + QUERY_BLOCK]
        before = (key.shape[2] if length is None else length) - query.shape[2] + start
        grouped = block.unflatten(1, (kv_heads, -1)) / SHIFT  # [B, H_kv, G, t, D]
        blocks.append(
            _attend(grouped, before, key, value, key_scale, value_scale, scale, window, softcap, sinks)
        )
    return torch.cat(blocks, dim=2)


def _attend(
    query: Tensor, before: int | Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:
    """Attention of queries with `before` rows before them. [B, H_q, t, D_v]"""
    n_query = query.shape[3]
    top = query.new_full(query.shape[:4], -torch.inf, dtype=torch.float32)
    if sinks is not None:
        top = sinks.float().view(1, key.shape[1], -1, 1).expand_as(top).clone()
    total = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
    output = query.new_zeros((*query.shape[:4], value.shape[3]), dtype=torch.float32)
    first, stop = 0, key.shape[2]
    if not isinstance(before, Tensor):
        first, stop = 0 if window is None else max(0, before - window + 1), before + n_query
    for low in range(first, stop, ROW_BLOCK):
        rows = slice(low, min(low + ROW_BLOCK, stop))
        # One product per KV head: codes are not copied for the heads of their group.
        logits = (query.flatten(2, 3) @ key[:, :, rows].to(query.dtype).mT).float().unflatten(2, query.shape[2:4])
        logits = logits * (key_scale[:, :, None, None, rows].float() * (scale * SHIFT))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mask = visible_rows(before - low, n_query, rows.stop - low, window, None, 0, query.device)
        logits = logits.masked_fill(~mask, -torch.inf)
        peak = torch.maximum(top, logits.amax(-1)).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(logits - peak[..., None])
        shrink = torch.exp(top - peak)
        total = total * shrink + weights.sum(-1)
        weights = (weights * value_scale[:, :, None, None, rows].float()).to(query.dtype)
        mixed = (weights.flatten(2, 3) @ value[:, :, rows].to(query.dtype)).float().unflatten(2, query.shape[2:4])
        output = output * shrink[..., None] + mixed
        top = peak
    return (output / total[..., None]).to(query.dtype).flatten(1, 2)
