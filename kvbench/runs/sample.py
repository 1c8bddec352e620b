"""Run one sample: its conversation under a method, with every turn timed and scored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.budget import BudgetKind
from kvbench.engine.agreement import compare_logits, find_full_logits, force_answer_passes
from kvbench.engine.autoregressive import Tokens
from kvbench.engine.passes import Passes, finish, merge
from kvbench.engine.recording import InexactPrefillError, Recording
from kvbench.engine.session import Session
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.runs.job import Job, cap_new_tokens, check_capacity, find_capacity
from kvbench.runs.journal import Line, Times, TokenCounts
from kvbench.runs.spec import RunSpec
from kvbench.task import Encoded, EncodedTurn, Example, Mode, Turn

if TYPE_CHECKING:
    from kvbench.engine.shared import SharedPrefill


@dataclass
class Timer:
    """Start times of the current turn, and the times before its first token."""

    wall: float
    asked: float = 0.0
    prefill_s: float | None = None
    compress_s: float | None = None


@dataclass(frozen=True)
class Reply:
    """The answer to a question: generated text, or the most likely choice."""

    text: str
    ids: tuple[int, ...]
    stop_reason: str
    steps: int
    facts: dict[str, object] = field(default_factory=dict)


class SampleFailedError(Exception):
    """A turn of a sample raised. The last of `lines` has the error."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__(lines[-1].error)
        self.lines = lines


def run_sample(
    job: Job, index: int, example: Example, encoded: Encoded, shared: SharedPrefill | None = None
) -> list[Line]:
    """Run a sample, one question at a time, and return its journal lines.

    shared: the prefills that this run shares with others on the same contexts; a sample that takes one has no times.

    Raises:
        SampleFailedError: a turn raised.
    """
    lines: list[Line] = []
    begun = time.perf_counter()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return finish(converse(job, index, example, encoded, shared, lines))
    except InexactPrefillError as error:
        assert shared is not None
        shared.refuse(job.spec, str(error))
        return run_sample(job, index, example, encoded)
    except Exception as error:
        del lines[len(example.turns) - 1 :]  # if closing the session raised, the last turn failed
        seconds = time.perf_counter() - begun - sum(x.seconds for x in lines)
        lines.append(fail(example, index, len(lines), error, encoded.prompt_hash, started, seconds))
        raise SampleFailedError(lines) from error


def converse(
    job: Job, index: int, example: Example, encoded: Encoded, shared: SharedPrefill | None = None,
    lines: list[Line] | None = None, width: int = 1,
) -> Passes[list[Line]]:
    """The passes of a sample after its prefill, which is run at once. Returns its journal lines.

    lines: where lines are put as turns end. width: questions of mode multi-request that run together.
    """
    spec, model, device = job.spec, job.model, job.model.device
    lines = [] if lines is None else lines
    timer, started = Timer(time.perf_counter()), datetime.now(UTC).isoformat(timespec="seconds")
    limits = [cap_new_tokens(x.max_new_tokens, spec.generation) for x in example.turns]
    visible = () if spec.visibility == "hidden" else encoded.turns[0].first
    method = job.method.fit(job.budget, model.shape(len(encoded.context) + len(visible)))
    capacity = find_capacity(encoded, spec, limits)
    check_capacity(job, capacity)
    compares = not (model.random or method.budget_kind is BudgetKind.NONE)
    recording, proves = None, False
    if shared is not None:
        recording, proves = shared.take(model, encoded.context + visible, spec)
    with Session(
        model, method, capacity=capacity, chunk=spec.chunk, recompress=spec.recompress, recording=recording,
        compare=proves,
    ) as session:
        before = now(device)
        session.prefill(encoded.context, visible=visible)
        timer.prefill_s, timer.compress_s = now(device) - before, session.compress_seconds
        turns = (
            _ask(job, index, example, encoded, turn, session, limit, timer, lines, compares=compares, started=started)
            for turn, limit in enumerate(limits)
        )
        forced = yield from merge(turns, width if spec.mode is Mode.MULTI_REQUEST else 1)
    lines.sort(key=lambda x: x.turn)
    if compares:
        lines[:] = _with_agreement(job, encoded, lines, [x for x in forced if x is not None], capacity, recording)
    if shared is not None and recording is not None:
        shared.accept(spec)
        lines[:] = [x.model_copy(update={"times": None, "shared_prefill": True}) for x in lines]
    return lines


def _ask(
    job: Job, index: int, example: Example, encoded: Encoded, turn: int, session: Session, limit: int, timer: Timer,
    lines: list[Line], *, compares: bool, started: str,
) -> Passes[Tensor | None]:
    """Ask the question of a turn and add its line. Returns the logits of the reference answer, if they are compared."""
    spec, device, ids = job.spec, job.model.device, encoded.turns[turn]
    timer = timer if turn == 0 else Timer(time.perf_counter())
    forced = None
    with _conversation(session, spec) as talk:
        query = _query(ids, turn, spec)
        timer.asked = now(device)
        yield from talk.question_passes(query, limit)
        if compares:
            paused = now(device)
            forced = yield from force_answer_passes(talk, ids.answer, counts=ids.answer in ids.choices)
            timer.asked += now(device) - paused
        history = _history(spec, example, turn, ids)
        if ids.choices:
            known = {} if forced is None else {ids.answer: forced}
            reply = yield from _choose(job, talk, example.turns[turn], ids, known)
            talk.remember(reply.ids if history is None else history)
        else:
            if job.task.nonempty:
                talk.ban_first(job.stop_ids)
            tokens = yield from talk.answer_passes(limit, history=history, stop=job.stop_ids)
            reply = _reply(job, tokens)
        done = now(device)
        lines.append(_line(job, index, example, turn, talk, reply, timer, done,
                           prompt_hash=encoded.prompt_hash, started=started, query=query, answer=ids.answer))
    return forced


