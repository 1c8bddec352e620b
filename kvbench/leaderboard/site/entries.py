"""What lies below a folder of results, read as from strangers: runs, and what is none, with the reason."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kvbench.analysis.load import FinishedRun
from kvbench.errors import UserError
from kvbench.leaderboard.submission.archive import JOURNAL, find_bundles, read_files, read_regular
from kvbench.leaderboard.submission.bundle import Head, open_head, split_journal
from kvbench.leaderboard.submission.documents import MOST_NUMBER, check_containers, parse
from kvbench.leaderboard.submission.records import VERIFICATION, Verification
from kvbench.leaderboard.verification.outcome import RefusedError, blaming, show
from kvbench.method import Card
from kvbench.runs.journal import Answer, Line
from kvbench.runs.results import Result

SHOWN = 3
"""Contexts whose answers a run's page shows."""
CLOSE = 1e-6


@dataclass(frozen=True)
class Entry:
    """A run with a page."""

    name: str
    """Of its page: the run's id, and who sent it."""
    place: str
    """Its folder, below the results."""
    run: FinishedRun
    sample: tuple[Line, ...]
    """All turns of the first SHOWN contexts."""
    submitter: str | None
    """None: nobody sent it."""
    tuned_on: tuple[str, ...]
    """What its sender says the settings were chosen on."""
    verification: Verification | None
    """Of these very files; None: there is none."""
    files: Mapping[str, bytes]

    @property
    def result(self) -> Result:
        """What the run came to."""
        return self.run.result

    @property
    def counted(self) -> bool:
        """Whether others are compared with it: of what was sent in, only what was verified."""
        return self.submitter is None or (self.verification is not None and self.verification.level is not None)

    @property
    def flags(self) -> list[str]:
        """What its verifier wants readers to know; that a curated run has no sender is nothing of the kind."""
        checks = () if self.verification is None else self.verification.checks
        return [x.reason for x in checks if x.outcome == "flag" and (self.submitter is not None or x.name != "files")]

    @property
    def trust(self) -> tuple[bool, bool, str, str]:
        """The greater, the more it is to be believed: not sent in, then verified, then new."""
        verified = self.verification is not None and self.verification.level is not None
        return self.submitter is None, verified, self.result.environment.started, self.name


@dataclass(frozen=True)
class Problem:
    """A folder that is no run to be shown."""

    place: str
    reason: str


def read_entries(results: Path) -> tuple[list[Entry], list[Problem]]:
    """All runs below the folder by their place, and what is none: the one never hides the other.

    Raises:
        UserError: there is no such folder.
    """
    if not results.is_dir():
        raise UserError(f"'{results}' is no folder. Give the folder that holds the runs, such as results/.")
    entries: dict[str, Entry] = {}
    problems = []
    for folder in _find(results):
        place = folder.relative_to(results).as_posix().encode(errors="backslashreplace").decode()
        try:
            entry = _read_entry(folder, place)
            if entry.name in entries:
                raise RefusedError("copies", f"the same run as {show(entries[entry.name].place)}")
            entries[entry.name] = entry
        except RefusedError as error:
            problems.append(Problem(place, str(error)))
    return list(entries.values()), problems


def _find(results: Path) -> Iterator[Path]:
    try:
        yield from find_bundles(results)
    except UserError:  # nothing yet: a leaderboard starts empty
        return


def _read_entry(folder: Path, place: str) -> Entry:
    """One run.

    Raises:
        RefusedError: it is none, it was refused when it was verified, or its parts do not agree.
    """
    files = dict(read_files(folder))
    head = open_head(files)
    verification = _read_verification(folder, head)
    parts = split_journal(files)
    answers = {(x.sample, x.turn): x for x in map(_read_answer, parts)}
    if len(answers) < len(parts):
        raise RefusedError("journal", "it has a turn of a sample twice")
    _check_result(head.result, answers)
    first = sorted({x.index for x in answers.values()})[:SHOWN]
    shown = [
        parse(part, Line, JOURNAL) for part, x in zip(parts, answers.values(), strict=True) if x.index in first
    ]
    result = head.result
    if verification is not None and verification.score is not None:
        result = result.model_copy(update={"score": verification.score})  # made again from the answers
    name = head.spec.run_id if head.submitter is None else f"{head.spec.run_id}.{head.submitter}"
    return Entry(
        name, place, FinishedRun(folder, result, answers), tuple(sorted(shown, key=lambda x: (x.index, x.turn))),
        head.submitter, () if head.manifest is None else head.manifest.tuned_on, verification, files,
    )


def _read_verification(folder: Path, head: Head) -> Verification | None:
    path = folder / VERIFICATION
    if not os.path.lexists(path):
        return None
    found = parse(read_regular(path), Verification, VERIFICATION)
    if found.refused:
        refused = next(x for x in found.checks if x.outcome == "refused")
        raise RefusedError(refused.name, f"refused when it was verified: {refused.reason}")
    return found if found.content == head.content else None


def _read_answer(part: bytes) -> Answer:
    check_containers(part, JOURNAL)
    try:
        found = Answer.model_validate_json(part)
    except ValidationError as error:
        raise RefusedError("journal", f"a line is none: {error.errors(include_url=False)[0]['msg']}") from error
    if found.score is not None and abs(found.score) > MOST_NUMBER:
        raise RefusedError("journal", f"score {found.score:g} is too large")
    return found


def _check_result(result: Result, answers: Mapping[tuple[str, int], Answer]) -> None:
    """Refuse what a page would have to be wrong about.

    A rank is of the answers, and the score beside it is of the result: they must not be two things.
    """
    with blaming("method", "its card"):
        Card.model_validate(result.method.card)
    scores = [x.score for x in answers.values() if x.score is not None]
    said = result.score.mean
    if said is not None and not (scores and math.isclose(said, math.fsum(scores) / len(scores), abs_tol=CLOSE)):
        raise RefusedError("scores", f"its mean is {said}, which is not that of its {len(scores)} scored answers")
    if result.memory is not None:
        amounts = result.memory.model_dump()
        least = min(amounts, key=lambda name: float(amounts[name]))
        if amounts[least] < 0 or not amounts["full_bytes"]:
            raise RefusedError("bytes", f"a dense cache of {amounts['full_bytes']} bytes, {least} {amounts[least]:g}")
