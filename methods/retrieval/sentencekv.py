"""SentenceKV: entries of whole sentences are read, chosen by the mean query of the sentence being written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Odd, Positive
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream, resolved
from kvbench.selection import group_mean, pool_before, top_entries
from kvbench.store import LayerKV
from kvbench.store.chosen import ChosenKV
from kvbench.store.layer import OFFSET_BYTES
from kvbench.store.scores import attention_mass_of
from kvbench.techniques.clustering import label_offsets, means
from kvbench.techniques.reading import EndsMethod, mark_units

if TYPE_CHECKING:
    from kvbench.hf import Model

SUM_BYTES = 4
ENDS = (".", "!", "?", "\u3002", "\uff01", "\uff1f")
"""The last three are Chinese and Japanese."""
_SENTENCE_ENDS: dict[str, Tensor] = {}
"""Which token ids end a sentence, by the hash of the tokenizer, in this process."""


@dataclass(frozen=True)
class SentenceKV(EndsMethod):
    """Keeps several times the budget as SnapKV does, and reads, per KV head, the sentences that match the query."""

    factor: Positive = 3
    """Entries that are stored for each entry of the budget."""
    window: Positive = 32
    """Last queries of the context that decide which entries are stored."""
    kernel: Annotated[int, Ge(1), Odd] = 7
    """Width of the pooling of their attention."""
    sinks: Positive = 32
    """First stored entries, which are always read."""
    recent: Positive = 32
    """Last entries of the context, which are always read."""
    shortest: Positive = 8
    """Fewest tokens of a sentence: a shorter one goes on."""
    longest: Positive = 64
    """Most tokens of a sentence: a longer one is divided."""

    sentence_ends: str | None = resolved(by_bind=True)
    """SHA-256 of the tokenizer that tells which tokens end a sentence."""

    card: ClassVar[Card] = Card(
        name="sentencekv",
        title="SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching",
        idea="A sentence is a unit of meaning, so its mean key tells whether its tokens are needed. "
        "The mean query of the sentence that is being written chooses sentences, whose entries are then read.",
        arxiv="2504.00970",
        year=2025,
        family="retrieval",
        stages=("compression", "retrieval"),
        budget=BudgetKind.READ,
        paper_budget="1024",
        heads="independent",
        upstream=Upstream(repo="zzbright1998/SentenceKV", commit="d6bb131", license=None),
        deviations=(
            ("Entries are kept and chosen per KV head, with attention averaged and similarities summed over its query "
            "heads; the authors' code repeats keys for the query heads, which stores several times as much."),
            "Entries that are not kept are evicted, as in the authors' code; the paper moves them to the host.",
            ("The first token of a sentence chooses by its own query, the token that ends one by the queries of its "
            "sentence; the authors' code reads all stored entries at both."),
            ("A token ends a sentence if its text ends with a full stop, an exclamation or question mark, or contains "
            "a blank line; the authors' list of tokens depends on the tokenizer."),
            "Sentences have 8 to 64 tokens, so that their number is bounded; the authors' code cuts long ones off.",
            ("Later entries are always read, in addition to the budget, and so are the last ones of the context. The "
            "authors' code makes sentences of generated tokens, and its recent entries are the last ones of all."),
            ("Each token of a question chooses its own entries, as if it were decoded, and its query counts in the "
            "sentence that the answer continues. In the authors' code the question is a part of the context, and only "
            "the queries of the answer count."),
            ("A sentence's mean key leaves out its first and last entries that are always read; the authors' mean has "
            "them."),
            ("The entry behind the first ones can be chosen. In the authors' code (models/sentencekv/"
            "custom_llama_sentencekv.py, line 579, > for >=) it cannot."),
        ),
        unverified=("shortest and longest: assumptions.",),
        limits=(
            "A text without punctuation is divided every 64 tokens.",
            "Entries evicted at the end of the context cannot be chosen by later questions.",
            "Mean keys are not normalized, so short sentences with similar keys are preferred.",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse sentences that cannot be (`UserError`)."""
        super().__post_init__()
        if self.longest < self.shortest:
            raise UserError(
                f"sentencekv: longest is {self.longest} tokens and shortest is {self.shortest}. Use longest="
                f"{self.shortest} or more."
            )

    def bind(self, model: Model) -> Self:
        """Find the tokens that end a sentence, once per process and tokenizer."""
        if model.tokenizer_sha256 not in _SENTENCE_ENDS:
            weight = model.module.get_input_embeddings().weight
            assert isinstance(weight, Tensor)
            size = weight.shape[0]
            texts = model.tokenizer.batch_decode([[x] for x in range(min(size, len(model.tokenizer)))])
            ends = [x.rstrip().endswith(ENDS) or "\n\n" in x for x in texts]
            _SENTENCE_ENDS[model.tokenizer_sha256] = torch.tensor(ends + [False] * (size - len(ends)))
        return replace(self, sentence_ends=model.tokenizer_sha256)

    def minimum_entries(self) -> int:
        """The entries that are always read and one to choose; stored are at least the window and one more."""
        return max(self.sinks + self.recent, -(-self.window // self.factor)) + 1

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return ChosenKV(queries=self.window)

    def stored_entries(self, shape: Shape) -> int:
        """Entries per KV head that are kept of the context."""
        assert self.rows is not None
        return min(shape.length, self.factor * self.rows)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Note which tokens of the context end a sentence; keep entries and index their sentences at its end."""
        if step.moment.in_context and step.window is None and self.rows is not None:
            assert step.ids is not None and self.sentence_ends is not None, "bind first; steps need their ids"
            ends = sentence_ends(self.sentence_ends, step.ids.device)[step.ids]
            kv.state["ends"] = torch.cat([kv.state["ends"], ends], dim=1) if "ends" in kv.state else ends
        super().evict(kv, step)
        if step.moment.compresses:
            kv.state.pop("ends", None)

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Keep the entries with the most attention, and store the mean key of every sentence."""
        assert kv.recent_queries is not None and self.rows is not None
        kv_heads, entries = kv.keys.shape[1:3]
        numbers = [split_sentences(x, self.shortest, self.longest) for x in kv.state["ends"].tolist()]
        sentence = torch.tensor(numbers, device=kv.keys.device)[:, None].expand(-1, kv_heads, -1)
        if entries > self.factor * self.rows:
            mass = group_mean(attention_mass_of(kv.recent_queries, kv, step), kv_heads)
            kept = top_entries(pool_before(mass, self.window, self.kernel, "max"), self.factor * self.rows)
            sentence = sentence.gather(2, kept)
            kv.keep(kept)
        inner = slice(self.sinks, kv.n - self.recent)
        count = self.sentences(entries)
        empty = kv.keys.new_zeros((*kv.keys.shape[:2], count, kv.keys.shape[3]), dtype=torch.float32)
        kv.start({
            "sentences": means(kv.keys[:, :, inner].float(), sentence[:, :, inner], empty).to(kv.keys.dtype),
            "offsets": label_offsets(sentence[:, :, inner], count),
        })
        kv.state["query"] = torch.zeros_like(step.query[:, :, 0], dtype=torch.float32)

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over sinks, the sentences chosen by the queries since the last one ended, and recent entries."""
        assert self.sentence_ends is not None and step.ids is not None
        query = kv.state["query"].add_(step.query[:, :, 0])
        sentences, offsets = kv.scan(kv.index["sentences"]), kv.scan(kv.index["offsets"])
        partial = query.unflatten(1, (sentences.shape[1], -1)).sum(2)[..., None]  # its length does not count
        between = kv.indexed - self.sinks - self.recent
        chosen = mark_units((sentences.float() @ partial)[..., 0], offsets, between, self.chosen)
        mask = torch.ones((*chosen.shape[:2], seen), dtype=torch.bool, device=chosen.device)
        mask[:, :, self.sinks : self.sinks + chosen.shape[2]] = chosen
        query.mul_(~sentence_ends(self.sentence_ends, step.ids.device)[step.ids][..., None])
        return kv.read(step, mask)

    def sentences(self, length: int) -> int:
        """Sentences that a context of this length can have."""
        return -(-length // self.shortest)

    def scanned_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the mean keys and of where sentences start."""
        count = self.sentences(shape.length)
        return layer.kv_heads * (count * layer.key_dim * shape.itemsize + (count + 1) * OFFSET_BYTES)

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the sentences and of the sums of queries."""
        return self.scanned_bytes(layer, shape) + layer.query_heads * layer.key_dim * SUM_BYTES

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: every sentence's mean key, and entries."""
        return self.scanned_bytes(layer, shape) + self.entry_bytes(layer, shape)


@functools.lru_cache(maxsize=8)
def sentence_ends(sha256: str, device: torch.device) -> Tensor:
    """Which token ids end a sentence, copied to a device once. sha256: of the tokenizer. [V] bool"""
    return _SENTENCE_ENDS[sha256].to(device)


def split_sentences(ends: Sequence[bool], shortest: int, longest: int) -> list[int]:
    """The number of the sentence that each token belongs to. ends: whether a sentence may end with the token."""
    numbers, number, length = [], 0, 0
    for end in ends:
        numbers.append(number)
        length += 1
        if (end and length >= shortest) or length == longest:
            number, length = number + 1, 0
    return numbers
