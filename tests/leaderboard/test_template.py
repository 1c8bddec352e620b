"""Prompts are made again as the run had them, in the chat template of its tokenizer or without."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvbench.hf import load_model
from kvbench.leaderboard.verification import lookup as known
from kvbench.leaderboard.verification.runnable import prepare_again

from .conftest import Done, edit_spec, make_run


@pytest.fixture(autouse=True)
def _here(chat_mini, monkeypatch):
    """The model is one that kvbench would find by its name."""
    monkeypatch.setattr("kvbench.hf.find_copy", lambda *_: chat_mini)


@pytest.fixture(scope="module", params=["own", "none"])
def done(request, tmp_path_factory, chat_mini) -> Done:
    """A run of either kind."""
    return make_run(tmp_path_factory.mktemp("runs"), "full", model=str(chat_mini), template=request.param)


def test_either_is_verified(done, check):
    found = check(done.files)
    assert (found["prompts"], found["level"], found["refused"]) == ("ok", "L0", "")


def test_either_in_the_name_of_the_other_is_refused(done, check, chat_mini):
    tokenizer, _ = known._load(chat_mini)
    sha = done.job.task.frame(tokenizer).sha
    other = None if done.job.spec.task.chat_template_sha else sha
    found = check(edit_spec(done.files, lambda x: x["task"].update(chat_template_sha=other)))
    assert found["refused"].startswith("prompts: sample 0 turn 0: ")


def test_another_template_is_refused(done, check):
    found = check(edit_spec(done.files, lambda x: x["task"].update(chat_template_sha="0" * 16)))
    assert found["refused"].startswith("tokenizer: the chat template of ")


def test_either_runs_again_as_itself(done, chat_mini):
    model = replace(load_model(str(chat_mini), dtype="bfloat16"), id=done.job.spec.model.id)
    job, differs = prepare_again(done.job.spec, model)
    assert (job.spec.run_id, differs) == (json.loads(done.files["result.json"])["run_id"], ())
