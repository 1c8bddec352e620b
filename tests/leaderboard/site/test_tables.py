"""Grouping and ranking of runs."""

from __future__ import annotations

import json

import pytest

from kvbench.leaderboard.site.guide import FrontPage
from kvbench.leaderboard.site.listed import read_listed
from kvbench.leaderboard.site.tables import TRAINED, UNRANKED, make_groups
from kvbench.leaderboard.submission.records import Check
from kvbench.runs.results import TASKS


def read_groups(results):
    entries, problems = read_listed(results.folder)
    assert problems == []
    return make_groups(entries)


def ranks(group):
    """Rank and tie by method, over all bands."""
    return {
        row.result.method.name: (row.rank, row.tied)
        for table in group.tables for band in table.bands for row in band.rows
    }


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        (None, "visibility", "hidden"), (None, "mode", "multi-request"), ("model", "sha256", "0" * 64),
        ("model", "dtype", "float32"), ("task", "version", "2"), ("task", "length", 4096), ("task", "scorer", "x@1"),
        ("task", "name", "kv"),
    ],
)
def test_runs_of_another_protocol_are_in_another_table(results, part, field, value):
    """One different field of protocol or model suffices."""
    results.add("a")

    def edit(result, lines):
        (result if part is None else result[part])[field] = value
        if field == "mode":
            result["visibility"] = "hidden"  # the only one of this mode

    results.add("b", method="h2o", edit=edit)
    assert [len(x.rows) for x in read_groups(results)] == [1, 1]


def test_runs_of_one_protocol_share_a_table(results):
    """Methods, budgets and machines may differ within a table."""
    results.add("a")
    results.add("b", method="h2o", stored=0.26, edit=lambda result, lines: result["environment"].update(cpu="other"))
    (group,) = read_groups(results)
    assert group.machines == ["AMD EPYC, 1 thread", "other, 1 thread"]
    assert group.usual_machine == "AMD EPYC, 1 thread"
    assert len(group.tables) == 1
    assert ranks(group) == {"snapkv": (1, True), "h2o": (1, True)}


def test_the_model_with_the_most_runs_is_first(results):
    """The first page opens with it, and bundled models come after all others."""
    for model, methods in (("a", ("snapkv",)), ("b", ("snapkv", "h2o")), ("mini", ("snapkv", "h2o", "tova"))):
        for method in methods:
            def edit(result, lines, model=model):
                result["model"].update(id=model, sha256=model.rjust(64, "0"))

            results.add(f"{model}-{method}", method=method, edit=edit)
    assert FrontPage(read_groups(results)).models == ["b", "a", "mini"]


def test_stored_and_read_bytes_are_ranked_separately(results):
    """Methods with a read budget have a table of their own, in bands of bytes read."""
    results.add("a", "bad")
    results.add("b", "good", method="quest", stored=1.05, kind="read")
    (group,) = read_groups(results)
    assert [(x.axis, x.bands[0].title) for x in group.tables] == [
        ("stored", "stored: 15% to 30% of the full cache"), ("read", "read: 15% to 30% of the full cache")
    ]
    assert ranks(group) == {"snapkv": (1, False), "quest": (1, False)}


def test_no_stated_size_of_the_full_cache_stops_the_build(results):
    """The width that quantized caches are compared with follows from the model's type, not from the submitted bytes."""
    def empty(result, lines):
        result["method"]["family"] = result["method"]["card"]["family"] = "quantization"
        result["model"]["dtype"] = "float32"
        result["memory"]["full_16bit_bytes"] = 0

    results.add("a", method="kivi", stored=0.1, kind="bits", edit=empty)
    (group,) = read_groups(results)
    assert [x.title for x in group.tables[0].bands] == ["stored: 15% to 30% of the full cache"]


def test_the_full_caches_reads_come_from_the_most_trusted_run(results):
    """Of earlier results, which lack them. A run without verification, or of lower trust, changes no band."""
    def forget(result, lines):
        result["memory"]["full_read_bytes_per_step"] = None

    def read(factor):
        def edit(result, lines):
            result["memory"]["read_bytes_per_step"] = round(factor * result["memory"]["full_bytes"])
            result["environment"]["started"] = f"203{factor}-01-01T00:00:00+00:00"
        return edit

    full = {"method": "full", "stored": 1.0, "kind": "none"}
    results.add("x", "good", **full, edit=read(1))
    results.send(results.add("0", "good", **full, edit=read(2)), "eve")
    mallory = results.add("1", "good", **full, edit=read(3))
    results.send(mallory, "mallory")
    results.verify(mallory, "L0")
    results.add("y", method="quest", stored=1.05, kind="read", edit=forget)
    (group,) = read_groups(results)
    (band,) = next(x.bands for x in group.tables if x.axis == "read")
    assert band.title == "read: 15% to 30% of the full cache"


