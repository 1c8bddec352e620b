"""RULER's qa.py, reproduced: questions of SQuAD and HotpotQA in the order of their files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvbench.task import Scorer
from kvbench.tasks.ruler.documents import Library
from kvbench.tasks.ruler.official.script import (
    COMMIT,
    OfficialTask,
    Run,
    Sample,
    ScriptError,
    draw_until,
    find_size,
    guess_high,
)
from kvbench.tasks.ruler.qa import DOCUMENT, INTRO, MAX_NEW_TOKENS, PREFIX, QUESTION, FileQa, HotpotQa, SquadQa
from kvbench.tasks.ruler.scoring import STRICT_PART, STRING_MATCH_PART

FILES: dict[str, type[FileQa]] = {SquadQa.name: SquadQa, HotpotQa.name: HotpotQa}
STEP = 10


@dataclass(frozen=True)
class OfficialQa(OfficialTask):
    """RULER's questions about documents as published. task: qa_1 or qa_2; data: path of SQuAD's or HotpotQA's file."""

    task: Literal["qa_1", "qa_2"] = "qa_1"
    data: str = ""

    name: ClassVar[str] = "ruler-official-qa"
    summary: ClassVar[str] = "RULER's own samples of qa_1 and qa_2: --task-set task=qa_1 --task-set data=PATH"
    needs: ClassVar[str | None] = "SQuAD's or HotpotQA's file, a larger model"
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_PART, STRICT_PART)
    joint: ClassVar[str] = "\n\n"
    max_new_tokens: ClassVar[int] = MAX_NEW_TOKENS

    @property
    def library(self) -> Library:
        """The documents and questions of the file, read once."""
        return FILES[self.task](data=self.data).library

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the task."""
        return f"ruler-official/{self.task}@{COMMIT}"

    @property
    def dataset_revision(self) -> str:
        """`sha256:` and the hash of the file."""
        return f"sha256:{self.library.sha256}"

    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """Draw samples with as many documents as fit the first question, and fewer if a question has longer ones."""
        first = partial(self.draw, run, 0)
        high = guess_high(run.measure(first(STEP)), STEP, run.room)
        size = find_size(lambda n: run.measure(first(n)) + MAX_NEW_TOKENS, run.room, STEP, high)
        for index in itertools.count():
            if index == len(self.library.questions):
                raise ScriptError(f"'{self.data}' has {index} questions. Use --samples {index} or fewer.")
            yield draw_until(
                partial(self.draw, run, index), lambda x: run.measure(x) + MAX_NEW_TOKENS <= run.room, size, STEP
            )

    def draw(self, run: Run, index: int, n: int) -> Sample:
        """Draw a question with `n` documents: its own, those of the same article, then any; all repeat if too few."""
        asked, texts = self.library.questions[index], self.library.documents
        shown, near = list(asked.shown), list(asked.near)
        if n >= len(texts):
            found = list(itertools.islice(itertools.cycle(texts), n))
        else:
            if n - len(shown) > len(near):
                known = {*shown, *near}
                rest = [i for i in range(len(texts)) if i not in known]
                more = near + run.rng.sample(rest, max(0, n - len(shown) - len(near)))
            else:
                more = run.rng.sample(near, n - len(shown))
            found = [texts[i] for i in shown + more]
        run.shuffle(found)
        context = "\n\n".join(DOCUMENT.format(number=rank, text=text) for rank, text in enumerate(found, 1))
        question = QUESTION.format(query=asked.text)
        return Sample(INTRO + context, question, PREFIX, asked.answers, f" {asked.answers[0]}")
