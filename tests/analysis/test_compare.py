"""Comparing runs: paired differences, ranks, regressions, protocols, and the minimum detectable effect."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.analysis.compare import (
    PROTOCOL,
    SCORE_PROTOCOL,
    Difference,
    Regression,
    compare_pair,
    compare_runs,
    describe_code,
    find_baseline,
    find_conflicts,
    find_full,
    find_regressions,
    get_field,
    is_full,
    name_protocol,
    name_questions,
    rank_runs,
)
from kvbench.analysis.load import FinishedRun, find_runs, load_run, load_runs
from kvbench.analysis.metrics import Metric
from kvbench.analysis.power import describe_power, describe_powers
from kvbench.analysis.significance import adjust, find_needed_contexts
from kvbench.cli.results import format_output
from kvbench.cli.tables import LISTED, print_regressions
from kvbench.errors import UserError
from kvbench.runs.files import read_file, write_record
from kvbench.runs.journal import Line
from kvbench.runs.options import Request
from kvbench.runs.request import ResolvedRequest, check
from kvbench.runs.results import TASKS, BudgetResult, EffectResult, Output, Result, Score
from kvbench.runs.spec import ModelSpec, RunSpec, TaskSpec

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"
TOY = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Toy"

TURNS = 2


def run(
    name: str, scores: dict[tuple[int, int], float | None], *, full: bool = False, prompt: str = "p",
    status: str = "ok", higher: bool = True, trained: bool = False, metric: str = "m",
) -> FinishedRun:
    """A finished run with given scores by sample and turn."""
    lines = {
        (f"s{index}", turn): Line(
            sample=f"s{index}", index=index, turn=turn, turns=TURNS, prompt_hash=f"{prompt}{index}", prediction="x",
            ids=(1,), references=("x",), score=score, scores={}, tokens=None, stop_reason="stop", times=None,
            bytes=None, effect=None, agreement=None, facts={}, started="", seconds=0.0, error=None,
        )
        for (index, turn), score in scores.items()
    }
    effect = EffectResult(
        kind="none" if full else "stored", n_acted=0, n=0 if full else len(lines), n_identity=len(lines) if full else 0,
        entries_seen=9, entries_kept=9, entries_kept_by_layer=(9,), facts={},
    )
    result = Result.model_construct(
        run_id=name, status=status, effect=effect,
        budget=BudgetResult(
            asked=None, kind="none" if full else "stored", resolved={"trained_on": TASKS} if trained else {}
        ),
        score=Score(
            metric=metric, higher_is_better=higher, mean=sum(found) / len(found) if (found := _known(scores)) else None,
            partial_mean=None, ci95=None, by_turn=(),
        ),
    )
    return FinishedRun(Path(name), result, lines)


def _known(scores):
    return [x for x in scores.values() if x is not None]


FULL = {(0, 0): 1.0, (0, 1): 0.5, (1, 0): 1.0, (2, 0): 0.25, (10, 0): 1.0}


def test_worse_answers_are_listed_worst_first():
    """By the loss, then in the order of samples and turns, without equal and better answers."""
    full = run("full", {**FULL, (3, 0): 1.0, (4, 0): 0.5}, full=True)
    other = run("other", {
        (0, 0): 0.5, (0, 1): 0.0, (1, 0): 0.0, (2, 0): 1.0, (10, 0): 0.0, (3, 0): 0.0, (4, 0): 0.5,
    })
    (found,) = find_regressions([other, full])
    assert (found.run_id, found.full, found.n, found.count) == ("other", "full", 7, 5)
    assert found.samples == (
        Regression("s1", 0, 1.0, 0.0), Regression("s3", 0, 1.0, 0.0), Regression("s10", 0, 1.0, 0.0),
        Regression("s0", 0, 1.0, 0.5), Regression("s0", 1, 0.5, 0.0),
    )


def test_a_higher_error_is_a_regression():
    """For a metric of which lower is better, the sign is reversed, and so is the order."""
    full = run("full", {(0, 0): 0.0, (1, 0): 1.0, (2, 0): 0.0}, full=True, higher=False)
    (found,) = find_regressions([full, run("other", {(0, 0): 1.0, (1, 0): 0.0, (2, 0): 2.0}, higher=False)])
    assert found.samples == (Regression("s2", 0, 0.0, 2.0), Regression("s0", 0, 0.0, 1.0))


def test_only_common_questions_count():
    """Different prompts, missing turns and answers without a score are left out."""
    full = run("full", FULL, full=True)
    fewer = run("fewer", {(0, 0): 0.0, (1, 0): None, (7, 0): 0.0})
    (found,) = find_regressions([full, fewer])
    assert (found.n, found.count) == (1, 1)
    assert find_regressions([full, run("elsewhere", dict.fromkeys(FULL, 0.0), prompt="q")]) == []


def test_each_run_is_compared_with_the_full_cache_on_its_questions():
    """Of two such runs, the one with the same questions; failed runs are left out."""
    ours, theirs = run("ours", FULL, full=True), run("theirs", FULL, full=True, prompt="q")
    lost = dict.fromkeys(FULL, 0.0)
    asked = [run("a", lost), run("b", lost, prompt="q"), run("c", lost, status="failed")]
    assert [(x.run_id, x.full) for x in find_regressions([ours, theirs, *asked])] == [("a", "ours"), ("b", "theirs")]
    assert find_regressions(asked) == []
    assert find_regressions([run("failed", FULL, full=True, status="failed"), *asked]) == []


def test_a_run_is_compared_with_the_full_cache_of_its_protocol(result):
    """And not with an earlier one on the same prompts, such as that of another element type."""
    other = result.spec.model_copy(update={"model": result.spec.model.model_copy(update={"dtype": "float64"})})
    runs = [run("other", FULL, full=True), run("own", FULL, full=True), run("a", dict.fromkeys(FULL, 0.0))]
    for x, spec in zip(runs, (other, result.spec, result.spec), strict=True):
        object.__setattr__(x.result, "spec", spec)
    assert [x.full for x in find_regressions(runs)] == ["own"]
    assert [x.full for x in find_regressions([runs[0], runs[2]])] == ["other"]
    third = run("third", FULL, full=True)
    object.__setattr__(third.result, "spec", other)
    assert [x.full for x in find_regressions([runs[0], third, runs[2]])] == ["other"]  # the first, where none is


def test_a_method_without_a_budget_that_loses_entries_is_not_the_full_cache():
    """The effect check decides, not the name."""
    merging = run("merging", FULL, full=True)
    effect = merging.result.effect.model_copy(update={"n": 5, "n_identity": 0})
    merging = FinishedRun(merging.folder, merging.result.model_copy(update={"effect": effect}), merging.lines)
    assert find_regressions([merging, run("a", dict.fromkeys(FULL, 0.0))]) == []


@pytest.mark.parametrize("part", ["lossless", "reuse"])
def test_a_draft_and_reused_entries_are_not_the_full_cache(part):
    """Methods without a budget that keep every entry, too."""
    other = run("other", FULL, full=True)
    assert is_full(other.result)
    assert not is_full(other.result.model_copy(update={"budget": run("a", FULL).result.budget}))
    assert not is_full(other.result.model_copy(update={"effect": None}))
    assert not is_full(other.result.model_copy(update={part: SimpleNamespace()}))


def test_the_largest_losses_are_shown_and_the_rest_counted(capsys):
    """In the table, with the command that shows them; the record has all."""
    scores = {(i, 0): 1.0 for i in range(25)}
    found = find_regressions([run("full", scores, full=True), run("a", dict.fromkeys(scores, 0.0))])
    names = {"full": "full", "a": "elsewhere/a"}
    print_regressions(found, Metric("contains", "", higher_is_better=True), {"a": "snapkv 25%"}, names)
    shown = capsys.readouterr().out
    assert "25 of 25" in shown
    assert shown.count("1.000 -> 0.000") == LISTED
    assert f"{25 - LISTED} more: kvbench answers full elsewhere/a" in shown
    assert len(found[0].samples) == 25
    print_regressions(found, Metric("perplexity", "", higher_is_better=False, exponential=True), {"a": "a"}, names)
    assert "2.718 -> 1.000" in capsys.readouterr().out


def test_the_difference_is_the_mean_over_common_questions():
    """To the first run, whatever its method."""
    first, other = run("a", FULL), run("b", {**dict.fromkeys(FULL, 0.0), (9, 0): 1.0})
    difference = compare_pair(first, other)
    assert (difference.n, difference.mean) == (5, -sum(FULL.values()) / 5)


def test_a_difference_is_tested_by_context():
    """Five contexts of four questions each that all got worse: p = 2 / 2**5."""
    asked = list(product(range(5), range(4)))
    found = compare_pair(run("a", dict.fromkeys(asked, 1.0)), run("b", dict.fromkeys(asked, 0.0)))
    assert (found.n, found.contexts, found.mean, found.p, found.least_p) == (20, 5, -1.0, 2 / 32, 2 / 32)
    first, *others = (run(name, dict.fromkeys(asked, float(name == "a"))) for name in "abc")
    assert [x.least_p for x in compare_runs(first, others)] == [4 / 32] * 2


def test_questions_of_a_context_belong_together_in_any_order():
    """A journal may hold the first questions of all contexts before the second ones."""
    asked = [(index, turn) for turn in range(2) for index in range(6)]
    found = compare_pair(run("a", dict.fromkeys(asked, 1.0)), run("b", dict.fromkeys(asked, 0.0)))
    assert (found.n, found.contexts, found.p) == (12, 6, 2 / 2**6)


def test_contexts_without_a_score_give_no_ranks():
    """Eight contexts, of which the scorer applies to three."""
    few = [run(name, {(i, 0): x if i < 3 else None for i in range(8)}) for name, x in (("a", 1.0), ("b", 0.0))]
    assert rank_runs(few) == [None, None]
    assert rank_runs([run(name, {(i, 0): x for i in range(8)}) for name, x in (("a", 1.0), ("b", 0.0))]) == [1, 2]


def test_too_few_contexts_cannot_tell():
    """With five contexts the least p-value is 2 / 2**5, and adjusted for four runs that of eight is 4 * 2 / 2**8."""
    def compare(contexts, others):
        asked = [(i, 0) for i in range(contexts)]
        first, *rest = (run(str(n), dict.fromkeys(asked, float(n == 0))) for n in range(others + 1))
        return compare_runs(first, rest), rank_runs([first, *rest])

    for contexts, others, few in ((5, 1, True), (6, 1, False), (7, 4, True), (8, 4, False)):
        found, ranks = compare(contexts, others)
        assert {x.too_few for x in found} == {few}
        assert {x.within_noise for x in found} == {None if few else False}
        assert {x.judge(higher_is_better=True) for x in found} == {"too few to tell" if few else "worse"}
        assert ranks == ([None] * (others + 1) if few else [1, *[2] * others])
        assert find_needed_contexts(others) <= contexts or few
    assert [find_needed_contexts(x) for x in (1, 4, 10)] == [6, 8, 9]


def test_a_p_value_of_5_percent_is_not_significant():
    """Nor is it enough if no smaller one can be reached."""
    def judge(adjusted, least):
        found = Difference("a", 20, 20, 0.5, None, 0.01, adjusted, least)
        return found.too_few, found.within_noise, found.judge(higher_is_better=True)

    assert judge(0.05, 0.01) == (False, True, "not significant")
    assert judge(0.05, 0.05) == (True, None, "too few to tell")
    assert judge(0.049, 0.05) == (False, False, "better")


@pytest.mark.parametrize(("mean", "higher", "verdict"), [
    (0.5, True, "better"), (-0.5, True, "worse"), (0.5, False, "worse"), (-0.5, False, "better"),
])
def test_the_metric_gives_the_direction_of_a_verdict(mean, higher, verdict):
    """A lower error is better."""
    assert Difference("a", 20, 20, mean, None, 0.01, 0.01).judge(higher_is_better=higher) == verdict


def test_a_significant_difference_of_few_contexts_is_told():
    """Next to a run of many contexts, whose own p-value is smaller, six that all got worse have 2 / 2**6."""
    first = run("a", {(i, 0): 1.0 for i in range(40)})
    many, few = (run(str(n), {(i, 0): 0.0 for i in range(n)}) for n in (40, 6))
    found = compare_runs(first, [many, few])
    assert found[1].p_adjusted == 2 / 64 < 0.05 <= found[1].least_p
    assert [x.judge(higher_is_better=True) for x in found] == ["worse", "worse"]


def test_the_baseline_is_the_full_cache_or_the_named_run():
    """By method, id or the hash at its end; a name of several runs and an unknown name are refused."""
    runs = [run("a-1", FULL), run("b-2", FULL), run("c-3", FULL)]
    names = ("snapkv", "full", "snapkv")
    runs = [
        replace(x, result=x.result.model_copy(update={"method": SimpleNamespace(name=name)}))
        for x, name in zip(runs, names, strict=True)
    ]
    assert [find_baseline(runs, x) for x in ("full", "b-2", "3")] == [1, 1, 2]
    assert find_baseline([*runs, run("failed", FULL, full=True, status="failed"), run("whole", FULL, full=True)]) == 4
    assert find_baseline(runs) == 0
    with pytest.raises(UserError, match=r"'snapkv' is the name of 2 runs.*a-1, c-3"):
        find_baseline(runs, "snapkv")
    with pytest.raises(UserError, match=r"unknown baseline 'ful'\. Did you mean 'full'"):
        find_baseline(runs, "ful")


def test_a_run_that_failed_or_has_other_questions_gets_no_verdict():
    """It is not that its contexts are too few."""
    others = [run("failed", FULL, status="failed"), run("alien", FULL, prompt="q")]
    found = compare_runs(run("first", FULL), others)
    found += compare_runs(run("failed", FULL, status="failed"), [run("other", FULL)])
    assert [(x.judge(higher_is_better=True), x.too_few, x.within_noise) for x in found] == [("", False, None)] * 3
    assert [(x.n, x.contexts, x.mean) for x in found] == [(0, 0, None)] * 3


@pytest.mark.parametrize(("metric", "higher", "n"), [("nll", False, 0), ("m, first value", True, 10)])
def test_scores_of_other_metrics_are_subtracted_only_if_both_are_shares(metric, higher, n):
    """A log-probability of 2 is not 1 above a share of right answers of 1; a strict scorer gives a share, too."""
    full = run("full", {(i, 0): 1.0 for i in range(10)}, full=True)
    other = run("other", {(i, 0): (0.5 if higher else 2.0) for i in range(10)}, higher=higher, metric=metric)
    (found,) = compare_runs(full, [other])
    assert (found.n, found.mean is None) == (n, n == 0)
    assert [x.n for x in find_regressions([full, other])] == ([n] if n else [])


def test_more_runs_need_larger_differences():
    """p-values are adjusted over the runs that are compared with the first; failed runs do not count."""
    asked = [(i, 0) for i in range(20)]
    first = run("first", dict.fromkeys(asked, 1.0))
    others = [run(str(n), {key: float(i >= n) for i, key in enumerate(asked)}) for n in (7, 8, 0)]
    found = compare_runs(first, [*others, run("failed", FULL, status="failed"), run("alien", FULL, prompt="q")])
    raw = [2 / 2**7, 2 / 2**8, 1.0]
    assert [x.p for x in found] == [*raw, None, None]
    assert [x.p_adjusted for x in found] == [*adjust(raw), None, None]
    assert [x.within_noise for x in found] == [False, False, True, None, None]
    assert found[0].least_p == 3 * 2 / 2**20
    assert compare_pair(first, others[0]).least_p == 2 / 2**20
    assert compare_runs(first, others[:1])[0].p_adjusted == raw[0]


# Ranks


QUESTIONS = [(i, 0) for i in range(20)]


def right(name: str, n: int, **more) -> FinishedRun:
    """A run that answers the first `n` of twenty questions."""
    return run(name, {key: float(i < n) for i, key in enumerate(QUESTIONS)}, **more)


def test_runs_that_do_not_differ_share_a_rank():
    """Five more right answers are not significant, seven are; the next rank is one more than the runs above."""
    runs = [right("a", 4), right("b", 20), right("c", 15), right("d", 3)]
    assert rank_runs(runs) == [3, 1, 1, 3]
    assert rank_runs([right("a", 19), right("b", 19)]) == [1, 1]


def test_ranks_are_tested_by_context():
    """Five contexts of eight that lost three questions each are 2 / 2**5, not 2 / 2**15.

    A context counts by the sum of its questions: next to eight that lost three each, two that won one do not matter.
    """
    def rank(*differences):
        asked = [(i, turn) for i, x in enumerate(differences) for turn in range(max(1, abs(x)))]
        first = run("a", {(i, turn): float(differences[i] < 0) for i, turn in asked})
        return rank_runs([first, run("b", {(i, turn): float(differences[i] > 0) for i, turn in asked})])

    assert rank(*[-3] * 5, 0, 0, 0) == [1, 1]
    assert rank(*[-3] * 8, 1, 1) == [1, 2]


def test_questions_under_other_names_are_other_questions():
    """A run whose prompts are those of the others, but of other samples, cannot be paired with them."""
    moved = right("moved", 20)
    moved = FinishedRun(moved.folder, moved.result, {(f"x{key[0]}", key[1]): x for key, x in moved.lines.items()})
    assert rank_runs([right("a", 5), moved, right("b", 5)]) == [1, None, 1]


def test_a_lower_error_ranks_higher():
    """The metric gives the direction."""
    assert rank_runs([right("a", 20, higher=False), right("b", 0, higher=False)]) == [2, 1]


def test_a_failed_run_has_no_rank():
    """Nor has a run without a score, or with other questions than most runs."""
    others = [right("failed", 20, status="failed"), run("none", {}), right("alien", 20, prompt="q")]
    assert rank_runs([right("a", 5), *others, right("b", 5)]) == [1, None, None, None, 1]
    assert rank_runs(others[:2]) == [None, None]
    assert rank_runs([]) == []
    fewer = run("fewer", dict.fromkeys(QUESTIONS[:5], 1.0))
    assert rank_runs([right("a", 5), right("b", 5), fewer]) == [1, 1, None]


def test_a_run_that_was_trained_on_the_tasks_has_no_rank():
    """It is not compared with methods without training, and takes no rank from them."""
    assert rank_runs([right("a", 5), right("trained", 20, trained=True), right("b", 5)]) == [1, None, 1]


@pytest.fixture(scope="module")
def result() -> Result:
    """A curated result of the full cache."""
    return next(
        x for path in sorted(CURATED.glob("full-niah*/result.json"))
        if (x := read_file(path, Result)).task.length == 1024 and x.visibility == "hidden"
    )


def test_every_field_of_the_protocol_exists(result):
    """A misspelled field would be equal in all results."""
    document = result.model_dump(mode="json")
    for name in PROTOCOL:
        *parents, last = name.split(".")
        assert last in (get_field(document, ".".join(parents)) if parents else document), name


MAY_DIFFER = {
    "schema_version", "protocol_version", "suite", "task.suite", "method", "budget", "bound", "weights_sha256",
    "model.id", "model.revision", "model.kind", "model.params", "batch", "chunk", "kernels", "versions", "sources",
}
"""Fields of a spec that runs with comparable scores need not share: the method and its budget, names of the same model,
how passes are run, and provenance."""


def test_every_other_field_of_a_spec_is_of_the_protocol():
    """A field that is missing would let runs of two protocols share a ranking, with the same method and prompts."""
    fields = RunSpec.model_fields.keys() - {"task", "model"}
    fields |= {f"task.{x}" for x in TaskSpec.model_fields} | {f"model.{x}" for x in ModelSpec.model_fields}
    assert fields - {x.removeprefix("spec.") for x in SCORE_PROTOCOL} == MAY_DIFFER


def test_methods_and_machines_may_differ_in_score_comparisons(result):
    """Methods may differ in both comparisons, machines only where times are not compared."""
    other = result.model_copy(update={"environment": result.environment.model_copy(update={"cpu": "another"})})
    assert name_questions(other.spec) == name_questions(result.spec)
    assert name_protocol(other) != name_protocol(result)
    document = result.model_dump(mode="json")
    for change in ({"chunk": 16}, {"kernels": "triton"}):  # the same answers, in another time
        again = result.model_copy(update={"spec": result.spec.model_copy(update=change)})
        assert name_questions(again.spec) == name_questions(result.spec)
        assert name_protocol(again) != name_protocol(result)
    document["spec"]["method"]["name"] = document["method"]["name"] = "other"
    assert name_protocol(Result.model_validate(document)) == name_protocol(result)
    for change in ({"visibility": "first-turn"}, {"seed": 1}, {"split": "dev"}):
        assert name_questions(result.spec.model_copy(update=change)) != name_questions(result.spec)


def test_an_edited_task_of_one_s_own_is_another_task(result):
    """Its version may be the same: a file that was edited may score the same answers otherwise."""
    task = result.spec.task
    codes = ("a" * 64, "b" * 64)
    edited = [result.spec.model_copy(update={"task": task.model_copy(update={"code": x})}) for x in codes]
    assert len({name_questions(x) for x in (result.spec, *edited)}) == 3


# Minimum detectable effect


def spec_of(result, **change) -> RunSpec:
    return result.spec.model_copy(update=change)


def test_the_minimum_detectable_effect_is_described(result):
    """In the worst case, or at the full cache's accuracy where it is known; both extremes for several questions."""
    assert describe_power(20, 1) == (
        "20 samples can detect a difference of about 49 points (80 % power, p < 0.05, worst case)."
    )
    assert describe_power(40, 5, result) == (
        "40 contexts x 5 questions can detect a difference of about 5 (answers independent) to 20 points "
        "(answers correlated within a context) "
        f"(80 % power, p < 0.05, full cache at {result.score.mean:.3f} in {result.run_id})."
    )
    assert describe_power(5, 5) == (
        "5 contexts x 5 questions cannot detect any difference at p < 0.05. Use more --samples."
    )


