"""CacheGen: a context's cache is quantized and entropy coded, to be stored and sent, and decoded before it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.method import Budget, BudgetKind, Card, Shape, Step, Upstream, resolved
from kvbench.methods.quantization.streams import StreamMethod
from kvbench.store.coders import as_half
from kvbench.store.entropy import Streams, boundaries, count_tables, decode, encode
from kvbench.store.stream import Stream, StreamKV

SEGMENT = 256
"""Tokens of a stream; the streams of a chunk share tables."""
KEY_BINS = {1: ((10, 16), (20, 16), (32, 12)), 2: ((10, 32), (20, 16), (32, 16)), 3: ((32, 32),)}
VALUE_BINS = {1: ((2, 16), (32, 12)), 2: ((2, 32), (32, 16)), 3: ((32, 32),)}
"""By level: bins of the layers below a number, of 32 layers."""
LAYERS = 32


@dataclass(frozen=True)
class CacheGen(StreamMethod):
    """Stores a context as streams of entropy-coded symbols, one for every 256 tokens of a channel."""

    level: Literal[1, 2, 3] = 2
    """Quality, as in the authors' code: the number of bins, fewer in later layers except at level 3."""
    chunk: Positive = 1500
    """Tokens that share tables of frequencies."""

    layers: int | None = resolved()
    """The model's number of layers."""

    card: ClassVar[Card] = Card(
        name="cachegen",
        title="CacheGen: KV Cache Compression and Streaming for Fast Large Language Model Serving",
        idea="A cache that is stored or sent need not have the form in which attention reads it. Quantized to few bins "
        "and entropy coded by channel, it takes a few bits per element, and it is decoded before the next question.",
        arxiv="2310.07240",
        year=2023,
        family="quantization",
        stages=("compression", "loading"),
        budget=BudgetKind.BITS,
        heads="pooled",
        upstream=Upstream(repo="UChi-JCL/CacheGen", commit="6bed34c", license=None),
        deviations=(
            ("The released code is followed: the paper's anchors, whose differences to the next nine tokens are coded, "
            "are not in it and not here."),
            ("Symbols are coded by the range variant of asymmetric numeral systems, whose rate is that of the authors' "
            "range coder; frequencies have 16 bits in both."),
            ("Levels and bins are the authors' for Mistral-7B; bins change at its 32 layers, in proportion to the "
            "model's depth. Their code has other bins for a model of 80 layers."),
            ("Chunks have 1,500 tokens, as where the authors' scripts/adapt.sh loads them; it encodes chunks of 1,000. "
            "The last one may be shorter. Their main script encodes a context as one chunk."),
            "Largest magnitudes are stored in float16; the authors store them in the element type of the cache.",
            "A table has as many frequencies as its layer has bins; the authors' have the most of any layer.",
            "A token of zeros is restored as zeros; the authors' code divides by its largest element.",
        ),
        limits=(
            ("Stored bytes are those of the stream, with its tables. They depend on the text, so they are measured and "
            "cannot be declared, and there is no budget."),
            ("While a question is answered, the decoded context takes as many bytes as the full cache, and every step "
            "reads them."),
            "Tables take 2 bytes per channel for every bin but one in each chunk: short contexts gain little.",
            "Choosing a level by the bandwidth of a network, as the paper does for every chunk, is not simulated.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse a budget (`UserError`), and take the number of layers."""
        return replace(super().fit(budget, shape), layers=len(shape.layers))

    def bins(self, layer: int) -> tuple[int, int]:
        """Bins of a layer's keys and of its values."""
        assert self.layers is not None, "call fit first: bins depend on the number of layers"
        depth = layer * LAYERS // self.layers
        keys, values = (
            next(bins for below, bins in table[self.level] if depth < below) for table in (KEY_BINS, VALUE_BINS)
        )
        return keys, values

    def encode(self, kv: StreamKV, step: Step) -> Stream:
        """Encode every chunk of keys and of values."""
        parts = zip((kv.keys, kv.values), self.bins(step.layer), strict=True)
        return CacheGenStream([[CodedChunk.encode(x, bins) for x in entries.split(self.chunk, dim=2)]
                               for entries, bins in parts])


@dataclass(frozen=True)
class CodedChunk:
    """Keys or values of consecutive tokens."""

    largest: Tensor  # the largest magnitude of every token, over all heads, [B, n] float16
    tables: Tensor  # [B * H_kv * D, bins - 1] int16
    streams: Streams  # a stream for every segment of every channel
    bins: int
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def encode(cls, x: Tensor, bins: int) -> CodedChunk:
        """Quantize each token by its largest magnitude, and code each channel. x: [B, H_kv, n, D]"""
        largest = as_half(x.float().abs().amax((1, 3)))
        top = bins // 2 - 1
        scaled = x.float() / largest.float().masked_fill(largest == 0, 1.0)[:, None, :, None]
        symbols = (scaled * top).round().clamp(-top, top) + top
        by_channel = symbols.to(torch.uint8).transpose(2, 3).flatten(0, 2)  # [C, n]
        tables = count_tables(by_channel, bins)
        padded = torch.nn.functional.pad(by_channel, (0, -x.shape[2] % SEGMENT))
        cuts, counts = find_streams(tables, x.shape[2])
        return cls(largest, tables, encode(padded.view(-1, SEGMENT), counts, cuts), bins, x.shape, x.dtype)

    def decode(self) -> Tensor:
        """The quantized entries. [B, H_kv, n, D]"""
        batch, heads, count, width = self.shape
        cuts, counts = find_streams(self.tables, count)
        symbols = decode(self.streams, counts, cuts)
        symbols = torch.nn.functional.pad(symbols, (0, SEGMENT - symbols.shape[1])).reshape(len(self.tables), -1)
        top = self.bins // 2 - 1
        exact = (symbols[:, :count].float() - top).view(batch, heads, width, count).transpose(2, 3)
        return (exact / top * self.largest.float()[:, None, :, None]).to(self.dtype)


def find_streams(tables: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Boundaries of symbols and number of symbols for each stream of a chunk: the segments of a channel, in order."""
    segments = -(-count // SEGMENT)
    counts = torch.full((segments,), SEGMENT, device=tables.device)
    counts[-1] = count - (segments - 1) * SEGMENT
    return boundaries(tables).repeat_interleave(segments, dim=0), counts.repeat(len(tables))


@dataclass(frozen=True)
class CacheGenStream(Stream):
    """The chunks of keys and those of values."""

    chunks: list[list[CodedChunk]]

    def decode(self) -> dict[str, Tensor]:
        """Keys and values."""
        keys, values = (torch.cat([x.decode() for x in chunks], dim=2) for chunks in self.chunks)
        return {"key": keys, "value": values}

    def tensors(self) -> list[Tensor]:
        """Largest magnitudes, tables and streams."""
        return [y for chunks in self.chunks for x in chunks for y in (x.largest, x.tables, *x.streams.tensors())]
