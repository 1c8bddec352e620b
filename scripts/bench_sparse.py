"""The part `sparse` of scripts/bench.py: sparse prefill and sparse reads against the full cache on a real model."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.recording import Recording
from kvbench.engine.session import Session
from kvbench.engine.shared import record
from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.log import say
from kvbench.method import Budget, BudgetKind, Method
from kvbench.registry import list_entries
from kvbench.techniques.calibration import calibration_ids

NAME = "smollm2-135m"
LENGTHS = (4096, 8192)
BUDGET = "1024"
STEPS, ROUNDS = 4, 3


def find_kinds(kind: BudgetKind) -> list[type[Method]]:
    """The methods with this budget kind."""
    found: list[type[Method]] = [x.load() for x in list_entries("method") if x.models == "autoregressive"]
    return [x for x in found if x.card.budget is kind]


def bench_prefill() -> dict[str, Any]:
    """By length and method: the prompt's attention that was computed, and the time of the whole prefill.

    Both are shares of the full cache's; times are CPU seconds in one process. Ctrl+C ends the measurement and keeps
    what was found.
    """
    model = load_model(NAME, dtype="float32")
    found: dict[str, Any] = {}
    try:
        for length in LENGTHS:
            ids = calibration_ids(model, length)
            whole, _ = time_prefill(model, FullCache(), ids)
            found[str(length)] = part = {}
            for kind in find_kinds(BudgetKind.PROMPT):
                method = kind().bind(model).fit(None, model.shape(length))
                spent, facts = time_prefill(model, method, ids)
                computed = facts["prompt_pairs_computed"]
                part[kind.card.name] = {
                    "computed": computed / (computed + facts["prompt_pairs_skipped"]), "time": spent / whole,
                    "lost_mass": facts["lost_mass_millionths"] / facts["sampled_queries"] / 1e6,
                }
                say(f"{kind.card.name}, {length} tokens: {part[kind.card.name]}")
    except KeyboardInterrupt:
        say("stopped: the methods so far were timed")
    return {"model": NAME, "lengths": found}


def bench_reads() -> dict[str, Any]:
    """By method: bytes that a decode step reads after the longest context, and its time, over the full cache's."""
    model = load_model(NAME, dtype="float32")
    found: dict[str, Any] = {}
    ids = calibration_ids(model, LENGTHS[-1])
    recording = record(model, ids[0].tolist(), None, "torch", outputs=False)
    try:
        for kind in find_kinds(BudgetKind.READ):
            found[kind.card.name] = bench_decode(model, kind(), ids, recording)
    except KeyboardInterrupt:
        say("stopped: the methods so far were timed")
    return {
        "model": NAME, "length": LENGTHS[-1], "budget": BUDGET, "decode_steps": STEPS, "rounds": ROUNDS,
        "methods": found,
    }


def time_prefill(model: Model, method: Method, ids: torch.Tensor) -> tuple[float, dict[str, int]]:
    """CPU seconds of a prefill, and the counters of the stores."""
    with Session(model, method) as session:
        started = time.process_time()
        session.prefill(ids)
        return time.process_time() - started, session.effect().facts


def bench_decode(model: Model, method: Method, ids: torch.Tensor, recording: Recording) -> dict[str, Any]:
    """Bytes that a decode step reads and its time, over the full cache's; the median of rounds, taken in turn."""
    try:
        fitted = method.bind(model).fit(Budget.parse(BUDGET), model.shape(ids.shape[1]))
        capacity = ids.shape[1] + STEPS * ROUNDS
        with Session(model, FullCache(), capacity=capacity, recording=recording) as full, Session(
            model, fitted, capacity=capacity, recording=recording
        ) as ours:
            full.prefill(ids)
            ours.prefill(ids)
            speeds = [time_steps(ours, ids) / time_steps(full, ids) for _ in range(ROUNDS)]
            memory = ours.memory()
            assert memory.full_read_bytes_per_step
    except UserError as error:
        return {"refused": str(error)}
    found = {
        "bytes_read": memory.read_bytes_per_step / memory.full_read_bytes_per_step,
        "time": {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)},
    }
    say(f"{method.card.name}, a step after {ids.shape[1]} tokens: {found}")
    return found


def time_steps(session: Session, ids: torch.Tensor) -> float:
    """CPU seconds of some decode steps."""
    started = time.process_time()
    for x in range(STEPS):
        session.force(ids[:, x : x + 1])
    return time.process_time() - started
