"""Forward passes of several conversations, run together.

A conversation is a generator that yields the passes it needs next and receives their logits. Passes that are wanted at
the same time run as one: their tokens stand one after another in one sequence, with their own positions, and attention
takes each conversation's part to that conversation's stores. Everything else in a model works on one token at a time.
So there is no padding, lengths and moments may differ, and no store or method depends on another conversation.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kvbench.hf import Forward
from kvbench.step import Moment, Step

if TYPE_CHECKING:
    from kvbench.engine.session import Session

T = TypeVar("T")


@dataclass(frozen=True)
class PassRequest:
    """A forward pass that a conversation needs next; see `Session.forward`."""

    session: Session
    ids: Tensor  # [B, T]
    moment: Moment
    keep: int = 1
    """Last positions whose logits are wanted."""


Passes = Generator[Sequence[PassRequest], Sequence[Tensor], T]
"""Yields passes to run together, receives the logits of each [B, keep, V], and returns a result."""


def request(session: Session, ids: Tensor, moment: Moment, keep: int = 1) -> Passes[Tensor]:
    """Wait for one pass. Returns its logits [B, keep, V]."""
    (logits,) = yield [PassRequest(session, ids, moment, keep)]
    return logits


def finish(passes: Passes[T]) -> T:
    """Run all passes, those that are wanted at the same time together, and return the result."""
    try:
        wanted = next(passes)
        while True:
            wanted = passes.send(run_together(wanted))
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        passes.close()


def merge(parts: Iterator[Passes[T]], width: int) -> Passes[list[T]]:
    """Results of several conversations in order, of which `width` run together; when one ends, the next begins."""
    results: dict[int, T] = {}
    active: list[tuple[int, Passes[T], Sequence[PassRequest]]] = []
    waiting = enumerate(parts)

    def advance(number: int, part: Passes[T], logits: Sequence[Tensor] | None) -> None:
        try:
            active.append((number, part, next(part) if logits is None else part.send(logits)))
        except StopIteration as end:
            results[number] = end.value

    try:
        while True:
            while len(active) < width and (found := next(waiting, None)) is not None:
                advance(*found, None)
            if not active:
                return [results[x] for x in sorted(results)]
            logits = yield [x for _, _, wanted in active for x in wanted]
            start = 0
            for _ in range(len(active)):  # if a part raises, those after it are still in `active`, and are closed
                number, part, wanted = active.pop(0)
                advance(number, part, logits[start : start + len(wanted)])
                start += len(wanted)
    finally:
        for _, part, _ in active:
            part.close()


def run_together(requests: Sequence[PassRequest]) -> list[Tensor]:
    """Run the passes of different sessions on one model as one. Logits of each. [B, keep, V]"""
    if len(requests) == 1:
        (one,) = requests
        return [one.session.forward(one.ids, one.moment, keep=one.keep)]
    model = requests[0].session.model
    ends = [0]
    positions: list[Tensor] = []
    kept: list[int] = []
    for x in requests:
        assert x.session.batch == 1 and x.session.model is model, "passes of single sequences on one model"
        count = x.ids.shape[1]
        positions.append(x.session.take_positions(x.ids))
        ends.append(ends[-1] + count)
        kept += range(ends[-1] - x.keep, ends[-1])
    spans = [slice(start, stop) for start, stop in pairwise(ends)]

    def attend(step: Step) -> Tensor:
        outputs = []
        for x, span in zip(requests, spans, strict=True):
            outputs.append(x.session.attend(step.part(span, seen=x.session.seen, moment=x.moment)))
        return torch.cat(outputs, dim=2)

    moment = next((x.moment for x in requests if x.moment.compresses), requests[0].moment)
    forward = Forward(moment=moment, positions=torch.cat(positions, dim=1), seen=0, attend=attend, ropes=model.ropes)
    logits = model.run(
        torch.cat([x.ids for x in requests], dim=1), forward, torch.tensor(kept, device=model.device)
    )
    return list(logits.split([x.keep for x in requests], dim=1))
