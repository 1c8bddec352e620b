"""The rows that are there already: whether a run has its baseline among them, and whether it is one of them again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.compare import is_full, name_protocol, name_questions
from kvbench.leaderboard.bundle import Bundle, open_bundle
from kvbench.leaderboard.parcel import find_bundles, read_files
from kvbench.leaderboard.records import Check
from kvbench.leaderboard.verdict import RefusedError, flag, ok
from kvbench.log import say
from kvbench.results import Line
from kvbench.spec import RunSpec

TELLING = 10
"""Wrong answers that two methods do not have in common by chance."""


@dataclass(frozen=True)
class Row:
    """What is remembered of a run."""

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
    wrong: int
    """Answers that are not entirely right: those that are, are the same under any method that loses nothing."""
    answers: Mapping[int, str]
    """Hash of the token ids of each sample's answers."""
    times: frozenset[str]
    """Hashes of each sample's times: no two runs have the same."""

    @classmethod
    def of(cls, bundle: Bundle) -> Row:
        """What is remembered of this one."""
        spec, result = bundle.spec, bundle.result
        best = 1.0 if result.score.higher_is_better else 0.0
        samples: dict[int, list[Line]] = {}
        for line in bundle.lines:
            samples.setdefault(line.index, []).append(line)
        return cls(
            run_id=spec.run_id, submitter=bundle.submitter,
            method=json.dumps([spec.method.model_dump(mode="json"), spec.budget], sort_keys=True),
            questions=name_questions(spec), protocol=name_protocol(result), prompts=_prompts(spec),
            full=is_full(result),
            wrong=sum(x.score != best for x in bundle.lines),
            answers={index: _hash([x.ids for x in lines]) for index, lines in samples.items()},
            times=frozenset(
                _hash([x.times.model_dump() for x in lines if x.times is not None])
                for lines in samples.values() if any(x.times is not None for x in lines)
            ),
        )


class Repository:
    """Rows by what makes them neighbours."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows: list[Row] = []
        for row in rows:
            self.add(row)

    @classmethod
    def read(cls, folders: Sequence[Path]) -> Repository:
        """All bundles below these folders; what is no bundle is said and left out."""
        found = cls()
        for path in (x for folder in folders for x in find_bundles(folder)):
            try:
                found.add(Row.of(open_bundle(read_files(path))))
            except RefusedError as error:
                say(f"{path} is not used: {error}.")
        return found

    def add(self, row: Row) -> None:
        """Remember one more."""
        self._rows.append(row)

    def check_baseline(self, row: Row) -> Check:
        """Whether the dense cache was asked the same; a difference of protocol is no merit of a method."""
        if row.full:
            return ok("baseline", "it is the baseline")
        found = [x for x in self._rows if x.full and x.questions == row.questions]
        if not found:
            return flag("baseline", "no run of the dense cache that was asked the same is known")
        best = max(found, key=lambda x: x.protocol == row.protocol)
        apart = "" if best.protocol == row.protocol else ", on another machine: its times are no baseline"
        return ok("baseline", f"{best.run_id}{apart}")

    def check_copies(self, row: Row) -> Check:
        """Whether it is another run under another name.

        Raises:
            RefusedError: its times are another run's, which no two runs have in common.
        """
        others = [
            x for x in self._rows
            if x.prompts == row.prompts and (x.run_id, x.submitter) != (row.run_id, row.submitter)
        ]
        for x in others:
            if x.times & row.times:
                raise RefusedError("copies", f"its times are those of {_name(x)}: a copy of it")
        for x in others:
            common = row.answers.keys() & x.answers.keys()
            same = all(row.answers[i] == x.answers[i] for i in common)
            if same and x.method != row.method and min(row.wrong, x.wrong) >= TELLING:
                return flag("copies", f"all its answers, {row.wrong} wrong ones too, are {_name(x)}'s: another method")
        return ok("copies", f"unlike {len(others)} others on the same prompts")


def _name(row: Row) -> str:
    return f"{row.run_id} of {row.submitter}" if row.submitter else row.run_id


def _prompts(spec: RunSpec) -> str:
    """All that examples are a function of."""
    return _hash(spec.model_dump(mode="json", include={
        "task": {"name", "version", "settings", "length"}, "split": True, "seed": True, "turns": True,
        "model": {"tokenizer_sha256"},
    }))


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
