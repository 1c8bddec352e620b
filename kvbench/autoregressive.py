"""The decoding loop of autoregressive models: greedy, one token at a time."""

from __future__ import annotations

import torch

from kvbench.method import Phase
from kvbench.session import Session, Tokens


def greedy(session: Session, limit: int, stop: frozenset[int]) -> Tokens:
    """The most likely token, again and again, until every sequence stopped or `limit` tokens are made.

    The token that ends an answer is part of it and is never run.
    """
    assert session.logits is not None, "prefill first"
    ids: list[list[int]] = [[] for _ in range(session.batch)]
    done = [False] * session.batch
    steps = 0
    while True:
        token = session.logits.argmax(-1)  # [B]
        for i, x in enumerate(token.tolist()):
            if not done[i]:
                ids[i].append(x)
                done[i] = x in stop
        if all(done) or len(ids[0]) >= limit or max(map(len, ids)) >= limit:
            break
        session.logits = session.forward(token[:, None], Phase.DECODE)[:, -1]
        steps += 1
    reasons = ["stop" if x else "length" for x in done]
    return Tokens(ids, reasons, steps)


def step_logits(session: Session, token: torch.Tensor) -> torch.Tensor:
    """One decode step without the loop: what a CUDA graph captures. token: [B, 1]. Logits [B, V]."""
    return session.forward(token, Phase.DECODE)[:, -1]
