"""Checks the record of a prompt that took over entries of other prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.runs.examples import Made
from kvbench.runs.journal import CacheBytes, Effect, Line, ReuseLine, Times, TokenCounts

LEAST_PASS_S = 1e-5
"""Seconds of a forward pass: launching its operations takes longer on every machine."""


def list_wrong_reuse(
    found: ReuseLine, tokens: TokenCounts, effect: Effect, times: Times | None, size: CacheBytes
) -> Iterator[str]:
    """Every token is taken over, computed or left out; chunks are made in the prefill."""
    layers = len(effect.entries_kept)
    entry = size.full_bytes / max(1, tokens.context * layers)  # bytes of a token in a layer
    if found.tokens != tokens.context * layers:
        yield f"it reuses {found.tokens} tokens of {layers} layers of {tokens.context}"
    for name, value, counter in (
        ("reused", found.reused, "entries_reused"), ("computed", found.computed, "tokens_computed"),
    ):
        if value != effect.facts.get(counter, 0):
            yield f"it has {value} tokens {name}, and {effect.facts.get(counter, 0)} {counter}"
    known = found.reused + found.computed + effect.facts.get("entries_dropped", 0)
    if found.computed < layers:
        yield f"it computes {found.computed} tokens in {layers} layers, and the prompt's last token is always computed"
    if found.reused > found.tokens or known < found.tokens:
        yield f"{found.reused} tokens reused and {found.computed} computed are not {found.tokens}"
    chunks = found.hits + found.misses
    if found.mismatched > found.misses or found.refused > found.misses or chunks > tokens.context:
        yield f"{tokens.context} tokens of {found.hits} hits, {found.misses} misses and {found.refused} refused chunks"
    if found.reused and (not chunks or found.moved_bytes < found.reused * entry or not found.chunk_bytes):
        yield (
            f"{found.reused} tokens of {chunks} chunks in {found.chunk_bytes} bytes moved {found.moved_bytes} bytes, "
            f"and a token takes {entry:g} in a layer"
        )
    if found.loaded:
        yield f"{found.loaded} chunks are of earlier runs (--chunk-store), and a submitted run computes its own"
    if found.reused and not found.misses:
        yield f"it takes over {found.reused} tokens, and computed no chunk: a sample begins with an empty store"
    if found.moved_bytes > size.full_bytes:
        yield f"it moved {found.moved_bytes} bytes into a cache of {size.full_bytes}"
    if found.build_s < found.misses * LEAST_PASS_S:
        yield f"{found.misses} chunks were computed in {found.build_s:g} s"
    if times is not None and times.prefill_s is not None and found.build_s > times.prefill_s - LEAST_PASS_S:
        yield f"its chunks took {found.build_s:g} s of a prefill of {times.prefill_s:g} s, which also runs the prompt"


def check_chunks(lines: Sequence[Line], made: Sequence[Made]) -> None:
    """Check that the chunks of a sample hold the tokens that were taken from them.

    A chunk may be used at several places, but only for tokens that it has.

    Raises:
        RefusedError: they are smaller than the different tokens that were moved.
    """
    for x in lines:
        if x.reuse is None or x.tokens is None or x.bytes is None or not x.tokens.context:
            continue
        encoded = made[x.index][1]
        token = x.bytes.full_bytes / x.tokens.context
        left, least = x.reuse.moved_bytes / token, 0
        for _, places in Counter([*encoded.context, *encoded.turns[0].first]).most_common():
            if left < 1:
                break
            left, least = left - places, least + 1
        if x.reuse.chunk_bytes < int(least * token):
            raise RefusedError(
                "bytes", f"sample {x.index}: {x.reuse.moved_bytes} bytes are entries of {least} different tokens or "
                f"more, and its chunks have {x.reuse.chunk_bytes} bytes"
            )
