"""The git commit of a run, also in a copy of the checkout without .git."""

from __future__ import annotations

import pytest

from kvbench.runs import environment
from kvbench.runs.results import Git

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def no_git(monkeypatch):
    """A folder without .git."""
    monkeypatch.setattr(environment, "_ask_git", lambda: None)
    environment.find_git.cache_clear()
    yield
    environment.find_git.cache_clear()


def test_a_variable_goes_before_a_stale_git(monkeypatch, no_git):
    """A machine that is lent may keep the .git of an earlier copy."""
    monkeypatch.setattr(environment, "_ask_git", lambda: Git(commit="f" * 40, dirty=True))
    monkeypatch.setenv("KVBENCH_COMMIT", COMMIT)
    assert environment.find_git() == Git(commit=COMMIT, dirty=False)


@pytest.mark.parametrize(("text", "found"), [
    (COMMIT, Git(commit=COMMIT, dirty=False)), (f"{COMMIT}-dirty", Git(commit=COMMIT, dirty=True)), ("main", None),
    ("", None),
])
def test_a_variable_names_the_commit_of_a_copy(monkeypatch, no_git, text, found):
    """A machine that is lent gets the files of a checkout, but no history."""
    monkeypatch.setenv("KVBENCH_COMMIT", text)
    assert environment.find_git() == found
