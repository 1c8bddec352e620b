"""Top-1 agreement and KL divergence to the full cache, teacher-forced on the reference answers.

Agreement still distinguishes methods where accuracy saturates. After the method's session is closed, the full cache
runs the same conversation without generating: one extra pass over the prompt. With reference history this conversation
is the same under every method, so its logits are cached for later runs on the same model, as in a sweep.
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
from kvbench.engine.passes import Passes, finish, merge
from kvbench.engine.session import Session
from kvbench.kernels.choice import using
from kvbench.method import Card, Method
from kvbench.runs.journal import Agreement, AgreementPart
from kvbench.task import Encoded, EncodedTurn, Mode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kvbench.engine.recording import Recording
    from kvbench.hf import Model
    from kvbench.runs.spec import RunSpec


@dataclass(frozen=True)
class FullCache(Method):
    """The full cache as the reference of comparisons. As a method of its own it is `full`."""

    card: ClassVar[Card] = Card(
        name="full-reference", title="Full KV cache", idea="Keeps every entry. Attention is exact.", arxiv=None,
        year=None, family="baseline", stages=(), budget=BudgetKind.NONE, heads="independent", upstream=None,
    )


CHUNK = 256
"""Positions whose logits are compared in float64 at once."""
FIRST_PART = 64
"""Tokens of the first part of `Agreement.by_distance`."""
CACHED_BYTES = 2**30
"""Most bytes of cached logits per model, on the CPU; the least recently used are dropped first.

Should hold those of a batch: the runs of a sweep ask for them in the same order, and each would be dropped just before.
"""
_cached: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, list[Tensor]]] = WeakKeyDictionary()


def find_full_logits(
    model: Model, encoded: Encoded, spec: RunSpec, own: Sequence[Sequence[int]], capacity: int,
    recording: Recording | None = None,
) -> list[Tensor]:
    """As `compute_full_logits`, from the cache of this model's logits if they are in it."""
    cached = _cached.setdefault(model.module, OrderedDict())
    history = tuple(tuple(ids) for ids in own) if spec.history == "own" else None
    key = (encoded, spec.mode, spec.visibility, spec.chunk, spec.batch, spec.kernels, history)
    if key not in cached:
        cached[key] = [x.cpu() for x in compute_full_logits(model, encoded, spec, own, capacity, recording)]
    cached.move_to_end(key)
    while sum(x.nbytes for logits in cached.values() for x in logits) > CACHED_BYTES and len(cached) > 1:
        cached.popitem(last=False)
    return cached[key]


def forget() -> None:
    """Drop all cached logits, as in a new process."""
    _cached.clear()


def force_answer(talk: Session, answer: Sequence[int]) -> Tensor:
    """Logits that predict each token of an answer, given the tokens before it; the session does not change. [T, V]"""
    return finish(force_answer_passes(talk, answer))


def force_answer_passes(talk: Session, answer: Sequence[int], *, counts: bool = False) -> Passes[Tensor]:
    """The passes of `force_answer`. counts: whether the bytes that they read count as read for the session's answer."""
    with talk.fork() as branch:
        logits = (yield from branch.force_passes(answer))[0].float()
        if counts:
            talk.credit(branch)
    return logits


def compute_full_logits(
    model: Model, encoded: Encoded, spec: RunSpec, own: Sequence[Sequence[int]], capacity: int,
    recording: Recording | None = None,
) -> list[Tensor]:
    """The full cache's logits on the reference answers of a conversation, by turn. [T, V] each

    own: the method's answers without stop tokens, which later turns see if the history is `own`.
    recording: the prefill of the context, if it has been run.
    """
    found = []
    visible = () if spec.visibility == "hidden" else encoded.turns[0].first
    # A context of its own: the kernels that run here are not counted as the method's.
    with using(spec.kernels), Session(
        model, FullCache(), capacity=capacity, chunk=spec.chunk, recording=recording
    ) as session:
        session.prefill(encoded.context, visible=visible)
        if spec.mode is Mode.MULTI_REQUEST:
            return finish(merge((_force_on_fork(session, ids) for ids in encoded.turns), spec.batch))
        for turn, ids in enumerate(encoded.turns):
            first = () if visible else ids.first
            session.question(ids.later if turn else first, len(ids.answer))
            found.append(force_answer(session, ids.answer))
            session.remember(own[turn] if spec.history == "own" else ids.answer)
    return found


def _force_on_fork(session: Session, ids: EncodedTurn) -> Passes[Tensor]:
    with session.fork() as branch:
        yield from branch.question_passes(ids.first, len(ids.answer))
        return (yield from force_answer_passes(branch, ids.answer))


def compare_logits(ours: Tensor, full: Tensor) -> Agreement:
    """Share of positions with the same top-1 token, and the mean KL divergence from the full cache in nats.

    Long answers are also split by distance from the question, into parts of doubling length.

    ours, full: [T, V].
    """
    same, divergence = torch.empty(len(ours)), torch.empty(len(ours))
    for start in range(0, len(ours), CHUNK):  # float64 logits of a long answer can need gigabytes
        part = slice(start, start + CHUNK)
        p, q = (x[part].to(full.device).double().log_softmax(-1) for x in (full, ours))
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
