"""What the kernel and the step clock time: the attention of a decode step alone, and the whole step.

Every method runs the same tokens. Where it can be, a step is a captured CUDA graph: it takes its token from a list on
the device and counts there, so that a replay is the next step. What it is compared with is timed in the same way.
"""

from __future__ import annotations

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
from kvbench.method import Phase, Step

ROTATED = 4
"""Queries that the attention's calls take in turn, so that what one selected is no answer to the next."""
BESIDE = "what it is beside is no graph"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Of the largest logit, as of the proof at load: between a captured step and the same step run as it comes."""


class WrongStepError(Exception):
    """A captured step gives other logits than the step itself."""


@dataclass(frozen=True)
class Timed:
    """Something to call again and again, whether as a graph, and if not why not."""

    call: Call
    prepare: Call
    """What each call needs first; not timed."""
    reason: str | None
    """Why it is no graph; None: it is one."""
    session: Session
    """The fork that it runs on; its stores say what was read."""


@contextmanager
def open_steps(setting: Setting, base: Session, *, graph: bool) -> Iterator[Timed]:
    """Whole decode steps on a fork, from the end of the context on.

    Raises:
        WrongStepError: the captured step is not the step.
    """
    device = setting.model.device
    reason = BESIDE if not graph else base.method.graphable or why_no_graph(device)
    if reason is None:
        wanted = _run_plainly(setting, base, CAPTURED_CALLS + 1)
        with base.fork() as fork:
            try:
                fork.make_static()
            except UserError as error:  # its store cannot, and its method did not say so
                reason = str(error)
            else:
                steps = _Steps(setting, fork)
                call, reason = capture(steps.run, device)
                if reason is None:
                    call()
                    _compare(steps.logits, wanted)
                    yield Timed(call, _nothing, None, fork)
                    return
    with base.fork() as fork:
        yield Timed(_Steps(setting, fork).run, _nothing, reason.rstrip("."), fork)


def why_no_graph(device: torch.device) -> str | None:
    """Why nothing on a device can be a graph; None: something may be."""
    return None if device.type == "cuda" else "there is no CUDA graph on a CPU"


def _run_plainly(setting: Setting, base: Session, count: int) -> Tensor:
    """Logits of the last of so many steps, run as they come. [B, V]

    On a fork that is closed before another one is static: that one takes all the room there is.
    """
    with base.fork() as fork:
        steps = _Steps(setting, fork)
        for _ in range(count):
            steps.run()
        return steps.logits


def _compare(logits: Tensor, wanted: Tensor) -> None:
    """Of a replayed step, and of the same step run as it comes."""
    allowed = TOLERANCE[wanted.dtype] * wanted.abs().max().item()
    worst = (logits - wanted).abs().max().item()
    if not worst <= allowed:
        raise WrongStepError(
            f"the captured step's logits differ by {worst:.2g} from the step's own, allowed {allowed:.2g}"
        )


def _nothing() -> None:
    """A step takes its own token."""


class _Steps:
    """Decode steps of one session over the setting's tokens."""

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
    """The attention of one decode step in all layers, over what a fork holds after a few tokens, and nothing else.

    What a method does beside it in a step (adding, scoring, evicting rows) is in the whole step alone.
    """
    device = setting.model.device
    with base.fork() as fork:
        recorded = [_record(setting, fork, token) for token in setting.tokens(fork.batch, ROTATED, seed=2).split(1, 1)]
        steps = [
            replace(step, query=step.query.clone(), positions=last.positions, seen=last.seen)
            for step, last in zip(recorded[0], recorded[-1], strict=True)
        ]
        attention = _Attention(fork, steps, recorded)
        call, reason = attention.run, why_no_graph(device) if graph else BESIDE
        if reason is None:
            call, reason = capture(attention.run, device)
        yield Timed(call, attention.turn, reason, fork)


def _record(setting: Setting, fork: Session, token: Tensor) -> list[Step]:
    """Every layer's step of one token, which is added and attends; nothing is evicted."""
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        fork.layers[step.layer].append(step)
        return fork.method.attend(fork.layers[step.layer], step)

    fork.seen += 1
    positions = torch.full_like(token, fork.seen - 1)
    setting.model.run(token, Forward(
        phase=Phase.DECODE, positions=positions, seen=fork.seen, attend=attend, ropes=setting.model.ropes
    ))
    return sorted(steps, key=lambda step: step.layer)


class _Attention:
    """Calls of every layer's attention; queries stand in buffers that never move."""

    def __init__(self, session: Session, steps: list[Step], recorded: list[list[Step]]) -> None:
        self.session, self.steps, self.recorded = session, steps, recorded
        self.turns = 0

    def turn(self) -> None:
        """Put the next token's queries in."""
        self.turns += 1
        for step, other in zip(self.steps, self.recorded[self.turns % ROTATED], strict=True):
            step.query.copy_(other.query)

    def run(self) -> None:
        with torch.no_grad():
            for step in self.steps:
                self.session.method.attend(self.session.layers[step.layer], step)
