"""How far a method's next-token distributions are from the dense cache's, on the reference answers as forced tokens.

Accuracy saturates; agreement does not. The dense cache runs the same conversation once more, after the method's own
session is closed, and generates nothing: one extra pass over the prompt. With reference history that conversation is
the same under every method, so its logits are kept for the next run on the same model (a sweep asks again and again).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import torch

from kvbench.budget import BudgetKind
from kvbench.engine.session import Session
from kvbench.kernels.choice import using
from kvbench.method import Card, Method
from kvbench.runs.journal import Agreement, AgreementPart
from kvbench.task import Encoded, Mode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvbench.hf import Model
    from kvbench.runs.spec import RunSpec


@dataclass(frozen=True)
class FullCache(Method):
    """The dense cache, as the reference of comparisons; the row that users run is the method `full`."""

    card: ClassVar[Card] = Card(
        name="dense-reference", title="Dense KV cache", idea="Every row stays. Attention is exact.", arxiv=None,
        year=None, family="baseline", stages=(), budget=BudgetKind.NONE, heads="independent", upstream=None,
    )


AT_ONCE = 256
FIRST_PART = 64
KEPT_BYTES = 256 * 2**20
"""Most bytes of dense logits that are kept per model, on the CPU; those asked for longest ago go first."""
_kept: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, list[Tensor]]] = WeakKeyDictionary()


def find_full_logits(
    model: Model, encoded: Encoded, spec: RunSpec, own: Sequence[Sequence[int]], capacity: int
) -> list[Tensor]:
    """What `compute_full_logits` comes to, computed unless it is still known from an earlier run on this model."""
    kept = _kept.setdefault(model.module, OrderedDict())
    history = tuple(tuple(ids) for ids in own) if spec.history == "own" else None
    key = (encoded, spec.mode, spec.visibility, spec.chunk, spec.kernels, history)
    if key not in kept:
        kept[key] = [x.cpu() for x in compute_full_logits(model, encoded, spec, own, capacity)]
    kept.move_to_end(key)
    while sum(x.nbytes for logits in kept.values() for x in logits) > KEPT_BYTES and len(kept) > 1:
        kept.popitem(last=False)
    return kept[key]


def force_answer(talk: Session, answer: Sequence[int], *, counts: bool = False) -> Tensor:
    """Logits that predict each token of an answer, given the ones before it. [T, V]

    The session is left as it was, but for the account of what was read, where this `counts` as its answer.
    """
    with talk.fork() as branch:
        logits = branch.force(answer)[0].float()
        if counts:
            talk.credit(branch)
    return logits


def compute_full_logits(
    model: Model, encoded: Encoded, spec: RunSpec, own: Sequence[Sequence[int]], capacity: int
) -> list[Tensor]:
    """The dense cache's logits on the reference answers of the same conversation, by turn. [T, V] each

    own: the method's answers without their stop token, which later turns see where the history is its own.
    """
    found = []
    visible = () if spec.visibility == "hidden" else encoded.turns[0].first
    # What it ran as is noted apart, or it would stand in the method's account.
    with using(spec.kernels), Session(model, FullCache(), capacity=capacity, chunk=spec.chunk) as session:
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


def compare_logits(ours: Tensor, dense: Tensor) -> Agreement:
    """Share of positions with the same most likely token, and the mean KL divergence from the dense cache in nats.

    ours, dense: [T, V]. Long answers also by distance, in parts that double: a difference that grows shows there.
    """
    same, divergence = torch.empty(len(ours)), torch.empty(len(ours))
    for start in range(0, len(ours), AT_ONCE):  # double logits of a long answer at once would be gigabytes
        part = slice(start, start + AT_ONCE)
        p, q = (x[part].to(dense.device).double().log_softmax(-1) for x in (dense, ours))
        same[part], divergence[part] = (p.argmax(-1) == q.argmax(-1)).float(), (p.exp() * (p - q)).sum(-1)
    edges = [0]
    while edges[-1] < len(ours) >= FIRST_PART:
        edges.append(max(FIRST_PART, 2 * edges[-1]))
    parts = [(start, same[start:end], divergence[start:end]) for start, end in pairwise(edges)]
    return Agreement(
        top1=same.mean().item(), kl=divergence.mean().item(), n=len(ours),
        by_distance=tuple(
            AgreementPart(start=start, top1=x.mean().item(), kl=y.mean().item(), n=len(x)) for start, x, y in parts
        ),
    )
