"""Compares a submission with the runs already present: is its baseline there, and is it a copy of another run?"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from kvbench.analysis.compare import name_protocol, name_questions
from kvbench.leaderboard.submission.archive import find_bundles, read_files, read_regular
from kvbench.leaderboard.submission.bundle import Bundle, Head, open_bundle, open_head
from kvbench.leaderboard.submission.outcome import RefusedError, flag, ok, refuse
from kvbench.leaderboard.submission.records import VERIFICATION, Check, Verification
from kvbench.leaderboard.submission.strict_json import parse
from kvbench.leaderboard.verification.answers import LOGPROBS
from kvbench.leaderboard.verification.lookup import find_known_task, is_known_full
from kvbench.log import say
from kvbench.runs.journal import Agreement, Times

References = Mapping[tuple[int, int], Sequence[int]]
"""Token ids of the reference answers, by sample and turn."""
Wrong = frozenset[tuple[tuple[int, int], str]]
"""Wrong answers: hashes with their sample and turn."""
MIN_SHARED_ERRORS = 10
"""Fewer common wrong answers prove nothing."""
SHARED_ERRORS = 0.95
"""Share of common wrong answers, without those of the full cache, which methods that lose nothing have in common."""
MIN_TIMES = 8
SPREAD_OF_COPIES, SPREAD_OF_DOUBTS = 0.001, 0.01
"""Spread of the ratios of two runs' times: median deviation from their median. Two curated runs have 0.025 or more."""


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
    unverified: bool = False
    """Whether its verification reached no level, so that its answers and times are evidence of nothing."""

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
    """The parts of a journal that a copy has in common with its original."""

    wrong: Mapping[tuple[int, int], str]
    """Hash of each wrong answer by sample and turn: token ids, and log-probabilities of choices.

    Right answers are the same for every lossless method, so they prove no copy.
    """
    times: frozenset[str]
    """Hash of each sample's times; no two runs share one."""
    clocks: frozenset[str]
    """Hash of each sample's turns with their starts and seconds, which samples without times have, too."""
    answers: Mapping[tuple[int, int], Sequence[int]]
    """The token ids of each generated answer, by sample and turn."""
    speeds: tuple[Mapping[tuple[int, int], float], ...]
    """Logarithms of the seconds per decode step, and of those to the first token, by sample and turn."""

    @classmethod
    def of(cls, bundle: Bundle) -> JournalFingerprint:
        """Compute the fingerprint of a bundle's journal."""
        best = 1.0 if bundle.result.score.higher_is_better else 0.0
        samples: dict[int, list[Times]] = {}
        clocks: dict[int, list[tuple[str, float]]] = {}
        steps, firsts = {}, {}
        for x in bundle.lines:
            clocks.setdefault(x.index, []).append((x.started, x.seconds))
            if x.times is not None:
                samples.setdefault(x.index, []).append(x.times)
                if x.times.steps and x.times.decode_s > 0:
                    steps[x.index, x.turn] = math.log(x.times.decode_s / x.times.steps)
                if x.times.ttft_s > 0:
                    firsts[x.index, x.turn] = math.log(x.times.ttft_s)
        return cls(
            wrong={
                (x.index, x.turn): _hash([x.ids, x.facts.get(LOGPROBS)])
                for x in bundle.lines if x.score is not None and x.score != best
            },
            times=frozenset(_hash([x.model_dump() for x in times]) for times in samples.values()),
            clocks=frozenset(map(_hash, clocks.values())),
            answers={(x.index, x.turn): x.ids for x in bundle.lines if x.stop_reason != "choice"},
            speeds=(steps, firsts),
        )

    def count_shared(self, other: JournalFingerprint, model: Wrong) -> tuple[int, int]:
        """Number of wrong answers that both have, and that the one with fewer of them has. model: not counted."""
        mine, theirs = (x.wrong.items() - model for x in (self, other))
        return len(mine & theirs), min(len(mine), len(theirs))

    def find_spread(self, other: JournalFingerprint) -> float:
        """Smallest spread of the ratios of the two runs' times; infinite if there are too few."""
        spreads = [math.inf]
        for ours, theirs in zip(self.speeds, other.speeds, strict=True):
            ratios = [ours[x] - theirs[x] for x in ours.keys() & theirs.keys()]
            if len(ratios) >= MIN_TIMES:
                middle = median(ratios)
                spreads.append(median(abs(x - middle) for x in ratios))
        return min(spreads)


