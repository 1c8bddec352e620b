"""The part `reuse` of scripts/bench.py: time to first token of methods that reuse entries across prompts."""

from __future__ import annotations

import time
from typing import Any

from kvbench.engine.agreement import FullCache
from kvbench.engine.reuse import Reuse, count_reuse
from kvbench.engine.session import Session
from kvbench.hf import Model, load_model
from kvbench.log import say
from kvbench.method import Method
from kvbench.registry import find_method
from kvbench.store.chunks import ChunkStore
from kvbench.techniques.calibration import calibration_ids

NAME = "smollm2-135m"
LENGTH, INSTRUCTION, QUESTION, DOCUMENTS = 2048, 64, 32, 8
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("concat-aligned", {}), ("cacheblend", {"ratio": 0.15}), ("epic", {"first": 16}), ("cacheblend", {"ratio": 0.5}),
    ("cacheblend", {"ratio": 1.0}), ("fusionrag", {"ratio": 0.15}), ("ape", {}), ("relaycaching", {}),
)


def bench_reuse() -> dict[str, Any]:
    """By method and setting: the share of tokens times layers that is computed, and two times over a full prefill's.

    in_hand: with every chunk in the store. building: with an empty store. CPU seconds in one process. Ctrl+C ends the
    measurement and keeps what was found.
    """
    model = load_model(NAME, dtype="float32")
    ids = calibration_ids(model, LENGTH)[0].tolist()
    size = (LENGTH - INSTRUCTION - QUESTION) // DOCUMENTS
    starts = range(INSTRUCTION, INSTRUCTION + size * DOCUMENTS, size)
    first, documents = tuple(ids[:INSTRUCTION]), [tuple(ids[x : x + size]) for x in starts]
    parts, earlier = (first, *documents), ((first, *documents[::-1]),)
    tail = ids[INSTRUCTION + size * DOCUMENTS :]
    found: list[dict[str, Any]] = []
    time_prompt(model, FullCache(), parts[:2], tail)  # a warm-up
    whole, _ = time_prompt(model, FullCache(), parts, tail)
    try:
        for name, settings in ROWS:
            store, method = ChunkStore(), find_method(name)(**settings)
            building, _ = time_prompt(model, method, parts, tail, Reuse(parts, earlier, store))
            in_hand, share = time_prompt(model, method, parts, tail, Reuse(parts, earlier, store))
            found.append({
                "method": name, "settings": settings, "computed": share, "in_hand": in_hand / whole,
                "building": building / whole,
            })
            say(f"{found[-1]}")
    except KeyboardInterrupt:
        say("stopped: the methods so far were timed")
    return {"model": NAME, "length": LENGTH, "documents": DOCUMENTS, "rows": found}


def time_prompt(
    model: Model, method: Method, parts: tuple[tuple[int, ...], ...], tail: list[int], reuse: Reuse | None = None
) -> tuple[float, float | None]:
    """CPU seconds of a prefill, and the share of it that was computed; None: the method does not reuse."""
    ids = [x for part in parts for x in part]
    with Session(model, method, capacity=LENGTH, reuse=reuse) as session:
        started = time.process_time()
        session.prefill(ids, visible=tail)
        spent, counted = time.process_time() - started, count_reuse(session)
        return spent, None if counted is None else counted.computed / counted.tokens