def fail(
    example: Example, index: int, turn: int, error: Exception, prompt_hash: str, started: str, seconds: float
) -> Line:
    """The journal line of a turn that raised."""
    first = (str(error).strip() or "no message").splitlines()[0]
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return Line(
        sample=example.id, index=index, turn=turn, turns=len(example.turns), prompt_hash=prompt_hash, prediction=None,
        ids=(), question=example.turns[turn].question, references=example.turns[turn].references, score=None, scores={},
        tokens=None, stop_reason=None,
        times=None, bytes=None, effect=None, agreement=None, facts=turn_facts(example, turn), started=started,
        seconds=seconds, error=f"{kind}{first}",
    )


def _with_agreement(
    job: Job, encoded: Encoded, lines: list[Line], forced: list[Tensor], capacity: int, recording: Recording | None
) -> list[Line]:
    """The lines with agreement, or unchanged if the full cache does not fit in memory."""
    own = [line.ids[:-1] if line.stop_reason == "stop" else line.ids for line in lines]
    try:
        full = find_full_logits(job.model, encoded, job.spec, own, capacity, recording)
    except torch.OutOfMemoryError:
        return lines
    found = []
    for line, ours, theirs in zip(lines, forced, full, strict=True):
        found.append(line.model_copy(update={"agreement": compare_logits(ours, theirs)}))
    return found


@contextmanager
def _conversation(session: Session, spec: RunSpec) -> Iterator[Session]:
    """The session itself, or a fork of it in mode multi-request."""
    if spec.mode is Mode.MULTI_REQUEST:
        with session.fork() as branch:
            yield branch
    else:
        yield session


def _query(ids: EncodedTurn, turn: int, spec: RunSpec) -> tuple[int, ...]:
    """The tokens of a question that are not in the cache yet; none if the context held it."""
    if turn == 0 or spec.mode is Mode.MULTI_REQUEST:
        return ids.first if spec.visibility == "hidden" else ()
    return ids.later


def _history(spec: RunSpec, example: Example, turn: int, ids: EncodedTurn) -> tuple[int, ...] | None:
    """The reference answer, if a later turn sees it."""
    follows = spec.mode is Mode.MULTI_TURN and turn + 1 < len(example.turns)
    return ids.answer if follows and spec.history == "reference" else None


def turn_facts(example: Example, turn: int) -> dict[str, object]:
    """The facts of a turn, with those of the example on its first turn."""
    return {**(example.facts if turn == 0 else {}), **example.turns[turn].facts}


def _reply(job: Job, tokens: Tokens) -> Reply:
    ids = tokens.ids[0]
    answer = ids[:-1] if ids and ids[-1] in job.stop_ids else ids
    text = str(job.model.tokenizer.decode(answer, skip_special_tokens=True))
    return Reply(text, tuple(ids), tokens.stop_reasons[0], tokens.steps)


def score_answer(job: Job, example: Example, turn: int, text: str, found: Mapping[str, object]) -> dict[str, float]:
    """Score an answer with every scorer that applies to it. Empty for models with random weights."""
    asked = example.turns[turn]
    facts = {**example.facts, **asked.facts, **found}
    scores = {} if job.model.random else {x.id: x(text, asked.references, facts) for x in job.task.scorers}
    return {name: score for name, score in scores.items() if score is not None}


def _choose(
    job: Job, talk: Session, turn: Turn, ids: EncodedTurn, known: dict[tuple[int, ...], Tensor]
) -> Passes[Reply]:
    """The choice with the greatest log-probability. The session does not change.

    known: logits of continuations that were computed before.
    """
    talk.answer_started = now(job.model.device)
    logprobs = []
    for choice in ids.choices:
        logits = known.get(choice)
        if logits is None:
            logits = yield from force_answer_passes(talk, choice, counts=True)
        tokens = torch.tensor(choice, device=logits.device)
        logprobs.append(logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist())
    if not all(isfinite(x) for choice in logprobs for x in choice):
        raise ValueError("a choice has log-probabilities that are not finite")
    best = max(range(len(logprobs)), key=lambda i: sum(logprobs[i]))
    facts: dict[str, object] = {"logprobs": [[round(x, 5) for x in choice] for choice in logprobs]}
    return Reply(turn.choices[best], ids.choices[best], "choice", 0, facts)


def _line(
    job: Job, index: int, example: Example, turn: int, talk: Session, reply: Reply, timer: Timer, done: float, *,
    prompt_hash: str, started: str, query: tuple[int, ...], answer: tuple[int, ...],
) -> Line:
    references = example.turns[turn].references
    scores = score_answer(job, example, turn, reply.text, reply.facts)
    shape = talk.shape
    assert shape is not None
    return Line(
        sample=example.id, index=index, turn=turn, turns=len(example.turns), prompt_hash=prompt_hash,
        prediction=reply.text, ids=reply.ids, question=example.turns[turn].question, references=tuple(references),
        score=scores.get(job.scorer.id),
        scores=scores,
        tokens=TokenCounts(
            context=shape.length, query=len(query), generated=0 if reply.stop_reason == "choice" else len(reply.ids),
            reference=len(answer),
        ),
        stop_reason=reply.stop_reason,
        times=Times(
            prefill_s=timer.prefill_s, compress_s=timer.compress_s,
            ttft_s=(timer.prefill_s or 0.0) + talk.answer_started - timer.asked,
            decode_s=done - talk.answer_started, steps=reply.steps,
        ),
        bytes=talk.memory(),
        effect=talk.effect(),
        agreement=None, facts={**turn_facts(example, turn), **reply.facts}, started=started,
        seconds=time.perf_counter() - timer.wall,
        error=None,
    )
