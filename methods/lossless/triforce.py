"""TriForce: a window of recent entries drafts for retrieved chunks, and these draft for the full cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from kvbench.constraints import Natural, Positive
from kvbench.method import BudgetKind, Card, Method, Round, Shape, Step, Upstream
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.methods.lossless.verified import Verified
from kvbench.store import LayerKV
from kvbench.store.entries import gather
from kvbench.store.verified import VerifiedKV

if TYPE_CHECKING:
    from kvbench.hf import Model


@dataclass(frozen=True)
class TriForce(Verified):
    """Drafts with retrieved chunks, whose own draft is a sliding window; verifies with every entry."""

    draft_length: Positive = 6
    """Most tokens that the retrieved chunks draft in a round."""
    window_length: Positive = 1
    """Most tokens that the sliding window drafts for the retrieved chunks."""
    chunk: Positive = 8
    """Entries of a chunk."""
    window_budget: Positive = 256
    """Entries per KV head of the sliding window, the first ones included."""
    sinks: Natural = 16
    """First entries of the sliding window."""

    card: ClassVar[Card] = Card(
        name="triforce",
        title="TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding",
        idea="A few retrieved chunks of the cache predict the full cache's tokens, and a cheaper drafter predicts "
        "theirs. Each level verifies the tokens of the level below, up to the full cache.",
        arxiv="2404.11912",
        year=2024,
        version="5",
        family="lossless",
        stages=("generation", "retrieval"),
        budget=BudgetKind.READ,
        paper_budget="4096",
        heads="pooled",
        upstream=Upstream(repo="Infini-AI-Lab/TriForce", commit="164c8c0", license=None),
        deviations=(
            ("The lowest level is the model itself with StreamingLLM's cache of the same size and first entries; the "
            "authors' is another model of 68 million parameters."),
            ("Chunks are chosen by the mean over the query heads of a KV head; the authors' models have one query head "
            "per KV head."),
            ("Chunks are chosen anew after every round, by the query of its last token. The released code chooses them "
            "once, by the query of the last prompt token (models/modeling_llama.py:235), and after every round it puts "
            "all new tokens in place of retrieved ones (utils/decoding.py:125, models/cache.py:180)."),
            "The retrieved chunks and the newest tokens, at most a chunk less one, make up the budget.",
            "Greedy decoding, for which every level is exact; the authors sample.",
        ),
        limits=(
            "It stores the full cache, the retrieved chunks and the window: it saves reads, not memory.",
            ("Answers equal those of the full cache in float32, and up to near ties in 16 bits, where a pass over "
            "several tokens rounds differently."),
        ),
    )

    @cached_property
    def drafter(self) -> Retrieved:
        """The two lower levels."""
        return Retrieved(
            draft_length=self.window_length, window_budget=self.window_budget, sinks=self.sinks, chunk=self.chunk,
            ahead=self.draft_length + 1, rows=self.rows, length=self.length,
        )

    def bind(self, model: Model) -> Self:
        """Let the sliding window refuse the model (`UserError`)."""
        self.drafter.bind(model)
        return self

    def minimum_entries(self) -> int:
        """The first chunk, one to choose and the newest tokens, or the least window."""
        return max(3 * self.chunk - 1, self.sinks + 1)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Slide the window, and retrieve chunks with the last query whenever every entry has been read."""
        super().evict(kv, step)
        assert isinstance(kv, VerifiedKV)
        if step.moment.is_last and step.seen == kv.seen:  # a round gives its tokens one by one
            _find_retrieved(kv).retrieve(kv.target, step, self.chunk, self.entries_in(step.layer, step.window))

    def follow(self, kv: VerifiedKV, step: Step) -> None:
        """Give a verified token to the lower levels, and count what retrieval reads after the last one of a round."""
        super().follow(kv, step)
        if step.seen == kv.seen:
            kv.chosen_bytes += _find_retrieved(kv).retrieved_bytes

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes of a token if every drafted one is rejected, with a retrieval."""
        return super().declared_read_bytes(shape) + self.retrieval_bytes(shape)

    def round(self, shape: Shape) -> Round:
        """A draft in rounds, a pass over everything, and a retrieval."""
        found = super().round(shape)
        return found._replace(read_bytes=found.read_bytes + self.retrieval_bytes(shape))

    def retrieval_bytes(self, shape: Shape) -> int:
        """Bytes that a retrieval reads: the keys of all chunks if it chooses, and the entries that it copies."""
        keys = 0
        for index, layer in enumerate(shape.layers):
            count = shape.entries(layer)
            if choose_chunks(count, self.chunk, self.entries_in(index, layer.window)) is not None:
                keys += layer.kv_heads * layer.key_dim * (count // self.chunk * self.chunk)
        return keys * shape.itemsize + self.drafter.target_bytes(shape)


@dataclass(frozen=True)
class Retrieved(Verified):
    """The middle level: retrieved chunks, with a sliding window as their draft."""

    window_budget: int = 256
    sinks: int = 16
    chunk: int = 8
    ahead: int = 0
    """Most tokens that are added between two retrievals."""

    @cached_property
    def drafter(self) -> Method:
        """The sliding window."""
        rows = None if self.length is None else min(self.window_budget, self.length)
        return StreamingLLM(sinks=self.sinks, rows=rows, length=self.length)

    def bind(self, model: Model) -> Self:
        """Let the sliding window refuse the model (`UserError`)."""
        self.drafter.bind(model)
        return self

    def target_layer(self, index: int) -> LayerKV:
        """An empty store of chunks."""
        del index
        return RetrievedKV(bounded=True, slack=2 * self.chunk + self.ahead)

    def target_bytes(self, shape: Shape) -> int:
        """Bytes of the retrieved entries."""
        total = 0
        for index, layer in enumerate(shape.layers):
            count = shape.entries(layer)
            chosen = choose_chunks(count, self.chunk, self.entries_in(index, layer.window))
            entries = count if chosen is None else chosen * self.chunk + count % self.chunk
            total += RetrievedKV(track=layer.window is not None).bytes_for(layer, shape, entries)
        return total


def choose_chunks(count: int, chunk: int, entries: int | None) -> int | None:
    """Number of chunks in a budget of `count` entries; None: all. The last entries that fill no chunk always stay."""
    return None if entries is None or entries >= count else max(0, entries - count % chunk) // chunk


@dataclass
class RetrievedKV(LayerKV):
    """Copies of another store's first chunk, of those that a query attends to most, and of the entries after them."""

    retrieved_bytes: int = field(default=0, init=False)
    """Bytes that the last retrieval read: keys of the chunks that it chose from, and the entries that it copied."""

    def append(self, step: Step) -> None:
        """Add a forward's entries; those of the context are copied once it is complete."""
        if step.moment.in_context:
            self.seen, self._window = step.seen, step.window
        else:
            super().append(step)

    def retrieve(self, source: LayerKV, step: Step, chunk: int, entries: int | None) -> None:
        """Hold the first chunk, those that the last query attends to most, and the entries after the last full chunk.

        A chunk's score is the product of the query and the mean of its keys. entries: to hold per KV head; None: all.
        """
        held = {"key": source.keys, "value": source.values}
        count = source.n
        self.seen, self._window, self.track = source.seen, step.window, self.track or step.window is not None
        if self.track:
            held["position"] = source.logical_positions().to(torch.int32).expand(*source.keys.shape[:2], -1)
        chosen, scored = choose_chunks(count, chunk, entries), 0
        if chosen is not None:
            full = count // chunk * chunk
            means = source.keys[:, :, :full].unflatten(2, (-1, chunk)).float().mean(3)  # [B, H_kv, n / chunk, D]
            scored = source.keys[:, :, :full].nbytes
            query = step.query[:, :, -1:].float().unflatten(1, (means.shape[1], -1)).squeeze(3)  # [B, H_kv, G, D]
            scores = (query @ means.mT).mean(2)  # [B, H_kv, n / chunk]
            if step.window is None:  # a window has slid past the context's first chunk
                scores[..., :1] = torch.inf
            best = scores.topk(chosen, dim=-1).indices.sort(-1).values
            inside = best[..., None] * chunk + torch.arange(chunk, device=best.device)
            rest = torch.arange(full, count, device=best.device).expand(*best.shape[:2], -1)
            index = torch.cat([inside.flatten(2), rest], dim=-1)
            held = {name: gather(x, index) for name, x in held.items()}
        self.retrieved_bytes = scored + sum(x.nbytes for x in held.values())
        buffer, found = self._buffer, held["key"].shape[2]
        if buffer is None or buffer.tensors.keys() != held.keys() or found + self.slack > buffer.capacity:
            self._replace(held, (max(self.capacity, found) if chosen is None else found) + self.slack)
        else:
            buffer.write(0, held)
            self.n = found


def _find_retrieved(kv: VerifiedKV) -> RetrievedKV:
    """The chunks of a layer with three levels."""
    assert isinstance(kv.draft, VerifiedKV) and isinstance(kv.draft.target, RetrievedKV)
    return kv.draft.target
