"""Scores of stored entries that several methods use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbench.kernels.window_scores import window_scores
from kvbench.kernels.window_scores.torch import window_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvbench.step import Step
    from kvbench.store.layer import LayerKV


def plain_keys(kv: LayerKV, step: Step, start: int = 0, stop: int | None = None) -> Tensor:
    """Keys of the dense block before rotation, of some entries. [B, H_kv, n, D] float32"""
    keys = kv.keys[:, :, start:stop].float()
    positions = kv.logical_positions()[..., start:stop].expand(keys.shape[:3])
    by_head = keys.flatten(0, 1)[:, None]  # positions differ by head after an eviction
    return step.rope.rotate(by_head, positions.flatten(0, 1), inverse=True).view_as(keys)


def roll_queries(kv: LayerKV, step: Step, count: int) -> None:
    """Keep the last `count` queries in `kv.state["queries"]`, in place; zeros before the first. [B, H_q, count, D]"""
    if "queries" not in kv.state:
        kv.state["queries"] = step.query.new_zeros((*step.query.shape[:2], count, step.query.shape[3]))
    held, new = kv.state["queries"], step.query[:, :, -count:]
    kept = count - new.shape[2]
    held[:, :, :kept] = held[:, :, count - kept :].clone()
    held[:, :, kept:] = new


def attention_mass_of(queries: Tensor, kv: LayerKV, step: Step, heads: Sequence[int] | None = None) -> Tensor:
    """Attention that each entry receives, summed over the last queries seen so far. [B, H_q, n] float32

    queries: [B, H_q, w, D]. heads: the query heads to score; None: all.
    """
    keys, positions, sinks = kv.keys, kv.positions, step.sinks
    if heads is not None:
        read = [x * keys.shape[1] // queries.shape[1] for x in heads]  # their KV heads
        queries, keys = queries[:, heads], keys[:, read]
        positions = None if positions is None else positions[:, read]
        sinks = None if sinks is None else sinks[heads]
    return window_scores(
        queries, keys, scale=step.scale, seen=step.seen, window=step.window, positions=positions, softcap=step.softcap,
        sinks=sinks,
    )


def window_weights_of(queries: Tensor, kv: LayerKV, step: Step, head: slice = slice(None)) -> Iterator[Tensor]:
    """Attention of each of the last queries to blocks of entries, of some KV heads. [B, H_kv, G, w, n] float32

    queries: [B, H_q, w, D].
    """
    group = queries.shape[1] // kv.keys.shape[1]
    by_head = queries.unflatten(1, (-1, group))[:, head].flatten(1, 2)
    sinks = None if step.sinks is None else step.sinks.unflatten(0, (-1, group))[head].flatten()
    positions = None if kv.positions is None else kv.positions[:, head]
    return window_weights(
        by_head, kv.keys[:, head], scale=step.scale, seen=step.seen, window=step.window, positions=positions,
        softcap=step.softcap, sinks=sinks,
    )
