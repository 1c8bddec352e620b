"""Online softmax over blocks of codes in float32; scales and minima are applied to queries, logits and weights.

Keys in groups of tokens: q . (code * s + m) = (q * s) . code + q . m, once per group. Keys in groups of channels: the
scale of a token's group is a factor of its logit; for values, of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.kernels.pack.torch import Codes, code_planes
from kvbench.kernels.ragged_attention.torch import Partial

BLOCK = 2**19
"""Elements unpacked at a time, over all heads: 2 MiB, which fit into the cache of a core."""
QUERY_BLOCK = 32
"""Queries of a block: bounds the memory for queries times the scales of a block of entries."""


def packed_partial(
    query: Tensor, keys: Codes, values: Codes, *,
    scale: float, seen: int, window: int | None = None, positions: Tensor | None = None, start: int = 0,
    softcap: float | None = None,
) -> Partial:
    """Partial attention over packed entries that all precede the queries.

    query: [B, H_q, T, D]. keys: [B, H_kv, N or more, D] in groups of tokens or of channels; the first N are read.
    values: [B, H_kv, N, D_v] in groups of channels.
    positions: [B, H_kv, N], needed with a window if entries were dropped; None: entry 0 is the token `start`.
    """
    assert values.tokens == 1 and 1 in {keys.tokens, keys.channels}, "values by token, keys by token or by channel"
    batch, kv_heads, entries, _ = values.packed.shape
    n_query = query.shape[2]
    grouped = (query.float() * scale).unflatten(1, (kv_heads, -1))  # [B, H_kv, G, T, D]
    top = grouped.new_full(grouped.shape[:4], -torch.inf)
    total = torch.zeros_like(top)
    output = grouped.new_zeros((*grouped.shape[:4], values.width))
    first = 0 if window is None or positions is not None else max(0, seen - n_query - start - window + 1)
    size = max(1, BLOCK // (batch * kv_heads * max(keys.width, values.width)))
    for low, stop in _blocks(first, entries, keys.tokens, size):
        whole = stop if keys.tokens > size else -(-stop // keys.tokens) * keys.tokens  # or a part of one long group
        held = keys.slice(low, min(whole, keys.packed.shape[2]))
        key_planes, value_block = _planes(held), values.slice(low, stop)
        value_planes = _planes(value_block)
        for begin in range(0, n_query, QUERY_BLOCK):
            block = slice(begin, min(begin + QUERY_BLOCK, n_query))
            some = grouped[:, :, :, block]
            logits = _logits(some.flatten(2, 3), held, key_planes)[..., : stop - low].unflatten(2, some.shape[2:4])
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if window is not None:
                at = torch.arange(start + low, start + stop, device=query.device)
                at = at if positions is None else positions[:, :, None, None, low:stop]
                now = torch.arange(seen - n_query, seen, device=query.device)[block, None]
                logits = logits.masked_fill(now - at >= window, -torch.inf)
            peak = torch.maximum(top[..., block], logits.amax(-1)).clamp_min_(torch.finfo(torch.float32).min)
            weights = (logits - peak[..., None]).exp_()
            shrink = (top[..., block] - peak).exp_()
            total[..., block].mul_(shrink).add_(weights.sum(-1))
            mixed = _mix(weights.flatten(2, 3), value_block, value_planes).unflatten(2, some.shape[2:4])
            output[:, :, :, block].mul_(shrink[..., None]).add_(mixed)
            top[..., block] = peak
    lse = torch.where(total > 0, top + total.log(), -torch.inf)
    output /= total.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return Partial(output.flatten(1, 2), lse.flatten(1, 2))


def _blocks(first: int, entries: int, tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Blocks of about `size` entries: whole groups of tokens, or parts of one group."""
    low = first // tokens * tokens
    while low < entries:
        end = min(low + max(1, size // tokens) * tokens, entries)
        for part in range(low, end, max(size, tokens) if tokens <= size else size):
            yield part, min(part + size, end)
        low = end


def _planes(codes: Codes) -> list[tuple[int, Tensor]]:
    """The factor of each part of a code, and its planes. [planes, B, H_kv, n, w] float32"""
    return [(1 << below, planes.float()) for below, planes in code_planes(codes.packed, codes.bits, codes.width)]


def _by_plane(x: Tensor, planes: Tensor) -> Tensor:
    """Cut vectors in the same way as planes. [..., D] -> [planes, ..., w]"""
    count, width = planes.shape[0], planes.shape[-1]
    if count * width > x.shape[-1]:
        x = F.pad(x, (0, count * width - x.shape[-1]))
    cut: Tensor = x.unflatten(-1, (count, width))
    return cut.movedim(-2, 0)


def _logits(query: Tensor, keys: Codes, planes: list[tuple[int, Tensor]]) -> Tensor:
    """Products of queries with the keys of a block. query: [B, H_kv, M, D]. Returns [B, H_kv, M, n]"""
    scale, minimum = keys.scale.float(), keys.minimum.float()
    if keys.channels == 1:
        scaled = query[:, :, None] * scale[:, :, :, None]  # [B, H_kv, n/t, M, D]
        logits = (query @ minimum.transpose(-1, -2)).transpose(-1, -2)[..., None]  # [B, H_kv, n/t, M, 1]
        for factor, part in planes:
            code = part.unflatten(-2, (-1, keys.tokens)).transpose(-1, -2)  # [planes, B, H_kv, n/t, w, t]
            logits = torch.add(logits, (_by_plane(scaled, part) @ code).sum(0), alpha=factor)
        return logits.transpose(2, 3).flatten(-2)
    logits = query.unflatten(-1, (-1, keys.channels)).sum(-1) @ minimum.transpose(-1, -2)
    for factor, part in planes:
        for piece, groups in _pieces(part, keys):
            products = _by_plane(query, part)[..., piece] @ part[..., piece].transpose(-1, -2)
            logits = torch.add(logits, (products * _per_piece(scale, groups)).sum(0), alpha=factor)
    return logits


def _mix(weights: Tensor, values: Codes, planes: list[tuple[int, Tensor]]) -> Tensor:
    """Weighted sums of the values of a block. weights: [B, H_kv, M, n]. Returns [B, H_kv, M, D]"""
    scale, minimum = values.scale.float(), values.minimum.float()
    mixed = (weights @ minimum)[..., None].expand(-1, -1, -1, -1, values.channels).flatten(-2)
    for factor, part in planes:
        pieces = [
            (weights * _per_piece(scale, groups)) @ part[..., piece]  # [planes, B, H_kv, M, u]
            for piece, groups in _pieces(part, values)
        ]
        parts = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
        mixed = torch.add(mixed, parts.movedim(0, -2).flatten(-2)[..., : values.width], alpha=factor)
    return mixed


def _pieces(planes: Tensor, codes: Codes) -> Iterator[tuple[slice, list[int]]]:
    """Ranges of columns within which each plane has a single group of channels, and that group by plane."""
    count, width = planes.shape[0], planes.shape[-1]
    size = math.gcd(width, codes.channels)
    last = codes.width // codes.channels - 1
    for begin in range(0, width, size):
        yield slice(begin, begin + size), [min((p * width + begin) // codes.channels, last) for p in range(count)]


def _per_piece(scale: Tensor, groups: list[int]) -> Tensor:
    """The scales of the groups of one range. [B, H_kv, n, D/c] -> [planes or 1, B, H_kv, 1, n]"""
    if scale.shape[-1] == 1:
        return scale.movedim(-1, 0)[..., None, :]
    return torch.stack([scale[..., group] for group in groups])[..., None, :]
