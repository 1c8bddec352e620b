"""LongBench v2: 503 questions with four choices, asked without a chain of thought.

The prompt is THUDM/LongBench's at 2e00731f (prompts/0shot.txt). As in its code (pred.py), white space around a row's
texts is left out, and the whole is cut in the middle to 120,000 tokens by default; here the chat template's own tokens
count among them. Decoding is greedy, where the official runs sample at temperature 0.1; the variant with a chain of
thought is not offered.

With 503 rows a 95% interval is about 4.4 points on either side: smaller differences are noise.
"""

from __future__ import annotations

from typing import ClassVar

from kvbench.task import Example, Frame, Mode, Scorer
from kvbench.tasks.longbench.filled import FilledPrompt, fill
from kvbench.tasks.rows import Row
from kvbench.tasks.scoring.longbench import VERSION_2

PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\n"
    "Choices:\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
LIMIT = 128


class LongBench2(FilledPrompt):
    """Books, papers, code, tables and conversations of 8,000 to 2,000,000 words."""

    name: ClassVar[str] = "longbench2"
    version: ClassVar[str] = "2"
    suite: ClassVar[str] = "longbench"
    summary: ClassVar[str] = "LongBench v2: multiple choice over texts of 8,000 to 2,000,000 words"
    needs: ClassVar[str | None] = "LongBench v2's data, a larger model"
    scorers: ClassVar[tuple[Scorer, ...]] = VERSION_2
    default_length: ClassVar[int] = 120_000 + LIMIT
    hub: ClassVar[str] = "THUDM/LongBench-v2"
    revision: ClassVar[str] = "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9"
    split: ClassVar[str] = "train"
    columns: ClassVar = dict.fromkeys(
        ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "domain", "sub_domain",
         "difficulty", "length", "_id"),
        str,
    )

    @property
    def prompt_id(self) -> str:
        """Asked at once, without a chain of thought."""
        return "longbench2/0shot@2e00731f"

    def fault(self, row: Row) -> str | None:
        """An answer that is none of the four letters."""
        return None if row["answer"] in set("ABCD") else f"answer is '{row['answer']}', not A, B, C or D"

    def compose(self, row: Row, *, mode: Mode, turns: int, frame: Frame) -> Example:  # noqa: ARG002  # there is one turn
        """The filled prompt; what results are told apart by are its facts."""
        return fill(
            PROMPT, {name: text.strip() for name, text in row.items()}, prefix="",
            answer=f"The correct answer is ({row['answer']}).", references=(row["answer"],), limit=LIMIT, frame=frame,
            facts={x: row[x] for x in ("_id", "domain", "sub_domain", "difficulty", "length")},
        )
