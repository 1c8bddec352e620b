"""What can be said of a bundle without running it again: level L0, or why not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from kvbench import __version__
from kvbench.leaderboard.submission.archive import read_files
from kvbench.leaderboard.submission.bundle import Bundle, open_bundle
from kvbench.leaderboard.submission.records import Check, HiddenSeed, Level, Rerun, Verification
from kvbench.leaderboard.submission.repository import Repository
from kvbench.leaderboard.verification.account import check_bytes, check_machine, check_summary
from kvbench.leaderboard.verification.answers import LOGPROBS, check_answers, check_prompts, check_scores, score_again
from kvbench.leaderboard.verification.lookup import (
    StrangerError,
    check_card,
    check_model,
    find_known_method,
    find_known_task,
    find_known_tokenizer,
    is_own_split,
)
from kvbench.leaderboard.verification.outcome import RefusedError, flag, ok, refuse
from kvbench.leaderboard.verification.rebuilt import Account, Outline, Replay, make_again
from kvbench.machine import find_git
from kvbench.method import Method
from kvbench.runs.results import Score

BASIS = {"prompts", "answers", "scores", "summary"}
"""What L0 rests on, beside that nothing was refused."""


@dataclass
class Findings:
    """What is known of a bundle so far."""

    checks: list[Check] = field(default_factory=list)
    bundle: Bundle | None = None
    score: Score | None = None
    rerun: Rerun | None = None
    hidden: HiddenSeed | None = None

    @property
    def level(self) -> Level | None:
        """The highest that was reached."""
        reached = {x.name for x in self.checks if x.outcome == "ok"}
        if any(x.outcome == "refused" for x in self.checks) or not reached >= BASIS:
            return None
        if self.hidden is not None:
            return "L3"
        if self.rerun is not None:
            return "L2" if self.rerun.share == 1 else "L1"
        return "L0"

    def conclude(self) -> Verification:
        """The record."""
        bundle, git = self.bundle, find_git()
        return Verification(
            run_id="" if bundle is None else bundle.spec.run_id, content="" if bundle is None else bundle.content,
            submitter=None if bundle is None else bundle.submitter, level=self.level, checks=tuple(self.checks),
            score=self.score, rerun=self.rerun, hidden=self.hidden, kvbench=__version__,
            commit=None if git is None else f"{git.commit}{'-dirty' if git.dirty else ''}",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def verify(source: Path | Mapping[str, bytes], repository: Repository) -> Findings:
    """Look at a bundle, by its place or its files, as far as what it is refused for lets one look."""
    found = Findings()
    try:
        found.bundle = open_bundle(read_files(source) if isinstance(source, Path) else source)
        for check in chain(_look_at_claims(found.bundle), _look_at_answers(found, found.bundle)):
            found.checks.append(check)
        found.checks += [repository.check_baseline(found.bundle), repository.check_copies(found.bundle)]
    except RefusedError as error:
        found.checks.append(error.verdict)
    return found


def _look_at_claims(bundle: Bundle) -> Iterator[Check]:
    """What stands in its files about itself."""
    spec, manifest = bundle.spec, bundle.manifest
    if manifest is None:
        yield flag("files", "no manifest: nobody submitted it")
    else:
        size = sum(map(len, bundle.files.values()))
        yield ok("files", f"{size:,} bytes, as the manifest of {manifest.submitter} has them")
    tuned = () if manifest is None else manifest.tuned_on
    if spec.split != "test":
        yield refuse("split", f"it ran on split {spec.split}: settings are chosen there, rows are of split test")
    elif any(is_own_split(x, spec.task.name) for x in tuned):
        yield flag("split", f"its settings were chosen on {spec.task.name}, on the very examples of the row")
    else:
        yield ok("split", f"test{', settings chosen on ' if tuned else ''}{', '.join(tuned)}")
    if bundle.result.status == "failed":
        yield flag("status", f"the run failed: {bundle.result.error}")
    yield check_machine(bundle.result, datetime.now(UTC))


def _look_at_answers(found: Findings, bundle: Bundle) -> Iterator[Check]:
    """Its answers, scores and bytes, by the method, the task and the tokenizer that are here."""
    spec, result = bundle.spec, bundle.result
    method: Method | None = None
    since: list[str] = []
    try:
        method, since = find_known_method(spec)
    except StrangerError as error:
        yield flag("method", f"{error}: nothing is said of its code")
    card, check = check_card(result, method)
    yield check
    if since:
        yield flag("method", f"it ran before {spec.method.name} had {', '.join(since)}")
    try:
        task = find_known_task(spec)
        tokenizer, frame, folder = find_known_tokenizer(spec, task)
    except StrangerError as error:
        yield flag("prompts", f"{error}: its prompts cannot be made again, and so its scores are not verified")
        return
    yield check_model(spec, card, folder)
    scorer = next(x for x in task.scorers if x.id == spec.task.scorer)
    random = spec.model.id.startswith("random:")
    replay = Replay(
        spec, Account(card), task, scorer, Outline(tokenizer, random, result.environment.device_map), frame
    )
    made, check = check_prompts(replay, bundle.lines, make_again(replay))
    yield check
    yield check_answers(replay, bundle.lines, made)
    again = score_again(replay, bundle.lines, made)
    yield check_scores(bundle.lines, again)
    if any(LOGPROBS in x.facts for x in bundle.lines):
        yield flag("logprobs", "its answers rest on the log-probabilities in its journal, which only a rerun can tell")
    found.score, checks = check_summary(replay, result, again)
    yield from checks
    yield check_bytes(replay, method, result, again, folder)
