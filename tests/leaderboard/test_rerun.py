"""Levels above L0: what was computed comes out again, and what was made up does not."""

from __future__ import annotations

import json

import pytest

from kvbench.leaderboard.submission.deliver import put_in_folder
from kvbench.leaderboard.submission.repository import Repository
from kvbench.leaderboard.verification import fresh_seed as hidden
from kvbench.leaderboard.verification import levels
from kvbench.leaderboard.verification.fresh_seed import _chance
from kvbench.leaderboard.verification.levels import Wish, raise_level
from kvbench.leaderboard.verification.lookup import StrangerError
from kvbench.leaderboard.verification.runnable import load_again, prepare_again
from kvbench.leaderboard.verification.verify import verify
from kvbench.runs.progress import show_progress

from .conftest import edit_spec

SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _loaded(snapkv, monkeypatch):
    """The model that the runs had: loading it again takes longer than running."""
    monkeypatch.setattr(levels, "load_again", lambda _: snapkv.job.model)


@pytest.fixture
def raised():
    """The record of a bundle after a wish."""

    def record(files, share=None, secret=None):
        found = verify(files, Repository())
        raise_level(found, Wish(share, 0, secret), show_progress)
        return found.conclude()

    return record


@pytest.fixture
def forged(runs, snapkv):
    """The dense cache's answers, all right, in the place of the method's own, and every number that follows."""
    right = runs["full"].bundle.lines

    def answer(number, line):
        names = ("prediction", "ids", "score", "scores", "tokens", "stop_reason")
        return line.model_copy(update={name: getattr(right[number], name) for name in names})

    return snapkv.with_lines(answer)


def test_a_share_run_again_is_l1(snapkv, raised):
    record = raised(snapkv.files, 0.5)
    assert record.level == "L1" and record.rerun is not None
    assert (record.rerun.samples, record.rerun.answers, record.rerun.same_answers) == (2, 4, 4)
    assert record.rerun.same_tokens == record.rerun.tokens > 0
    assert record.rerun.mean == record.rerun.submitted_mean


def test_all_samples_run_again_is_l2(snapkv, raised):
    assert raised(snapkv.files, 1.0).level == "L2"


def test_a_small_share_is_one_sample_at_least(snapkv, raised):
    rerun = raised(snapkv.files, 0.001).rerun
    assert (rerun.samples, rerun.share) == (1, 0.25)


def test_forged_answers_pass_l0_and_fall_when_they_are_run(forged, raised):
    """What is consistent in itself can only be refuted by computing it, and then both numbers are told."""
    assert raised(forged).level == "L0"
    record = raised(forged, 1.0)
    assert (record.level, record.refused) == (None, True)
    assert record.rerun.same_tokens < 0.95 * record.rerun.tokens
    assert record.rerun.mean < record.rerun.submitted_mean == 1.0
    assert "at least 95% of the tokens must be" in record.checks[-1].reason


def test_older_code_is_named_and_no_reason_to_refuse(snapkv, raised):
    files = edit_spec(snapkv.files, lambda x: x["sources"].update(method="0" * 64))
    record = raised(files, 0.25)
    assert record.level == "L1" and "sources.method" in record.rerun.differs


def test_a_protocol_that_is_not_the_one_here_is_refused(snapkv, raised):
    """L0 cannot see which tokens end an answer; a rerun does."""
    files = edit_spec(snapkv.files, lambda x: x["task"].update(stop=[0, 255]))
    assert "its task.stop" in raised(files, 0.25).checks[-1].reason


def test_a_file_of_the_submitters_is_never_opened(snapkv):
    gated = {"name": "duo-attention", "settings": {"gates": "/etc/passwd", "gates_sha256": "0" * 64}}
    spec = snapkv.bundle.spec
    spec = spec.model_copy(update={"method": spec.method.model_copy(update=gated)})
    with pytest.raises(StrangerError, match="setting gates of duo-attention names a file of the submitter's"):
        prepare_again(spec, snapkv.job.model)


