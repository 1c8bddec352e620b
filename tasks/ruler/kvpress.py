"""RULER as kvpress runs it: records of `simonjegou/ruler`, in kvpress's order of context, question and answer prefix.

The records are RULER's own samples, generated with Llama-3.1-8B's tokenizer and without a chat template. Another
model's tokenizer makes more or fewer than the nominal 4,096 tokens of them, and its chat template adds some. Nothing is
cut, so `--length` must have room for the longest record. Without a chat template, a line break precedes the answer
prefix, as in kvpress.

Where a chat template trims messages, as Llama-3's does, the space at the end of a question is left out; kvpress adds
the question to the rendered text and keeps it.

kvpress turns off the thinking mode of chat templates that have one; here the template is used as it is. The pinned
commit is the one that public runs of kvpress name; it was not checked on the hub.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Scorer, Split, Turn
from kvbench.tasks.dataset import DatasetTask
from kvbench.tasks.records import Columns, Record, Source, open_copy, open_hub
from kvbench.text.scorers import match_first
from kvbench.text.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONTROL = re.compile(r"[\x00-\x1f]")


def string_match(prediction: str, references: Sequence[str], task: str) -> float:
    """Share of references found in the prediction; for questions about documents, whether any reference is found.

    Differs from RULER's rule in that control characters are removed instead of replaced by line breaks.
    """
    text = CONTROL.sub("", prediction.strip()).strip().lower()
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if task.startswith("qa") else sum(found) / len(found)


def match_strictly(prediction: str, references: Sequence[str], task: str) -> float | None:
    """As `string_match`, for the first values that the prediction names; never above it."""
    first = match_first(prediction, references, every=not task.startswith("qa"))
    return None if first is None else min(first, string_match(prediction, references, task))


@dataclass(frozen=True)
class KvpressRuler(DatasetTask):
    """kvpress's RULER records.

    tokens: nominal length of the set.
    task: one of RULER's thirteen tasks, or all of them mixed.
    """

    tokens: Literal[4096, 8192, 16384] = 4096
    task: Literal[
        "all", "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
        "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    ] = "all"  # fmt: skip

    name: ClassVar[str] = "ruler-kvpress"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    summary: ClassVar[str] = (
        "RULER's samples as kvpress has them, of one task or all: --task-set task=vt --task-set tokens=4096"
    )
    needs: ClassVar[str | None] = "kvpress's data, a larger model"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    scorers: ClassVar[tuple[Scorer, ...]] = (
        Scorer("ruler-string-match-kvpress@1", "string_match", string_match, facts=("task",)),
        Scorer("ruler-string-match-kvpress-strict@2", "string_match, first value", match_strictly, facts=("task",)),
    )
    default_length: ClassVar[int] = 8192
    default_turns: ClassVar[int] = 1
    joint: ClassVar[str] = ""
    truncation: ClassVar[Literal["none", "middle"]] = "none"
    hub: ClassVar[str] = "simonjegou/ruler"
    revision: ClassVar[str] = "24adceac8a0e6532936e8d721cd9e9084d2e4686"
    columns: ClassVar[Columns] = {
        "context": str, "question": str, "answer_prefix": str, "answer": list, "task": str, "max_new_tokens": int,
    }

    @property
    def prompt_id(self) -> str:
        """The prompt's id; the set and the task are settings and not part of it."""
        return "ruler-kvpress@1"

    @property
    def source(self) -> Source:
        """The records of the set, opened once per process."""
        part = str(self.tokens)
        if self.data:
            return open_copy(self.data, self.hub, self.revision, part, self.split)
        return open_hub(self.hub, self.revision, part, self.split)

    def choose(self, n: int, seed: int) -> list[int]:
        """Indices of the first `n` records of the task: in file order for seed 0, in a random order otherwise."""
        records = find_records(self)
        if not records:
            raise UserError(
                f"{self.source.name} has no records of task {self.task}. Use another --task-set task, or give "
                f"{self.name} other data."
            )
        if n > len(records):
            raise UserError(
                f"{self.name} has {len(records)} records of task {self.task} in {self.source.name}: use --samples "
                f"{len(records)} or fewer."
            )
        rng = random.Random(f"{self.name}/{seed}")
        return list(records[:n]) if seed == 0 else rng.sample(records, len(records))[:n]

    def compose(self, record: Record, *, mode: Mode, turns: int, frame: Frame) -> Example:  # noqa: ARG002  # one question
        """Build the example of a record, with kvpress's own answer prefix and max_new_tokens."""
        answers = record["answer"]
        if not answers or not all(isinstance(x, str) and x for x in answers) or record["max_new_tokens"] < 1:
            raise UserError(f"{self.source.name}: a record's answer is no list of texts, or has no tokens. {self.hint}")
        prefix = record["answer_prefix"] if frame.sha else f"\n{record['answer_prefix']}"
        turn = Turn(record["question"], prefix, f" {', '.join(answers)}", tuple(answers), record["max_new_tokens"])
        return Example("", record["context"], (turn,), {"task": record["task"]})

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Build examples from records, without cutting.

        Raises:
            UserError: the split is dev, there are too few records, a record is wrong or does not fit `length`.
        """
        found = super().examples(
            seed=seed, split=split, n=n, length=length, turns=turns, mode=mode, tokenizer=tokenizer
        )
        for example in found:
            if example.facts["cut_tokens"]:
                raise UserError(
                    f"{example.id} of {self.name} has {example.facts['cut_tokens']} tokens more than fit {length}, and "
                    "kvpress cuts nothing. Use a greater --length."
                )
            yield example


@cache
def find_records(task: KvpressRuler) -> range | tuple[int, ...]:
    """Indices of the task's records."""
    every = range(len(task.source.records))
    return every if task.task == "all" else tuple(i for i in every if task.record(i)["task"] == task.task)
