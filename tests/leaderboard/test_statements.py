"""Statements of a submission that only kvbench's own lists, code and history can confirm."""

from __future__ import annotations

import json
import subprocess

import pytest

from kvbench.leaderboard.submission.deliver import put_in_folder
from kvbench.leaderboard.submission.records import MANIFEST
from kvbench.leaderboard.verification import code
from kvbench.leaderboard.verification.code import check_code
from kvbench.leaderboard.verification.counters import list_counters
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.suite import check_suite
from kvbench.leaderboard.verification.verify import verify
from kvbench.registry import HERE, find_method, find_task
from kvbench.runs.environment import CODE
from kvbench.runs.provenance import find_files, find_sources
from kvbench.runs.results import Git
from kvbench.runs.schema import upgrade
from kvbench.sweep.suite import list_suites

from .conftest import make_run
from .test_forgeries import forge_facts, in_environment, in_spec

RESULTS = HERE.parent / "results"


@pytest.mark.parametrize("name", ["bonus", "entries_quantized", "", "<b>", "keys"])
def test_a_counter_that_the_methods_stores_do_not_have_is_refused(snapkv, check, name):
    """Also one of another method's stores: `entries_quantized` would excuse missing bytes."""
    files = snapkv.with_lines(lambda _, x: x.model_copy(update=forge_facts(**{name: 7})(x)))
    assert f"its counter '{name}' is none that the stores of snapkv have" in check(files)["refused"]


@pytest.mark.slow
def test_every_counter_of_the_curated_runs_is_known():
    """Runs of 60 methods, read from their stores: no honest run is refused."""
    paths = [x for x in RESULTS.glob("*/*/result.json") if not (x.parent / MANIFEST).exists()]
    found = [upgrade(json.loads(x.read_text())) for x in paths]
    assert len(found) > 300
    for x in found:
        counters = (x["effect"] or {"facts": {}})["facts"].keys()
        files = find_files(find_method(x["method"]["name"]))
        assert counters <= list_counters(x.read_bytes() for x in files), x["run_id"]


@pytest.mark.parametrize(("suite", "outcome", "reason"), [
    ("ruler-mini", "refused", "suite: its suite 'ruler-mini' is not NAME@VERSION"),
    ("<b>@1", "refused", "suite: its suite '<b>@1' is not NAME@VERSION"),
    ("ru1er-mini@1", "refused", "suite: its suite 'ru1er-mini' can be taken for the suite ruler-mini"),
    ("scbench@1", "refused", "suite: the run is none of scbench@1"),
    ("ruler-mini@1", "refused", "suite: the run is none of ruler-mini@1"),
    ("mine@1", "flag", ""), ("ruler-mini@9", "flag", ""),
])
def test_a_run_of_no_known_suite_is_refused_or_flagged(snapkv, check, suite, outcome, reason):
    """A suite from a file of the submitter's own is a label."""
    found = check(in_spec("suite", value=suite)(snapkv.files))
    assert (found["suite"], found["refused"][: len(reason)]) == (outcome, reason)


def test_the_runs_of_every_suite_are_its_runs(snapkv):
    for suite in list_suites():
        for cell in suite.cells({"method": "full"}, HERE)[:20]:
            task, asked = find_task(cell.request.task), cell.request
            spec = snapkv.job.spec
            stated = spec.model_copy(update={
                "suite": suite.label, "mode": asked.mode, "turns": asked.turns or 1, "samples": asked.samples,
                "task": spec.task.model_copy(update={"name": task.name, "length": asked.length or 1024}),
            })
            assert check_suite(stated).outcome == "ok"


@pytest.mark.slow
def test_an_honest_run_of_a_suite_is_verified(check, tmp_path):
    done = make_run(
        tmp_path, "full", task="niah_single_1", samples=1, length=1024, turns=1, mode="single", visibility=None,
        suite="ruler-mini@1",
    )
    found = check(done.files)
    assert (found["suite"], found["level"]) == ("ok", "L0")


def test_another_revision_of_a_model_is_refused(snapkv, check):
    """A bundled model has none, and that of a hub model is the name of its folder."""
    found = check(in_spec("model", "revision", value="a" * 40)(snapkv.files))
    assert found["refused"] == f"model: its revision is '{'a' * 40}', that of mini is None"


