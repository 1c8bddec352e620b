"""Greedy decoding of autoregressive models, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvbench.engine.passes import request
from kvbench.errors import UserError
from kvbench.step import Moment

if TYPE_CHECKING:
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


def greedy_passes(session: Session, max_new_tokens: int, stop: frozenset[int]) -> Passes[Tokens]:
    """Generate the most likely token until every sequence has stopped or has `max_new_tokens`.

    The stop token is part of the answer. The last token is not run through the model.

    Raises:
        UserError: max_new_tokens is below 1.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens {max_new_tokens} must be 1 or more.")
    assert session.logits is not None, "prefill first"
    ids: list[list[int]] = [[] for _ in range(session.batch)]
    done = [False] * session.batch
    for made in range(1, max_new_tokens + 1):
        token = session.logits.argmax(-1)  # [B]
        for i, x in enumerate(token.tolist()):
            if not done[i]:
                ids[i].append(x)
                done[i] = x in stop
        if all(done) or made == max_new_tokens:
            break
        session.logits = (yield from request(session, token[:, None], Moment.DECODE))[:, -1]
    return Tokens(ids, ["stop" if x else "length" for x in done], steps=made - 1)


def step_logits(session: Session, token: torch.Tensor) -> torch.Tensor:
    """Run one decode step, as a CUDA graph captures it. token: [B, 1]. Returns logits [B, V]."""
    return session.forward(token, Moment.DECODE)[:, -1]
