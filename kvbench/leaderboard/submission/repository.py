"""The rows that are there already: whether a run has its baseline among them, and whether it is one of them again."""

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

TELLING = 10
"""Wrong answers that two methods do not have in common by chance."""


@dataclass(frozen=True)
class Row:
    """What the files beside a run's journal say of it."""

    run_id: str
    submitter: str | None
    method: str
    """With its settings and its budget."""
    questions: str
    """Equal where the same was asked in the same way."""
    protocol: str
    """Equal where times compare, too."""
    prompts: str
    """Equal where the examples are the same."""
    full: bool
    """Whether it is the dense cache's."""

    @classmethod
    def of(cls, head: Head) -> Row:
        """The row of this run."""
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
        """For a reason."""
        return f"{self.run_id} of {self.submitter}" if self.submitter else self.run_id


@dataclass(frozen=True)
class Trace:
    """What tells a journal from another one."""

    answers: Mapping[int, str]
    """Hash of each sample's answers: of their token ids, and of the log-probabilities of choices."""
    times: frozenset[str]
    """Hashes of each sample's times: no two runs have one in common."""
    wrong: int
    """Answers that are not entirely right: those that are, are the same under any method that loses nothing."""

    @classmethod
    def of(cls, bundle: Bundle) -> Trace:
        """The trace of this journal."""
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
    """The runs below some folders; a journal is read when a run on the same prompts is to be told from it."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._rows: dict[Path, Row] = {}
        self._traces: dict[Path, Trace] = {}
        for path in (x for folder in folders for x in find_bundles(folder)):
            try:
                self._rows[path] = Row.of(open_head(read_files(path)))
            except RefusedError as error:
                say(f"{path} is not used: {error}.")

    def check_baseline(self, head: Head) -> Check:
        """Whether the dense cache was asked the same; a difference of protocol is no merit of a method."""
        row = Row.of(head)
        if row.full:
            return ok("baseline", "it is the baseline")
        if head.result.diffusion is not None and head.result.diffusion.baselines:
            return ok("baseline", f"in the same job: {', '.join(sorted(head.result.diffusion.baselines))}")
        found = [x for x in self._rows.values() if x.full and x.questions == row.questions]
        if not found:
            return flag("baseline", "no run of the dense cache that was asked the same is known")
        best = max(found, key=lambda x: x.protocol == row.protocol)
        apart = "" if best.protocol == row.protocol else ", on another machine: its times are no baseline"
        return ok("baseline", f"{best}{apart}")

    def check_copies(self, bundle: Bundle) -> Check:
        """Whether it is another run under another name; refused where it has another run's times."""
        row, trace = Row.of(bundle), Trace.of(bundle)
        others = [
            (x, self._read(path)) for path, x in self._rows.items()
            if x.prompts == row.prompts and (x.run_id, x.submitter) != (row.run_id, row.submitter)
        ]
        for x, other in others:
            if other.times & trace.times:
                return refuse("copies", f"its times are those of {x}: a copy of it")
        for x, other in others:
            common = trace.answers.keys() & other.answers.keys()
            if not common or any(trace.answers[i] != other.answers[i] for i in common):
                continue
            if x.method == row.method:
                return ok("copies", f"the answers of {x}, at other times: it repeats that run")
            if min(trace.wrong, other.wrong) >= TELLING:
                return flag("copies", f"its answers, {trace.wrong} wrong ones too, are those of {x}, another method")
        return ok("copies", f"unlike {len(others)} others on the same prompts")

    def _read(self, path: Path) -> Trace:
        if path not in self._traces:
            try:
                self._traces[path] = Trace.of(open_bundle(read_files(path)))
            except RefusedError as error:
                say(f"{path} is not used: {error}.")
                self._traces[path] = Trace({}, frozenset(), 0)
        return self._traces[path]


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
