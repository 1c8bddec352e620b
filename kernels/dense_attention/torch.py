"""Attention by SDPA, or with explicit logits in blocks of queries if SDPA cannot express it (soft caps, sinks).

For several queries, this module and not torch chooses SDPA's kernel, and records it: as `dense_attention.prompt` for
whole prompts, as `dense_attention.chunk` for queries after other entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kvbench.kernels.blocks import float_products
from kvbench.kernels.choice import note

QUERY_BLOCK = 256
"""Queries of a block, so that masks are [256, N] and never [T, N]."""
WITHOUT_CUDNN = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""SDPA's kernels without cuDNN's, which builds a plan for every key length, 23 to 37 ms each."""
FLASH_WIDTH = 256
"""Most channels that SDPA's flash attention supports on a GPU."""


def has_cudnn(query: Tensor) -> bool:
    """Whether cuDNN could take a call of scaled_dot_product_attention."""
    return query.is_cuda


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    seen: int | Tensor,
    window: int | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    length: Tensor | None = None,
) -> Tensor:
    """Attention output of the last T tokens over all N entries. [B, H_q, T, D_v]

    query: [B, H_q, T, D]. keys: [B, H_kv, N, D]. values: [B, H_kv, N, D_v]; the last T entries are the queries' own.
    seen: tokens so far. positions: [B, H_kv, N], needed with a window if entries were dropped.
    length: entries written so far, as a tensor on the device (`seen` is one then, too): the whole block is read, so
        that shapes do not change between steps.
    """
    n_query, n_key = query.shape[2], keys.shape[2]
    before = n_key - n_query
    narrow = window is not None and (positions is not None or n_key > window or length is not None)
    special = softcap is not None or sinks is not None
    if not causal and narrow:
        raise NotImplementedError("bidirectional attention with a window")
    if length is None and not narrow and not special:
        if n_query == 1:
            if not has_cudnn(query):  # the context costs as much as a short attention
                return grouped_sdpa(query, keys, values, None, scale)
            with sdpa_kernel(list(WITHOUT_CUDNN)):
                return grouped_sdpa(query, keys, values, None, scale)
        if flash_takes(query, values) and (query.is_cuda or before == 0 or not causal):
            return attend_by_flash(query, keys, values, scale=scale, causal=causal)
    flash = flash_takes(query, values) and not query.is_cuda  # on a GPU it supports no mask
    if n_query > 1:
        note(label(n_query, n_key), "torch" if special else "sdpa_flash" if flash else "sdpa_math")
    blocks = []
    several = SDPBackend.FLASH_ATTENTION if flash else SDPBackend.MATH
    with sdpa_kernel(list(WITHOUT_CUDNN) if n_query == 1 else several):
        for start in range(0, n_query, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n_query)
            low, high = 0, n_key
            if causal and length is None:
                high = before + stop
                if narrow and positions is None:
                    assert window is not None
                    low = max(0, before + start - window + 1)
            mask = None
            if causal:
                mask = visible_entries(
                    (before - low if length is None else length - n_query) + start, stop - start, high - low,
                    window if narrow else None, None if positions is None else positions[:, :, low:high],
                    seen - n_query + start, query.device,
                )
            block, k, v = query[:, :, start:stop], keys[:, :, low:high], values[:, :, low:high]
            if special:
                blocks.append(explicit(block, k, v, mask, scale, softcap, sinks))
            else:
                blocks.append(grouped_sdpa(block, k, v, mask, scale))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def label(n_query: int, n_key: int) -> str:
    """The name under which the kernel for several queries is recorded."""
    return f"dense_attention.{'prompt' if n_query == n_key else 'chunk'}"


def flash_takes(query: Tensor, values: Tensor) -> bool:
    """Whether SDPA's flash attention supports these tensors: on a GPU, 16 bits and up to 256 channels."""
    fits = not query.is_cuda or (query.itemsize == 2 and query.shape[3] <= FLASH_WIDTH)
    return fits and query.shape[3] == values.shape[3]


def attend_by_flash(query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool) -> Tensor:
    """Attention of the last T tokens by SDPA's flash attention and no other kernel; records it.

    On a CPU, causal attention requires T = N, because the mask of its flash attention is aligned to the first entry.
    """
    n_query, n_key = query.shape[2], keys.shape[2]
    note(label(n_query, n_key), "sdpa_flash")
    lower_right = causal_lower_right(n_query, n_key) if causal and n_query < n_key else None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            query, keys, values, lower_right, scale=scale, is_causal=causal and lower_right is None, enable_gqa=True
        )


def grouped_sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """SDPA over grouped heads; mask: [T, N] or [B, H_kv, T, N]. [B, H_q, T, D_v]"""
    batch, heads, n_query, width = query.shape
    kv_heads = keys.shape[1]
    if n_query == 1:
        # The heads of a group take the place of queries: one pass over their keys, and on a CPU in bfloat16 six to ten
        # times as fast as one query at a time.
        packed = query.reshape(batch, kv_heads, heads // kv_heads, width)
        output = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
        return output.reshape(batch, heads, 1, values.shape[3])
    if mask is not None and mask.dim() == 4:  # one mask per KV head: one per query head
        mask = mask.repeat_interleave(heads // kv_heads, dim=1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)


def visible_entries(
    before: int | Tensor, n_query: int, n_key: int, window: int | None, positions: Tensor | None,
    first: int | Tensor, device: torch.device,
) -> Tensor:
    """Mask of the entries that queries attend to. [T, N] or, with positions, [B, H_kv, T, N]

    Entries are in the order of arrival, so a query attends to the entries before it. A window counts tokens: the
    distance between entries, or between positions if entries were dropped.

    before: entries before the first query's own. first: position of the first query. positions: [B, H_kv, N].
    """
    entry = torch.arange(n_key, device=device)
    query = torch.arange(n_query, device=device)[:, None]
    mask = entry <= query + before
    if window is None:
        return mask
    if positions is None:
        return mask & (query + before - entry < window)
    return mask & (query + first - positions[:, :, None, :] < window)


def hide_unseen(
    logits: Tensor, before: int | Tensor, window: int | None, positions: Tensor | None, first: int | Tensor
) -> Tensor:
    """Logits, -inf where a query does not attend to an entry. [B, H_kv, G, T, N]; arguments of `visible_entries`."""
    n_query, n_key = logits.shape[-2:]
    if n_query == 1 and window is None and not isinstance(before, Tensor) and before >= n_key - 1:
        return logits  # one query, which attends to all entries
    mask = visible_entries(before, n_query, n_key, window, positions, first, logits.device)
    return logits.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)


def explicit(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one block of queries with explicit logits in float32. [B, H_q, t, D_v]"""
    kv_heads, n_key = keys.shape[1:3]
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, t, D]
    logits = float_products(grouped, keys[:, :, None]) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~(mask if mask.dim() == 2 else mask[:, :, None]), -torch.inf)
    if sinks is not None:
        column = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], dim=-1)
    weights: Tensor = logits.softmax(-1)[..., :n_key].to(values.dtype)
    output: Tensor = weights @ values[:, :, None]
    return output.flatten(1, 2)
