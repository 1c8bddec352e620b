"""Prompts are regenerated with the chat template of the run, or without one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvbench.hf import load_model
from kvbench.leaderboard.verification import lookup
from kvbench.leaderboard.verification.rerun_job import prepare_rerun

from .conftest import Done, edit_spec, make_run


@pytest.fixture(autouse=True)
def _here(chat_mini, monkeypatch):
    """Let kvbench find the model by its name."""
    monkeypatch.setattr("kvbench.hf.find_copy", lambda *_: chat_mini)


@pytest.fixture(scope="module", params=["own", "none"])
def done(request, tmp_path_factory, chat_mini) -> Done:
    """A run with the tokenizer's template, and one without."""
    return make_run(tmp_path_factory.mktemp("runs"), "full", model=str(chat_mini), template=request.param)


@pytest.mark.few
def test_runs_with_and_without_template_are_verified(done, check):
    found = check(done.files)
    assert (found["prompts"], found["level"], found["refused"]) == ("ok", "L0", "")


@pytest.mark.few
def test_swapping_template_and_none_is_refused(done, check, chat_mini):
    tokenizer, _ = lookup._load(chat_mini)
    sha = done.job.task.frame(tokenizer).sha
    other = None if done.job.spec.task.chat_template_sha else sha
    found = check(edit_spec(done.files, lambda x: x["task"].update(chat_template_sha=other)))
    assert found["refused"].startswith("prompts: sample 0 turn 0: ")


@pytest.mark.few
def test_an_unknown_template_hash_is_refused(done, check):
    found = check(edit_spec(done.files, lambda x: x["task"].update(chat_template_sha="0" * 16)))
    assert found["refused"].startswith("tokenizer: the chat template of ")


@pytest.mark.slow
def test_a_rerun_uses_the_same_template(done, chat_mini):
    model = replace(load_model(str(chat_mini), dtype="bfloat16"), id=done.job.spec.model.id)
    job, differs = prepare_rerun(done.job.spec, model)
    assert (job.spec.run_id, differs) == (json.loads(done.files["result.json"])["run_id"], ())
