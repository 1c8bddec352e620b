"""Greedy decoding of autoregressive models, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.engine.passes import request
from kvbench.errors import UserError
from kvbench.step import Moment

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.engine.passes import Passes
    from kvbench.engine.session import Session
    from kvbench.engine.speculation import Speculation


@dataclass(frozen=True)
class Tokens:
    """Generated answers of a batch."""

    ids: list[list[int]]
    """By sequence."""
    stop_reasons: list[str]
    """By sequence: `stop` or `length`."""
    steps: int
    """Tokens after the first, each a decode step unless they were drafted and verified."""
    speculation: Speculation | None = None
    """None: one token was decoded per step."""


class Answers:
    """Answers of a batch that are being generated. A sequence gets its stop token, and no token after it.

    Raises:
        UserError: max_new_tokens is below 1.
    """

    def __init__(self, batch: int, max_new_tokens: int, stop: frozenset[int]) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens {max_new_tokens} must be 1 or more.")
        self.stop = stop
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.stopped = [False] * batch

    def add(self, tokens: Tensor) -> bool:
        """Add the next token of each sequence. Whether all have stopped. tokens: [B]"""
        for i, x in enumerate(tokens.tolist()):
            if not self.stopped[i]:
                self.ids[i].append(x)
                self.stopped[i] = x in self.stop
        return all(self.stopped)

    def finish(self, steps: int, speculation: Speculation | None = None) -> Tokens:
        """The answers as they are now."""
        return Tokens(self.ids, ["stop" if x else "length" for x in self.stopped], steps, speculation)


def greedy_passes(session: Session, max_new_tokens: int, stop: frozenset[int]) -> Passes[Tokens]:
    """Generate the most likely token until every sequence has stopped or has `max_new_tokens`.

    The stop token is part of the answer. The last token is not run through the model.

    Raises:
        UserError: max_new_tokens is below 1.
    """
    answers = Answers(session.batch, max_new_tokens, stop)
    assert session.logits is not None, "prefill first"
    for made in range(1, max_new_tokens + 1):
        token = session.logits.argmax(-1)  # [B]
        if answers.add(token) or made == max_new_tokens:
            break
        session.logits = (yield from request(session, token[:, None], Moment.DECODE))[:, -1]
    return answers.finish(steps=made - 1)


def step_logits(session: Session, token: Tensor) -> Tensor:
    """Run one decode step, as a CUDA graph captures it. token: [B, 1]. Returns logits [B, V]."""
    return session.forward(token, Moment.DECODE)[:, -1]
