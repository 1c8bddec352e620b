"""Reads the runs below a results folder as untrusted input. Invalid folders are listed with a reason."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from kvbench.analysis.load import FinishedRun, renew_interval
from kvbench.analysis.shares import fill_full_reads
from kvbench.errors import UserError
from kvbench.leaderboard.submission.archive import JOURNAL, find_bundles, read_files, read_regular
from kvbench.leaderboard.submission.bundle import Head, open_head, split_journal
from kvbench.leaderboard.submission.outcome import RefusedError, quote, refusing_errors
from kvbench.leaderboard.submission.records import VERIFICATION, RerunResult, Verification
from kvbench.leaderboard.submission.seal import is_believed
from kvbench.leaderboard.submission.strict_json import MAX_NUMBER, check_containers, parse
from kvbench.leaderboard.verification.lookup import check_method_name
from kvbench.method import Card
from kvbench.report.grid import PLACE
from kvbench.runs.journal import Answer, Line
from kvbench.runs.results import Result

CONTEXTS_SHOWN = 3
"""Contexts of each kind whose answers a run's page shows."""
TOLERANCE = 1e-6
RECORD_CHECKS = ("files", "kernels", "facts", "fields")
"""Checks of how a run is recorded, on which neither its score nor its bytes depend."""


@dataclass(frozen=True)
class ListedRun:
    """A run that has a page."""

    name: str
    """Name of its page: run id and submitter."""
    place: str
    """Its folder, relative to the results."""
    run: FinishedRun
    sample: tuple[Line, ...]
    """All turns of the CONTEXTS_SHOWN contexts with the worst scores, and of as many first ones."""
    submitter: str | None
    """None: not a submission."""
    tuned_on: tuple[str, ...]
    """Data on which the settings were chosen, as the submitter states."""
    links: Sequence[tuple[str, str]]
    """The submitter's links, each with the word to show."""
    verification: Verification | None
    """None if there is none of this verifier for these exact files."""
    files: Mapping[str, bytes]

    @property
    def result(self) -> Result:
        """The run's result."""
        return self.run.result

    @property
    def counted(self) -> bool:
        """Whether it is ranked and compared.

        Its answers and bytes are verified, its method is registered, and its model does not have other weights than
        the verifier's of that name.
        """
        if self.verification is None or self.verification.level is None:
            return False
        checks = self.verification.checks
        passed = {x.name for x in checks if x.outcome == "ok"} >= {"method", "bytes"}
        return passed and all(x.name != "weights" for x in checks)

    @property
    def flags(self) -> list[str]:
        """Reasons of the flagged checks that concern the score or the bytes; the run's page has all checks."""
        checks = () if self.verification is None else self.verification.checks
        return [x.reason for x in checks if x.outcome == "flag" and x.name not in RECORD_CHECKS]

    @property
    def level(self) -> str:
        """The level of its verification, of which a higher one sorts later; empty: none."""
        return "" if self.verification is None else self.verification.level or ""

    @property
    def priority(self) -> tuple[bool, bool, str, str, str]:
        """Sort key, most trusted last: verified runs, then curated ones, then higher levels, then newer ones."""
        return self.counted, self.submitter is None, self.level, self.result.environment.started, self.name


@dataclass(frozen=True)
class Problem:
    """A folder that is not shown, with the reason."""

    place: str
    reason: str


def read_listed(results: Path) -> tuple[list[ListedRun], list[Problem]]:
    """Read all runs below a folder, of copies the most trusted, and list the folders that are not valid runs.

    Raises:
        UserError: there is no such folder.
    """
    if not results.is_dir():
        raise UserError(f"'{results}' is not a folder. Give the folder that holds the runs, such as results/.")
    runs: dict[str, ListedRun] = {}
    problems = []
    for folder in find_bundles(results):
        place = folder.relative_to(results).as_posix().encode(errors="backslashreplace").decode()
        try:
            run = _read_run(folder, place)
            worse, best = sorted((run, runs.get(run.name, run)), key=lambda x: x.priority)  # of equal ones, the first
            runs[run.name] = best
            if worse is not best:
                problems.append(Problem(worse.place, f"the same run as {quote(best.place)}"))
        except RefusedError as error:
            problems.append(Problem(place, str(error)))
    trusted = sorted((x for x in runs.values() if x.counted), key=lambda x: x.priority, reverse=True)
    filled = fill_full_reads([x.run for x in runs.values()], [x.run for x in trusted])
    problems.sort(key=lambda x: x.place)
    return [replace(x, run=run) for x, run in zip(runs.values(), filled, strict=True)], problems


