"""LongBench v1: 21 tasks with its own prompts, its cut of the middle and its rules about chat templates.

A record fills the task's prompt template (`prompts.py`). The text after the context, instruction included, is the
question of the turn, so that a method can compress with or without the question in view. With the question visible, the
prompt equals the official one byte for byte. A prompt that is too long is cut in the middle before the chat template is
applied; six tasks never use a chat template.

The official code cuts at a number of tokens per model, without generation and chat template (in papers: Llama-2 3,500;
Mistral-0.2 31,500; Llama-3.1 127,500). `--length` here includes both. The default suits models of 32k positions. To
compare with published results, give the sum of the published number, the task's max_new_tokens and the tokens of the
chat template. The template is the tokenizer's own; the official code writes one for each model that it knows, such as
`[INST]` and `[/INST]` without spaces for Llama-2. Decoding is greedy, as in the official code. A text that was cut is
decoded without cleaning up spaces, which older versions of transformers did by default for some tokenizers.

The data is the hub's `data.zip`; a local copy is its unpacked folder. The copy with parquet files
(Xnhyacinth/LongBench) holds kvpress's prompts and lacks the columns that the templates need.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.task import Example, Mode
from kvbench.tasks.longbench.filled import FilledPrompt, fill
from kvbench.tasks.longbench.hub import open_archive
from kvbench.tasks.longbench.prompts import BARE, MAX_NEW_TOKENS, PROMPTS
from kvbench.tasks.records import Record, Source
from kvbench.tasks.scoring.longbench import NUMBERS, SCORERS
from kvbench.text.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LongBench(FilledPrompt):
    """Base class; a subclass is named `longbench_` plus the name of its data file, which selects everything else."""

    suite: ClassVar[str] = "longbench"
    default_length: ClassVar[int] = 32_768
    hub: ClassVar[str] = "THUDM/LongBench"
    revision: ClassVar[str] = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
    columns: ClassVar = {
        "input": str, "context": str, "answers": list, "length": int, "dataset": str, "language": str,
        "all_classes": (list, NoneType), "_id": str,
    }
    kind: ClassVar[str]
    """The task by its name in LongBench."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.config = cls.name.removeprefix("longbench_")
        cls.kind = cls.config.removesuffix("_e")
        cls.scorers = SCORERS[cls.kind]

    @property
    def prompt_id(self) -> str:
        """The prompt's id; a LongBench-E task has the id of its LongBench task."""
        return f"longbench/{self.kind}@1"

    @property
    def source(self) -> Source:
        """The records of the local copy, or of the archive on the hub."""
        return super().source if self.data else open_archive(self.hub, self.revision, f"data/{self.config}.jsonl")

    def frame(self, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """The chat template; none for few-shot and code completion tasks (`BARE`)."""
        return Frame.plain() if self.kind in BARE else super().frame(tokenizer)

    def fault(self, record: Record) -> str | None:
        """Report a record of another task, and one that cannot be scored."""
        if record["dataset"].removesuffix("_e") != self.kind:
            return f"it is of {record['dataset']}"
        if not record["answers"] or not all(isinstance(x, str) for x in record["answers"]):
            return "answers must be texts, one at least"
        if not record["answers"][0].strip():
            return "the first answer, which methods are compared on, must not be empty"
        if not record["all_classes"] and any("all_classes" in x.facts for x in self.scorers):
            return "all_classes must name the classes"
        if not all(isinstance(x, str) for x in record["all_classes"] or ()):
            return "all_classes must be texts"
        if NUMBERS in self.scorers and not all(re.search(r"\d", x) for x in record["answers"]):
            return "answers must hold the number that is asked for"
        return None

    def compose(self, record: Record, *, mode: Mode, turns: int, frame: Frame) -> Example:  # noqa: ARG002  # one turn
        """Fill the prompt; the fact `bucket` is LongBench-E's length class in words (Chinese: characters)."""
        length = record["length"]
        facts = {x: record[x] for x in ("_id", "length", "language")}
        facts["bucket"] = "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
        if record["all_classes"]:
            facts["all_classes"] = record["all_classes"]
        return fill(
            PROMPTS[self.kind], record, prefix="", answer=record["answers"][0], references=tuple(record["answers"]),
            max_new_tokens=MAX_NEW_TOKENS[self.kind], frame=frame, facts=facts,
        )


class NarrativeQA(LongBench):
    """Questions about whole stories."""

    name: ClassVar[str] = "longbench_narrativeqa"
    summary: ClassVar[str] = "LongBench: questions about a novel or a film script"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class Qasper(LongBench):
    """Questions about one paper."""

    name: ClassVar[str] = "longbench_qasper"
    summary: ClassVar[str] = "LongBench: questions about a scientific article"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class MultiFieldQAEn(LongBench):
    """Questions about one text of any field."""

    name: ClassVar[str] = "longbench_multifieldqa_en"
    summary: ClassVar[str] = "LongBench: questions about an English document of any field"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class MultiFieldQAZh(LongBench):
    """The same in Chinese."""

    name: ClassVar[str] = "longbench_multifieldqa_zh"
    summary: ClassVar[str] = "LongBench: questions about a Chinese document of any field"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class HotpotQA(LongBench):
    """Two passages among ten make the answer."""

    name: ClassVar[str] = "longbench_hotpotqa"
    summary: ClassVar[str] = "LongBench: questions that two of several passages answer"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class TwoWikiMQA(LongBench):
    """Up to five hops over passages."""

    name: ClassVar[str] = "longbench_2wikimqa"
    summary: ClassVar[str] = "LongBench: questions of several hops over Wikipedia passages"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class MuSiQue(LongBench):
    """Up to four hops over passages."""

    name: ClassVar[str] = "longbench_musique"
    summary: ClassVar[str] = "LongBench: questions of up to four hops over passages"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class DuReader(LongBench):
    """Chinese questions over web pages."""

    name: ClassVar[str] = "longbench_dureader"
    summary: ClassVar[str] = "LongBench: Chinese questions about several web pages"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class GovReport(LongBench):
    """A page about a long report."""

    name: ClassVar[str] = "longbench_gov_report"
    summary: ClassVar[str] = "LongBench: a summary of a government report"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class QMSum(LongBench):
    """Queries about a meeting."""

    name: ClassVar[str] = "longbench_qmsum"
    summary: ClassVar[str] = "LongBench: a summary of a meeting as a query asks for it"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class MultiNews(LongBench):
    """A page about several articles."""

    name: ClassVar[str] = "longbench_multi_news"
    summary: ClassVar[str] = "LongBench: a summary of several news articles"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class VCSum(LongBench):
    """A Chinese meeting."""

    name: ClassVar[str] = "longbench_vcsum"
    summary: ClassVar[str] = "LongBench: a summary of a Chinese meeting"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class Trec(LongBench):
    """Many labeled questions, one without."""

    name: ClassVar[str] = "longbench_trec"
    summary: ClassVar[str] = "LongBench: the type of a question, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class TriviaQA(LongBench):
    """Answered questions, one without."""

    name: ClassVar[str] = "longbench_triviaqa"
    summary: ClassVar[str] = "LongBench: a question about a passage, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class SamSum(LongBench):
    """Summarized dialogues, one without; an answer is one line, and not an empty one."""

    name: ClassVar[str] = "longbench_samsum"
    summary: ClassVar[str] = "LongBench: a summary of a dialogue, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"
    nonempty: ClassVar[bool] = True

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """The last token of a newline."""
        return frozenset(tokenizer("\n", add_special_tokens=False).input_ids[-1:])


class Lsht(LongBench):
    """Many labeled articles in Chinese, one without."""

    name: ClassVar[str] = "longbench_lsht"
    summary: ClassVar[str] = "LongBench: the class of a Chinese news article, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class PassageCount(LongBench):
    """Paragraphs, some of them twice."""

    name: ClassVar[str] = "longbench_passage_count"
    summary: ClassVar[str] = "LongBench: the number of different paragraphs"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class PassageRetrievalEn(LongBench):
    """Thirty paragraphs and an abstract of one."""

    name: ClassVar[str] = "longbench_passage_retrieval_en"
    summary: ClassVar[str] = "LongBench: the paragraph that an abstract is of"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class PassageRetrievalZh(LongBench):
    """The same in Chinese."""

    name: ClassVar[str] = "longbench_passage_retrieval_zh"
    summary: ClassVar[str] = "LongBench: the Chinese paragraph that an abstract is of"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class Lcc(LongBench):
    """A file up to a line."""

    name: ClassVar[str] = "longbench_lcc"
    summary: ClassVar[str] = "LongBench: the next line of a code file"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class RepoBenchP(LongBench):
    """A file up to a line, after others of its repository."""

    name: ClassVar[str] = "longbench_repobench-p"
    summary: ClassVar[str] = "LongBench: the next line of a file, after others of its repository"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"