def test_ranks_count_within_a_band(results):
    """Half of the cache is not ranked against a tenth of it."""
    results.add("a", "poor", stored=0.10)
    results.add("b", "bad", method="h2o", stored=0.104)
    results.add("c", "good", method="kvzip", stored=0.5)
    (group,) = read_groups(results)
    assert [band.title.partition(": ")[2] for band in group.tables[0].bands] == [
        "up to 15% of the full cache", "30% to 60% of the full cache"
    ]
    assert ranks(group) == {"snapkv": (1, False), "h2o": (2, False), "kvzip": (1, False)}


def test_runs_with_parts_trained_on_the_tasks_are_not_ranked(results):
    """They have a band of their own, although their scores are best; other training data changes nothing."""

    def train_on(data):
        return lambda result, lines: result["budget"]["resolved"].update(trained_on=data)

    results.add("a", "good", edit=train_on("Python's manual"))
    results.add("b", "poor", method="h2o")
    results.add("c", "good", method="kvzip", edit=train_on(TASKS))
    (group,) = read_groups(results)
    bands = {band.title: [x.result.method.name for x in band.rows] for band in group.tables[0].bands}
    assert bands == {"stored: 15% to 30% of the full cache": ["snapkv", "h2o"], TRAINED: ["kvzip"]}
    assert ranks(group) == {"snapkv": (1, False), "h2o": (2, False), "kvzip": (None, False)}


def test_insignificant_differences_share_a_rank(results):
    """One wrong answer of 24 is not significant; twelve in twelve contexts are, with p = 2 / 2**12."""
    results.add("a", "good", method="kvzip")
    results.add("b", [[1.0, 0.0], *[[1.0, 1.0]] * 11], method="mikv")
    results.add("c", "poor")
    (group,) = read_groups(results)
    assert ranks(group) == {"kvzip": (1, True), "mikv": (1, True), "snapkv": (3, False)}


def test_nothing_is_ranked_where_the_full_cache_fails_the_task(results):
    """Its page warns, and the runs have neither rank nor tie."""
    results.add("a", "bad", method="full", stored=1.0, kind="none")
    results.add("b", "poor")
    results.add("c", "good", method="kvzip")
    (group,) = read_groups(results)
    assert ranks(group) == {"snapkv": (None, False), "kvzip": (None, False)}
    (page,) = results.build().folder.glob("protocols/*.html")
    assert "the full cache itself scores 0.000, so nothing is ranked" in page.read_text()


def test_the_full_cache_is_an_anchor_without_a_rank(results):
    """It is the first row, and all others have a difference to it."""
    results.add("a", "good", method="full", stored=1.0, kind="none")
    results.add("b", "poor")
    (group,) = read_groups(results)
    assert [(x.result.method.name, x.rank, x.difference) for x in group.anchors] == [("full", None, None)]
    (row,) = group.tables[0].bands[0].rows
    assert row.difference.mean == -0.5
    assert row.difference.p_adjusted == 2 / 2**12


def test_only_verified_full_caches_are_anchors(results):
    """Neither an unregistered method declared lossless, nor `full` with half of the bytes."""
    results.add("a", "good", method="mine", stored=0.05, kind="none")
    results.add("b", "good", method="full", stored=0.5, kind="none")
    results.add("c", "poor")
    (group,) = read_groups(results)
    assert (group.anchors, [x.difference for x in group.rows]) == ((), [None] * 3)
    assert ranks(group) == {"mine": (None, False), "full": (1, False), "snapkv": (1, False)}


def test_a_failed_run_has_no_rank(results):
    """Even if its partial mean is the best."""
    def fail(result, lines):
        result["score"]["mean"] = result["score"]["ci95"] = None
        result |= {"status": "failed", "error": "out of memory", "n_failed": 1}

    results.add("a", "good", method="h2o", edit=fail)
    results.add("b", "poor")
    (group,) = read_groups(results)
    assert ranks(group) == {"snapkv": (1, False)}
    assert [(x.result.method.name, x.rank) for x in group.failed] == [("h2o", None)]


def test_a_run_on_other_prompts_has_no_rank(results):
    """Same protocol, but its journal has prompts of other data."""
    def swap(result, lines):
        for x in lines:
            x["prompt_hash"] = "f" * 16

    results.add("a", "poor")
    results.add("b", "poor", method="h2o")
    results.add("c", "good", method="kvzip", edit=swap)
    (group,) = read_groups(results)
    assert ranks(group)["kvzip"] == (None, False)


