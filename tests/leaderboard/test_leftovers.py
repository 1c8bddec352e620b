"""A server that starts removes the unfinished files of a killed one, and leaves those of a running one."""

from __future__ import annotations

import pytest

from kvbench.leaderboard.server.leftovers import occupy
from kvbench.leaderboard.server.publisher import _remove
from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.submission import archive
from kvbench.leaderboard.submission.archive import write_folder


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The folders after a kill: an upload, a bundle and a published run being written, a run being removed."""
    state = State(tmp_path / "state", tmp_path / "results")
    state.make()
    (state.uploads / "abc.tar").write_bytes(b"x")
    write_folder({"spec.json": b"{}"}, state.bundle("complete"))
    write_folder({"spec.json": b"{}"}, state.results / "ada" / "published")
    write_folder({"spec.json": b"{}"}, state.results / "ada" / "gone")
    with monkeypatch.context() as patch:
        patch.setattr(archive.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(archive, "_sync", lambda _: 1 / 0)
        for folder in (state.bundle("half"), state.results / "ada" / "half"):
            with pytest.raises(ZeroDivisionError):
                write_folder({"spec.json": b"{}"}, folder)
        _remove(state.results / "ada" / "gone")
    assert [x[:6] for x in list_names(state) if x.startswith(".")] == [".gone-", ".part-", ".part-"]
    return state


def list_names(state):
    """Names of everything below the folders, but for the lock."""
    found = (x.name for root in (state.folder, state.results) for x in root.rglob("*"))
    return sorted(x for x in found if x != state.lock.name)


def test_leftovers_of_a_kill_are_removed(state):
    with occupy(state):
        assert list_names(state) == sorted([
            "uploads", "bundles", "complete", "spec.json", "ada", "published", "spec.json",
        ])


def test_files_of_a_running_server_are_kept(state):
    with occupy(state):
        (state.uploads / "new.tar").write_bytes(b"x")
        with occupy(state):
            assert (state.uploads / "new.tar").exists()
    with occupy(state):
        assert not (state.uploads / "new.tar").exists()
