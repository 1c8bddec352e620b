"""The parts `reuse` and `lossless` of scripts/bench.py, on a real model."""

from __future__ import annotations

import time
from typing import Any

from bench_place import find_place

from kvbench.engine.agreement import FullCache
from kvbench.engine.autoregressive import Tokens
from kvbench.engine.recording import InexactPrefillError, Recording
from kvbench.engine.reuse import Reuse, count_reuse
from kvbench.engine.session import Session
from kvbench.engine.shared import record
from kvbench.hf import Model, load_model
from kvbench.log import say
from kvbench.method import Budget, BudgetKind, Method
from kvbench.registry import find_method
from kvbench.store.chunks import ChunkStore
from kvbench.techniques.calibration import calibration_ids

NAME = "smollm2-135m"
LENGTHS, INSTRUCTION, QUESTION, DOCUMENTS = (4096, 2048), 64, 32, 8
Rows = tuple[tuple[str, dict[str, Any]], ...]
REUSED: Rows = (
    ("concat-aligned", {}), ("cacheblend", {"ratio": 0.15}), ("cacheblend", {"ratio": 1.0}), ("epic", {}),
    ("cacheblend", {"ratio": 0.5}), ("fusionrag", {}), ("ape", {}), ("pie", {}), ("kamera", {}), ("prompt-cache", {}),
    ("kvshare", {}), ("relaycaching", {}), ("cache-craft", {}), ("kvcomm", {}), ("no-context", {}),
)
"""`concat` does the work of `concat-aligned`."""
BETWEEN = 3
"""Rows from one full prefill to the next."""
ANSWER, SHARE, CONTEXT = 32, "25%", 2048
DRAFTED: Rows = (
    ("prompt-lookup", {}), ("magicdec", {"draft_length": 4}), ("quantspec", {}), ("triforce", {"draft_length": 4}),
    ("snapkv+vericache", {"draft_length": 4}), ("magicdec", {"draft_length": 4, "draft": "streaming-llm"}),
)


def bench_reuse(before: dict[str, Any]) -> dict[str, Any]:
    """By length, method and setting: the share of tokens times layers that is computed, and times over full prefill's.

    in_hand: with every chunk in the store. building: with an empty store. CPU seconds in one process, over the full
    prefill of at most two rows before. The documents ran before in two other orders. Ctrl+C ends the measurement and
    keeps what was found, and the same call continues.

    before: the part of the file so far, whose rows are not measured again.
    """
    found: dict[str, Any] = dict(before.get("lengths", {}))
    model = load_model(NAME, dtype="float32")
    time_prompt(model, FullCache(), (tuple(calibration_ids(model, 512)[0].tolist()),), [])  # a warm-up
    try:
        for length in LENGTHS:
            bench_length(model, length, found.setdefault(str(length), {"rows": []})["rows"])
    except KeyboardInterrupt:
        say("stopped: the rows so far were timed")
    return {"model": NAME, "documents": DOCUMENTS, "lengths": found}


def bench_length(model: Model, length: int, rows: list[dict[str, Any]]) -> None:
    """Add the rows of one length that are missing."""
    ids = calibration_ids(model, length)[0].tolist()
    size = (length - INSTRUCTION - QUESTION) // DOCUMENTS
    starts = range(INSTRUCTION, INSTRUCTION + size * DOCUMENTS, size)
    first, documents = tuple(ids[:INSTRUCTION]), [tuple(ids[x : x + size]) for x in starts]
    parts, tail = (first, *documents), ids[INSTRUCTION + size * DOCUMENTS :]
    earlier = ((first, *documents[::-1]), (first, *documents[1:], documents[0]))
    known = [find_method(x["method"])(**x["settings"]) for x in rows]
    missing = [(name, settings) for name, settings in REUSED if find_method(name)(**settings) not in known]
    for number, (name, settings) in enumerate(missing):
        if number % BETWEEN == 0:
            whole, _ = time_prompt(model, FullCache(), parts, tail)
        store, method = ChunkStore(), find_method(name)(**settings)
        building, _ = time_prompt(model, method, parts, tail, Reuse(parts, earlier, store))
        in_hand, share = time_prompt(model, method, parts, tail, Reuse(parts, earlier, store))
        rows.append({
            "method": name, "settings": settings, "computed": share, "in_hand": in_hand / whole,
            "building": building / whole, "measured": find_place(),
        })
        say(f"{length} tokens: {rows[-1]}, a full prefill {whole:.1f} s")


def time_prompt(
    model: Model, method: Method, parts: tuple[tuple[int, ...], ...], tail: list[int], reuse: Reuse | None = None
) -> tuple[float, float | None]:
    """CPU seconds of a prefill, and the share of it that was computed; None: the method does not reuse."""
    ids = [x for part in parts for x in part]
    with Session(model, method, capacity=len(ids) + len(tail), reuse=reuse) as session:
        started = time.process_time()
        session.prefill(ids, visible=tail)
        spent, counted = time.process_time() - started, count_reuse(session)
        return spent, None if counted is None else counted.computed / counted.tokens


def bench_lossless(before: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of lossless methods over plain decoding after the same context, and accepted tokens per round.

    CPU seconds in one process, over those of an answer of plain decoding right before. Ctrl+C ends the measurement and
    keeps what was found, and the same call continues.

    before: the part of the file so far, whose rows are not measured again.
    """
    rows: list[dict[str, Any]] = list(before.get("rows", []))
    known = [(x["method"], x["settings"]) for x in rows]
    model = load_model(NAME, dtype="float32")
    ids = calibration_ids(model, CONTEXT + 8)[0].tolist()
    try:
        recording = record(model, ids[:CONTEXT], None, "torch", outputs=False)
        for row in (x for x in DRAFTED if x not in known):
            rows.append({**bench_draft(model, *row, ids, recording), "measured": find_place()})
            say(f"{rows[-1]}")
    except KeyboardInterrupt:
        say("stopped: the rows so far were timed")
    return {"model": NAME, "context": CONTEXT, "budget": SHARE, "tokens": ANSWER, "rows": rows}


def bench_draft(
    model: Model, name: str, settings: dict[str, Any], ids: list[int], recording: Recording
) -> dict[str, Any]:
    """The row of a method."""
    method = find_method(name)(**settings)
    takes = method.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
    fitted = method.bind(model).fit(Budget.parse(SHARE) if takes else None, model.shape(CONTEXT))
    plain, wanted = time_answer(model, FullCache(), ids, recording)
    spent, made = time_answer(model, fitted, ids, recording)
    found = made.speculation
    assert found is not None
    return {
        "method": name, "settings": settings, "drafted_per_round": found.drafted / found.rounds,
        "accepted_per_round": found.accepted / found.rounds, "equal": made.ids == wanted.ids, "speed": plain / spent,
    }


def time_answer(model: Model, method: Method, ids: list[int], recording: Recording) -> tuple[float, Tokens]:
    """CPU seconds of an answer after a context and a question, and the answer."""
    for given in (recording, None):
        try:
            with Session(model, method, capacity=len(ids) + ANSWER + 64, recording=given) as session:
                session.prefill(ids[:CONTEXT])
                session.question(ids[CONTEXT:], ANSWER)
                started = time.process_time()
                made = session.answer(ANSWER, stop=frozenset())
                return time.process_time() - started, made
        except InexactPrefillError:
            continue
    raise AssertionError("a prefill of its own is exact")