def test_differences_are_taken_to_the_most_trusted_full_cache(results):
    """A submitted full-cache run with a bad score does not change the differences."""
    results.add("a", "good", method="full", stored=1.0, kind="none")

    def submit(result, lines):
        result["environment"]["started"] = "2030-01-01T00:00:00+00:00"

    folder = results.add("0", "bad", method="full", stored=1.0, kind="none", edit=submit)
    results.send(folder, "mallory")
    results.add("b", "poor")
    (group,) = read_groups(results)
    assert [x.listed.submitter for x in group.anchors] == [None]
    assert group.tables[0].bands[0].rows[0].difference.mean == -0.5
    results.verify(folder, "L0")
    (group,) = read_groups(results)
    assert [x.listed.submitter for x in group.anchors] == [None, "mallory"]
    assert group.tables[0].bands[0].rows[0].difference.mean == -0.5


def test_unverified_submissions_are_shown_and_not_ranked(results):
    """Nor do they affect the ranks of others."""
    def swap(result, lines):
        for x in lines:
            x["prompt_hash"] = "f" * 16

    results.add("a", "good", method="full", stored=1.0, kind="none")
    results.add("b", "poor")
    sent = results.add("c", "good", method="kvzip")
    results.send(sent, "eve")
    results.verify(sent, None)
    for method in ("h2o", "tova"):
        results.send(results.add(method, "good", method=method, edit=swap), "mallory")
    (group,) = read_groups(results)
    found = {"snapkv": (1, False), "kvzip": (None, False), "h2o": (None, False), "tova": (None, False)}
    assert ranks(group) == found
    assert [x.difference is None for band in group.tables[0].bands for x in band.rows] == [False, True, True, True]
    results.verify(sent, "L0")
    (group,) = read_groups(results)
    assert ranks(group) == found | {"kvzip": (1, False), "snapkv": (2, False)}


@pytest.mark.parametrize("ok", [(), ("method",), ("bytes",), ("method", "bytes")])
def test_a_rank_needs_verified_bytes_and_a_registered_method(results, ok):
    """A level alone is not enough; all other runs are listed apart."""
    results.add("a", "poor")
    folder = results.add("b", "good", method="mine", verified=False)
    checks = (Check(name=x, outcome="ok", reason="") for x in ok)
    results.verify(folder, "L0", *checks, passed=())
    (group,) = read_groups(results)
    apart = group.tables[0].bands[-1]
    if len(ok) == 2:
        assert ranks(group)["mine"] == (1, False)
    else:
        assert (apart.title, [x.result.method.name for x in apart.rows]) == (UNRANKED, ["mine"])
        assert ranks(group) == {"snapkv": (1, False), "mine": (None, False)}


def test_a_run_with_other_weights_has_no_rank(results):
    """Under the name of a model that the verifier has."""
    results.add("a", "poor")
    folder = results.add("b", "good", method="h2o", verified=False)
    results.verify(folder, "L0", Check(name="weights", outcome="flag", reason=""))
    (group,) = read_groups(results)
    assert ranks(group) == {"snapkv": (1, False), "h2o": (None, False)}


def test_a_run_without_verification_is_listed_apart(results):
    """With or without a manifest."""
    results.add("a", verified=False)
    (group,) = read_groups(results)
    assert [x.title for x in group.tables[0].bands] == [UNRANKED]


def test_a_technique_lacks_a_run_only_where_techniques_are_ranked(results):
    """With 4,096 tokens one technique has a run, so nothing is ranked there."""
    def of_length(length):
        return lambda result, lines: result["task"].update(length=length)

    for length in (1024, 2048, 4096):
        results.add(f"full-{length}", "good", method="full", stored=1.0, kind="none", edit=of_length(length))
        results.add(f"kvzip-{length}", "good", method="kvzip", edit=of_length(length))
    results.add("snapkv", "poor", edit=of_length(1024))
    results.add("h2o", "poor", method="h2o", edit=of_length(2048))
    front = FrontPage(read_groups(results))
    document = json.loads(front.write_answers(dict.fromkeys(("kvzip", "snapkv", "h2o"), "page")))
    texts, answer = document["texts"], document["answers"][f"0.{front.default}.0.0"]
    lacking = {texts[x["label"]]: [texts[y] for y in x["missing"]] for x in answer["best"]}
    names = {x.example.task.length: x.name for x in front.guide.protocols}
    assert lacking == {"kvzip": [], "snapkv": [names[2048]], "h2o": [names[1024]]}
