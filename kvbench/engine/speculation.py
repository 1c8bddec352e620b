"""Lossless decoding: one cache drafts tokens, and another verifies them in one pass.

A round drafts tokens on a fork of the draft's cache, which is then dropped. One pass of the target over the last token
and all drafted ones gives the target's own choice after each of them. The longest prefix of the draft that equals
these choices is accepted, and the choice after it is one more token. The target forgets the entries of the others, and
the draft is given the accepted entries as the target computed them. So both caches hold the same tokens after every
round, the tokens are those of greedy decoding with the target, and the newest token is in neither cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kvbench.engine.autoregressive import Answers, Tokens
from kvbench.engine.session import Session
from kvbench.method import Method
from kvbench.step import Moment, Step
from kvbench.store.verified import VerifiedKV


@dataclass(frozen=True)
class Speculation:
    """Rounds of drafting and verification of one answer."""

    rounds: int
    drafted: int
    """Tokens, of one sequence."""
    accepted: int
    """Drafted tokens that the target would have chosen too, up to the first that it would not."""
    reloaded_bytes: int
    """Bytes of the target that verification fetched from host memory."""


class DraftSession(Session):
    """The cache that drafts, as a session of its own method; the target's session runs the context for both."""

    target: Session

    def forward(self, ids: Tensor, moment: Moment, *, keep: int = 1) -> Tensor:
        """Run one forward pass; one of the context fills both caches. Logits of the last positions. [B, keep, V]"""
        if not moment.in_context:
            return super().forward(ids, moment, keep=keep)
        logits = self.target.forward(ids, moment, keep=keep)
        self.seen = self.target.seen
        return logits


def find_stores(session: Session) -> list[VerifiedKV]:
    """The stores of a session with two caches, by layer."""
    return cast("list[VerifiedKV]", session.layers)


def open_draft(session: Session, drafter: Method) -> DraftSession:
    """The draft's cache at the same place of the conversation."""
    draft = session.over([store.draft for store in find_stores(session)], drafter, DraftSession)
    draft.target = session
    return draft


def follow_nothing(store: VerifiedKV, step: Step) -> None:
    """Do nothing: the draft has no cache of its own to update."""
    del store, step


def speculate(
    session: Session, propose: Callable[[Tensor, int], Tensor], length: int, max_new_tokens: int,
    stop: frozenset[int], *, stepwise: bool = False, follow: Callable[[VerifiedKV, Step], None] = follow_nothing,
) -> Tokens:
    """Generate the target's most likely tokens, of which `propose` drafts up to `length` per round.

    propose: of the newest token [B] and a number, at most as many next tokens [B, n]. follow: gives a layer's draft the
    accepted tokens of a verification pass, with `stepwise` one at a time, because it may change its entries at every
    step.

    The answer, its end and the caches after it are those of `Session.greedy`. Sequences of a batch accept the same
    number of tokens per round.

    Raises:
        UserError: max_new_tokens is below 1.
    """
    answers = Answers(session.batch, max_new_tokens, stop)
    assert session.logits is not None, "prefill first"
    stores = find_stores(session)
    before = sum(store.reloaded for store in stores)
    rounds = drafted = accepted = 0
    token, made = session.logits.argmax(-1), 1  # [B]
    ended = answers.add(token)
    while not ended and made < max_new_tokens:
        draft = propose(token, min(length, max_new_tokens - made - 1))  # [B, x]
        logits, steps = verify(session, torch.cat([token[:, None], draft], dim=1))
        choices = logits.argmax(-1)  # [B, x + 1]
        same = (draft == choices[:, :-1]).cumprod(1).sum(1).tolist()
        count = min(x for x, finished in zip(same, answers.stopped, strict=True) if not finished)
        for i in range(count + 1):
            ended = answers.add(choices[:, i])
            if ended:
                count = i  # what was accepted after the end of every answer is dropped
                break
        settle(session, steps, count + 1, stepwise=stepwise, follow=follow)
        session.logits, token = logits[:, count], choices[:, count]
        rounds, drafted, accepted, made = rounds + 1, drafted + draft.shape[1], accepted + count, made + count + 1
        for store in stores:
            store.drafted += draft.shape[1]
            store.passes += 1
            store.generated += count + 1
    reloaded = sum(store.reloaded for store in stores) - before
    return answers.finish(made - 1, Speculation(rounds, drafted, accepted, reloaded))


def draft_with(session: Session, drafter: Method, token: Tensor, count: int) -> Tensor:
    """The next `count` tokens under the draft's cache, which does not change. token: the newest one [B]. [B, count]"""
    if count == 0:
        return token.new_empty((session.batch, 0))
    draft = open_draft(session, drafter)
    with draft.fork() as branch:
        branch.logits = branch.forward(token[:, None], Moment.DECODE)[:, -1]
        for store in branch.layers:
            if isinstance(store, VerifiedKV):  # a drafter in rounds: its first token needs a pass, too
                store.passes += 1
                store.generated += 1
        found = drafter.generate(branch, count, frozenset())
        branch.ledger.note_layers()  # while the branch is in memory together with the session's caches
        draft.credit(branch)
    return torch.tensor(found.ids, device=token.device)


def verify(session: Session, ids: Tensor) -> tuple[Tensor, list[Step]]:
    """One pass of the target, which keeps these tokens until `settle`. ids: [B, T]

    Returns logits [B, T, V] and the steps by layer.
    """
    stores = find_stores(session)
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        target = stores[step.layer].target
        target.append(step)
        return target.attend(step)

    return session.run_model(ids, Moment.DECODE, attend, ids.shape[1]), steps


def settle(
    session: Session, steps: Sequence[Step], kept: int, *, stepwise: bool,
    follow: Callable[[VerifiedKV, Step], None],
) -> None:
    """Keep the first `kept` tokens of a verification pass in both caches, and no others."""
    rejected = steps[0].key.shape[2] - kept
    start = session.seen - steps[0].key.shape[2]
    session.seen -= rejected
    size, moment = (1, Moment.DECODE) if stepwise else (kept, Moment.TURN_END)
    shared: list[dict[str, Tensor]] = [{} for _ in range(0, kept, size)]  # of the layers of each part
    for store, step in zip(find_stores(session), steps, strict=True):
        store.target.crop(rejected)
        store.seen = session.seen
        for first, tensors in zip(range(0, kept, size), shared, strict=True):
            part = step.part(slice(first, first + size), seen=start + first + size, moment=moment)
            follow(store, replace(part, shared=tensors))