def test_a_score_that_is_no_accuracy_predicts_nothing(result):
    """As BLEU, from 0 to 100; and it is not said that no difference could be found."""
    full = result.model_copy(update={"score": result.score.model_copy(update={"mean": 31.0})})
    assert describe_power(40, 1, full).startswith(
        f"40 samples: no detectable difference is predicted, because {result.run_id} scores 31.000"
    )


def test_six_contexts_can_detect_a_difference_but_not_every_one_reliably(result):
    """All six must be lost; where the full cache answers 0.9 that happens in 53 % at most."""
    score = result.score.model_copy(update={"mean": 0.9})
    full = result.model_copy(update={"score": score})
    assumed = f"p < 0.05, full cache at 0.900 in {result.run_id})"
    assert describe_power(6, 1, full) == (
        f"6 samples detect no difference with 80 % power ({assumed}. Use more --samples."
    )
    assert describe_power(6, 5, full) == (
        "6 contexts x 5 questions can detect a difference of about 60 points (answers independent), and none if "
        f"answers are correlated within a context (80 % power, {assumed}."
    )


def test_a_run_logs_its_minimum_detectable_effect(kvbench, arguments):
    """Before its first sample."""
    answer = kvbench(*arguments, "--method", "full")
    assert answer.code == 0, answer.err
    said = answer.err.index("4 samples cannot detect any difference")
    assert said < answer.err.index("samples, about")


