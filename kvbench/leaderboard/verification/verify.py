"""Level L0: verifies a bundle without running the method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

from kvbench import __version__
from kvbench.leaderboard.submission.archive import read_files
from kvbench.leaderboard.submission.bundle import Bundle, open_bundle
from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, quote, refuse
from kvbench.leaderboard.submission.records import Check, FreshSeedResult, Level, RerunResult, Verification
from kvbench.leaderboard.submission.seal import is_curated
from kvbench.leaderboard.verification.answers import (
    LOGPROBS,
    check_answers,
    check_denoising,
    check_prompts,
    check_scores,
    check_stop_tokens,
    rescore,
)
from kvbench.leaderboard.verification.code import check_age, check_code
from kvbench.leaderboard.verification.counters import check_counters
from kvbench.leaderboard.verification.declared import check_bytes
from kvbench.leaderboard.verification.journal import check_lines
from kvbench.leaderboard.verification.lookup import (
    UnverifiableError,
    check_card,
    check_method_name,
    check_model,
    check_source,
    find_known_method,
    find_known_task,
    find_known_tokenizer,
    is_task_known,
    is_tuned_on_test,
)
from kvbench.leaderboard.verification.plausibility import check_plausibility
from kvbench.leaderboard.verification.provenance import check_machine
from kvbench.leaderboard.verification.replay import MethodStub, ModelStub, Replay, remake_examples
from kvbench.leaderboard.verification.repository import References, Repository
from kvbench.leaderboard.verification.request import check_spec
from kvbench.leaderboard.verification.result import check_summary
from kvbench.leaderboard.verification.reuse import check_chunks
from kvbench.leaderboard.verification.suite import check_suite
from kvbench.method import BudgetKind, Card, Method
from kvbench.runs.environment import find_git
from kvbench.runs.results import Score

REQUIRED_FOR_L0 = {"prompts", "answers", "scores", "summary"}
"""Checks that must be ok for L0, in addition to no refusal."""


@dataclass
class CheckedBundle:
    """The checks of a bundle so far."""

    checks: list[Check] = field(default_factory=list)
    bundle: Bundle | None = None
    score: Score | None = None
    references: References = field(default_factory=dict)
    rerun: RerunResult | None = None
    hidden: FreshSeedResult | None = None

    @property
    def level(self) -> Level | None:
        """Highest level reached; each includes those below."""
        reached = {x.name for x in self.checks if x.outcome == "ok"}
        if any(x.outcome == "refused" for x in self.checks) or not reached >= REQUIRED_FOR_L0:
            return None
        if self.rerun is None:
            return "L0"
        if self.rerun.share < 1:
            return "L1"
        return "L2" if self.hidden is None else "L3"

    def conclude(self) -> Verification:
        """Build the verification record."""
        bundle, git = self.bundle, find_git()
        return Verification(
            run_id="" if bundle is None else bundle.spec.run_id, content="" if bundle is None else bundle.content,
            submitter=None if bundle is None else bundle.submitter,
            manifest=None if bundle is None else bundle.manifest_sha256, level=self.level, checks=tuple(self.checks),
            score=self.score, rerun=self.rerun, hidden=self.hidden, kvbench=__version__,
            commit=None if git is None else f"{git.commit}{'-dirty' if git.dirty else ''}",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )


def verify(source: Path | Mapping[str, bytes], repository: Repository, *, own: bool = False) -> CheckedBundle:
    """Check a bundle, given by path or files. A refusal ends the checks that depend on it.

    own: it is a run of the user's own, or a curated one, which needs no manifest.
    """
    found = CheckedBundle()
    own = own or (isinstance(source, Path) and is_curated(source))
    try:
        found.bundle = open_bundle(read_files(source) if isinstance(source, Path) else source)
        for check in chain(_check_records(found.bundle, own=own), _check_content(found, found.bundle)):
            found.checks.append(check)
        found.checks += [repository.check_baseline(found.bundle), repository.check_copies(found.bundle)]
        doubt = None if found.level is None else repository.check_agreement(found.bundle, found.references)
        found.checks += [] if doubt is None else [doubt]
    except RefusedError as error:
        found.checks.append(error.check)
    return found


def _check_records(bundle: Bundle, *, own: bool) -> Iterator[Check]:
    """Check manifest, split, status and environment."""
    spec, manifest = bundle.spec, bundle.manifest
    if manifest is None and not own:
        yield refuse("files", "no manifest: pack the run with kvbench submit, or verify your own with --own")
    elif manifest is None:
        yield flag("files", "no manifest: it is not a submission")
    else:
        size = sum(map(len, bundle.files.values()))
        yield ok("files", f"{size:,} bytes match the manifest of {manifest.submitter}")
    tuned = () if manifest is None else manifest.tuned_on
    if spec.split != "test":
        yield refuse("split", f"it ran on split {spec.split}: the leaderboard shows runs on split test only")
    elif any(is_tuned_on_test(x, spec.task.name) for x in tuned):
        yield flag("split", f"its settings were chosen on the test examples of {spec.task.name}")
    elif strange := [x for x in tuned if not is_task_known(x)]:
        yield flag("split", f"its settings were chosen on {quote(strange[0])}, which is no task of kvbench")
    else:
        yield ok("split", f"test{', settings chosen on ' if tuned else ''}{', '.join(tuned)}")
    if bundle.result.status == "failed":
        yield flag("status", f"the run failed: {bundle.result.error}")
    yield check_machine(bundle.result, bundle.lines, manifest, datetime.now(UTC))
    yield check_plausibility(spec, bundle.lines)
    check_lines(spec, bundle.lines)


def _check_content(found: CheckedBundle, bundle: Bundle) -> Iterator[Check]:
    """Check the bundle with the installed method, task and tokenizer."""
    spec, result = bundle.spec, bundle.result
    method: Method | None = None
    since: list[str] = []
    own = False
    check_method_name(spec.method.name)
    if spec.suite is not None:
        yield check_suite(spec)
    source = check_source(bundle)
    if source is not None:
        yield source
    try:
        method, since = find_known_method(spec)
    except UnverifiableError as error:
        yield flag("method", f"{error}: its code was not checked")
    card, check = check_card(result, method)
    yield check
    if since:
        yield flag("method", f"it ran before {spec.method.name} got the settings {', '.join(since)}")
    if method is not None:
        check_counters(type(method), bundle.lines)
    try:
        task = find_known_task(spec)
        tokenizer, frame, folder = find_known_tokenizer(spec, task)
    except UnverifiableError as error:
        yield flag("prompts", f"{error}: its prompts cannot be regenerated, so its scores are not verified")
        return
    if method is not None:
        check_spec(spec)
        check, own = check_code(spec.sources, result.environment.git, type(method), type(task))
        yield check
        aged = check_age(bundle, card, since, own=own)
        if aged is not None:
            yield aged
    size, check = check_model(spec, card, folder)
    yield check
    scorer = next(x for x in task.scorers if x.id == spec.task.scorer)
    random = spec.model.random
    if method is not None and (method.is_exact or random) and any(x.agreement is not None for x in bundle.lines):
        whose = f"{spec.method.name} on random weights" if random else spec.method.name
        raise RefusedError("agreement", f"{whose} is not compared with the full cache, and it has an agreement")
    stub = _describe(card, method)
    stand_in = ModelStub(
        spec.model.id, tokenizer, random, result.environment.device_map, size.max_length, size.vocabulary
    )
    yield from _check_journal(found, bundle, method, Replay(spec, stub, task, scorer, stand_in, frame), folder, own=own)


def _check_journal(
    found: CheckedBundle, bundle: Bundle, method: Method | None, replay: Replay, folder: Path, *, own: bool
) -> Iterator[Check]:
    """Check answers, scores and bytes against examples that are made again, and the result against the journal.

    folder: of the model. own: whether the run states the hashes of the verifier's own code.
    """
    spec = bundle.spec
    made, check = check_prompts(replay, bundle.lines, remake_examples(replay))
    yield check
    found.references = {(i, turn): ids.answer for i, (_, x) in enumerate(made) for turn, ids in enumerate(x.turns)}
    check_stop_tokens(replay, folder)
    check_denoising(spec, bundle.lines, made, method)
    yield check_answers(replay, bundle.lines, made)
    again = rescore(replay, bundle.lines, made, every=own)
    yield check_scores(bundle.lines, again)
    if any(LOGPROBS in x.facts for x in bundle.lines):
        yield flag("logprobs", "its answers depend on log-probabilities in its journal, which only a rerun can check")
    found.score, checks = check_summary(replay, bundle.result, again)
    yield from checks
    check_chunks(again, made)
    yield check_bytes(replay, method, bundle.result, again, made, folder)


def _describe(card: Card, method: Method | None) -> MethodStub:
    """The parts of a method that a summary needs; of an unknown one by its card."""
    if method is None:
        return MethodStub(card, card.budget, card.budget is BudgetKind.NONE)
    return MethodStub(card, method.budget_kind, method.is_exact)
