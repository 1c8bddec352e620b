"""MagicPIG: entries are sampled by hash tables and weighted by how likely they were to be sampled."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.constraints import Ge, Le, Natural
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.reading import EndsMethod

CODE_BYTES, PLACE_BYTES, PARAMETER_BYTES = 2, 4, 4
LEAST_CHANCE = 1e-4
"""Added to every chance, as in the authors' code, so that no weight is unbounded."""


@dataclass(frozen=True)
class MagicPIG(EndsMethod):
    """Reads, per query head, the entries that share two or more hash codes with the query, weighted by 1 / chance."""

    bits: Annotated[int, Ge(1), Le(15)] = 10
    """Signs of random projections in a hash code (K)."""
    tables: Annotated[int, Ge(2)] = 150
    """Hash tables (L)."""
    sinks: Natural = 4
    """First entries, which are always read."""
    seed: Natural = 0
    """Of the projections, and of the order in which entries beyond the budget are left out."""

    card: ClassVar[Card] = Card(
        name="magicpig",
        title="MagicPIG: LSH Sampling for Efficient LLM Generation",
        idea="Attention is an expectation over entries, so a sample estimates it better than the top ones. Hash "
        "tables sample entries near the query's direction, and each is divided by the chance that it was sampled.",
        arxiv="2410.16179",
        year=2024,
        version="2",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        heads="indexed",
        upstream=Upstream(
            repo="Infini-AI-Lab/MagicPIG", commit="ac9aa36c866330ca6ad2ce342a7848d7df6f49bb", license="Apache-2.0"
        ),
        deviations=(
            ("The budget is the most entries that a query head reads: of more samples, a random part is left out, and "
            "the chance of the others is lowered by that share. The authors have no budget: bits and tables decide."),
            "Every layer samples; the authors' layers 0, 16, 32 and 48 read everything.",
            ("All layers and KV heads have the same projections, as in the authors' models/attnserver.py; their RULER "
            "reference draws new ones for every KV head and every 16 layers."),
            ("By default entries stay on the device. With tier=host they are on the host, as in the paper, which also "
            "computes their attention there."),
            "Later entries are always read, in addition to the budget, as in the authors' code.",
            "Each token of a question samples its own entries, as if it were decoded.",
        ),
        unverified=("bits and tables: those of the authors' runs at 2 % of the computation.",),
        limits=(
            ("The tables count as stored bytes: with 150 of them 900 bytes per entry and KV head. In the paper they "
            "are in host memory."),
            "A step reads few entries where queries and keys have no similar directions.",
            "The prompt is run with full attention.",
        ),
    )

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Hash the centered keys between the first and last ones, and sort every table by code."""
        del step
        keys = kv.keys[:, :, self.sinks : kv.n - self.recent].float()
        center = keys.mean(2, keepdim=True)
        generator = torch.Generator().manual_seed(self.seed)
        planes = torch.randn(keys.shape[3], self.tables * self.bits, generator=generator).to(keys.device)
        codes, places = self.hash(keys - center, planes).sort(dim=-1, stable=True)
        kv.start({
            "codes": codes, "places": places.to(torch.int32), "center": center, "planes": planes[None, None],
        })  # [B, H_kv, L, n] each, [B, H_kv, 1, D], [1, 1, D, L * K]

    def hash(self, x: Tensor, planes: Tensor) -> Tensor:
        """The code of every vector in every table. x: [B, H, n, D]. Returns [B, H, L, n] int16"""
        signs = (x @ planes > 0).unflatten(3, (self.tables, self.bits))
        codes: Tensor = signs.float() @ torch.exp2(torch.arange(self.bits, device=x.device))  # faster than shifts
        return codes.to(torch.int16).mT.contiguous()

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over first, last and later entries, and over samples with the weight 1 / chance."""
        query = step.query[:, :, 0].float()  # [B, H_q, D]
        planes, center = kv.scan(kv.index["planes"])[0, 0], kv.scan(kv.index["center"])[:, :, 0]
        counts = self.look_up(kv, self.hash(query[:, :, None], planes)[..., 0])  # [B, H_q, n]
        sampled, share = self.thin(counts >= 2, step)
        mask = torch.ones((*sampled.shape[:2], seen), dtype=torch.bool, device=query.device)
        inner = slice(self.sinks, kv.indexed - self.recent)
        mask[:, :, inner] = sampled
        group = query.shape[1] // center.shape[1]

        def weigh(keys: Tensor, batch: Tensor, head: Tensor, entry: Tensor) -> Tensor:
            """Minus the log of each entry's chance; nothing for entries that are always read. [R]"""
            cosine = F.cosine_similarity(query[batch, head], keys.float() - center[batch, head // group], dim=-1)
            log = (self.chance(cosine) * share[batch, head] + LEAST_CHANCE).log()
            return -log.masked_fill((entry < inner.start) | (entry >= inner.stop), 0.0)

        return kv.read(step, mask, weigh)

    def look_up(self, kv: ChosenKV, codes: Tensor) -> Tensor:
        """In how many tables each entry has the query's code. codes: [B, H_q, L]. Returns [B, H_q, n]"""
        held, places = kv.index["codes"], kv.index["places"]
        batch, heads = held.shape[:2]
        wanted = codes.unflatten(1, (heads, -1)).movedim(2, 3).contiguous()  # [B, H_kv, L, G]
        low, high = torch.searchsorted(held, wanted), torch.searchsorted(held, wanted, right=True)
        sizes = (high - low).flatten()
        start = (low + torch.arange(batch * heads * self.tables, device=low.device).view(batch, heads, -1, 1)
                 * held.shape[3]).flatten()
        first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        found = places.flatten()[start.repeat_interleave(sizes) + torch.arange(len(first), device=low.device) - first]
        probes = 2 * math.ceil(math.log2(held.shape[3] + 1)) * CODE_BYTES  # of two binary searches
        kv.reads["bytes"] += len(found) * PLACE_BYTES + wanted.numel() * probes
        unit = torch.arange(codes.shape[0] * codes.shape[1], device=low.device).view(batch, heads, 1, -1)
        unit = unit.expand_as(low).flatten().repeat_interleave(sizes)
        counts = torch.bincount(unit * held.shape[3] + found, minlength=batch * codes.shape[1] * held.shape[3])
        return counts.view(batch, codes.shape[1], -1)

    def thin(self, sampled: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """At most as many samples as the budget leaves, at random, and the share of them. [B, H, n], [B, H]"""
        most, total = self.chosen, sampled.sum(-1)
        kept = sampled
        if (total > most).any():
            # by position and not by draw: the order is the same in a batch, alone, and however a question is split
            numbers = torch.stack([
                torch.rand(sampled.shape[1:], generator=self.seed_order(step.layer, x))
                for x in step.positions[:, 0].tolist()
            ]).to(sampled.device)
            best = numbers.masked_fill(~sampled, -1).topk(min(most, sampled.shape[2]), dim=-1).indices
            kept = torch.zeros_like(sampled).scatter_(-1, best, True) & sampled
        return kept, (most / total.clamp_min(1)).clamp_max(1)

    def seed_order(self, layer: int, position: int) -> torch.Generator:
        """Random numbers of a layer and a token."""
        place = random.Random(f"{self.seed} {layer} {position}")
        return torch.Generator().manual_seed(place.getrandbits(32))  # of a longer seed torch takes 32 bits on a CPU

    def chance(self, cosine: Tensor) -> Tensor:
        """The chance that two vectors at this angle share the code of two tables or more."""
        angle = torch.arccos(cosine.double().clamp(-1, 1))  # small chances are differences of numbers near 1
        same = (1 - angle / math.pi) ** self.bits
        none = (1 - same) ** self.tables
        one = self.tables * same * (1 - same) ** (self.tables - 1)
        return (1 - none - one).float()

    def _parameter_bytes(self, layer: LayerShape) -> int:
        return (layer.kv_heads + self.tables * self.bits) * layer.key_dim * PARAMETER_BYTES

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the tables, the projections and the keys' mean."""
        entries = shape.length - self.sinks - self.recent
        return layer.kv_heads * self.tables * entries * (CODE_BYTES + PLACE_BYTES) + self._parameter_bytes(layer)

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of the projections, which all sequences use."""
        widths = [x.key_dim for x in shape.layers if x.window is None and not self.identity(shape)]
        return sum(widths) * self.tables * self.bits * PARAMETER_BYTES

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads at most: all places in all tables, probes, and entries of every query head."""
        group, width = layer.query_heads // layer.kv_heads, (layer.key_dim + layer.value_dim) * shape.itemsize
        entries = shape.length - self.sinks - self.recent
        places = layer.query_heads * self.tables * entries * PLACE_BYTES
        return places + self.least_token_bytes(layer, shape) + group * layer.kv_heads * self.chosen * width

    def least_token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads whose query has no code of any key."""
        entries = shape.length - self.sinks - self.recent
        probes = layer.query_heads * self.tables * 2 * math.ceil(math.log2(entries + 1)) * CODE_BYTES
        width = (layer.key_dim + layer.value_dim) * shape.itemsize
        always = layer.query_heads * (self.sinks + self.recent) * width
        return probes + always + self._parameter_bytes(layer)
