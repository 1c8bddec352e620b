"""`kvbench suggest`: techniques are ordered only where a test tells them apart."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbench.analysis.load import find_runs, load_run
from kvbench.report.group import Axis
from kvbench.report.suggest import Guide, group_protocols
from kvbench.report.suggestion import Question, Suggestion, Technique, describe_lead, describe_standing
from kvbench.runs.results import TASKS
from kvbench.task import Mode

FAILING = [[1.0, 0.0, 0.0], *[[0.0, 0.0, 0.0]] * 11]


def ask(results, limit=0.25, *, axis=Axis.STORED, visibility=None):
    """The answer for the bundled model in multi-turn mode."""
    runs = [load_run(x) for x in find_runs([str(results.folder)])]
    return Guide(group_protocols(runs)).answer(
        Question("mini", Mode.MULTI_TURN, axis, limit, visibility=visibility)
    )


def places(answer):
    """Place, tie and count of led protocols by technique, in order."""
    return {x.label: (x.place, x.tied, x.leads) for x in answer.techniques}


def hide(result, lines):
    """Hide the question: another protocol."""
    result["visibility"] = "hidden"


@pytest.fixture
def full(results):
    """Results with a run of the full cache."""
    results.add("full", "good", method="full", stored=1.0, kind="none")
    return results


def test_the_significantly_best_technique_is_suggested(full):
    """Twelve contexts that all differ: p = 2 / 2**12."""
    full.add("a", "poor")
    full.add("b", "good", method="kvzip")
    answer = ask(full)
    assert answer.verdict == "kvzip is best under one protocol; no other technique is tied with it."
    assert places(answer) == {"kvzip": (1, False, 1), "snapkv": (None, False, 0)}
    assert [(x.difference.mean, x.leads) for y in answer.techniques for x in y.standings] == [(0, True), (-0.5, False)]
    assert "mini is a small model trained on these tasks and says nothing about 8B models." in answer.limits


def test_a_technique_trained_on_the_tasks_is_not_suggested(full):
    """Although its score is the best; the answer names it apart."""
    full.add("a", "poor")
    full.add("b", "good", method="kvzip", edit=lambda result, lines: result["budget"]["resolved"].update(
        trained_on=TASKS
    ))
    answer = ask(full)
    assert set(places(answer)) == {"snapkv"}
    assert "Not compared, because they were trained on the tasks' train split: kvzip." in answer.limits


def test_what_happens_before_a_run_is_said(full):
    """Next to the number of protocols under which a technique leads."""
    full.add("a", "poor")
    full.add("b", "good", method="kvzap", edit=lambda result, lines: result["method"]["card"].update(
        calibration="a predictor, trained on a manual"
    ))
    answer = ask(full)
    leads = {x.label: describe_lead(x, answer) for x in answer.techniques}
    assert leads == {
        "kvzap": "best or tied under 1 of 1 protocol, trained on another text", "snapkv": "not among the best",
    }


def test_techniques_that_no_test_separates_share_a_place(full):
    """One wrong answer of 24 is not significant; the worst technique has no place."""
    full.add("a", "good", method="kvzip")
    full.add("b", [[1.0, 0.0], *[[1.0, 1.0]] * 11], method="mikv")
    full.add("c", "bad", method="h2o")
    answer = ask(full)
    assert places(answer) == {"kvzip": (1, True, 1), "mikv": (1, True, 1), "h2o": (None, False, 0)}
    assert answer.verdict == "2 techniques share the first place, best or tied under one protocol: kvzip, mikv."


@pytest.mark.parametrize("contexts", [1, 5])
def test_too_few_contexts_rank_nothing(results, contexts):
    """Five contexts cannot reach p < 0.05, whatever their scores."""
    results.add("full", [[1.0]] * contexts, method="full", stored=1.0, kind="none")
    results.add("a", [[1.0]] * contexts, method="kvzip")
    results.add("b", [[0.0]] * contexts)
    answer = ask(results)
    assert answer.best == ()
    assert answer.verdict == "Nothing can be ranked; the reasons are below."
    assert set(places(answer).values()) == {(None, False, 0)}
    assert any("too few to tell" in x for x in answer.limits)


def test_nothing_is_ranked_where_the_full_cache_fails_the_task(results):
    """A model that cannot do the task says nothing about techniques."""
    results.add("full", FAILING, method="full", stored=1.0, kind="none")
    results.add("a", [[1.0] * 3] * 12, method="kvzip")
    results.add("b", [[0.0] * 3] * 12)
    answer = ask(results)
    assert answer.best == ()
    assert any("the full cache itself scores 0.028" in x for x in answer.limits)


def test_a_weak_full_cache_is_a_warning(results):
    """Many published tasks score below one half; techniques are ranked, with a note."""
    results.add("full", [[1.0, 0.0, 0.0]] * 12, method="full", stored=1.0, kind="none")
    results.add("a", [[1.0, 0.0, 0.0]] * 12, method="kvzip")
    results.add("b", [[0.0] * 3] * 12)
    answer = ask(results)
    assert [x.label for x in answer.best] == ["kvzip"]
    assert any("the full cache itself scores 0.333: the model fails this task" in x for x in answer.limits)


def test_a_single_technique_is_not_called_the_best(full):
    full.add("a", "good")
    answer = ask(full)
    assert answer.best == ()
    assert any("one technique has a run" in x for x in answer.limits)


def test_the_largest_run_within_the_limit_counts(full):
    """Not the best one, which would be chosen on the test data. Rounding may exceed the limit by 5 %."""
    full.add("a", "good", stored=0.1)
    full.add("b", "poor", stored=0.26)
    full.add("c", "good", stored=0.5)

    def chosen(limit):
        return [describe_standing(y)["stored"] for x in ask(full, limit).techniques for y in x.standings]

    assert [chosen(x) for x in (0.09, 0.2, 0.25, 0.3, 0.6)] == [[], ["10.0%"], ["26.0%"], ["26.0%"], ["50.0%"]]
    assert ask(full, 0.09).verdict == "No technique with a run stores at most 9% of the full cache."


def test_a_higher_level_counts_before_a_larger_size_in_one_band(full):
    """A run that nobody reran does not displace a rerun one of similar size; a much smaller run does not count."""
    sizes = {"a": 0.05, "b": 0.2, "c": 0.25}
    for name, stored in sizes.items():
        full.add(name, "poor", stored=stored)
    runs = {x: load_run(full.folder / x) for x in ("full", *sizes)}

    def chosen(**levels):
        (protocol,) = group_protocols(runs.values())
        levels = tuple(levels.get(x.folder.name, "L0") for x in protocol.runs)
        answer = Guide([replace(protocol, levels=levels)]).answer(Question("mini", Mode.MULTI_TURN, Axis.STORED, 0.25))
        return [y.run.folder.name for x in answer.techniques for y in x.standings]

    assert [chosen(), chosen(b="L2"), chosen(a="L2"), chosen(a="L3", b="L2")] == [["c"], ["b"], ["c"], ["b"]]


def test_bytes_read_have_their_own_limit(full):
    """A method that stores everything and reads a fifth fits a limit on reads, and is named as too large on stores."""
    full.add("a", "good", method="quest", stored=1.05, kind="read")
    full.add("b", "poor", stored=0.2)
    assert list(places(ask(full, axis=Axis.READ))) == ["quest", "snapkv"]
    stored = ask(full)
    assert list(places(stored)) == ["snapkv"]
    assert "No run within the limit: quest." in stored.limits


def test_settings_distinguish_techniques(full):
    """Runs of one method with other settings are other techniques, labeled by what differs."""
    full.add("a", "poor")
    full.add("b", "good", edit=lambda result, lines: result["method"]["settings"].update(kernel=15))
    assert places(ask(full)) == {"snapkv kernel=15": (1, False, 1), "snapkv kernel=7": (None, False, 0)}


def test_the_technique_that_leads_under_most_protocols_comes_first(full):
    """kvzip leads under both, snapkv under one, and h2o has no run under the other."""
    full.add("a", "good", method="kvzip")
    full.add("b", "good")
    full.add("c", "bad", method="h2o")
    full.add("d", "good", method="kvzip", edit=hide)
    full.add("e", "bad", edit=hide)
    answer = ask(full)
    assert places(answer) == {"kvzip": (1, False, 2), "snapkv": (2, False, 1), "h2o": (None, False, 0)}
    assert answer.verdict == "kvzip is best or tied under all of 2 protocols, more than any other technique."
    assert any(re.search("question hidden, .*: no run of the full cache", x) for x in answer.limits)
    assert places(ask(full, visibility="first-turn")) == {
        "kvzip": (1, True, 1), "snapkv": (1, True, 1), "h2o": (None, False, 0)
    }


def test_protocols_of_another_seed_or_other_model_files_count_once(full):
    """So that nobody multiplies first places; kvzip leads under three protocols of one kind, snapkv under one."""
    def change(part, field, value):
        return lambda result, lines: result[part].update({field: value})

    for name, edit in (("a", None), ("b", change("spec", "seed", 1)), ("c", change("model", "sha256", "0" * 64))):
        full.add(f"{name}-good", "good", method="kvzip", edit=edit)
        full.add(f"{name}-poor", "poor", edit=edit)
    full.add("d", "poor", method="kvzip", edit=hide)
    full.add("e", "good", edit=hide)
    answer = ask(full)
    assert places(answer) == {"kvzip": (1, True, 1), "snapkv": (1, True, 1)}
    assert answer.verdict.startswith("2 techniques share the first place, best or tied under 1 of 2 protocols: ")


def test_techniques_that_do_not_lead_are_ordered_by_their_largest_loss(full):
    """Not by the number of protocols under which they ran."""
    full.add("hidden", "good", method="full", stored=1.0, kind="none", edit=hide)
    full.add("a", "good", method="kvzip")
    full.add("b", "good", method="kvzip", edit=hide)
    full.add("c", "bad", method="h2o")
    full.add("d", "bad", method="h2o", edit=hide)
    full.add("e", "poor")
    assert list(places(ask(full))) == ["kvzip", "snapkv", "h2o"]


def test_a_technique_of_unknown_loss_stands_below_those_of_known_ones(full):
    """Its score under a protocol without a run of the full cache is not a smaller loss than theirs."""
    full.add("a", "poor")
    full.add("b", "bad", method="h2o", edit=hide)
    assert list(places(ask(full))) == ["snapkv", "h2o"]


def test_lower_scores_lead_where_lower_is_better(results):
    """Perplexity, for example."""
    def lower(result, lines):
        result["score"]["higher_is_better"] = False

    results.add("full", "bad", method="full", stored=1.0, kind="none", edit=lower)
    results.add("a", "good", method="kvzip", edit=lower)
    results.add("b", "poor", edit=lower)
    assert places(ask(results)) == {"snapkv": (1, False, 1), "kvzip": (None, False, 0)}


@pytest.mark.parametrize(("best", "others", "shown"), [(1, 0, 1), (1, 5, 3), (5, 5, 5), (9, 0, 8)])
def test_all_that_share_the_first_place_are_shown_up_to_eight(best, others, shown):
    """And at least three."""
    places = [1] * best + [None] * others
    techniques = [Technique(str(i), "m", (), place, tied=best > 1) for i, place in enumerate(places)]
    answer = Suggestion(Question("mini", Mode.SINGLE, Axis.STORED, 0.25), (), tuple(techniques), ())
    assert [x.label for x in answer.shown] == [str(i) for i in range(shown)]


def test_a_technique_is_known_since_the_day_of_its_last_run():
    """Before, its place rests on fewer protocols; unknown where the day of a run is."""
    def known(*days):
        return Technique("a", "a", tuple(SimpleNamespace(since=x) for x in days), None, tied=False).since

    assert known("2026-02-01", "2026-10-03", "2026-03-02") == "2026-10-03"
    assert known("2026-02-01", None) is None


def test_failed_runs_are_never_suggested(full):
    """They have no score."""
    def fail(result, lines):
        result["score"]["mean"] = result["score"]["ci95"] = None
        result |= {"status": "failed", "error": "out of memory", "n_failed": 1}

    full.add("a", "good", edit=fail)
    assert ask(full).techniques == ()


def test_times_are_shown_with_their_gpu_only(full):
    """Times of a shared CPU are not comparable."""
    full.add("a", "good", method="kvzip")
    full.add("b", "poor", edit=lambda result, lines: (
        result["environment"].update(gpu="NVIDIA H100"), result["latency"].update(tpot_s=0.0123)
    ))
    answer = ask(full)
    assert {x.label: describe_standing(x.standings[0])["per token"] for x in answer.techniques} == {
        "kvzip": "-", "snapkv": "12.3 ms on NVIDIA H100"
    }


def test_differences_of_a_diffusion_model_are_to_decoding_without_a_cache():
    """It has no full cache, so no column or note names one."""
    folder = Path(__file__).parents[3] / "results" / "cpu-2-cores-diffusion"
    guide = Guide(group_protocols([load_run(x) for x in find_runs([str(folder)])]))
    answer = guide.answer(Question("mini-diffusion", Mode.SINGLE, Axis.COMPUTED, 0.25, task="niah_multikey_1"))
    described = [describe_standing(y) for x in answer.techniques for y in x.standings if y.difference is not None]
    assert {x["against the full cache"] for x in described} == {"-"}
    assert "-" not in {x["against no cache"] for x in described}
    assert any(x.endswith(": no run without a cache, so losses are unknown.") for x in answer.limits)
    assert not any("the full cache" in x for x in answer.limits)


def test_the_command_prints_the_evidence(full, kvbench):
    """The verdict, the runs of the best techniques, and the limits; --json has every technique."""
    full.add("a", "good", method="kvzip")
    full.add("b", "poor")
    answer = kvbench(
        "suggest", "--model", "mini", "--memory", "25%", "--mode", "multi-turn", "--task", "niah", "--results",
        full.folder, "--json",
    )
    assert answer.code == 0
    assert answer.out.startswith("kvzip is best under one protocol; ")
    assert "Note: mini is a small model" in answer.out
    assert [(x["label"], x["place"], x["runs"][0]["score"]["mean"]) for x in answer.json["techniques"]] == [
        ("kvzip", 1, 1.0), ("snapkv", None, 0.5)
    ]
    assert answer.json["question"] == {
        "model": "mini", "mode": "multi-turn", "axis": "stored", "limit": 0.25, "task": "niah_multikey_1",
        "visibility": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--model": "minj"}, "unknown model 'minj'. Did you mean 'mini'? Allowed: mini. No other model has a run"),
        ({"--mode": "multiturn"}, "unknown mode 'multiturn'. Did you mean 'multi-turn'? Allowed: multi-request, "),
        ({"--visibility": "seen"}, "unknown visibility 'seen'. Allowed: first-turn, hidden, visible."),
        ({"--mode": "single"}, "unknown mode 'single'. Allowed: multi-turn. No other mode has a run here"),
        ({"--task": "vt"}, "unknown task 'vt'. Allowed: niah_multikey_1. No other task has a run here"),
        ({"--visibility": "hidden"}, "unknown visibility 'hidden'. Allowed: first-turn. No other visibility has a run"),
        *(({"--memory": x}, f"the limit '{x}' is not a share of the full cache. Give a percentage above 0% and up")
          for x in ("1024", "lots", "0%", "101%")),
        ({"--read": "25%"}, "give one limit: --memory 25%, --read 25%, or for a diffusion model --computed 25%."),
    ],
)
def test_questions_without_a_run_are_refused(full, kvbench, options, message):
    """With the value, what has a run, and the next step."""
    full.add("a", "good")
    given = {"--model": "mini", "--memory": "25%", "--mode": "multi-turn"} | options
    answer = kvbench("suggest", *(x for pair in given.items() for x in pair), "--results", full.folder)
    assert answer.code == 2
    assert message in answer.err


def test_a_damaged_journal_does_not_hide_the_other_runs(full, kvbench):
    """It is left out with a warning."""
    full.add("a", "good")
    full.add("b", "good")
    (full.folder / "b" / "samples.jsonl").write_text("")
    given = ("--model", "mini", "--memory", "25%", "--mode", "multi-turn", "--results", full.folder)
    answer = kvbench("suggest", *given, "--json")
    assert answer.code == 0
    assert f"warning: skipped: run '{full.folder / 'b'}' has 0 answers" in answer.err
    assert [len(x["runs"]) for x in answer.json["techniques"]] == [1]


def test_a_model_has_the_name_under_which_it_was_installed(full, kvbench):
    """Its results have the longer name of its file."""
    for x in full.folder.glob("*/*.json"):
        x.write_text(x.read_text().replace('"id":"mini"', '"id":"smollm2-135m-q4_1"').replace(
            '"id": "mini"', '"id": "smollm2-135m-q4_1"'
        ))
    given = ("--model", "smollm2-135m", "--memory", "25%", "--mode", "single", "--results", full.folder)
    assert "unknown mode 'single'. Allowed: multi-turn." in kvbench("suggest", *given).err


def test_without_runs_the_next_step_is_named(kvbench, tmp_path, monkeypatch):
    """In a folder that has none of the default ones."""
    monkeypatch.chdir(tmp_path)
    answer = kvbench("suggest", "--model", "mini", "--memory", "25%", "--mode", "multi-turn")
    assert (answer.code, answer.err) == (2, (
        "kvbench: there is no finished run in runs/ or results/ here. Make runs with `kvbench run`, or give folders of "
        "runs with --results.\n"
    ))


def test_an_unfinished_run_does_not_hide_the_curated_results(full, kvbench, tmp_path, monkeypatch):
    """The default folders are those with a finished run."""
    full.add("a", "good")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(full.folder)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "spec.json").write_text("{}")
    answer = kvbench("suggest", "--model", "mini", "--memory", "25%", "--mode", "multi-turn", "--json")
    assert (answer.code, len(answer.json["techniques"])) == (0, 1)
