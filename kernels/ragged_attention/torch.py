"""Partial attention with its log-sum-exp, in float32, by KV head, or for all at once if they have equally many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.blocks import BLOCK_ELEMENTS
from kvbench.kernels.dense_attention.torch import QUERY_BLOCK, visible_entries


@dataclass(frozen=True)
class Partial:
    """Attention over some of the entries: the normalized output and the log of its normalizer."""

    output: Tensor  # [B, H_q, T, D_v] float32
    lse: Tensor  # [B, H_q, T] float32; -inf if no entry is visible


def ragged_partial(
    query: Tensor, keys: Tensor, values: Tensor, offsets: Tensor, counts: list[int], *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, bias: Tensor | None = None,
) -> Partial:
    """Partial attention over flat entries that all precede the queries.

    query: [B, H_q, T, D]. keys: [R, D], values: [R, D_v]: heads one after the other, counts[b * H_kv + h] entries each.
    positions: [R], needed with a window. bias: [R] float32, added to the logits after scale and soft cap.
    offsets: [B * H_kv + 1], the cumulative counts on the device, for Triton.
    """
    del offsets  # the same as counts
    batch, _, n_query, _ = query.shape
    kv_heads = len(counts) // batch
    grouped = query.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # [B * H_kv, G, T, D]
    output = query.new_zeros((*grouped.shape[:3], values.shape[1]), dtype=torch.float32)
    lse = query.new_full(grouped.shape[:3], -torch.inf, dtype=torch.float32)
    if n_query == 1 and window is None and counts[0] and len(set(counts)) == 1:  # one product for all heads
        keys, values = (x.unflatten(0, (len(counts), -1)) for x in (keys, values))  # [B * H_kv, n, D]
        bias = None if bias is None else bias.view(len(counts), 1, -1)
        output[:, :, 0], lse[:, :, 0] = _attend(grouped[:, :, 0], keys, values, None, scale, softcap, bias)
        return _by_batch(output, lse, batch)
    start = 0
    for head, count in enumerate(counts):
        entries = slice(start, start + count)
        start += count
        if count == 0:
            continue
        for low in range(0, n_query, QUERY_BLOCK):
            block = slice(low, min(low + QUERY_BLOCK, n_query))
            mask = None
            if window is not None:
                assert positions is not None, "a window over ragged entries needs their positions"
                logical = (torch.arange(n_query, device=query.device) + (seen - n_query))[block]
                mask = logical[:, None] - positions[entries] < window  # [t, n]
            output[head, :, block], lse[head, :, block] = _attend(
                grouped[head, :, block], keys[entries], values[entries], mask, scale, softcap,
                None if bias is None else bias[entries],
            )
    return _by_batch(output, lse, batch)


def _by_batch(output: Tensor, lse: Tensor, batch: int) -> Partial:
    """The partial attention by query head. From [B * H_kv, G, ...] to [B, H_q, ...]"""
    output, lse = (x.unflatten(0, (batch, -1)).flatten(1, 2) for x in (output, lse))
    return Partial(output, lse)


def dense_partial(
    query: Tensor, keys: Tensor, values: Tensor, *,
    scale: float, seen: int | Tensor, window: int | None = None, positions: Tensor | None = None,
    softcap: float | None = None, length: Tensor | None = None,
) -> Partial:
    """Partial attention over a dense tail whose last T entries are the queries' own; see `dense_attention`."""
    n_query, n_key = query.shape[2], keys.shape[2]
    batch, kv_heads = keys.shape[:2]
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, H_kv, G, T, D]
    if n_query == 1 and keys.numel() <= BLOCK_ELEMENTS:  # one product for all heads; 16 bits are copied to float32
        visible = None
        if window is not None or length is not None:
            before = n_key - 1 if length is None else length - 1
            visible = visible_entries(before, 1, n_key, window, positions, seen - 1, query.device)
        of_all, lse_of_all = _attend(grouped[:, :, :, 0], keys, values, visible, scale, softcap)
        return Partial(of_all.flatten(1, 2)[:, :, None], lse_of_all.flatten(1, 2)[:, :, None])
    output = query.new_empty((*grouped.shape[:4], values.shape[3]), dtype=torch.float32)
    lse = query.new_empty(grouped.shape[:4], dtype=torch.float32)
    for low in range(0, n_query, QUERY_BLOCK):
        block = slice(low, min(low + QUERY_BLOCK, n_query))
        before = n_key - n_query + low if length is None else length - n_query + low
        mask = visible_entries(before, block.stop - low, n_key, window, positions, seen - n_query + low, query.device)
        masks = mask.expand(batch, kv_heads, -1, -1)  # [B, H_kv, t, n]
        for b in range(batch):
            for h in range(kv_heads):  # a batched product would copy keys for every query head of the group
                output[b, h, :, block], lse[b, h, :, block] = _attend(
                    grouped[b, h, :, block], keys[b, h], values[b, h], masks[b, h], scale, softcap
                )
    return Partial(output.flatten(1, 2), lse.flatten(1, 2))


def merge_partials(parts: list[Partial], sinks: Tensor | None = None) -> Tensor:
    """Attention over the entries of all parts and a learned sink logit per head. [B, H_q, T, D_v] float32"""
    lse = torch.stack([part.lse for part in parts])  # [P, B, H_q, T]
    if sinks is not None:
        lse = torch.cat([lse, sinks.float().view(1, 1, -1, 1).expand_as(lse[:1])])
    weights = lse.softmax(0).masked_fill(lse == -torch.inf, 0.0)  # NaN where no part has a visible entry
    return sum((weights[i, ..., None] * part.output for i, part in enumerate(parts)), start=torch.zeros(()))


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention and its log-sum-exp in float32; queries without a visible entry give zero and -inf.

    query: [..., D] with the leading dimensions of the keys first. keys: [..., n, D]. values: [..., n, D_v].
    """
    if mask is None and softcap is None and bias is None and _flash_takes(query, keys, values):
        return _attend_by_flash(query, keys, values, scale)
    logits = query.float() @ keys.float().mT * scale  # in 16 bits, large logits lose whole units
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(-1)
    # Every query sees an entry, unless a mask or an infinite bias hides all.
    shift = lse if mask is None and bias is None else lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.exp(logits - shift[..., None])
    return (weights.to(values.dtype) @ values).float(), lse


def _flash_takes(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch's flash attention for CPUs supports these tensors."""
    same = query.dtype == keys.dtype == values.dtype and keys.shape[-1] == values.shape[-1]
    return same and query.device.type == "cpu" and keys.stride(-1) == values.stride(-1) == 1


def _attend_by_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `_attend`, in one pass over the entries, and two to four times as fast in 16 bits or over few entries."""
    keys, values = (x[(None,) * (4 - x.dim())] for x in (keys, values))
    packed = query.reshape(*keys.shape[:2], -1, query.shape[-1])  # heads of a group take the place of queries
    # scaled_dot_product_attention calls this operator and drops the log-sum-exp; no public function returns it.
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    output, lse = attend(packed, keys, values, scale=scale)
    return output.float().reshape(query.shape), lse.reshape(query.shape[:-1])
