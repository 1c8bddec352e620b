"""RocketKV: a part of the entries is evicted for good, and tokens read the best chunks of what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge, Odd, Positive
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.selection import group_mean, pool_before, top_entries
from kvbench.store import LayerKV
from kvbench.store.chosen import ChosenKV
from kvbench.store.layer import OFFSET_BYTES
from kvbench.store.scores import attention_mass_of
from kvbench.techniques.reading import ReadingMethod, mark_units


@dataclass(frozen=True)
class RocketKV(ReadingMethod):
    """Evicts as SnapKV does, then reads, per KV head, the chunks with the best bounds in a few channels."""

    window: Positive = 32
    """Last queries of the context that decide which entries are kept."""
    kernel: Annotated[int, Ge(1), Odd] = 63
    """Width of the pooling of their attention."""

    card: ClassVar[Card] = Card(
        name="rocketkv",
        title="RocketKV: Accelerating Long-Context LLM Inference via Two-Stage KV Cache Compression",
        idea="Evicting coarsely first makes the choice among the entries that stay cheap and precise. "
        "Chunks of them are chosen by the extreme keys of each chunk, in the channels in which the query is largest.",
        arxiv="2502.14051",
        year=2025,
        version="2",
        family="retrieval",
        stages=("compression", "retrieval"),
        budget=BudgetKind.READ,
        heads="independent",
        upstream=Upstream(
            repo="NVlabs/RocketKV", commit="63637c8eb4b06b5eb83cd687723b0eeb19f48f65", license="NVIDIA, non-commercial"
        ),
        deviations=(
            ("The budget is the number of entries that a token reads. The authors read half as many, because the bytes "
            "of approximate scores are the other half of theirs; kvbench reports these bytes separately."),
            ("The ratio that the stages share is that of the context; the authors count the tokens to generate, too, "
            "and keep at least twice as many entries as these."),
            ("Chunks are made of kept entries in order of position, and the number of channels is rounded down, as in "
            "the authors' code for accuracy (pipeline). Their code for speed (gpt-fast) makes chunks in order of the "
            "scores by which it kept the entries, so that one may have entries of distant places, and rounds the "
            "number to the nearest."),
            ("Later entries are always read, in addition to the budget; the authors rank them like the others, so that "
            "a token may not read its own entry."),
            "The window has 32 queries; the authors' runs of SCBench have 128.",
            "Each token of a question chooses its own chunks, as if it were decoded.",
        ),
        limits=(
            ("Entries evicted at the end of the context cannot be chosen by later questions; the paper's variant for "
            "several turns, which keeps all, is not built."),
            "Bounds of small chunks take as many bytes as keys: at a budget of 25 %, chunks have two entries.",
        ),
    )

    def minimum_entries(self) -> int:
        """An entry to choose, and enough that the kept ones exceed the window."""
        return self.window + 1

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return ChosenKV(queries=self.window)

    def kept(self, length: int) -> int:
        """Entries per KV head that stay: the first stage takes a power of the ratio, the greater the higher it is."""
        assert self.rows is not None
        ratio = max(1.0, length / self.rows)
        return int(length / ratio ** min(0.2 + 0.06 * math.log2(ratio), 0.8))

    def stored_entries(self, shape: Shape) -> int:
        """Entries per KV head that are kept of the context."""
        return self.kept(shape.length)

    def chunk(self, length: int) -> int:
        """Entries per chunk: the root of the ratio of kept entries to those that a token reads."""
        assert self.rows is not None
        ratio = self.kept(length) / self.rows
        size = math.ceil(math.sqrt(ratio))
        return size if size <= ratio else 1

    def channels(self, chunk: int, kept: int, width: int) -> int:
        """Channels by which chunks are chosen: what chunks of this size leave of the ratio."""
        assert self.rows is not None
        return max(1, min(width, width * chunk * self.rows // kept))

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Keep the entries with the most attention, and store the extreme keys of their chunks."""
        assert kv.recent_queries is not None
        entries = kv.n
        mass = group_mean(attention_mass_of(kv.recent_queries, kv, step), kv.keys.shape[1])
        kv.keep(top_entries(pool_before(mass, self.window, self.kernel, "max"), self.kept(entries)))
        size = self.chunk(entries)
        offsets = torch.arange(0, kv.n + size, size, dtype=torch.int32, device=kv.keys.device).clamp_max(kv.n)
        kv.start({"bounds": find_bounds(kv.keys, size), "offsets": offsets})  # [B, H_kv, 2, chunks, D], [chunks + 1]

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the best chunks and all later entries."""
        assert self.rows is not None and self.length is not None
        bounds, offsets = kv.index["bounds"], kv.scan(kv.index["offsets"])
        size, kept = self.chunk(self.length), kv.indexed
        grouped = step.query[:, :, 0].float().unflatten(1, (bounds.shape[1], -1))  # [B, H_kv, G, D]
        high = (grouped.sum(2) > 0).long()
        channels = grouped.abs().mean(2).topk(self.channels(size, kept, grouped.shape[3]), dim=-1).indices
        sides = high.gather(2, channels)[:, :, None, None].expand(-1, -1, 1, bounds.shape[3], -1)
        both = bounds.gather(4, channels[:, :, None, None].expand(-1, -1, 2, bounds.shape[3], -1))
        extreme = kv.scan(both.gather(2, sides)[:, :, 0]).float()  # [B, H_kv, chunks, r]
        part = grouped.gather(3, channels[:, :, None].expand(-1, -1, grouped.shape[2], -1))
        covered = part.abs().sum(-1) / grouped.abs().sum(-1).clamp_min(1e-12)
        logits = part @ extreme.mT * step.scale / covered.clamp_min(1e-12).sqrt()[..., None]
        chosen = mark_units(logits.softmax(-1).mean(2), offsets.expand(*bounds.shape[:2], -1), kept, self.rows)
        mask = torch.ones((*chosen.shape[:2], seen), dtype=torch.bool, device=chosen.device)
        mask[:, :, :kept] = chosen
        return kv.read(step, mask)

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the extreme keys of the chunks, and of where chunks start."""
        chunks = self._chunks(shape)
        return layer.kv_heads * chunks * 2 * layer.key_dim * shape.itemsize + (chunks + 1) * OFFSET_BYTES

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of where chunks start, which is equal in all sequences."""
        selecting = 0 if self.identity(shape) else sum(x.window is None for x in shape.layers)
        return selecting * (self._chunks(shape) + 1) * OFFSET_BYTES if selecting else 0

    def _chunks(self, shape: Shape) -> int:
        return -(-self.kept(shape.length) // self.chunk(shape.length))

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: one bound of every chunk in a few channels, where chunks start, and entries."""
        kept, size, chunks = self.kept(shape.length), self.chunk(shape.length), self._chunks(shape)
        scanned = chunks * self.channels(size, kept, layer.key_dim) * shape.itemsize
        return layer.kv_heads * scanned + (chunks + 1) * OFFSET_BYTES + self.entry_bytes(layer, shape)


def find_bounds(keys: Tensor, size: int) -> Tensor:
    """The least and the largest element of each channel in chunks of `size` keys, the last one shorter.

    keys: [B, H_kv, n, D]. Returns [B, H_kv, 2, chunks, D].
    """
    whole = keys.shape[2] - keys.shape[2] % size
    parts = [keys[:, :, :whole].unflatten(2, (whole // size, size)), keys[:, :, None, whole:]]
    return torch.cat([torch.stack([x.amin(3), x.amax(3)], dim=2) for x in parts if x.shape[3]], dim=3)
