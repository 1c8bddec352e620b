"""Compares a submission with the runs already present: is its baseline there, and is it a copy of another run?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbench.analysis.compare import name_protocol, name_questions
from kvbench.leaderboard.submission.archive import find_bundles, read_files
from kvbench.leaderboard.submission.bundle import Bundle, Head, open_bundle, open_head
from kvbench.leaderboard.submission.records import Check
from kvbench.leaderboard.verification.answers import LOGPROBS
from kvbench.leaderboard.verification.lookup import is_known_full
from kvbench.leaderboard.verification.outcome import RefusedError, flag, ok, refuse
from kvbench.log import say
from kvbench.runs.journal import Line

MIN_SHARED_ERRORS = 10
"""Wrong answers in common that two different methods do not reach by chance."""


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run, read without its journal."""

    run_id: str
    submitter: str | None
    method: str
    """With settings and budget."""
    questions: str
    """Equal for runs that were asked the same questions in the same way."""
    protocol: str
    """Equal for runs whose times are comparable, too."""
    prompts: str
    """Equal for runs on the same examples."""
    full: bool
    """Whether it is a run of the full cache."""

    @classmethod
    def of(cls, head: Head) -> RunIdentity:
        """Read the identity of a run."""
        spec = head.spec
        prompts = spec.model_dump(mode="json", include={
            "task": {"name", "version", "settings", "length"}, "split": True, "seed": True, "turns": True,
            "model": {"tokenizer_sha256"},
        })
        return cls(
            run_id=spec.run_id, submitter=head.submitter,
            method=json.dumps([spec.method.model_dump(mode="json"), spec.budget], sort_keys=True),
            questions=name_questions(spec), protocol=name_protocol(head.result),
            prompts=json.dumps(prompts, sort_keys=True), full=is_known_full(head.result),
        )

    def __str__(self) -> str:
        """Run id and submitter, for the reason of a check."""
        return f"{self.run_id} by {self.submitter}" if self.submitter else self.run_id


@dataclass(frozen=True)
class JournalFingerprint:
    """Hashes that identify a journal."""

    answers: Mapping[int, str]
    """Hash of each sample's answers: token ids, and log-probabilities of choices."""
    times: frozenset[str]
    """Hash of each sample's times; no two runs share one."""
    wrong: int
    """Number of wrong answers. Right answers are the same for every lossless method, so they prove no copy."""

    @classmethod
    def of(cls, bundle: Bundle) -> JournalFingerprint:
        """Compute the fingerprint of a bundle's journal."""
        best = 1.0 if bundle.result.score.higher_is_better else 0.0
        samples: dict[int, list[Line]] = {}
        for line in bundle.lines:
            samples.setdefault(line.index, []).append(line)
        times = [[x.times.model_dump() for x in lines if x.times is not None] for lines in samples.values()]
        return cls(
            answers={i: _hash([(x.ids, x.facts.get(LOGPROBS)) for x in lines]) for i, lines in samples.items()},
            times=frozenset(_hash(x) for x in times if x), wrong=sum(x.score != best for x in bundle.lines),
        )


class Repository:
    """The runs below some folders. Journals are read only for runs on the same prompts."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._runs: dict[Path, RunIdentity] = {}
        self._fingerprints: dict[Path, JournalFingerprint] = {}
        for path in (x for folder in folders for x in find_bundles(folder)):
            try:
                self._runs[path] = RunIdentity.of(open_head(read_files(path)))
            except RefusedError as error:
                say(f"{path} is ignored: {error}.")

    def check_baseline(self, head: Head) -> Check:
        """Flag a run if no full-cache run of the same protocol is known."""
        identity = RunIdentity.of(head)
        if identity.full:
            return ok("baseline", "it is a run of the full cache")
        if head.result.diffusion is not None and head.result.diffusion.baselines:
            return ok("baseline", f"baselines in the same job: {', '.join(sorted(head.result.diffusion.baselines))}")
        found = [x for x in self._runs.values() if x.full and x.questions == identity.questions]
        if not found:
            return flag("baseline", "no run of the full cache under this protocol is known")
        best = max(found, key=lambda x: x.protocol == identity.protocol)
        apart = "" if best.protocol == identity.protocol else ", on another machine, so times are not comparable"
        return ok("baseline", f"{best}{apart}")

    def check_copies(self, bundle: Bundle) -> Check:
        """Refuse a run with the times of another; flag one that repeats another method's wrong answers."""
        identity, fingerprint = RunIdentity.of(bundle), JournalFingerprint.of(bundle)
        others = [
            (x, self._read(path)) for path, x in self._runs.items()
            if x.prompts == identity.prompts and (x.run_id, x.submitter) != (identity.run_id, identity.submitter)
        ]
        for x, other in others:
            if other.times & fingerprint.times:
                return refuse("copies", f"its times equal those of {x}: it is a copy")
        for x, other in others:
            common = fingerprint.answers.keys() & other.answers.keys()
            if not common or any(fingerprint.answers[i] != other.answers[i] for i in common):
                continue
            if x.method == identity.method:
                return ok("copies", f"its answers equal those of {x}, its times do not: it repeats that run")
            if min(fingerprint.wrong, other.wrong) >= MIN_SHARED_ERRORS:
                return flag(
                    "copies", f"its answers, {fingerprint.wrong} of them wrong, equal those of {x}, another method"
                )
        return ok("copies", f"differs from {len(others)} other runs on the same prompts")

    def _read(self, path: Path) -> JournalFingerprint:
        if path not in self._fingerprints:
            try:
                self._fingerprints[path] = JournalFingerprint.of(open_bundle(read_files(path)))
            except RefusedError as error:
                say(f"{path} is ignored: {error}.")
                self._fingerprints[path] = JournalFingerprint({}, frozenset(), 0)
        return self._fingerprints[path]


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
