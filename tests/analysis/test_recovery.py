"""The share of a context's benefit that reuse keeps."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvbench.analysis.recovery import find_recoveries


@dataclass(frozen=True, eq=False)
class Run:
    """The fields of a finished run that are read."""

    result: object
    lines: dict


def make(name, scores, reuse=None, *, full=False, hashes="same", higher=True, metric="m"):
    """A run with one question per context."""
    result = SimpleNamespace(
        status="ok", run_id=name, reuse=reuse, lossless=None, budget=SimpleNamespace(kind="none"),
        effect=SimpleNamespace(n=0 if full else len(scores)),
        score=SimpleNamespace(metric=metric, higher_is_better=higher),
    )
    lines = {(f"s{i}", 0): SimpleNamespace(score=x, prompt_hash=hashes, index=i) for i, x in enumerate(scores)}
    return Run(result, lines)


FLOOR = SimpleNamespace(reused_share=0.0, computed_share=0.2)
REUSE = SimpleNamespace(reused_share=0.8, computed_share=0.2)


def test_the_share_is_between_no_context_and_full_prefill():
    """By hand: (0.5 - 0.25) / (0.75 - 0.25)."""
    runs = [make("full", [1, 1, 1, 0], full=True), make("none", [1, 0, 0, 0], FLOOR), make("ours", [1, 1, 0, 0], REUSE)]
    (found,) = find_recoveries(runs)
    assert (found.run_id, found.share, found.gap, found.contexts) == ("ours", 0.5, 0.5, 4)


def test_a_run_below_no_context_is_below_zero():
    """Reuse can be worse than leaving the documents out."""
    runs = [make("full", [1.0] * 30, full=True), make("none", [0.5] * 30, FLOOR), make("ours", [0.25] * 30, REUSE)]
    (found,) = find_recoveries(runs)
    assert found.share == pytest.approx(-0.5)


@pytest.mark.parametrize("n", [1, 30])
def test_contexts_that_agree_have_no_interval(n):
    """Draws that all give one share do not show that other contexts give it, too."""
    runs = [make("full", [0.9] * n, full=True), make("none", [0.2] * n, FLOOR), make("ours", [0.9] * n, REUSE)]
    (found,) = find_recoveries(runs)
    assert (found.share, found.ci95) == (pytest.approx(1), None)


def test_scores_of_other_metrics_are_not_subtracted():
    """A log-probability is no share of right answers, which full prefill and no context have here."""
    full, floor = make("full", [1, 1], full=True), make("none", [0, 0], FLOOR)
    assert find_recoveries([full, floor, make("ours", [2.5, 2.0], REUSE, higher=False, metric="nll")]) == []


def test_errors_are_recovered_where_lower_is_better():
    """By hand: (0.75 - 0.5) / (0.75 - 0.25)."""
    full, floor = make("full", [0, 0, 0, 1], full=True, higher=False), make("none", [1, 0, 1, 1], FLOOR, higher=False)
    (found,) = find_recoveries([full, floor, make("ours", [0, 0, 1, 1], REUSE, higher=False)])
    assert (found.share, found.gap) == (0.5, 0.5)


def test_the_interval_is_that_of_drawn_contexts():
    """Half of eight contexts are recovered: a binomial number of eights, from 1 (P = 3.5 %) to 7."""
    runs = [make("full", [1] * 8, full=True), make("none", [0] * 8, FLOOR), make("ours", [1, 0] * 4, REUSE)]
    (found,) = find_recoveries(runs)
    assert (found.share, found.ci95) == (0.5, (1 / 8, 7 / 8))


def test_without_a_gap_there_is_no_share():
    """A full prefill that is no better than no context has nothing to recover."""
    runs = [make("full", [0, 1], full=True), make("none", [1, 0], FLOOR), make("ours", [1, 1], REUSE)]
    (found,) = find_recoveries(runs)
    assert (found.share, found.ci95, found.gap) == (None, None, 0)


def test_the_ends_are_of_the_protocol_of_the_run(monkeypatch):
    """Of several runs of full prefill and of no context, as of two models with one tokenizer."""
    monkeypatch.setattr("kvbench.analysis.compare.name_questions", lambda spec: spec)
    ends = [("full", [1, 1, 1, 1], None, True), ("none", [0, 0, 0, 0], FLOOR, False)]
    runs = [
        make(f"{name}-{spec}", [x * best for x in scores], reuse, full=full)
        for spec, best in (("small", 0.5), ("large", 1.0)) for name, scores, reuse, full in ends
    ]
    runs.append(make("ours-large", [1, 1, 0, 0], REUSE))
    for x in runs:
        x.result.spec = x.result.run_id.partition("-")[2]
    found = {x.run_id: (x.share, x.full) for x in find_recoveries(runs)}
    assert found["ours-large"] == (0.5, "full-large")


def test_only_common_questions_count():
    """Runs of other prompts have no recovery, and neither have runs without one of the ends."""
    full, floor = make("full", [1, 1], full=True), make("none", [0, 0], FLOOR)
    assert find_recoveries([full, floor, make("ours", [1, 1], REUSE, hashes="other")]) == []
    assert find_recoveries([full, make("ours", [1, 1], REUSE)]) == []
