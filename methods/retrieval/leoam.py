"""LeoAM: chunks of the context are halved where a query may find its keys, and the best ones are read from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.store.chosen import ChosenKV, Tier
from kvbench.techniques.reading import ReadingMethod

CODE = "speedup/longinfer/longinfer/adaptive_kv_manager.py"


@dataclass(frozen=True)
class LeoAM(ReadingMethod):
    """Keeps bounds of chunks of every size on the device, and the entries in a file, from which it reads the best."""

    chunk: Positive = 128
    """Entries of the largest chunks."""
    leaf: Positive = 8
    """Entries of the smallest chunks, the largest halved some times."""
    heads: Literal["layer", "group"] = "layer"
    """Whether all heads of a layer choose together, by the sum of their bounds, or every KV head for itself."""
    tier: Tier = "file"
    """Where the context's entries are: in the memory of the device, on the host, or in a file."""

    card: ClassVar[Card] = Card(
        name="leoam",
        title="LeoAM: Adaptive KV management over GPU, CPU and disk for long-context inference on one GPU",
        idea="Most of a context receives hardly any attention, so one bound per large chunk is enough there. "
        "Only chunks that may hold important keys are halved, so few bounds and few entries are read from the disk.",
        arxiv="2506.20187",
        year=2025,
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        heads="pooled",
        upstream=Upstream(repo="ustc-sunny/Long_Infer_KV", commit="60c78bc", license="Apache-2.0"),
        deviations=(
            ("The tree of the paper is built, as a comment in the authors' code describes it (" + CODE + ", lines 27 "
            "to 39), which leaves the number of halvings open: the best chunks are halved until all of them are "
            "smallest. Their code scores every key of the chosen chunks instead, which reads all of these keys."),
            "Chunks have the same sizes in all layers; the authors' code has chunks of 8 in the first two.",
            ("All layers read the same share of the entries; the authors' layers 0 and 1 have an importance_ratio of "
            "0.5."),
            ("The context's entries are in a file that is really read, and not also in host memory; what is read is "
            "not quantized, and computation waits for them."),
            ("Of the last chunk a token reads as many entries as the budget leaves; the comment takes whole chunks, "
            "whose entries slightly exceed the share."),
            "Later entries are always read, in addition to the budget.",
            "Each token of a question chooses its own chunks, as if it were decoded.",
        ),
        unverified=(
            ("We read the paper's abstract and reviews of it, not the paper; sizes of chunks are those of the authors' "
            "code."),
        ),
        limits=(
            ("The authors' published speed is not that of this selection: " + CODE + ", line 235, replaces the entries "
            "that it chose by those of InfiniGen's selection, whatever chose them before."),
            ("Their disk is simulated: speedup/flexgen/flexgen/flex_opt.py sleeps for the bytes over 7 GB/s, in lines "
            "481 and 491, and reads nothing."),
            ("Their loop over the keys of a chunk stops before the last one, which can never be chosen (" + CODE +
            ", line 102, with the end from line 61)."),
            "The time of a step depends on the disk and on how many of the chosen entries lie next to each other.",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse sizes of chunks that halving does not connect (`UserError`)."""
        super().__post_init__()
        sizes = [self.leaf << x for x in range(32)]
        if self.chunk not in sizes:
            raise UserError(
                f"leoam: chunks of {self.chunk} entries cannot be halved down to {self.leaf}. Use chunk="
                f"{', '.join(map(str, sizes[:5]))} or more."
            )

    @property
    def sizes(self) -> list[int]:
        """Entries of the chunks of each level, the largest first."""
        return [self.chunk >> x for x in range((self.chunk // self.leaf).bit_length())]

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Store the minimum and maximum of every channel over the keys of every chunk, level by level."""
        del step
        kv.start({
            f"level {i}": torch.stack([torch.stack([x.amin(2), x.amax(2)], 2) for x in kv.keys.split(size, 2)], 2)
            for i, size in enumerate(self.sizes)
        })  # [B, H_kv, chunks, 2, D] each

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the chunks with the best bounds and all later entries."""
        batch, heads = kv.keys.shape[:2]
        query = step.query[:, :, 0].float().unflatten(1, (heads, -1))  # [B, H_kv, G, D]
        mask = torch.ones((batch, heads, seen), dtype=torch.bool, device=query.device)
        groups = [slice(0, heads)] if self.heads == "layer" else [slice(x, x + 1) for x in range(heads)]
        for b in range(batch):
            for group in groups:
                chosen = torch.zeros(kv.indexed, dtype=torch.bool)  # on the host: one copy in place of many writes
                for start, stop in self.choose(kv, query[b, group], b, group):
                    chosen[start:stop] = True
                mask[b, group, : kv.indexed] = chosen.to(mask.device)
        return kv.read(step, mask)

    def choose(self, kv: ChosenKV, query: Tensor, b: int, group: slice) -> list[tuple[int, int]]:
        """Halve the best chunks until the best ones, with as many entries as the budget, are smallest.

        query: [H, G, D], of the KV heads of the group. Returns where chosen entries start and stop.
        """
        assert self.rows is not None
        sizes = self.sizes
        roots = self.bound(kv, query, b, group, 0, None)
        chunks = {(0, x): score for x, score in enumerate(roots)}
        while True:
            chosen: list[tuple[int, int, int, int]] = []
            left = self.rows
            for (level, number), _ in sorted(chunks.items(), key=lambda item: -item[1]):
                start = number * sizes[level]
                stop = min(start + sizes[level], kv.indexed)
                chosen.append((level, number, start, min(stop, start + left)))
                left -= stop - start
                if left <= 0:
                    break
            halved = [(level, number) for level, number, *_ in chosen if level < len(sizes) - 1]
            if not halved:
                return [(start, stop) for _, _, start, stop in chosen]
            for level in sorted({x for x, _ in halved}):
                size = sizes[level + 1]
                parents = [x for at, x in halved if at == level]
                halves = [y for x in parents for y in (2 * x, 2 * x + 1) if y * size < kv.indexed]
                scores = self.bound(kv, query, b, group, level + 1, halves)
                for x in parents:
                    del chunks[level, x]
                chunks.update({(level + 1, x): score for x, score in zip(halves, scores, strict=True)})

    def bound(
        self, kv: ChosenKV, query: Tensor, b: int, group: slice, level: int, numbers: list[int] | None
    ) -> list[float]:
        """The largest sum over heads of products that keys of these chunks can have. numbers: None: all of the level"""
        bounds = kv.index[f"level {level}"][b, group]
        read = kv.scan(bounds if numbers is None else bounds[:, numbers]).float()[:, None]  # [H, 1, chunks, 2, D]
        products = query[:, :, None, None] * read
        best: list[float] = products.amax(3).sum((0, 1, 3)).tolist()
        return best

    def _bound_bytes(self, layer: LayerShape, shape: Shape, sizes: list[int]) -> int:
        chunks = sum(-(-shape.length // x) for x in sizes)
        return layer.kv_heads * chunks * 2 * layer.key_dim * shape.itemsize

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the bounds of all chunks."""
        return self._bound_bytes(layer, shape, self.sizes)

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads at most: the bounds of all chunks, and entries."""
        return self.index_bytes(layer, shape) + self.entry_bytes(layer, shape)

    def least_token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads at least: the bounds of the largest chunks, and entries."""
        return self._bound_bytes(layer, shape, self.sizes[:1]) + self.entry_bytes(layer, shape)
