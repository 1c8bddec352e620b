"""Compares the hashes of the code that a run records with known code: the verifier's own, or a commit that it has."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.outcome import flag, ok, quote
from kvbench.method import Method
from kvbench.registry import HERE
from kvbench.runs.environment import CODE
from kvbench.runs.provenance import find_sources
from kvbench.runs.results import Git
from kvbench.runs.spec import Sources
from kvbench.task import Task

COMMIT = re.compile(r"[0-9a-f]{40}")


def check_code(stated: Sources, git: Git | None, method: type[Method], task: type[Task]) -> Check:
    """Flag a run whose hashes are those of no known code. Nothing of the commit is run.

    It does not refuse: a checkout that converts line ends has other hashes, and an earlier kvbench made them otherwise.
    """
    ours = find_sources(method, task)
    if stated == ours:
        return ok("code", "its source hashes are those of the verifier's own code")
    commit = "none" if git is None else quote(git.commit[:12])
    with _extract(git) as tree:
        if tree is not None and stated == (ours := find_sources(method, task, tree)):
            return ok("code", f"its source hashes are those of commit {commit}")
        whose = "the verifier's" if tree is None else "that commit's"
    wrong = [name for name, value in stated if value != getattr(ours, name)]
    known = "" if tree is not None else ", which the verifier does not have"
    return flag("code", f"unknown code at commit {commit}{known}: its hashes of {', '.join(wrong)} are not {whose}")


@contextmanager
def _extract(git: Git | None) -> Iterator[Path | None]:
    """The Python files of a commit; None: it is not in the history of the verifier's checkout.

    A commit that somebody pushed and no maintainer merged does not count.
    """
    program = shutil.which("git")
    if git is None or program is None or not COMMIT.fullmatch(git.commit):
        yield None
        return
    run = [program, "-C", str(HERE.parent)]
    merged = subprocess.run(  # noqa: S603  # a commit hash and fixed arguments
        [*run, "merge-base", "--is-ancestor", git.commit, "HEAD"], capture_output=True, check=False
    )
    if merged.returncode != 0:
        yield None
        return
    links = [f"kvbench/{x}" for x in CODE[1:]]
    packed = subprocess.run(  # noqa: S603  # as above
        [*run, "archive", git.commit, *links, *(f":(glob){x}/**/*.py" for x in CODE)], capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="tar")
        yield Path(folder)
