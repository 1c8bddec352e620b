"""Run one sample: its conversation under a method, with every turn timed and scored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.agreement import compare_logits, find_full_logits, force_answer_passes
from kvbench.engine.passes import Passes, finish, merge
from kvbench.engine.recording import InexactPrefillError, Recording
from kvbench.engine.reuse import Reuse, count_reuse
from kvbench.engine.session import Session
from kvbench.engine.timing import now
from kvbench.errors import FileTierError
from kvbench.log import say_once
from kvbench.runs.job import Job, cap_new_tokens, check_capacity, find_capacity
from kvbench.runs.journal import Line, Times, TokenCounts
from kvbench.runs.lines import SampleFailedError, fail, score_answer, stop_if_lost, turn_facts
from kvbench.runs.reply import Reply, choose_passes, decode_plainly, read_reply
from kvbench.runs.spec import RunSpec, find_origin
from kvbench.store.chunks import ChunkStore
from kvbench.task import Encoded, Example, Mode

if TYPE_CHECKING:
    from kvbench.engine.shared import SharedPrefill


@dataclass
class Timer:
    """Start times of a turn, and the times before its first token."""

    wall: float
    asked: float = 0.0
    prefill_s: float | None = None
    compress_s: float | None = None


def run_sample(
    job: Job, index: int, example: Example, encoded: Encoded, shared: SharedPrefill | None = None, *,
    agreement: bool = True,
) -> list[Line]:
    """Run a sample, one question at a time, and return its journal lines.

    shared: the prefills that this run shares with others on the same contexts; a sample that takes one has no times.
    agreement: whether the method is compared with the full cache on the reference answers.

    Raises:
        SampleFailedError: a turn raised.
        DeviceLostError: it made the GPU unusable.
    """
    lines: list[Line] = []
    begun = time.perf_counter()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        return finish(converse(job, index, example, encoded, shared, lines, agreement=agreement))
    except InexactPrefillError as error:
        assert shared is not None
        shared.refuse(job.spec, str(error))
        return run_sample(job, index, example, encoded, agreement=agreement)
    except FileTierError:
        raise  # the sample did not fail: it can be run again
    except Exception as error:
        stop_if_lost(job, f"sample {index}", error)
        if shared is not None:
            shared.retract(job.spec)
        del lines[len(example.turns) - 1 :]  # if closing the session raised, the last turn failed
        seconds = time.perf_counter() - begun - sum(x.seconds for x in lines)
        lines.append(fail(example, index, len(lines), error, encoded.prompt_hash, started, seconds))
        raise SampleFailedError(lines) from error


def converse(
    job: Job, index: int, example: Example, encoded: Encoded, shared: SharedPrefill | None = None,
    lines: list[Line] | None = None, width: int = 1, *, agreement: bool = True,
) -> Passes[list[Line]]:
    """The passes of a sample after its prefill, which is run at once. Returns its journal lines.

    lines: where lines are put as turns end. width: questions whose answers run together. agreement: as in run_sample.
    """
    spec, model, device = job.spec, job.model, job.model.device
    lines = [] if lines is None else lines
    timer, started = Timer(time.perf_counter()), datetime.now(UTC).isoformat(timespec="seconds")
    limits = [cap_new_tokens(x.max_new_tokens, spec.generation) for x in example.turns]
    visible = () if spec.visibility == "hidden" else encoded.turns[0].first
    method = job.method.fit(job.budget, model.shape(len(encoded.context) + len(visible)))
    compares = agreement and job.compares
    capacity = find_capacity(encoded, spec, limits, compares=compares)
    check_capacity(job, capacity)
    reuse = None
    if method.reads_parts:
        reuse = Reuse(
            encoded.parts, encoded.earlier, ChunkStore(job.chunks, device=str(device)), spec.task.chat_template_sha,
            find_origin(spec),
        )
    recording, proves = None, False
    if shared is not None and reuse is None:
        recording, proves = shared.take(model, encoded.context + visible, spec)
    with Session(
        model, method, capacity=capacity, chunk=spec.chunk, recompress=spec.recompress, recording=recording,
        compare=proves, reuse=reuse,
    ) as session:
        before = now(device)
        session.prefill(encoded.context, visible=visible)
        timer.prefill_s, timer.compress_s = now(device) - before, session.compress_seconds
        if shared is not None and recording is not None and not session.taken:
            shared.refuse(spec, "its passes over the context are not the full cache's.")
        questions = _Questions(job, index, example, encoded, limits, timer, lines, compares=compares, started=started)
        if width > 1 and spec.mode is Mode.MULTI_TURN:
            forced = yield from questions.ask_ahead(session, width)
        else:
            forced = yield from merge((questions.ask(session, turn) for turn in range(len(limits))), width)
    lines.sort(key=lambda x: x.turn)
    if compares:
        lines[:] = _with_agreement(job, encoded, lines, [x for x in forced if x is not None], capacity, recording)
    if shared is not None and session.taken:
        shared.accept(spec)
        lines[:] = [x.model_copy(update={"times": None, "shared_prefill": True}) for x in lines]
    return lines


@dataclass(frozen=True)
class _Questions:
    """The questions of a sample, and the lines that their answers become."""

    job: Job
    index: int
    example: Example
    encoded: Encoded
    limits: list[int]
    timer: Timer
    lines: list[Line]
    _: KW_ONLY
    compares: bool
    """Whether the logits of the reference answers are wanted."""
    started: str

    def ask(self, session: Session, turn: int) -> Passes[Tensor | None]:
        """Ask a question and add its line. Returns the logits of the reference answer, if they are compared."""
        timer = self.timer if turn == 0 else Timer(time.perf_counter())
        with _conversation(session, self.job.spec) as talk:
            timer.asked = now(self.job.model.device)
            yield from talk.question_passes(self._query(turn), self.limits[turn])
            forced, reply = yield from self._answer(talk, turn, timer)
            self._add_line(talk, turn, reply, timer)
        return forced

    def ask_ahead(self, session: Session, width: int) -> Passes[list[Tensor | None]]:
        """Ask all questions of a conversation whose history is known, then answer `width` of them together."""
        with ExitStack() as stack:
            talks: list[Session] = []
            for turn, limit in enumerate(self.limits):
                talk = stack.enter_context((talks[-1] if talks else session).fork())
                if turn:
                    talk.remember(self.encoded.turns[turn - 1].answer)
                yield from talk.question_passes(self._query(turn), limit)
                talks.append(talk)
            timers = [self.timer, *(Timer(self.timer.wall) for _ in talks[1:])]
            done = yield from merge((self._answer(x, turn, timers[turn]) for turn, x in enumerate(talks)), width)
            for turn, (before, talk) in enumerate(pairwise([session, *talks])):
                talk.credit(before)
                self._add_line(talk, turn, done[turn][1], timers[turn])
        return [forced for forced, _ in done]

    def _answer(self, talk: Session, turn: int, timer: Timer) -> Passes[tuple[Tensor | None, Reply]]:
        """The logits of the reference answer, if they are compared, and the answer to the question asked last."""
        job, ids, forced = self.job, self.encoded.turns[turn], None
        if self.compares:
            paused = now(job.model.device)
            forced = yield from force_answer_passes(talk, ids.answer, counts=ids.answer in ids.choices)
            if not ids.choices:
                forced = forced.cpu()  # a batch holds those of all its answers, which could take a GPU's memory
            timer.asked += now(job.model.device) - paused
        follows = job.spec.mode is Mode.MULTI_TURN and turn + 1 < len(self.limits)
        history = ids.answer if follows and job.spec.history == "reference" else None
        if ids.choices:
            known = {} if forced is None else {ids.answer: forced}
            reply = yield from choose_passes(job, talk, self.example.turns[turn], ids, known)
            talk.remember(reply.ids if history is None else history)
        else:
            if job.task.nonempty:
                talk.ban_first(job.stop_ids)
            limit, paused = self.limits[turn], now(job.model.device)
            plain = decode_plainly(job, talk, limit)
            timer.asked += now(job.model.device) - paused
            tokens = yield from talk.answer_passes(limit, history=history, stop=job.stop_ids)
            reply = read_reply(job, tokens, plain)
        return forced, reply

    def _query(self, turn: int) -> tuple[int, ...]:
        """The tokens of a question that are not in the cache yet; none if the context held it."""
        ids, spec = self.encoded.turns[turn], self.job.spec
        if turn == 0 or spec.mode is Mode.MULTI_REQUEST:
            return ids.first if spec.visibility == "hidden" else ()
        return ids.later

    def _add_line(self, talk: Session, turn: int, reply: Reply, timer: Timer) -> None:
        job, asked, shape = self.job, self.example.turns[turn], talk.shape
        scores = score_answer(job, self.example, turn, reply.text, reply.facts)
        assert shape is not None
        self.lines.append(Line(
            sample=self.example.id, index=self.index, turn=turn, turns=len(self.limits),
            prompt_hash=self.encoded.prompt_hash, prediction=reply.text, ids=reply.ids, question=asked.question,
            references=tuple(asked.references), score=scores.get(job.scorer.id), scores=scores,
            tokens=TokenCounts(
                context=shape.length, query=len(self._query(turn)),
                generated=0 if reply.stop_reason == "choice" else len(reply.ids),
                reference=len(self.encoded.turns[turn].answer),
            ),
            stop_reason=reply.stop_reason,
            times=Times(
                prefill_s=timer.prefill_s, compress_s=timer.compress_s,
                ttft_s=(timer.prefill_s or 0.0) + talk.answer_started - timer.asked,
                decode_s=talk.answer_ended - talk.answer_started, steps=reply.steps,
            ),
            bytes=talk.memory(), effect=talk.effect(), agreement=None, lossless=reply.lossless,
            reuse=count_reuse(talk) if turn == 0 else None,
            facts={**turn_facts(self.example, turn), **reply.facts}, started=self.started,
            seconds=time.perf_counter() - timer.wall, error=None,
        ))


def _with_agreement(
    job: Job, encoded: Encoded, lines: list[Line], forced: list[Tensor], capacity: int, recording: Recording | None
) -> list[Line]:
    """The lines with agreement, or unchanged if the full cache does not fit in memory."""
    own = [line.ids[:-1] if line.stop_reason == "stop" else line.ids for line in lines]
    try:
        full = find_full_logits(job.model, encoded, job.spec, own, capacity, recording)
    except torch.OutOfMemoryError:
        say_once(
            f"the full cache of {len(encoded.context)} tokens does not fit in memory: {job.method.card.name} is not "
            "compared with it."
        )
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
