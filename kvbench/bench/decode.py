"""Timed calls for kernel timing and decode step timing: the attention of one decode step alone, or the whole step.

Every method runs the same tokens. Where possible, a step is a captured CUDA graph: it reads its token from a list on
the device and advances a position there, so each replay is the next step. Anchors are timed in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.bench.state import Setting
from kvbench.bench.timing import CAPTURED_CALLS, Call, capture
from kvbench.engine.autoregressive import step_logits
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Forward
from kvbench.step import Moment, Step
from kvbench.store.selective import SelectiveKV

ROTATED = 4
"""Queries that calls of the attention use in turn, so that one call's selection does not fit the next call."""
NO_GRAPHS_COMPARED = "the method that it is compared with runs without a CUDA graph"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Allowed difference between a captured and a normal step, relative to the largest logit, as in the proof at load."""


class WrongStepError(Exception):
    """A captured step gives other logits than the same step without capture."""


@dataclass(frozen=True)
class Timed:
    """A call to time, as a graph or not."""

    call: Call
    prepare: Call
    """Runs before each call; not timed."""
    reason: str | None
    """Explains why the call is no graph; None if it is one."""
    session: Session
    """The fork that the call runs on; its stores count the bytes read."""
    settle: Call
    """Counts what replays read, after the last one."""


@contextmanager
def open_steps(setting: Setting, base: Session, *, graph: bool) -> Iterator[Timed]:
    """Whole decode steps on a fork of a session, starting at the end of its context.

    Raises:
        WrongStepError: the captured step gives other logits than the normal step.
    """
    device = setting.model.device
    reason = NO_GRAPHS_COMPARED if not graph else base.method.graphable or why_no_graph(device)
    if reason is None:
        wanted = _run_plainly(setting, base, CAPTURED_CALLS + 1)
        with base.fork() as fork:
            try:
                fork.make_static()
            except UserError as error:  # the store does not support it, although its method is declared graphable
                reason = str(error)
            else:
                steps = _Steps(setting, fork)
                reads = _Reads(fork)
                call, reason = reads.capture(steps.run, device)
                if reason is None:
                    call()
                    _compare(steps.logits, wanted)
                    yield Timed(call, _nothing, None, fork, reads.settle)
                    return
    with base.fork() as fork:
        yield Timed(_Steps(setting, fork).run, _nothing, reason.rstrip("."), fork, _nothing)


def why_no_graph(device: torch.device) -> str | None:
    """The reason why a device has no CUDA graphs; None if it has."""
    return None if device.type == "cuda" else "there is no CUDA graph on a CPU"


def _run_plainly(setting: Setting, base: Session, count: int) -> Tensor:
    """Logits of the last of `count` steps without capture. [B, V]

    They run on a fork that is closed before another fork becomes static, because that one takes all spare room.
    """
    with base.fork() as fork:
        steps = _Steps(setting, fork)
        for _ in range(count):
            steps.run()
        return steps.logits


def _compare(logits: Tensor, wanted: Tensor) -> None:
    """Compare the logits of a replayed step with those of the same step without capture."""
    allowed = TOLERANCE[wanted.dtype] * wanted.abs().max().item()
    worst = (logits - wanted).abs().max().item()
    if not worst <= allowed:
        raise WrongStepError(
            f"the captured step's logits differ by {worst:.2g} from those of the normal step, allowed {allowed:.2g}"
        )


def _nothing() -> None:
    """Steps need no preparation, and calls that are no graphs count their reads themselves."""


class _Reads:
    """Reads of a captured call: stores count in Python, which runs at the capture and at no replay."""

    def __init__(self, session: Session) -> None:
        self.counters = [x.reads for x in session.layers if isinstance(x, SelectiveKV)]
        self.captured: list[Counter[str]] = []
        self.replays = 0

    def capture(self, call: Call, device: torch.device) -> tuple[Call, str | None]:
        """Capture a call; its replays are counted."""

        def run() -> None:
            before = [x.copy() for x in self.counters]
            call()
            self.captured = [x - y for x, y in zip(self.counters, before, strict=True)]

        def replay() -> None:
            found()
            self.replays += 1

        found, reason = capture(run, device)
        return (call if reason else replay), reason

    def settle(self) -> None:
        """Count every replay as the captured call was counted, which itself read nothing."""
        for counter, one in zip(self.counters, self.captured, strict=True):
            counter.update({name: x * (self.replays - 1) for name, x in one.items()})


class _Steps:
    """Consecutive decode steps of one session over the setting's tokens."""

    def __init__(self, setting: Setting, session: Session) -> None:
        self.session = session
        self.feed = setting.tokens(session.batch, setting.later, seed=2).T[..., None].contiguous()  # [N, B, 1]
        self.at = torch.zeros(1, dtype=torch.long, device=self.feed.device)
        self.logits = torch.empty(0)
        self.best = torch.empty_like(self.feed[0])

    def run(self) -> None:
        token = self.feed.index_select(0, self.at)[0]
        self.at.add_(1)
        self.logits = step_logits(self.session, token)
        self.best.copy_(self.logits.argmax(-1, keepdim=True))


@contextmanager
def open_attention(setting: Setting, base: Session, *, graph: bool) -> Iterator[Timed]:
    """The attention of one decode step in all layers, over the entries that a fork holds after ROTATED tokens.

    Everything else that a method does in a step (appending, scoring, evicting entries) is in decode step timing only.
    """
    device = setting.model.device
    with base.fork() as fork:
        recorded = [_record(setting, fork, token) for token in setting.tokens(fork.batch, ROTATED, seed=2).split(1, 1)]
        steps = [
            replace(step, query=step.query.clone(), positions=last.positions, seen=last.seen)
            for step, last in zip(recorded[0], recorded[-1], strict=True)
        ]
        attention = _Attention(fork, steps, recorded)
        reads = _Reads(fork)
        call, reason = attention.run, why_no_graph(device) if graph else NO_GRAPHS_COMPARED
        if reason is None:
            call, reason = reads.capture(attention.run, device)
        yield Timed(call, attention.turn, reason, fork, _nothing if reason else reads.settle)


def _record(setting: Setting, fork: Session, token: Tensor) -> list[Step]:
    """Run one token, appending its entries without evicting any, and return the step of every layer."""
    steps: list[Step] = []
    shared: dict[str, Tensor] = {}  # of the layers, as in a session

    def attend(step: Step) -> Tensor:
        step = replace(step, shared=shared)
        steps.append(step)
        fork.layers[step.layer].append(step)
        return fork.method.attend(fork.layers[step.layer], step)

    fork.seen += 1
    positions = torch.full_like(token, fork.seen - 1)
    setting.model.run(token, Forward(
        moment=Moment.DECODE, positions=positions, seen=fork.seen, attend=attend, ropes=setting.model.ropes
    ))
    return sorted(steps, key=lambda step: step.layer)


class _Attention:
    """The attention of every layer; queries are copied into fixed buffers, because a graph replays fixed addresses."""

    def __init__(self, session: Session, steps: list[Step], recorded: list[list[Step]]) -> None:
        self.session, self.steps, self.recorded = session, steps, recorded
        self.turns = 0

    def turn(self) -> None:
        """Copy the next token's queries into the buffers."""
        self.turns += 1
        for step, other in zip(self.steps, self.recorded[self.turns % ROTATED], strict=True):
            step.query.copy_(other.query)

    def run(self) -> None:
        with torch.no_grad():
            for step in self.steps:
                self.session.method.attend(self.session.layers[step.layer], step)
