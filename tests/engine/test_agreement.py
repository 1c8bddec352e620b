"""Agreement with the full cache: exact for lossless methods, and equal to hand-computed numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from kvbench.engine import agreement
from kvbench.engine.agreement import FullCache, compare_logits, find_full_logits, force_answer
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.random import Random
from kvbench.methods.eviction.snapkv import SnapKV
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


def test_cached_logits_are_bounded(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the conversation asked for longest ago is forgotten."""
    model, protocol = tiny_model(), Protocol()
    size = sum(x.nbytes for x in find_full_logits(model, conversation(1), protocol, [], 200))
    monkeypatch.setattr(agreement, "CACHED_BYTES", 2 * size)
    for first in (2, 1, 3, 1, 2):
        find_full_logits(model, conversation(first), protocol, [], 200)
    assert [arguments[1].context[0] for arguments in runs] == [1, 2, 3, 2]
