"""The parts `prefill` and `reads` of scripts/bench.py: sparse prefill and sparse reads against the full cache."""

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

NAME = "smollm2-135m"
LENGTHS = (4096, 8192)
READ_AT = {NAME: 8192, "random:two-layers": 16384}
"""Tokens before the decode steps that are measured, by model."""
BUDGET = "1024"
STEPS, ROUNDS = 4, 3


def find_kinds(kind: BudgetKind) -> list[type[Method]]:
    """The methods with this budget kind."""
    found: list[type[Method]] = [x.load() for x in list_entries("method") if x.models == "autoregressive"]
    return [x for x in found if x.card.budget is kind]


def bench_prefill(before: dict[str, Any]) -> dict[str, Any]:
    """By length and method: the prompt's attention that was computed, and the time of the whole prefill.

    Both are shares of the full cache's; times are CPU seconds in one process. Ctrl+C ends the measurement and keeps
    what was found, and the same call continues.

    before: the part of the file so far, whose methods are not measured again.
    """
    found: dict[str, Any] = dict(before.get("lengths", {}))
    kinds = {x.card.name: x for x in find_kinds(BudgetKind.PROMPT)}
    model = load_model(NAME, dtype="float32")
    try:
        for length in LENGTHS:
            part = found.setdefault(str(length), {})
            waiting = [x for key, x in kinds.items() if key not in part]
            if not waiting:
                continue
            ids = calibration_ids(model, length)
            whole, _ = time_prefill(model, FullCache(), ids)
            for kind in waiting:
                part[kind.card.name] = {**compare_prefill(model, kind(), ids, whole), "measured": find_place()}
                say(f"{kind.card.name}, {length} tokens: {part[kind.card.name]}")
    except KeyboardInterrupt:
        say("stopped: the methods so far were timed")
    return {"model": NAME, "lengths": found}


def compare_prefill(model: Model, method: Method, ids: torch.Tensor, whole: float) -> dict[str, Any]:
    """Shares of the full cache's attention and time; or why there are none."""
    try:
        fitted = method.bind(model).fit(None, model.shape(ids.shape[1]))
        spent, facts = time_prefill(model, fitted, ids)
    except UserError as error:
        return {"refused": str(error)}
    computed = facts["prompt_pairs_computed"]
    return {
        "computed": computed / (computed + facts["prompt_pairs_skipped"]), "time": spent / whole,
        "lost_mass": facts["lost_mass_millionths"] / facts["sampled_queries"] / 1e6,
    }


def bench_reads(before: dict[str, Any]) -> dict[str, Any]:
    """By model and method: bytes that a decode step reads after a long context, and its time, over the full cache's.

    Methods that decode from a draft are left out: their steps are not these. Ctrl+C ends the measurement and keeps what
    was found, and the same call continues.

    before: the part of the file so far, whose methods are not measured again.
    """
    found: dict[str, Any] = dict(before.get("models", {}))
    try:
        for name, length in READ_AT.items():
            methods = found.setdefault(name, {"length": length, "methods": {}})["methods"]
            kinds = {x.card.name: x for x in find_kinds(BudgetKind.READ) if not x.generates_alone}
            if not kinds.keys() - methods.keys():
                continue
            model = load_model(name, dtype="float32")
            ids = calibration_ids(model, length)
            recording = record(model, ids[0].tolist(), None, "torch", outputs=False)
            for kind in (x for key, x in kinds.items() if key not in methods):
                methods[kind.card.name] = {**bench_decode(model, kind(), ids, recording), "measured": find_place()}
    except KeyboardInterrupt:
        say("stopped: the methods so far were timed")
    return {"budget": BUDGET, "decode_steps": STEPS, "rounds": ROUNDS, "models": found}


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
        try:
            found = compare_steps(model, fitted, ids, recording, recording)
        except InexactPrefillError:
            found = compare_steps(model, fitted, ids, recording, None)
    except UserError as error:
        return {"refused": str(error)}
    say(f"{method.card.name}, a step after {ids.shape[1]} tokens: {found}")
    return found


def compare_steps(
    model: Model, method: Method, ids: torch.Tensor, recording: Recording, own: Recording | None
) -> dict[str, Any]:
    """The comparison, with the recorded prefill of the full cache, and for the method with that or its own."""
    capacity = ids.shape[1] + STEPS * ROUNDS
    with Session(model, FullCache(), capacity=capacity, recording=recording) as full, Session(
        model, method, capacity=capacity, recording=own
    ) as ours:
        full.prefill(ids)
        ours.prefill(ids)
        speeds = [time_steps(ours, ids) / time_steps(full, ids) for _ in range(ROUNDS)]
        memory = ours.memory()
        assert memory.full_read_bytes_per_step
    return {
        "bytes_read": memory.read_bytes_per_step / memory.full_read_bytes_per_step,
        "time": {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)},
    }


def time_steps(session: Session, ids: torch.Tensor) -> float:
    """CPU seconds of some decode steps."""
    started = time.process_time()
    for x in range(STEPS):
        session.force(ids[:, x : x + 1])
    return time.process_time() - started
