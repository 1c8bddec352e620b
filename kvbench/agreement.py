"""How far a method's next-token distributions are from the dense cache's, on the golden answers as forced tokens.

Accuracy saturates; agreement does not. The dense cache runs the same conversation once more, after the method's own
session is closed, and generates nothing: one extra pass over the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvbench.method import BudgetKind, Card, Method
from kvbench.session import Session
from kvbench.task import Encoded, Mode

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.hf import Model
    from kvbench.spec import RunSpec


@dataclass(frozen=True)
class Dense(Method):
    """The dense cache, as the reference of comparisons; the row that users run is the method `full`."""

    card: ClassVar[Card] = Card(
        name="dense-reference", title="Dense KV cache", idea="Every row stays. Attention is exact.", arxiv=None,
        year=None, family="baseline", stages=(), budget=BudgetKind.NONE, heads="independent", upstream=None,
    )


def force_answer(talk: Session, answer: Sequence[int]) -> Tensor:
    """Logits that predict each token of an answer, given the ones before it; the session is left as it was. [T, V]"""
    with talk.fork() as branch:
        return branch.force(answer)[0].float()


def run_dense(
    model: Model, encoded: Encoded, spec: RunSpec, own: Sequence[Sequence[int]], capacity: int
) -> list[Tensor]:
    """The dense cache's logits on the golden answers of the same conversation, by turn. [T, V] each

    own: the method's answers without their stop token, which later turns see where the history is its own.
    """
    found = []
    visible = () if spec.visibility == "hidden" else encoded.turns[0].first
    with Session(model, Dense(), capacity=capacity, chunk=spec.chunk) as session:
        session.prefill(encoded.context, visible=visible)
        for turn, ids in enumerate(encoded.turns):
            if spec.mode is Mode.MULTI_REQUEST:
                with session.fork() as branch:
                    branch.question(ids.first, len(ids.answer))
                    found.append(force_answer(branch, ids.answer))
                continue
            first = () if visible else ids.first
            session.question(ids.later if turn else first, len(ids.answer))
            found.append(force_answer(session, ids.answer))
            session.remember(own[turn] if spec.history == "own" else ids.answer)
    return found


def compare_logits(ours: Tensor, dense: Tensor) -> tuple[float, float]:
    """Share of positions with the same most likely token, and the mean KL divergence from the dense cache in nats."""
    p, q = dense.double().log_softmax(-1), ours.double().log_softmax(-1)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    return same, (p.exp() * (p - q)).sum(-1).mean().item()
