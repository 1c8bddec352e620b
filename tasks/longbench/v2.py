"""LongBench v2: 503 questions with four choices, asked without chain of thought.

The prompt is that of THUDM/LongBench at 2e00731f (prompts/0shot.txt). As in its code (pred.py), white space around a
record's texts is stripped, and the prompt is cut in the middle to 120,000 tokens by default; here these include the
tokens of the chat template. Decoding is greedy, while the official runs sample at temperature 0.1. The variant with
chain of thought is not implemented.

With 503 records, a 95% confidence interval is about 4.4 points to either side; smaller differences are noise.
"""

from __future__ import annotations

from typing import ClassVar

from kvbench.task import Example, Mode, Scorer
from kvbench.tasks.longbench.filled import FilledPrompt, fill
from kvbench.tasks.records import Record
from kvbench.tasks.scoring.longbench import VERSION_2
from kvbench.text.template import Frame

PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\n"
    "Choices:\n(A) {choice_A}\n(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
MAX_NEW_TOKENS = 128


class LongBench2(FilledPrompt):
    """Multiple choice over books, papers, code, tables and conversations of 8,000 to 2,000,000 words."""

    name: ClassVar[str] = "longbench2"
    version: ClassVar[str] = "2"
    suite: ClassVar[str] = "longbench"
    summary: ClassVar[str] = "LongBench v2: multiple choice over texts of 8,000 to 2,000,000 words"
    needs: ClassVar[str | None] = "LongBench v2's data, a larger model"
    scorers: ClassVar[tuple[Scorer, ...]] = VERSION_2
    default_length: ClassVar[int] = 120_000 + MAX_NEW_TOKENS
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
        """The official zero-shot prompt, without chain of thought."""
        return "longbench2/0shot@2e00731f"

    def fault(self, record: Record) -> str | None:
        """Report an answer that is not one of the four letters."""
        return None if record["answer"] in set("ABCD") else f"answer is '{record['answer']}', not A, B, C or D"

    def compose(self, record: Record, *, mode: Mode, turns: int, frame: Frame) -> Example:  # noqa: ARG002  # one turn
        """Fill the prompt; facts are the columns by which LongBench v2 groups its results."""
        return fill(
            PROMPT, {name: record[name].strip() for name in self.columns}, prefix="",
            answer=f"The correct answer is ({record['answer']}).", references=(record["answer"],),
            max_new_tokens=MAX_NEW_TOKENS, frame=frame,
            facts={x: record[x] for x in ("_id", "domain", "sub_domain", "difficulty", "length")},
        )