def plans(*sizes: tuple[int, int], model: str = "mini") -> list[ResolvedRequest]:
    """Checked requests with these numbers of contexts and questions."""
    return [check(Request("full", "niah", model=model, mode="multi-turn", samples=x, turns=y)) for x, y in sizes]


def test_runs_of_one_size_share_a_line():
    """The line that `kvbench run` prints, with a count."""
    assert list(describe_powers(plans(*50 * [(20, 1)]))) == [f"each of 50 runs: {describe_power(20, 1)}"]
    assert list(describe_powers(plans((20, 1)))) == [f"1 run: {describe_power(20, 1)}"]


@pytest.mark.slow
def test_each_size_of_runs_has_a_line_up_to_four():
    """In ascending order; of more than four sizes only the smallest and the largest."""
    assert list(describe_powers(plans((40, 5), (5, 1), (40, 1), (40, 5)))) == [
        f"1 run: {describe_power(5, 1)}", f"1 run: {describe_power(40, 1)}", f"each of 2 runs: {describe_power(40, 5)}",
    ]
    assert len(list(describe_powers(plans(*((x, 1) for x in range(10, 14)))))) == 4
    assert list(describe_powers(plans(*((x, 1) for x in range(10, 60)), (30, 1)))) == [
        f"1 run: {describe_power(10, 1)}", f"1 run: {describe_power(59, 1)}",
        "49 runs of 48 sizes in between are not listed.",
    ]


