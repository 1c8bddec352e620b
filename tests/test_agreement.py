"""Agreement with the dense cache: zero for what loses nothing, the textbook's numbers for what does."""

from __future__ import annotations

import math

import torch

from kvbench.agreement import Dense, compare_logits, force_answer
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.random import Random
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.session import Session

CONTEXT = torch.randint(64, (120,), generator=torch.Generator().manual_seed(0)).tolist()


def test_the_divergence_of_two_coins() -> None:
    """KL((1/2, 1/2) || (1/4, 3/4)) is log(2 / sqrt 3), and the most likely tokens differ in one of two rows."""
    dense = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    ours = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()

    top1, kl = compare_logits(ours, dense)

    assert math.isclose(kl, math.log(2 / math.sqrt(3)) / 2, rel_tol=1e-6)
    assert top1 == 0.5


def test_every_row_kept_agrees_and_few_random_rows_do_not() -> None:
    """SnapKV at full budget has the dense cache's distributions; a handful of random rows has not."""
    model = tiny_model()
    found = {}
    methods = {"dense": Dense(), "all": SnapKV(), "few": Random(window=1)}
    budgets = {"dense": None, "all": Budget("fraction", 1.0), "few": Budget("rows", 8)}
    for name, method in methods.items():
        budget = budgets[name]
        with Session(model, method.fit(budget, model.shape(120)), capacity=200) as session:
            session.prefill(CONTEXT)
            session.question([5, 6, 7], 4)
            found[name] = force_answer(session, [1, 2, 3, 4])

    assert compare_logits(found["all"], found["dense"])[1] < 1e-9
    assert compare_logits(found["all"], found["dense"])[0] == 1.0
    assert compare_logits(found["few"], found["dense"])[1] > 1e-3


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
    with Session(model, Dense(), capacity=200) as session:
        session.prefill(CONTEXT)
        last = session.logits
        with session.fork() as branch:
            logits = branch.force([3, 1, 2])
        scores = session.score([3, 1, 2])

    assert last is not None
    assert logits[0, 0].equal(last[0])
    picked = logits.log_softmax(-1)[0, range(3), [3, 1, 2]]
    torch.testing.assert_close(picked, scores[0])
