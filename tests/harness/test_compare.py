"""What became worse than with the full cache is named, sample by sample, and only where both were asked the same."""

from __future__ import annotations

from pathlib import Path

from kvbench.compare import Regression, Run, compare_pair, find_regressions
from kvbench.results import BudgetResult, CertificateResult, Line, Output, Result, Score
from kvbench.table import _output, print_regressions

TURNS = 2


def run(
    name: str, scores: dict[tuple[int, int], float | None], *, full: bool = False, prompt: str = "p",
    status: str = "ok", higher: bool = True,
) -> Run:
    """A finished run by hand: scores by sample and turn, and whether it is the full cache."""
    lines = {
        (f"s{index}", turn): Line(
            sample=f"s{index}", index=index, turn=turn, turns=TURNS, prompt_hash=f"{prompt}{index}", prediction="x",
            ids=(1,), references=("x",), score=score, scores={}, tokens=None, stop_reason="stop", times=None,
            bytes=None, evidence=None, agreement=None, facts={}, started="", seconds=0.0, error=None,
        )
        for (index, turn), score in scores.items()
    }
    certificate = CertificateResult(
        kind="none" if full else "held", n_acted=0, n=0 if full else len(lines), n_identity=len(lines) if full else 0,
        rows_seen=9, rows_kept=9, rows_kept_by_layer=(9,), facts={},
    )
    result = Result.model_construct(
        run_id=name, status=status, certificate=certificate,
        budget=BudgetResult(asked=None, kind="none" if full else "held", resolved={}),
        score=Score(metric="m", higher_is_better=higher, mean=None, partial_mean=None, ci95=None, by_turn=()),
    )
    return Run(Path(name), result, lines)


FULL = {(0, 0): 1.0, (0, 1): 0.5, (1, 0): 1.0, (2, 0): 0.25, (10, 0): 1.0}


def test_worse_answers_are_listed_worst_first():
    """By how much was lost, then in the order of samples and turns; equal and better answers are not there."""
    full = run("full", FULL, full=True)
    other = run("other", {(0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.0, (2, 0): 1.0, (10, 0): 0.0})
    (found,) = find_regressions([other, full])
    assert (found.run_id, found.full, found.n, found.count) == ("other", "full", 5, 4)
    assert found.samples == (
        Regression("s1", 0, 1.0, 0.0), Regression("s10", 0, 1.0, 0.0), Regression("s0", 0, 1.0, 0.5),
        Regression("s0", 1, 0.5, 0.0),
    )


def test_of_a_loss_more_is_worse():
    """A metric that is better when lower turns the sign around."""
    full = run("full", {(0, 0): 0.0, (1, 0): 1.0}, full=True, higher=False)
    (found,) = find_regressions([full, run("other", {(0, 0): 1.0, (1, 0): 0.0}, higher=False)])
    assert found.samples == (Regression("s0", 0, 0.0, 1.0),)


def test_only_what_both_were_asked_counts():
    """Other prompts, missing turns and answers without a score are no pairs."""
    full = run("full", FULL, full=True)
    fewer = run("fewer", {(0, 0): 0.0, (1, 0): None, (7, 0): 0.0})
    (found,) = find_regressions([full, fewer])
    assert (found.n, found.count) == (1, 1)
    assert find_regressions([full, run("elsewhere", dict.fromkeys(FULL, 0.0), prompt="q")]) == []


def test_each_run_meets_the_full_cache_of_its_own_questions():
    """With two of them, the one that was asked the same; a failed run has none, and is none."""
    ours, theirs = run("ours", FULL, full=True), run("theirs", FULL, full=True, prompt="q")
    lost = dict.fromkeys(FULL, 0.0)
    asked = [run("a", lost), run("b", lost, prompt="q"), run("c", lost, status="failed")]
    assert [(x.run_id, x.full) for x in find_regressions([ours, theirs, *asked])] == [("a", "ours"), ("b", "theirs")]
    assert find_regressions(asked) == []
    assert find_regressions([run("failed", FULL, full=True, status="failed"), *asked]) == []


def test_a_method_without_a_budget_that_loses_rows_is_no_full_cache():
    """The certificate decides, not the name: it had something to do."""
    merging = run("merging", FULL, full=True)
    certificate = merging.result.certificate.model_copy(update={"n": 5, "n_identity": 0})
    merging = Run(merging.folder, merging.result.model_copy(update={"certificate": certificate}), merging.lines)
    assert find_regressions([merging, run("a", dict.fromkeys(FULL, 0.0))]) == []


def test_ten_are_shown_and_the_rest_counted(capsys):
    """On the screen; the record has them all."""
    scores = {(i, 0): 1.0 for i in range(25)}
    found = find_regressions([run("full", scores, full=True), run("a", dict.fromkeys(scores, 0.0))])
    print_regressions(found)
    shown = capsys.readouterr().out
    assert "25 of 25" in shown
    assert shown.count("1.000 -> 0.000") == 10
    assert "15 more: see --json" in shown
    assert len(found[0].samples) == 25


def test_the_difference_is_the_mean_over_common_questions():
    """To the first run, full or not."""
    first, other = run("a", FULL), run("b", {**dict.fromkeys(FULL, 0.0), (9, 0): 1.0})
    difference = compare_pair(first, other)
    assert (difference.n, difference.mean) == (5, -sum(FULL.values()) / 5)


def test_how_answers_ended_is_shown():
    """Mean length and the reasons; of no answer, neither."""
    assert _output(Output(tokens=30, stop_reasons={"stop": 3, "length": 1})) == ("7.5", "length 1, stop 3")
    assert _output(Output(tokens=0, stop_reasons={})) == ("-", "-")
