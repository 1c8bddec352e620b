"""The decoding loop of autoregressive models: greedy, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvbench.errors import UserError
from kvbench.step import Moment

if TYPE_CHECKING:
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class Tokens:
    """A generated answer: ids per sequence, and why each ended (`stop` or `length`)."""

    ids: list[list[int]]
    stop_reasons: list[str]
    steps: int
    """Forward passes made."""


def greedy(session: Session, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
    """The most likely token, again and again, until every sequence stopped or `max_new_tokens` are made.

    The token that ends an answer is part of it, and the last token is never run.

    Raises:
        UserError: max_new_tokens below 1.
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
        session.logits = session.forward(token[:, None], Moment.DECODE)[:, -1]
    return Tokens(ids, ["stop" if x else "length" for x in done], steps=made - 1)


def step_logits(session: Session, token: torch.Tensor) -> torch.Tensor:
    """One decode step without the loop: what a CUDA graph captures. token: [B, 1]. Logits [B, V]."""
    return session.forward(token, Moment.DECODE)[:, -1]
