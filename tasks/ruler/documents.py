"""Readers for the files of RULER's questions about documents: the dev sets of SQuAD v2.0 and HotpotQA.

kvbench may not redistribute them. Documents are all distinct ones of the file in sorted order, as in RULER.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from kvbench.errors import UserError

LARGEST = 2**30
"""Most bytes of a file that is read; SQuAD's has 4 MB, HotpotQA's 46 MB."""
T = TypeVar("T")


@dataclass(frozen=True)
class SquadQuestion:
    """One question, its answers in the order of the file, and indices of documents.

    shown: documents that RULER puts into every prompt of the question.
    gold: the documents among these that contain the answer.
    near: other documents of the same article, which RULER uses before those of other articles.
    """

    text: str
    answers: tuple[str, ...]
    shown: tuple[int, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """All documents and questions of a file, and the file's hash."""

    documents: tuple[str, ...]
    questions: tuple[SquadQuestion, ...]
    sha256: str


class SquadAnswer(BaseModel):
    """An answer of SQuAD."""

    text: str


class SquadEntry(BaseModel):
    """A question of SQuAD; an impossible one has no answers."""

    question: str
    is_impossible: bool
    answers: list[SquadAnswer]


class Paragraph(BaseModel):
    """A paragraph of SQuAD with its questions."""

    context: str
    qas: list[SquadEntry]


class SquadArticle(BaseModel):
    """An article of SQuAD."""

    paragraphs: list[Paragraph]


class Squad(BaseModel):
    """The content of SQuAD's file."""

    data: list[SquadArticle]


class Hotpot(BaseModel):
    """A question of HotpotQA's distractor setting: ten paragraphs (title, sentences) and the supporting facts."""

    question: str
    answer: str
    context: list[tuple[str, list[str]]]
    supporting_facts: list[tuple[str, int]]


@cache
def read_squad(path: str) -> Library:
    """Read SQuAD's answerable questions; UserError if the file cannot be read."""
    squad, sha256 = _read(path, TypeAdapter(Squad), "SQuAD's", "data[].paragraphs[]: context, qas[]")
    documents = sorted({paragraph.context for article in squad.data for paragraph in article.paragraphs})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for article in squad.data:
        of_article = [number[paragraph.context] for paragraph in article.paragraphs]
        for paragraph in article.paragraphs:
            own = number[paragraph.context]
            near = tuple(i for i in of_article if i != own)
            questions += [
                SquadQuestion(asked.question, tuple(x.text for x in asked.answers), (own,), (own,), near)
                for asked in paragraph.qas if not asked.is_impossible
            ]
    return _check(path, "SQuAD's", Library(tuple(documents), tuple(questions), sha256))


@cache
def read_hotpot(path: str) -> Library:
    """Read HotpotQA's questions with their paragraphs; UserError if the file cannot be read."""
    records, sha256 = _read(
        path, TypeAdapter(list[Hotpot]), "HotpotQA's", "a list of question, answer, context, supporting_facts"
    )
    documents = sorted({_join(*paragraph) for record in records for paragraph in record.context})
    number = {text: i for i, text in enumerate(documents)}
    questions = []
    for record in records:
        shown = tuple(number[_join(*paragraph)] for paragraph in record.context)
        titles = {title for title, _ in record.supporting_facts}
        gold = tuple(i for i, (title, _) in zip(shown, record.context, strict=True) if title in titles)
        questions.append(SquadQuestion(record.question, (record.answer,), shown, gold or shown, ()))
    return _check(path, "HotpotQA's", Library(tuple(documents), tuple(questions), sha256))


def _join(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def _read(path: str, adapter: TypeAdapter[T], whose: str, form: str) -> tuple[T, str]:
    """Read and validate a JSON file; return its content and its hash."""
    file = Path(path).expanduser()
    try:
        if (size := file.stat().st_size) > LARGEST:
            raise UserError(f"data '{path}' has {size / 1e9:.1f} GB, too much for {whose} dev set. Check the path.")
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"data '{path}' cannot be read: {error.strerror}. Give the path of {whose} dev set.") from error
    try:
        return adapter.validate_json(data, strict=True), hashlib.sha256(data).hexdigest()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"data '{path}' is not {whose} dev set ({form}): {where}: {first['msg']}. Download it again."
        ) from error


def _check(path: str, whose: str, found: Library) -> Library:
    if not found.questions or any(not x.shown or not x.answers or "" in x.answers for x in found.questions):
        raise UserError(
            f"data '{path}' is not {whose} dev set: it has no question, or one without an answer or a paragraph. "
            "Download it again."
        )
    return found
