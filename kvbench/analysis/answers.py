"""The answers of a run, or of two runs to the same questions, for reading."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.analysis.compare import require_one_task
from kvbench.errors import UserError
from kvbench.runs.files import has_journal, read_file, read_lines
from kvbench.runs.journal import Line
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec

BEST = 1.0
"""Score of a right answer."""


@dataclass(frozen=True)
class Asked:
    """One question, and each run's answer to it."""

    sample: str
    index: int
    turn: int
    question: str | None
    """None: a journal of kvbench 0.1, which has no questions."""
    references: tuple[str, ...]
    lines: tuple[Line, ...]
    """One per run, in the order of the runs."""

    @property
    def changed(self) -> bool:
        """Whether the runs gave other answers, or one of them failed."""
        return len({(x.prediction, x.score) for x in self.lines}) > 1

    @property
    def wrong(self) -> bool:
        """Whether one of the answers has less than the full score."""
        return any(x.score is not None and x.score < BEST for x in self.lines)

    @property
    def failed(self) -> bool:
        """Whether one of the samples failed, so that it has no answer."""
        return any(x.error is not None for x in self.lines)

    @property
    def shift(self) -> float:
        """How much the score changes from the first run to the second, in either direction."""
        first, last = self.lines[0].score, self.lines[-1].score
        return 0.0 if first is None or last is None else abs(last - first)


@dataclass(frozen=True)
class CommonQuestions:
    """The questions that all given runs answered."""

    specs: tuple[RunSpec, ...]
    asked: tuple[Asked, ...]
    apart: int
    """Questions that only one of the runs was asked."""
    rising: bool = True
    """Whether higher scores are better, as far as results say."""

    @property
    def graded(self) -> bool:
        """Whether BEST is the score of a right answer; a negative log-likelihood has none."""
        return self.rising and not any(x.score is not None and x.score > BEST for y in self.asked for x in y.lines)


def read_asked(folders: Sequence[Path]) -> CommonQuestions:
    """Read the answers of one or two runs, finished or not; of two runs the changed answers come first.

    Raises:
        UserError: runs of different tasks, no answers, or no common question.
    """
    specs = tuple(read_file(x / "spec.json", RunSpec) for x in folders)
    require_one_task(x.task.name for x in specs)
    found = [
        {(x.index, x.turn, x.prompt_hash): x for x in read_lines(folder / "samples.jsonl")}
        for folder in folders if has_journal(folder / "samples.jsonl")
    ]
    if len(found) < len(folders) or not all(found):
        raise UserError("a run has no answers in its journal. Delete its result.json, if there is one, and run it.")
    common = sorted(set.intersection(*(set(x) for x in found)))
    if not common:
        raise UserError(
            "the runs have no question in common: their prompts differ. `kvbench compare` names the settings in which "
            "they differ."
        )
    asked = [_ask([x[key] for x in found]) for key in common]
    asked.sort(key=lambda x: (not x.changed, -x.shift, x.index, x.turn))
    apart = len(set.union(*(set(x) for x in found))) - len(common)
    return CommonQuestions(specs, tuple(asked), apart, all(map(_is_rising, folders)))


def _is_rising(folder: Path) -> bool:
    """Whether higher scores of a run are better; also if it has no result that says so."""
    with contextlib.suppress(UserError):
        return read_file(folder / "result.json", Result).score.higher_is_better
    return True


def _ask(lines: Sequence[Line]) -> Asked:
    first = lines[0]
    question = next((x.question for x in lines if x.question is not None), None)
    return Asked(first.sample, first.index, first.turn, question, first.references, tuple(lines))


def choose(answers: CommonQuestions, *, wrong: bool, sample: str | None) -> list[Asked]:
    """The questions to show.

    Args:
        answers: of one or two runs.
        wrong: those with a wrong answer only.
        sample: the id of one sample, or its number if no sample has this id; None: all.

    Raises:
        UserError: the metric has no right and wrong answers, or there is no such sample.
    """
    if wrong and not answers.graded:
        raise UserError(
            "the metric of this run has no full score, so answers are not right or wrong. Leave --wrong out."
        )
    named = [x for x in answers.asked if sample is None or sample == x.sample]
    found = named or [x for x in answers.asked if sample == str(x.index)]  # ids of one's own may be numbers, too
    if not found:
        known = {x.index: x.sample for x in answers.asked}
        raise UserError(
            f"there is no sample '{sample}'. Give a number from {min(known)} to {max(known)}, or an id such as "
            f"{known[min(known)]}."
        )
    return [x for x in found if x.wrong or x.failed] if wrong else found
