"""Pairs of questions for semantic caches: made from the wordings of paraphrases.toml, or read from a file."""

from __future__ import annotations

import csv
import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError

MADE = Path(__file__).with_name("paraphrases.toml")
REQUIRED = ("question1", "question2", "is_duplicate")
OPTIONAL = ("category", "context1", "context2")
LABELS = {"0": False, "1": True}
LONGEST_FIELD = 1 << 20
Question = tuple[str, str]
"""A text and the conversation before it."""


@dataclass(frozen=True)
class Pair:
    """A cached question, one that is asked later, and whether one answer serves both."""

    cached: str
    asked: str
    same: bool
    category: str = ""
    cached_context: str = ""
    """The conversation before the question, as one text."""
    asked_context: str = ""

    @property
    def cached_question(self) -> Question:
        """The cached question with its conversation."""
        return self.cached, self.cached_context

    @property
    def asked_question(self) -> Question:
        """The question asked with its conversation."""
        return self.asked, self.asked_context


def make_pairs(seed: int) -> list[Pair]:
    """Paraphrases, and questions of equal wording about other subjects or after another conversation. Deterministic."""
    draw = random.Random(seed)
    with MADE.open("rb") as file:
        intents = tomllib.load(file)["intent"]
    return [pair for intent in intents for pair in _make_intent(intent, draw)]


def _make_intent(intent: dict[str, str | list[str]], draw: random.Random) -> Iterator[Pair]:
    """For each subject: every other wording of it, as often the same wording of another subject."""
    wordings, subjects = list(intent["wordings"]), list(intent["subjects"])
    contexts = list(intent.get("contexts", [""]))
    category = str(intent["category"])
    for subject in subjects:
        for wording in wordings[1:]:
            other = draw.choice([x for x in subjects if x != subject])
            for found in (subject, other):
                asked = wording if found == subject else wordings[0]
                yield Pair(
                    wordings[0].replace("{x}", subject), asked.replace("{x}", found), found == subject, category,
                    contexts[0].replace("{x}", subject), contexts[-1].replace("{x}", found),
                )


def read_pairs(path: Path) -> list[Pair]:
    """Pairs of a CSV or TSV file with the columns of Quora Question Pairs: question1, question2, is_duplicate.

    The columns category, context1 and context2 are optional.

    Raises:
        UserError: the file cannot be read, or a line is invalid, with its number and field.
    """
    usual = csv.field_size_limit(LONGEST_FIELD)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            head = file.readline()
            file.seek(0)
            rows = csv.DictReader(file, delimiter="\t" if "\t" in head else ",")
            if missing := [x for x in REQUIRED if x not in (rows.fieldnames or ())]:
                raise UserError(f"{path} has no column {', '.join(missing)}. Required: {', '.join(REQUIRED)}.")
            pairs = [_read_row(path, rows.line_num, row) for row in rows]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Give the path of a CSV or TSV file.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV or TSV file in UTF-8: {error}.") from error
    finally:
        csv.field_size_limit(usual)  # it is one for all readers of the process
    if len({x.same for x in pairs}) < 2:
        raise UserError(f"{path} has {len(pairs)} pairs of one label. Pairs of both labels, 0 and 1, are needed.")
    return pairs


def _read_row(path: Path, line: int, row: dict[str, str | None]) -> Pair:
    for name in REQUIRED:
        if not (row[name] or "").strip():
            raise UserError(f"{path}:{line}: {name} is empty.")
    label = (row["is_duplicate"] or "").strip()
    if label not in LABELS:
        raise UserError(f"{path}:{line}: is_duplicate '{label[:40]}' must be 0 or 1.")
    category, cached_context, asked_context = (row.get(x) or "" for x in OPTIONAL)
    return Pair(
        row["question1"] or "", row["question2"] or "", LABELS[label], category, cached_context, asked_context
    )
