"""MagicDec: a sparse cache of fixed size drafts, and the full cache in the same memory verifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from kvbench.constraints import Positive
from kvbench.method import BudgetKind, Card, Method, Upstream
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.methods.lossless.verified import Verified

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class MagicDec(Verified):
    """Drafts with a cache of the budget's entries, chosen once by SnapKV or sliding as StreamingLLM's."""

    draft_length: Positive = 3
    """Most tokens that are drafted in a round."""
    draft: Literal["snapkv", "streaming-llm"] = "snapkv"
    """The method that chooses the entries that draft."""

    card: ClassVar[Card] = Card(
        name="magicdec",
        title="MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with Speculative "
        "Decoding",
        idea="With long contexts and large batches, decoding waits for the cache to be read. The model drafts with a "
        "small part of its own cache, and one pass over the full cache verifies several tokens.",
        arxiv="2408.11049",
        year=2024,
        version="2",
        family="lossless",
        stages=("generation",),
        budget=BudgetKind.READ,
        paper_budget="256",
        heads="pooled",
        upstream=Upstream(repo="Infini-AI-Lab/MagicDec", commit="09cd671", license="Apache-2.0"),
        deviations=(
            ("The budget is entries of the context per KV head of the draft, 256 with --budget paper; so is the "
            "authors' draft_budget, which must be one more than a multiple of 128 (257 in their README)."),
            "SnapKV scales its logits; the authors' code does not.",
            ("With draft=streaming-llm, entries of the context are those of the full cache; the authors' draft reads "
            "the prompt through its own window."),
            ("After a round the draft takes the accepted entries as the full cache computed them; SnapKV's choice in "
            "the context stays, and StreamingLLM's window slides on. With draft=streaming-llm the authors' draft "
            "keeps the entries that it computed itself, and only grows while decoding."),
        ),
        limits=(
            "It stores the full cache and the draft's: it saves reads, not memory.",
            ("Greedy decoding only. Answers equal those of the full cache in float32, and up to near ties in 16 bits, "
            "where a pass over several tokens rounds differently."),
            "The authors' gain comes with large batches on GPUs; one conversation at a time shows acceptance only.",
        ),
    )

    @cached_property
    def drafter(self) -> Method:
        """The method of the small cache, with the settings of the authors' code."""
        if self.draft == "snapkv":
            return SnapKV(kernel=5, pool="avg", rows=self.rows, length=self.length)
        return StreamingLLM(sinks=16, rows=self.rows, length=self.length)

    def bind(self, model: Model) -> Self:
        """Let the drafter refuse the model (`UserError`)."""
        self.drafter.bind(model)
        return self