def _read_run(folder: Path, place: str) -> ListedRun:
    """Read one run.

    Raises:
        RefusedError: the run is invalid, inconsistent, or was refused by its verification.
    """
    files = dict(read_files(folder))
    head = open_head(files)
    verification = _read_verification(folder, head)
    parts = split_journal(files)
    answers = {(x.sample, x.turn): x for x in map(_read_answer, parts)}
    if len(answers) < len(parts):
        raise RefusedError("journal", "a turn of a sample occurs twice")
    _check_result(head.result, answers)
    chosen = _choose_contexts(answers.values(), head.result)
    shown = [
        parse(part, Line, JOURNAL) for part, x in zip(parts, answers.values(), strict=True) if x.index in chosen
    ]
    result = head.result
    if verification is not None and verification.score is not None:
        result = result.model_copy(update={"score": verification.score})  # recomputed by the verifier
    if verification is not None and verification.rerun is not None:
        answers = _replace_scores(answers, verification.rerun)
    result = renew_interval(result, answers.values())
    name = head.spec.run_id if head.submitter is None else f"{head.spec.run_id}.{head.submitter}"
    return ListedRun(
        name, place, FinishedRun(folder, result, answers),
        tuple(sorted(shown, key=lambda x: (chosen.index(x.index), x.turn))), head.submitter,
        () if head.manifest is None else head.manifest.tuned_on, () if head.manifest is None else head.manifest.links,
        verification, files,
    )


def _choose_contexts(answers: Collection[Answer], result: Result) -> list[int]:
    """The contexts with the worst scores, and the first ones; worst first."""
    scores: dict[int, list[float]] = {x: [] for x in sorted({answer.index for answer in answers})}
    for answer in answers:
        scores[answer.index] += [] if answer.score is None else [answer.score]
    sign = 1 if result.score.higher_is_better else -1
    worst = sorted(scores, key=lambda x: sign * math.fsum(scores[x]) / max(1, len(scores[x])))[:CONTEXTS_SHOWN]
    return list(dict.fromkeys([*worst, *list(scores)[:CONTEXTS_SHOWN]]))


def _read_verification(folder: Path, head: Head) -> Verification | None:
    path = folder / VERIFICATION
    if not os.path.lexists(path):
        return None
    found = parse(read_regular(path), Verification, VERIFICATION)
    if not is_believed(found, folder):
        return None  # the sender of the folder may have written it
    if (found.content, found.manifest) != (head.content, head.manifest_sha256):
        return None  # of other files, such as those before a correction
    if found.refused:
        refused = next(x for x in found.checks if x.outcome == "refused")
        raise RefusedError(refused.name, f"refused by its verification: {refused.reason}")
    return found


def _replace_scores(answers: dict[tuple[str, int], Answer], rerun: RerunResult) -> dict[tuple[str, int], Answer]:
    """The answers with the scores of the rerun, from which ranks and comparisons follow."""
    other = {(x.index, x.turn): x.score for x in rerun.other_scores}
    return {
        key: x.model_copy(update={"score": other[x.index, x.turn]}) if (x.index, x.turn) in other else x
        for key, x in answers.items()
    }


def _read_answer(part: bytes) -> Answer:
    check_containers(part, JOURNAL)
    try:
        found = Answer.model_validate_json(part)
    except ValidationError as error:
        raise RefusedError("journal", f"a line is invalid: {error.errors(include_url=False)[0]['msg']}") from error
    if "schema_version" not in found.model_fields_set:
        raise RefusedError("journal", "a line is invalid: no schema_version")
    if found.score is not None and abs(found.score) > MAX_NUMBER:
        raise RefusedError("journal", f"score {found.score:g} is too large")
    kept = {x: y for x, y in found.facts.items() if x in PLACE and isinstance(y, int | float)}
    return found.model_copy(update={"facts": kept})  # the others may be large, and no page of all runs shows them


def _check_result(result: Result, answers: Mapping[tuple[str, int], Answer]) -> None:
    """Refuse a result that a page could not show correctly.

    Ranks come from the answers and the shown score from the result, so the two must agree.
    """
    check_method_name(result.method.name)
    with refusing_errors("method", "its card"):
        Card.model_validate(result.method.card)
    scores = [x.score for x in answers.values() if x.score is not None]
    stated = result.score.mean
    if stated is not None and not (scores and math.isclose(stated, math.fsum(scores) / len(scores), abs_tol=TOLERANCE)):
        raise RefusedError("scores", f"its mean is {stated}, which is not the mean of its {len(scores)} scored answers")
    if result.memory is not None:
        amounts = result.memory.model_dump(exclude_none=True)
        least = min(amounts, key=lambda name: float(amounts[name]))
        if amounts[least] < 0 or not amounts["full_bytes"]:
            raise RefusedError("bytes", f"a full cache of {amounts['full_bytes']} bytes, {least} {amounts[least]:g}")
