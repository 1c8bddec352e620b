"""The part `compression` of scripts/bench.py: what methods add to a prefill on a real model, and their decode step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from bench_place import find_place

from kvbench.engine.agreement import FullCache
from kvbench.engine.recording import InexactPrefillError, Recording
from kvbench.engine.session import Session
from kvbench.engine.shared import record
from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.log import say
from kvbench.method import Budget, BudgetKind, Method
from kvbench.registry import list_entries
from kvbench.techniques.calibration import calibration_ids

NAME, LENGTH, SHARE = "smollm2-135m", 4096, "25%"
STEPS, ROUNDS = 8, 3
CHEAP = 0.1
"""Share of the prefill up to which a method is timed several times, because noise matters there."""


def bench_compression(before: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds that each method adds to the prefill of 4,096 tokens, over those of the full cache's prefill.

    A method takes the recorded prefill of the full cache, so that only storing, scoring and evicting are timed; what
    the full cache needs to store is subtracted. A method that cannot take it is timed with its own whole prefill, in
    turn with the full cache's, whose difference is noisier; these come last. The speed of a decode step is that over
    the full cache's, timed in turn. Ctrl+C ends the measurement and keeps what was found, and the same call continues.

    before: the methods in the file so far, which are not timed again; remove a method from the file to do so.
    """
    model = load_model(NAME, dtype="float32")
    ids = calibration_ids(model, LENGTH)
    found: dict[str, Any] = dict(before.get("methods", {}))
    with torch.no_grad():
        started = time.process_time()
        recording = record(model, ids[0].tolist(), None, "torch", outputs=False)
        prefill = time.process_time() - started
        stored = statistics.median(time_prefill(model, FullCache(), ids, recording)[0] for _ in range(ROUNDS))
        kinds = {x.name: x.load() for x in list_entries("method") if x.models == "autoregressive"}
        waiting = sorted(kinds.keys() - found.keys())
        try:
            for name in sorted(waiting, key=lambda x: takes_no_recording(kinds[x])):
                timed = bench_method(model, kinds[name], ids, recording, prefill, stored)
                found[name] = {**timed, "measured": find_place()}
        except KeyboardInterrupt:
            say(f"stopped: {len(found)} of {len(kinds)} methods were timed")
    return {
        "model": NAME, "length": LENGTH, "budget": SHARE, "rounds": ROUNDS, "decode_steps": STEPS,
        "storing_over_prefill": stored / prefill, "methods": found,
    }


def takes_no_recording(kind: type[Method]) -> bool:
    """Whether a method is known to need a prefill of its own."""
    return kind.replays_context or kind.reads_hidden


def bench_method(
    model: Model, kind: type[Method], ids: torch.Tensor, recording: Recording, prefill: float, stored: float
) -> dict[str, Any]:
    """A method's share of the prefill and the speed of its decode step; or why there are none."""
    plain, own = kind(), takes_no_recording(kind)
    takes = plain.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    shares: list[float] = []
    speeds: list[float] = []
    try:
        started = time.process_time()
        method = plain.bind(model).fit(Budget.parse(SHARE) if takes else None, model.shape(LENGTH))
        bind = time.process_time() - started
        while len(shares) < (ROUNDS if not own and (not shares or shares[0] < CHEAP) else 1):
            try:
                spent, step = time_prefill(model, method, ids, None if own else recording)
            except InexactPrefillError:
                own = True
                continue
            whole = time_prefill(model, FullCache(), ids, None)[0] if own else prefill
            shares.append((spent - (whole if own else stored)) / whole)
            speeds.append(time_prefill(model, FullCache(), ids, recording)[1] / step)
    except UserError as error:
        return {"refused": str(error)}
    say(f"{kind.card.name}: {statistics.median(shares):.1%}, a decode step at {statistics.median(speeds):.2f}")
    return {
        "share_of_prefill": {"median": statistics.median(shares), "min": min(shares), "max": max(shares)},
        "own_prefill": own, "bind_over_prefill": bind / prefill,
        "decode_speed_over_full": {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)},
    }


def time_prefill(
    model: Model, method: Method, ids: torch.Tensor, recording: Recording | None
) -> tuple[float, float]:
    """CPU seconds of a prefill and of a decode step after it."""
    with Session(model, method, capacity=LENGTH + STEPS + 2, recording=recording) as session:
        started = time.process_time()
        session.prefill(ids)
        spent = time.process_time() - started
        session.reserve(STEPS + 1, 1)
        session.force(ids[:, :1])
        started = time.process_time()
        for x in range(1, STEPS + 1):
            session.force(ids[:, x : x + 1])
        return spent, (time.process_time() - started) / STEPS