@pytest.mark.parametrize(("version", "outcome", "reason"), [
    ("99.0.0", "refused", "machine: triton '99.0.0' is not known"),
    ("2.1.0", "refused", "machine: triton '2.1.0' is older than any"),
    ("3.999.0", "flag", ""),
])
def test_a_triton_that_nobody_has_is_refused_or_flagged(snapkv, check, version, outcome, reason):
    found = check(in_environment(triton=version)(snapkv.files))
    assert (found["machine"], found["refused"][: len(reason)]) == (outcome, reason)


def test_triton_kernels_without_triton_are_refused(snapkv, check):
    files = in_environment(triton=None)(in_spec("kernels", value="triton")(snapkv.files))
    assert check(files)["refused"].startswith("machine: operations ran in Triton, and its environment has no triton")


def test_an_invented_source_hash_is_flagged_as_unknown_code(snapkv, check):
    """L0 cannot refuse it: later code has hashes that this verifier does not know."""
    for part in ("method", "task", "kernels", "harness"):
        record = verify(in_spec("sources", part, value="f" * 64)(snapkv.files), Repository()).conclude()
        found = next(x for x in record.checks if x.name == "code")
        assert (found.outcome, record.level) == ("flag", "L0")
        assert found.reason.startswith("unknown code at commit 'cccccccccccc', which the verifier does not have: its ")
        assert f"hashes of {part} are not the verifier's" in found.reason


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with kvbench's code as its only commit, from which the verifier runs; returns its commands."""
    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    for name in CODE:
        (tmp_path / name).mkdir()
        for path in (HERE.parent / name).rglob("*.py"):
            copy = tmp_path / path.relative_to(HERE.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    for name in CODE[1:]:
        (tmp_path / "kvbench" / name).symlink_to(f"../{name}")
    for args in (("init", "-qb", "main"), ("config", "user.email", "a@b.c"), ("config", "user.name", "a")):
        git(*args)
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(code, "HERE", tmp_path / "kvbench")
    return git


def test_hashes_of_a_commit_are_compared_with_its_files(snapkv, checkout, tmp_path):
    """A commit in the verifier's history; one on a branch that nobody merged does not count."""
    kinds = find_method("snapkv"), find_task("niah")
    with (tmp_path / "methods" / "eviction" / "snapkv.py").open("a") as file:
        file.write("# changed\n")
    checkout("commit", "-qam", "second")
    second = Git(commit=checkout("rev-parse", "HEAD"), dirty=False)
    with code._extract(second) as tree:
        stated = find_sources(*kinds, tree)
    assert stated.method != snapkv.bundle.spec.sources.method and stated.harness == snapkv.bundle.spec.sources.harness
    found, own = check_code(stated, second, *kinds)
    assert (found.outcome, found.reason) == ("ok", f"its source hashes are those of commit '{second.commit[:12]}'")
    assert not own
    first = Git(commit=checkout("rev-parse", "HEAD~1"), dirty=False)
    found, _ = check_code(stated, first, *kinds)
    assert (found.outcome, found.reason.rpartition(": ")[2]) == ("flag", "its hashes of method are not that commit's")
    checkout("reset", "-q", "--hard", "HEAD~1")
    assert "which the verifier does not have" in check_code(stated, second, *kinds)[0].reason


def test_an_agreement_that_contradicts_the_full_cache_is_flagged(runs, snapkv, tmp_path):
    """Where an answer leaves the reference, and the full cache's does not, their top-1 tokens differ."""
    folder = put_in_folder(runs["full"].files, runs["full"].bundle.manifest, tmp_path)
    repository = Repository([folder])
    assert "agreement" not in [x.name for x in verify(snapkv.files, repository).conclude().checks]
    perfect = snapkv.with_lines(lambda _, x: x.model_copy(update={
        "agreement": x.agreement.model_copy(update={"top1": 1.0, "kl": 0.001}),
    }))
    record = verify(perfect, repository).conclude()
    found = next(x for x in record.checks if x.name == "agreement")
    assert (found.outcome, record.level) == ("flag", "L0")
    assert found.reason.startswith("4 of its agreements, the first in sample 0 turn 0, contradict its answers and")


def test_logits_equal_to_the_last_bit_are_flagged(snapkv, check):
    """No line of the 53,000 curated ones in which a method acted has a divergence of exactly 0."""
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={
        "agreement": x.agreement.model_copy(update={"top1": 1.0, "kl": 0.0}),
    }))
    assert check(files)["agreement"] == "flag"
