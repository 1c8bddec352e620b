"""Divergence by step of methods whose tokens nothing verifies."""

from __future__ import annotations

import pytest

from kvbench.engine.agreement import FullCache, compare_logits, force_answer
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.reproduce.findings import steps
from tests.reproduce.findings.test_statistics import text

LENGTH, CONTEXT = 400, 300


def logits(method):
    """Of the last quarter of a text, behind the context that the method compressed."""
    with Session(tiny_model(), method, capacity=LENGTH) as session:
        session.prefill(text()[:CONTEXT])
        return force_answer(session, text()[CONTEXT:])


def test_curves_end_at_the_divergence_that_a_run_states(monkeypatch):
    """With a point for every 4 tokens of the last quarter, the last one is the mean KL times the tokens."""
    monkeypatch.setattr(steps, "METHODS", {"snapkv": "25%"})
    monkeypatch.setattr(steps, "PART", 4)
    found = steps.follow(tiny_model(), text())
    method = SnapKV().fit(Budget.parse("25%"), tiny_model().shape(CONTEXT))
    stated = compare_logits(logits(method), logits(FullCache()))
    sums = found["snapkv_sum"]
    assert len(sums) == 25
    assert sums == sorted(sums)
    assert sums[-1] == pytest.approx(stated.kl * stated.n, rel=1e-4)
    assert found["snapkv_agreement"] == pytest.approx(stated.top1)
    assert found["snapkv_second_half"] == pytest.approx(1 - sums[11] / sums[-1])


def test_a_whole_cache_does_not_diverge(monkeypatch):
    """Random eviction of nothing agrees with the full cache in every token."""
    monkeypatch.setattr(steps, "METHODS", {"random": "100%"})
    found = steps.follow(tiny_model(), text())
    assert found["random_sum"] == pytest.approx([0.0] * 12, abs=1e-6)
    assert found["random_agreement"] == 1.0
