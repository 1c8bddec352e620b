"""Agreement with the full cache: exact for lossless methods, and equal to hand-computed numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from kvbench.engine import agreement
from kvbench.engine.agreement import (
    FullCache,
    compare_logits,
    find_full_logits,
    force_answer,
    force_answer_passes,
)
from kvbench.engine.passes import finish
from kvbench.engine.session import Session
from kvbench.hf.tiny import placed, tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.random import Random
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.retrieval.quest import Quest
from kvbench.task import Encoded, EncodedTurn, Mode

CONTEXT = torch.randint(64, (120,), generator=torch.Generator().manual_seed(0)).tolist()


def test_the_divergence_of_two_coins() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) is log(2 / sqrt 3), and the most likely tokens differ in one of two rows."""
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    ours = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()

    found = compare_logits(ours, full)
    top1, kl = found.top1, found.kl

    assert math.isclose(kl, math.log(2 / math.sqrt(3)) / 2, rel_tol=1e-6)
    assert top1 == 0.5


def test_a_small_divergence_is_not_lost_in_rounding() -> None:
    """Of logits that differ by 0.0005: in float32 its 1e-7 would be noise."""
    full = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    ours = full + 5e-4 * torch.randn(2, 5000, generator=torch.Generator().manual_seed(1))
    p, q = (x.numpy().astype(float) for x in (full, ours))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    assert math.isclose(compare_logits(ours, full).kl, (np.exp(p) * (p - q)).sum(-1).mean(), rel_tol=1e-5)


def test_all_entries_kept_agree_and_a_few_random_ones_do_not() -> None:
    """SnapKV at full budget has the full cache's distributions; a few random entries do not."""
    model = tiny_model()
    found = {}
    methods = {"full": FullCache(), "all": SnapKV(), "few": Random(window=1)}
    budgets = {"full": None, "all": Budget("fraction", 1.0), "few": Budget("rows", 8)}
    for name, method in methods.items():
        budget = budgets[name]
        with Session(model, method.fit(budget, model.shape(120)), capacity=200) as session:
            session.prefill(CONTEXT)
            session.question([5, 6, 7], 4)
            found[name] = force_answer(session, [1, 2, 3, 4])

    assert compare_logits(found["all"], found["full"]).kl < 1e-9
    assert compare_logits(found["all"], found["full"]).top1 == 1.0
    assert compare_logits(found["few"], found["full"]).kl > 1e-3


def test_forcing_leaves_the_session_as_it_was() -> None:
    """After a forced answer the session answers as one that was never asked to agree."""
    model = tiny_model()
    answers = []
    for forces in (False, True):
        fitted = SnapKV().fit(Budget("rows", 40), model.shape(120))
        with Session(model, fitted, capacity=200) as session:
            session.prefill(CONTEXT)
            session.question([5, 6, 7], 8)
            if forces:
                force_answer(session, [1, 2, 3, 4])
            answers.append(session.answer(8, stop=frozenset()).ids)

    assert answers[0] == answers[1]


def test_reads_of_a_forced_answer_count_if_that_is_asked() -> None:
    """Of an agreement they do not, of a choice they do."""
    model = tiny_model()
    with Session(model, Quest().fit(Budget("rows", 64), model.shape(120)), capacity=200) as session:
        session.prefill(CONTEXT)
        session.question([5, 6, 7], 8)
        facts = [session.effect().facts]
        for counts in (False, True):
            finish(force_answer_passes(session, [1, 2, 3, 4], counts=counts))
            facts.append(session.effect().facts)
    assert facts[0] == facts[1] != facts[2]


def test_forced_logits_of_a_model_in_16_bits_are_in_32() -> None:
    """Log-probabilities in 16 bits would have three digits."""
    with placed("cpu", torch.bfloat16):
        model = tiny_model()
    with Session(model, FullCache(), capacity=200) as session:
        session.prefill(CONTEXT)
        assert force_answer(session, [3, 1, 2]).dtype == torch.float32


def test_forced_logits_are_those_that_predict_each_token() -> None:
    """The first row is the question's last logits, and log-likelihoods from all rows are `score`'s."""
    model = tiny_model()
    with Session(model, FullCache(), capacity=200) as session:
        session.prefill(CONTEXT)
        last = session.logits
        with session.fork() as branch:
            logits = branch.force([3, 1, 2])
        scores = session.score([3, 1, 2])

    assert last is not None
    assert logits[0, 0].equal(last[0])
    picked = logits.log_softmax(-1)[0, range(3), [3, 1, 2]]
    torch.testing.assert_close(picked, scores[0])


@dataclass(frozen=True)
class Protocol:
    """The parts of a spec that the full cache's conversation depends on."""

    mode: Mode = Mode.MULTI_TURN
    visibility: str = "hidden"
    history: str = "reference"
    chunk: int | None = None
    batch: int = 1
    kernels: str = "torch"