def test_the_model_is_the_one_of_that_name_here(snapkv):
    spec, model = snapkv.bundle.spec, load_again(snapkv.bundle.spec)
    assert (model.id, model.sha256, model.dtype) == ("mini", spec.model.sha256, spec.model.dtype)
    with pytest.raises(StrangerError, match="model '/etc' is not on this machine"):
        load_again(spec.model_copy(update={"model": spec.model.model_copy(update={"id": "/etc"})}))


def test_a_score_that_holds_under_a_secret_seed_is_l3(snapkv, raised, monkeypatch):
    """And the secret and its seed stay with the verifier."""
    seeds = []
    original = hidden.prepare_again
    monkeypatch.setattr(hidden, "prepare_again", lambda *x: seeds.append(x[2]) or original(*x))
    record = raised(snapkv.files, None, SECRET)
    assert record.level == "L3" and record.hidden is not None
    assert record.hidden.submitted_mean == snapkv.bundle.result.score.mean
    assert 0.01 <= record.hidden.p_value <= 1
    written = record.model_dump_json()
    assert len(seeds) == 1 and seeds[0] != snapkv.bundle.spec.seed
    assert SECRET not in written and str(seeds[0]) not in written


def test_chance_is_the_share_of_dealings_that_are_as_bad():
    """Of the six ways to deal 1, 1, 0, 0 one has both ones first; equal means are as bad in all of them."""
    assert _chance([1, 1], [0, 0]) == pytest.approx(1 / 6)
    assert _chance([1, 0], [1, 0]) == pytest.approx(5 / 6)
    assert _chance([0, 0], [1, 1]) == 1
    assert _chance([1.0] * 40, [0.9] * 40) < 0.001
    assert _chance([1.0] * 40, [1.0] * 39 + [0.0]) > 0.4


def test_a_score_that_does_not_hold_is_refused(forged, raised, monkeypatch):
    """Eight contexts cannot refute much; chance is set to what 40 would give."""
    monkeypatch.setattr(hidden, "_chance", lambda *_: 0.001)
    record = raised(forged, None, SECRET)
    assert (record.level, record.hidden.submitted_mean) == (None, 1.0)
    assert "does not hold on examples that nobody has seen" in record.checks[-1].reason


def test_rerun_on_the_command_line(kvbench, snapkv, tmp_path):
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    done = kvbench("leaderboard", "rerun", folder, "--share", "25%", "--write", "--json")
    assert (done.code, done.json[0]["level"]) == (0, "L1")
    written = json.loads((folder / "verification.json").read_text())
    assert written == {key: value for key, value in done.json[0].items() if key != "path"}
    assert kvbench("leaderboard", "verify", tmp_path).code == 0, "what a verifier wrote is no part of the bundle"


def test_samples_are_drawn_so_that_nobody_can_foresee_them(kvbench, snapkv):
    seeds = {kvbench("leaderboard", "rerun", snapkv.folder, "--json").json[0]["rerun"]["seed"] for _ in range(2)}
    assert len(seeds) == 2


@pytest.mark.parametrize(("options", "reason"), [
    (["--share", "0.1"], "--share 0.1 must be a percentage above 0%"),
    (["--share", "0%"], "--share 0% must be a percentage above 0%"),
    (["--share", "101%"], "--share 101% must be a percentage above 0%"),
    (["--share", "nan%"], "--share nan% must be a percentage above 0%"),
    (["--hidden-seed", "/no/file"], "--hidden-seed /no/file cannot be read"),
    (["--hidden-seed", "env:SHORT"], "--hidden-seed env:SHORT holds fewer than 16 characters"),
])
def test_wrong_requests(kvbench, snapkv, options, reason):
    done = kvbench("leaderboard", "rerun", snapkv.folder, *options)
    assert (done.code, reason in done.err) == (2, True)
