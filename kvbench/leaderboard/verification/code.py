"""Compares the hashes of the code that a run records with known code: the verifier's own, or a commit that it has."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvbench import __version__
from kvbench.leaderboard.submission.bundle import Bundle
from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, quote
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.journal import list_absent
from kvbench.leaderboard.verification.provenance import COMMIT
from kvbench.method import Card, Method
from kvbench.registry import HERE
from kvbench.runs.environment import CODE
from kvbench.runs.provenance import find_sources
from kvbench.runs.results import Git
from kvbench.runs.spec import Sources
from kvbench.task import Task


def check_code(stated: Sources, git: Git | None, method: type[Method], task: type[Task]) -> tuple[Check, bool]:
    """Flag a run whose hashes are those of no known code; also whether they are the verifier's own.

    Nothing of the commit is run. It does not refuse: a checkout that converts line ends has other hashes, and an
    earlier kvbench made them otherwise.
    """
    ours = find_sources(method, task)
    if stated == ours:
        return ok("code", "its source hashes are those of the verifier's own code"), True
    commit = "none" if git is None else quote(git.commit[:12])
    with _extract(git) as tree:
        if tree is not None and stated == (ours := find_sources(method, task, tree)):
            return ok("code", f"its source hashes are those of commit {commit}"), False
        whose = "the verifier's" if tree is None else "that commit's"
    wrong = [name for name, value in stated if value != getattr(ours, name)]
    known = "" if tree is not None else ", which the verifier does not have"
    reason = f"unknown code at commit {commit}{known}: its hashes of {', '.join(wrong)} are not {whose}"
    return flag("code", reason), False


def check_age(bundle: Bundle, card: Card, since: Sequence[str], *, own: bool) -> Check | None:
    """Flag a journal without the fields that later code writes; None: it has them.

    card: the registered method's. since: settings that it has and the run does not state. own: whether the run states
    the hashes of the verifier's own code.

    Raises:
        RefusedError: it does, and that code writes otherwise.
    """
    absent = list_absent(bundle.spec, bundle.lines)
    if own:
        for reason in _list_earlier(bundle, card, since, absent):
            raise RefusedError("code", f"its source hashes are those of the verifier's own code, and {reason}")
    return flag("fields", f"no line has {', '.join(absent)}, as in early journals") if absent else None


def _list_earlier(bundle: Bundle, card: Card, since: Sequence[str], absent: Sequence[str]) -> Iterator[str]:
    """Facts that only code other than the verifier's writes."""
    stated, version = Card.model_validate(bundle.result.method.card), bundle.spec.versions.kvbench
    if version != __version__:
        yield f"its kvbench is {quote(version)}, not {__version__}"
    yield from (f"its method has no setting {name}" for name in since)
    yield from (f"its card differs in {name}" for name, value in card if value != getattr(stated, name))
    yield from (f"no line has {name}" for name in absent)


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
        files.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.3 and earlier have no filters
        files.extractall(folder)  # noqa: S202  # git packed it
        yield Path(folder)