def test_runs_without_an_accuracy_have_no_detectable_effect():
    """Random weights have no score, and a perplexity is not an accuracy."""
    assert list(describe_powers(plans((20, 1), model="random:mini"))) == []
    assert list(describe_powers([check(Request("full", "ppl-stdlib"))])) == []


@pytest.mark.parametrize("dry", [True, False])
def test_a_sweep_logs_its_minimum_detectable_effect(kvbench, model_folder, tmp_path, dry):
    """One line for all runs of one size."""
    path = tmp_path / "runs.toml"
    path.write_text(
        f'out = "{tmp_path / "runs"}"\n[run]\nmodel = "{model_folder}"\nsamples = 6\ntask = "{TOY}"\n'
        '[[grid]]\nmethod = "full"\nlength = [60, 70]\n'
    )
    answer = kvbench("sweep", path, *["--dry-run"] * dry)
    assert answer.code == 0, answer.err
    assert answer.err.splitlines()[0] == f"each of 2 runs: {describe_power(6, 1)}"
    assert answer.err.count("each of") == 1


def test_the_full_cache_run_on_the_same_questions_is_found(result, tmp_path):
    """Among other and damaged runs."""
    assert find_full(result.spec, tmp_path) is None
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "result.json").write_text("{")
    write_record(tmp_path / "b" / "result.json", result)
    assert find_full(result.spec, tmp_path) == result
    assert find_full(spec_of(result, method=result.spec.method.model_copy(update={"name": "x"})), tmp_path) == result
    assert find_full(spec_of(result, seed=1), tmp_path) is None
    lossy = result.effect.model_copy(update={"n": 5})
    for change in ({"effect": lossy}, {"score": result.score.model_copy(update={"mean": None})}):
        write_record(tmp_path / "b" / "result.json", result.model_copy(update=change))
        assert find_full(result.spec, tmp_path) is None


