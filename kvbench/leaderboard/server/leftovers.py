"""Removes the files that a killed server left: unfinished uploads, and folders that were being written or removed.

A bundle without a row in the database is kept: it is complete, and is used when its sender sends it again.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.submission.archive import PART, TRASH


@contextmanager
def occupy(state: State) -> Iterator[None]:
    """Mark the folders as in use, after removing leftovers unless another server uses them already."""
    with state.lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # the unfinished files may be those of another server
            pass
        else:
            _clean(state)
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def _clean(state: State) -> None:
    for upload in state.uploads.iterdir():
        upload.unlink()
    for pattern in (f"{PART}*", f"{TRASH}*"):
        for folder in (*state.bundles.glob(pattern), *state.results.glob(f"*/{pattern}")):
            shutil.rmtree(folder)