def conversation(first: int) -> Encoded:
    """A context and two turns."""
    return Encoded((first, *CONTEXT), tuple(EncodedTurn((i, 6), (i, 7), (1, 2, 3)) for i in (4, 5)))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records every run of the full cache."""
    found: list[Any] = []
    really = agreement.compute_full_logits

    def run(*arguments: Any) -> list[torch.Tensor]:
        found.append(arguments)
        return really(*arguments)

    monkeypatch.setattr(agreement, "compute_full_logits", run)
    monkeypatch.setattr(agreement, "_cached", WeakKeyDictionary())
    return found


def test_the_full_cache_runs_a_conversation_once_per_model(runs: list[Any]) -> None:
    """Asked again it is known; another context, protocol, history or model is another conversation."""
    model, reference, own = tiny_model(), Protocol(), Protocol(history="own")
    first = find_full_logits(model, conversation(1), reference, [[9], [9]], 200)
    again = find_full_logits(model, conversation(1), reference, [[8], [8]], 300)
    assert len(runs) == 1
    assert all(x.equal(y) for x, y in zip(first, again, strict=True))

    find_full_logits(model, conversation(2), reference, [[9], [9]], 200)
    find_full_logits(model, conversation(1), Protocol(visibility="first-turn"), [[9], [9]], 200)
    find_full_logits(model, conversation(1), own, [[9], [9]], 200)
    find_full_logits(model, conversation(1), own, [[8], [8]], 200)
    find_full_logits(tiny_model(seed=1), conversation(1), reference, [[9], [9]], 200)
    assert len(runs) == 6
    agreement.forget()
    find_full_logits(model, conversation(1), reference, [[9], [9]], 200)
    assert len(runs) == 7


@pytest.mark.parametrize("changed", [
    {"mode": Mode.MULTI_REQUEST}, {"visibility": "first-turn"}, {"chunk": 50}, {"batch": 2}, {"kernels": "triton"}, {},
])
def test_another_protocol_and_other_turns_have_their_own_logits(monkeypatch: pytest.MonkeyPatch, changed: Any) -> None:
    """Each is computed once, and neither is taken for the other."""
    monkeypatch.setattr(agreement, "_cached", WeakKeyDictionary())
    computed: list[list[torch.Tensor]] = []
    monkeypatch.setattr(agreement, "compute_full_logits", lambda *_: computed.append([torch.zeros(1)]) or computed[-1])
    model, whole = tiny_model(), conversation(1)
    asked = [(whole, Protocol()), (whole if changed else replace(whole, turns=whole.turns[:1]), Protocol(**changed))]
    found = [find_full_logits(model, encoded, protocol, [[9], [9]], 200) for encoded, protocol in (*asked, *asked)]
    assert len(computed) == 2
    assert [x is found[0] for x in found] == [True, False, True, False]


@pytest.mark.parametrize(("protocol", "earlier"), [
    (Protocol(), (4, 6, 1, 2, 3, 5, 7)), (Protocol(visibility="first-turn"), (4, 6, 1, 2, 3, 5, 7)),
    (Protocol(history="own"), (4, 6, 9, 5, 7)), (Protocol(chunk=50), (4, 6, 1, 2, 3, 5, 7)),
    (Protocol(mode=Mode.MULTI_REQUEST), (5, 6)), (Protocol(mode=Mode.MULTI_REQUEST, batch=2), (5, 6)),
])
def test_the_full_caches_logits_are_those_of_a_plain_forward_pass(protocol: Protocol, earlier: tuple[int, ...]) -> None:
    """After all that the second question follows: the first one with the history's answer, or nothing."""
    model, encoded = tiny_model(), conversation(1)
    found = agreement.compute_full_logits(model, encoded, protocol, [[9], [8]], 200)
    for logits, before in zip(found, ((4, 6), earlier), strict=True):
        ids = (*encoded.context, *before, 1, 2, 3)
        with torch.no_grad():
            plain = model.module(torch.tensor([ids])).logits[0, -4:-1]
        torch.testing.assert_close(logits, plain)


def test_logits_beyond_the_limit_are_returned(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A single conversation may be larger than all that is kept."""
    monkeypatch.setattr(agreement, "CACHED_BYTES", 1)
    for _ in range(2):
        assert len(find_full_logits(tiny_model(), conversation(1), Protocol(), [], 200)) == 2


def test_cached_logits_are_bounded(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the conversation asked for longest ago is forgotten."""
    model, protocol = tiny_model(), Protocol()
    size = sum(x.nbytes for x in find_full_logits(model, conversation(1), protocol, [], 200))
    monkeypatch.setattr(agreement, "CACHED_BYTES", 2 * size)
    for first in (2, 1, 3, 1, 2):
        find_full_logits(model, conversation(first), protocol, [], 200)
    assert [arguments[1].context[0] for arguments in runs] == [1, 2, 3, 2]