# Finding runs


def test_runs_are_found_by_folder_id_and_suite(result, tmp_path):
    """Each once; unfinished runs in a folder are skipped."""
    for name in ("a", "b", "c"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "spec.json").touch()
        if name != "c":
            write_record(tmp_path / "runs" / name / "result.json", result)
    suite = tmp_path / "runs" / "suites" / "s-x-0"
    suite.mkdir(parents=True)
    (suite / "suite.json").write_text(json.dumps({"schema_version": 1, "name": "s", "version": "1", "runs": ["b"]}))
    runs = tmp_path / "runs"
    assert find_runs([str(runs)]) == [runs / "a", runs / "b"]
    assert find_runs([str(suite), "a", str(runs / "b"), str(tmp_path)], runs) == [runs / "b", runs / "a"]


def test_a_damaged_result_does_not_hide_the_others(result, tmp_path, capsys):
    """The runs of a folder whose results are cut off are left out, with one line; one given by name is refused."""
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.json").touch()
        write_record(tmp_path / name / "result.json", result)
    whole = (tmp_path / "a" / "result.json").read_text()
    (tmp_path / "b" / "result.json").write_text(whole[:100])
    renew = "Delete result.json and run the command again; no sample is lost.\n"
    assert find_runs([str(tmp_path)]) == [tmp_path / "a", tmp_path / "c"]
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path}: skipped 1 unreadable run: {tmp_path / 'b'}/result.json is not a")
    assert said.endswith(renew) and said.count("\n") == 1
    (tmp_path / "a" / "result.json").write_text("")
    assert find_runs([str(tmp_path)]) == [tmp_path / "c"]
    assert f"skipped 2 unreadable runs, first: {tmp_path / 'a'}/result.json" in capsys.readouterr().err
    (tmp_path / "c" / "result.json").write_text("")
    with pytest.raises(UserError, match="there is no finished run in"):
        find_runs([str(tmp_path)])
    with pytest.raises(UserError, match=renew.strip()):
        read_file(tmp_path / "b" / "result.json", Result)