class Repository:
    """The runs below some folders. Journals are read only for runs on the same prompts."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._runs: dict[Path, RunIdentity] = {}
        self._fingerprints: dict[Path, JournalFingerprint] = {}
        self.add(folders)

    def add(self, folders: Iterable[Path], submitter: str | None = None) -> None:
        """Add the runs below more folders; those without a manifest are of this submitter."""
        for path in (x for folder in folders for x in find_bundles(folder)):
            try:
                found = RunIdentity.of(open_head(read_files(path)))
                self._runs[path] = replace(
                    found, submitter=found.submitter or submitter, unverified=_is_unverified(path)
                )
            except RefusedError as error:
                say(f"{path} is no baseline and no possible original: {error}.")

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

    def check_agreement(self, bundle: Bundle, references: References) -> Check | None:
        """Flag an agreement that contradicts the answers of the full cache on the same machine; None: no contradiction.

        references: the tokens of the reference answers, on which agreement is measured. As long as both answers are the
        reference's, their tokens are the top-1 tokens of both; their first other tokens are, too.
        """
        spec, protocol = bundle.spec, name_protocol(bundle.result)
        path = next(
            (path for path, x in self._runs.items() if x.full and x.protocol == protocol and not x.unverified),
            None,
        )
        if path is None or spec.history != "reference" or find_known_task(spec).nonempty:
            return None
        full = self._read(path).answers
        wrong = [
            place for x in bundle.lines if x.agreement is not None and (place := (x.index, x.turn)) in full
            and not _is_possible(x.agreement, x.ids, full[place], references[place])
        ]
        if not wrong:
            return None
        return flag(
            "agreement", f"{len(wrong)} of its agreements, the first in sample {wrong[0][0]} turn {wrong[0][1]}, "
            f"contradict its answers and those of {self._runs[path]} on the same machine"
        )

    def check_copies(self, bundle: Bundle) -> Check:
        """Refuse a run with the times of another; flag one with its wrong answers, or with times too much like its."""
        identity, fingerprint = RunIdentity.of(bundle), JournalFingerprint.of(bundle)
        others = [
            (x, self._read(path)) for path, x in self._runs.items()
            if x.prompts == identity.prompts and not x.unverified
            and (x.run_id, x.submitter) != (identity.run_id, identity.submitter)
        ]
        model = frozenset(wrong for x, other in others if x.full for wrong in other.wrong.items())
        doubts = []
        for x, other in others:
            spread = fingerprint.find_spread(other)
            if other.times & fingerprint.times or other.clocks & fingerprint.clocks:
                return refuse("copies", f"its times equal those of {x}: it is a copy")
            if spread < SPREAD_OF_DOUBTS:
                alike = f"its times differ from those of {x} by one factor, within {spread:.1g}"
                if spread < SPREAD_OF_COPIES:
                    return refuse("copies", f"{alike}: it is a copy")
                doubts.append(alike)
            shared, fewer = fingerprint.count_shared(other, frozenset() if x.full else model)
            if x.method != identity.method and not identity.full and shared >= max(
                MIN_SHARED_ERRORS, SHARED_ERRORS * fewer
            ):
                doubts.append(
                    f"{shared} of its {len(fingerprint.wrong)} wrong answers equal those of {x}: a method that loses "
                    "nothing gives these, and so does a copy; only a rerun can tell" if x.full else
                    f"{shared} wrong answers that the full cache does not give equal those of {x}, another method, "
                    "budget or setting"
                )
        if doubts:
            return flag("copies", doubts[0])
        return ok("copies", f"differs from {len(others)} other runs on the same prompts")

    def _read(self, path: Path) -> JournalFingerprint:
        if path not in self._fingerprints:
            try:
                self._fingerprints[path] = JournalFingerprint.of(open_bundle(read_files(path)))
            except RefusedError as error:
                say(f"{path} is no baseline and no possible original: {error}.")
                self._fingerprints[path] = JournalFingerprint({}, frozenset(), frozenset(), {}, ({}, {}))
        return self._fingerprints[path]


def _is_possible(found: Agreement, ours: Sequence[int], full: Sequence[int], reference: Sequence[int]) -> bool:
    """Whether two answers can have this top-1 agreement on a reference answer."""
    same = 0
    for one, other, wanted in zip(ours, full, reference, strict=False):
        if one != other:
            return same <= round(found.top1 * found.n) < found.n
        same += 1
        if one != wanted:
            break
    return same <= round(found.top1 * found.n)


def read_record(folder: Path) -> Verification | None:
    """The record of verification next to a run, sealed or not; None: none that can be read."""
    try:
        return parse(read_regular(folder / VERIFICATION), Verification, VERIFICATION)
    except (OSError, RefusedError):
        return None


def _is_unverified(path: Path) -> bool:
    found = read_record(path)
    return found is not None and found.level is None


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
