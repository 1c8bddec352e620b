"""Online softmax over blocks of codes; scales are applied to logits and weights, so nothing is dequantized."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.dense_attention.torch import QUERY_BLOCK, hide_unseen

ENTRY_BLOCK = 2048
LEVELS = 127


def quantize_rows(key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Codes and scales of new entries. [B, H, T, D] int8 and [B, H, T] float16"""
    entries: dict[str, Tensor] = {}
    for name, x in (("key", key), ("value", value)):
        scale = (x.abs().amax(-1).float() / LEVELS).to(torch.float16)
        divisor = scale.float().masked_fill(scale == 0, 1.0)  # entries of zeros stay zeros
        entries[name] = (x.float() / divisor[..., None]).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        entries[f"{name}_scale"] = scale
    return entries


def int8_attention(
    query: Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None, length: Tensor | None = None,
) -> Tensor:
    """Attention of the last T tokens over all N entries. [B, H_q, T, D_v]

    query: [B, H_q, T, D]. key, value: [B, H_kv, N, D] int8. scales: [B, H_kv, N].
    length: entries written so far, as a tensor on the device: the whole block is read, so that shapes do not change.
    """
    kv_heads = key.shape[1]
    blocks = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        block = query[:, :, start : start + QUERY_BLOCK]
        before = (key.shape[2] if length is None else length) - query.shape[2] + start
        grouped = block.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, t, D]
        blocks.append(
            _attend(grouped, before, key, value, key_scale, value_scale, scale, window, softcap, sinks)
        )
    return torch.cat(blocks, dim=2)


def _attend(
    query: Tensor, before: int | Tensor, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor,
    scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:
    """Attention of queries with `before` entries before the first one's own. [B, H_q, t, D_v]"""
    n_query = query.shape[3]
    top = query.new_full(query.shape[:4], -torch.inf, dtype=torch.float32)
    if sinks is not None:
        top = sinks.float().view(1, key.shape[1], -1, 1).expand_as(top).clone()
    total = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
    output = query.new_zeros((*query.shape[:4], value.shape[3]), dtype=torch.float32)
    first, stop = 0, key.shape[2]
    if not isinstance(before, Tensor):
        first, stop = 0 if window is None else max(0, before - window + 1), before + n_query
    for low in range(first, stop, ENTRY_BLOCK):
        entries = slice(low, min(low + ENTRY_BLOCK, stop))
        # One product per KV head: codes are not copied for the heads of their group.
        logits = (query.flatten(2, 3).float() @ key[:, :, entries].float().mT).unflatten(2, query.shape[2:4])
        logits = logits * (key_scale[:, :, None, None, entries].float() * scale)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = hide_unseen(logits, before - low, window, None, 0)
        peak = torch.maximum(top, logits.amax(-1)).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(logits - peak[..., None])
        shrink = torch.exp(top - peak)
        total = total * shrink + weights.sum(-1)
        # In float32: of many entries, weights times scales are less than float16's least number.
        weights = weights * value_scale[:, :, None, None, entries].float()
        mixed = (weights.flatten(2, 3) @ value[:, :, entries].float()).unflatten(2, query.shape[2:4])
        output = output * shrink[..., None] + mixed
        top = peak
    return (output / total[..., None]).to(query.dtype).flatten(1, 2)
