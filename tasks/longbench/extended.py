"""LongBench-E: 13 LongBench tasks over records of evenly spread lengths; the fact `bucket` is the length class.

Its files have `_e` in their names. Their column `dataset` was not looked up; values with and without `_e` are accepted.
"""

from __future__ import annotations

from typing import ClassVar

from kvbench.tasks.longbench.v1 import (
    GovReport,
    HotpotQA,
    Lcc,
    MultiFieldQAEn,
    MultiNews,
    PassageCount,
    PassageRetrievalEn,
    Qasper,
    RepoBenchP,
    SamSum,
    Trec,
    TriviaQA,
    TwoWikiMQA,
)


class QasperE(Qasper):
    """Qasper by length."""

    name: ClassVar[str] = "longbench_qasper_e"
    summary: ClassVar[str] = "LongBench-E: questions about a scientific article"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class MultiFieldQAEnE(MultiFieldQAEn):
    """MultiFieldQAEn by length."""

    name: ClassVar[str] = "longbench_multifieldqa_en_e"
    summary: ClassVar[str] = "LongBench-E: questions about an English document of any field"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class HotpotQAE(HotpotQA):
    """HotpotQA by length."""

    name: ClassVar[str] = "longbench_hotpotqa_e"
    summary: ClassVar[str] = "LongBench-E: questions that two of several passages answer"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class TwoWikiMQAE(TwoWikiMQA):
    """TwoWikiMQA by length."""

    name: ClassVar[str] = "longbench_2wikimqa_e"
    summary: ClassVar[str] = "LongBench-E: questions of several hops over Wikipedia passages"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class GovReportE(GovReport):
    """GovReport by length."""

    name: ClassVar[str] = "longbench_gov_report_e"
    summary: ClassVar[str] = "LongBench-E: a summary of a government report"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class MultiNewsE(MultiNews):
    """MultiNews by length."""

    name: ClassVar[str] = "longbench_multi_news_e"
    summary: ClassVar[str] = "LongBench-E: a summary of several news articles"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class TrecE(Trec):
    """Trec by length."""

    name: ClassVar[str] = "longbench_trec_e"
    summary: ClassVar[str] = "LongBench-E: the type of a question, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class TriviaQAE(TriviaQA):
    """TriviaQA by length."""

    name: ClassVar[str] = "longbench_triviaqa_e"
    summary: ClassVar[str] = "LongBench-E: a question about a passage, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class SamSumE(SamSum):
    """SamSum by length."""

    name: ClassVar[str] = "longbench_samsum_e"
    summary: ClassVar[str] = "LongBench-E: a summary of a dialogue, after examples"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class PassageCountE(PassageCount):
    """PassageCount by length."""

    name: ClassVar[str] = "longbench_passage_count_e"
    summary: ClassVar[str] = "LongBench-E: the number of different paragraphs"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class PassageRetrievalEnE(PassageRetrievalEn):
    """PassageRetrievalEn by length."""

    name: ClassVar[str] = "longbench_passage_retrieval_en_e"
    summary: ClassVar[str] = "LongBench-E: the paragraph that an abstract is of"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class LccE(Lcc):
    """Lcc by length."""

    name: ClassVar[str] = "longbench_lcc_e"
    summary: ClassVar[str] = "LongBench-E: the next line of a code file"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"


class RepoBenchPE(RepoBenchP):
    """RepoBenchP by length."""

    name: ClassVar[str] = "longbench_repobench-p_e"
    summary: ClassVar[str] = "LongBench-E: the next line of a file, after others of its repository"
    needs: ClassVar[str | None] = "LongBench's data, a larger model"
