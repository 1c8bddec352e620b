"""The answer to one question: generated, or the most likely of several choices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import fsum, isfinite

import torch
from torch import Tensor

from kvbench.engine.agreement import force_answer_passes
from kvbench.engine.autoregressive import Tokens
from kvbench.engine.passes import Passes
from kvbench.engine.session import Session
from kvbench.engine.timing import now
from kvbench.runs.job import Job
from kvbench.runs.journal import LosslessLine
from kvbench.task import EncodedTurn, Turn


@dataclass(frozen=True)
class Reply:
    """The answer to a question: generated text, or the most likely choice."""

    text: str
    ids: tuple[int, ...]
    stop_reason: str
    steps: int
    facts: dict[str, object] = field(default_factory=dict)
    lossless: LosslessLine | None = None


def decode_plainly(job: Job, talk: Session, limit: int) -> tuple[list[int], float] | None:
    """The answer that a lossless method promises, decoded one token at a time, and the seconds that this takes.

    None: the method promises none. The session does not change.
    """
    target = job.method.target(talk)
    if target is None:
        return None
    with target.fork() as branch:
        started = now(job.model.device)
        tokens = branch.greedy(limit, job.stop_ids)
        return tokens.ids[0], now(job.model.device) - started


def read_reply(job: Job, tokens: Tokens, plain: tuple[list[int], float] | None) -> Reply:
    """The answer that these tokens are, with its difference to `plain` where the method promises that there is none."""
    ids, lossless = tokens.ids[0], None
    if plain is not None and tokens.speculation is not None:
        wanted, seconds = plain
        equal = sum(x == y for x, y in zip(ids, wanted, strict=False))
        lossless = LosslessLine(
            **asdict(tokens.speculation), different=max(len(ids), len(wanted)) - equal, plain_s=seconds
        )
    answer = ids[:-1] if ids and ids[-1] in job.stop_ids else ids
    text = str(job.model.tokenizer.decode(answer, skip_special_tokens=True))
    return Reply(text, tuple(ids), tokens.stop_reasons[0], tokens.steps, lossless=lossless)


def choose_passes(
    job: Job, talk: Session, turn: Turn, ids: EncodedTurn, known: dict[tuple[int, ...], Tensor]
) -> Passes[Reply]:
    """The passes that find the choice with the greatest log-probability. The session's tokens do not change.

    known: logits of continuations that were computed before.
    """
    talk.resume()
    talk.answer_started = now(job.model.device)
    logprobs = []
    for choice in ids.choices:
        logits = known.get(choice)
        if logits is None:
            logits = yield from force_answer_passes(talk, choice, counts=True)
        tokens = torch.tensor(choice, device=logits.device)
        found = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].tolist()
        logprobs.append([round(x, 5) for x in found])  # as recorded, so that a verification finds the same choice
    talk.answer_ended = now(job.model.device)
    if not all(isfinite(x) for choice in logprobs for x in choice):
        raise ValueError("a choice has log-probabilities that are not finite")
    best = max(range(len(logprobs)), key=lambda i: fsum(logprobs[i]))
    return Reply(turn.choices[best], ids.choices[best], "choice", 0, {"logprobs": logprobs})
