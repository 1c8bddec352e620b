"""The part `step` of scripts/bench.py: a decode step of a tiny model, which is hardly more than Python."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.hf import Model, load_model

NAME, CONTEXT = "random:two-layers", 57
STEPS, ROUNDS = 50, 41
PACKAGES = ("kvbench", "transformers", "torch")


def bench_step() -> dict[str, Any]:
    """CPU seconds of a decode step over those of transformers' own loop, in turn, and where the step passes.

    The shares come from Python's profiler, which adds the same to every call and so overstates Python against the
    operations of torch: those of kvbench's own functions are upper bounds.
    """
    model = load_model(NAME, dtype="float32")
    ids = torch.randint(0, model.module.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        decode(model, ids), decode_with_transformers(model, ids)
        ratios = [decode(model, ids) / decode_with_transformers(model, ids) for _ in range(ROUNDS)]
        profile = cProfile.Profile()
        decode(model, ids, profile)
    return {
        "model": NAME, "context": CONTEXT, "steps": STEPS, "rounds": ROUNDS,
        "over_transformers": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "profiled_shares": find_shares(pstats.Stats(profile)),
    }


def decode(model: Model, ids: torch.Tensor, profile: cProfile.Profile | None = None) -> float:
    """CPU seconds of the steps after a prefill in a session with the full cache."""
    with Session(model, FullCache(), capacity=CONTEXT + STEPS + 2) as session:
        logits = session.prefill(ids)
        session.reserve(STEPS + 1, 1)
        started = time.process_time()
        if profile is not None:
            profile.enable()
        for _ in range(STEPS):
            logits = session.force(logits.argmax(-1, keepdim=True))[:, -1]
        if profile is not None:
            profile.disable()
        return time.process_time() - started


def decode_with_transformers(model: Model, ids: torch.Tensor) -> float:
    """The same with transformers' own attention and cache."""
    cache = DynamicCache()
    logits = model.module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    started = time.process_time()
    for _ in range(STEPS):
        token = logits.argmax(-1, keepdim=True)
        logits = model.module(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
    return time.process_time() - started


def find_shares(stats: pstats.Stats) -> dict[str, float]:
    """Share of a profile's time in the Python of each package, without its callees, and in operations of torch."""
    seconds = dict.fromkeys((*PACKAGES, "operations", "other"), 0.0)
    for (file, _, name), (_, _, own, _, _) in stats.stats.items():  # type: ignore[attr-defined]
        where = next((x for x in PACKAGES if f"/{x}/" in file), "other")
        if file == "~" and "torch" in name:
            where = "operations"
        seconds[where] += own
    total = sum(seconds.values())
    return {where: found / total for where, found in seconds.items()}