def test_stop_reasons_are_shown(result):
    """In words, with the mean length of answers and of reference answers."""
    def show(**values):
        return format_output(result.model_copy(update={"output": Output(**values)}))

    ended = {"stop": 3, "length": 1}
    assert show(tokens=30, stop_reasons=ended) == (
        "7.5 tokens; 3 ended by a stop token, 1 cut by the length limit"
    )
    assert "(reference 7.0 tokens)" in show(tokens=30, stop_reasons=ended, reference_tokens=7.0)
    assert show(tokens=0, stop_reasons={"choice": 2}) == "2 scored by log-probability"
    assert show(tokens=0, stop_reasons={}) == "-"


def test_different_code_gives_a_warning(result):
    """Packages and harness between all runs; methods and kernels only between runs of one method."""
    def change(part, **values):
        spec = result.spec.model_copy(update={part: getattr(result.spec, part).model_copy(update=values)})
        return FinishedRun(Path(), result.model_copy(update={"spec": spec}), {})

    same = FinishedRun(Path(), result, {})
    assert describe_code([same, same]) is None
    line = describe_code([same, change("sources", harness="0"), change("versions", torch="1.0")])
    assert "torch" in line and "source of the harness" in line
    for part in ("method", "kernels"):
        assert f"source of the {part} of full" in describe_code([same, change("sources", **{part: "0"})])
        other = change("sources", **{part: "0"}).result.spec
        other = other.model_copy(update={"method": other.method.model_copy(update={"name": "another"})})
        assert describe_code([same, FinishedRun(Path(), result.model_copy(update={"spec": other}), {})]) is None


def test_conflicts_are_failures_and_differences_of_protocol(result):
    """A line each, with the values of all runs; runs of several tasks are refused."""
    runs = [FinishedRun(Path(), result.model_copy(update=x), {}) for x in (
        {}, {"history": "own"}, {"run_id": "x", "status": "failed", "error": "1 of 4 samples failed"},
    )]
    assert find_conflicts(runs[:1] * 2) == []
    assert find_conflicts(runs) == [
        "x failed: 1 of 4 samples failed", f"history differs: {result.history}, own, {result.history}",
    ]
    other = result.model_copy(update={"task": result.task.model_copy(update={"name": "another"})})
    with pytest.raises(UserError, match=r"belong to different tasks \(another, niah_multikey_1\)"):
        find_conflicts([runs[0], FinishedRun(Path(), other, {})])


def test_a_journal_with_fewer_answers_than_its_result_states_is_refused(tmp_path):
    """Its wrong answers may be those that are not there."""
    source = next(CURATED.glob("snapkv-niah*"))
    for name in ("spec.json", "result.json"):
        shutil.copy(source / name, tmp_path)
    lines = gzip.decompress((source / "samples.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines))
    assert len(load_run(tmp_path).lines) == len(lines)
    (tmp_path / "samples.jsonl").write_bytes(b"".join(lines[:-1]))
    with pytest.raises(UserError, match=f"has {len(lines) - 1} answers about .* its result states {len(lines)} about"):
        load_run(tmp_path)


def damage(folder: Path, **answer) -> Path:
    """A curated run whose answers have other fields, and whose result is one of kvbench 0.1."""
    source = next(CURATED.glob("snapkv-niah*"))
    result = json.loads((source / "result.json").read_text())
    result["score"].pop("interval", None)
    (folder / "result.json").write_text(json.dumps(result))
    shutil.copy(source / "spec.json", folder)
    lines = gzip.decompress((source / "samples.jsonl.gz").read_bytes()).splitlines()
    (folder / "samples.jsonl").write_text("".join(f"{json.dumps(json.loads(x) | answer)}\n" for x in lines))
    return folder


def test_an_earlier_result_whose_journal_has_no_score_has_no_interval(tmp_path):
    """There is nothing to compute it from."""
    found = load_run(damage(tmp_path, score=None)).result.score
    assert (found.ci95, found.interval) == (None, "exact")


def test_a_score_that_is_too_large_to_add_is_refused(tmp_path, capsys):
    """Sums of such scores are infinite, and a test of them ends in a traceback."""
    with pytest.raises(UserError, match="has 0 answers"):
        load_run(damage(tmp_path, score=1e308))
    assert "line 1 is broken and skipped: score" in capsys.readouterr().err


def test_a_copy_of_a_run_counts_once_and_its_repetition_counts(tmp_path, capsys):
    """A table holds a run once, whatever folders it lies in; the same spec run again is another run."""
    source = next(CURATED.glob("snapkv-niah*"))
    for name in ("a", "b", "c"):
        shutil.copytree(source, tmp_path / name)
    again = json.loads((source / "result.json").read_text())
    again["environment"]["started"] = "2027-01-01T00:00:00+00:00"
    (tmp_path / "c" / "result.json").write_text(json.dumps(again))
    assert [x.folder.name for x in load_runs([str(tmp_path)])] == ["a", "c"]
    assert capsys.readouterr().err == f"{tmp_path / 'b'}: skipped, a copy of {tmp_path / 'a'}.\n"


def test_a_damaged_journal_does_not_hide_the_other_runs_of_a_folder(tmp_path, capsys):
    """It is left out with a warning; a run given by name is refused."""
    source = next(CURATED.glob("snapkv-niah*"))
    for name in ("a", "b"):
        shutil.copytree(source, tmp_path / name)
    (tmp_path / "b" / "samples.jsonl").touch()
    assert [x.folder for x in load_runs([str(tmp_path)])] == [tmp_path / "a"]
    assert f"warning: skipped: run '{tmp_path / 'b'}' has 0 answers" in capsys.readouterr().err
    with pytest.raises(UserError, match="has 0 answers"):
        load_runs([str(tmp_path / "a"), str(tmp_path / "b")])
    (tmp_path / "a" / "samples.jsonl").touch()
    with pytest.raises(UserError, match=r"no run of .* can be read"):
        load_runs([str(tmp_path)])
