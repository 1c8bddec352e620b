"""MiKV: stores the entries that an eviction policy would drop in two to four bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Shape, Step
from kvbench.methods.quantization.two_precisions import TwoPrecisions
from kvbench.selection import top_entries
from kvbench.store import LayerKV
from kvbench.store.tiers import EXACT, Coding, TieredKV

BALANCER_RANGE = (1e-5, 1e5)
MAXIMUM_BYTES = 4


@dataclass(frozen=True)
class MiKV(TwoPrecisions):
    """Stores, per KV head, the entries that H2O would keep in a high tier and all others in a low tier."""

    important: Share = 0.2
    """Share of entries in the high tier if there is no budget."""
    high_bits: Literal[16, 8, 4, 2] = 16
    """16: exact, in the model's element type; 8, 4 or 2: quantized."""
    low_bits: Literal[2, 3, 4] = 2
    group: Positive | None = None
    """Channels that share a scale and a minimum; None: half of the head."""
    recent: Share = 0.5
    """Share of the high tier for the most recent entries; the rest is for those with the most attention."""
    balance: bool = True
    """Move outliers of key channels into the queries before keys are quantized."""

    card: ClassVar[Card] = Card(
        name="mikv",
        version="2",
        title="No Token Left Behind: Reliable KV Cache Compression via Importance-Aware Mixed Precision Quantization",
        idea="Later turns may need the entries that an eviction policy would drop, and a few bits are enough for them. "
        "Important entries stay exact; the others are quantized after a balancer moves key outliers into queries.",
        arxiv="2402.18096",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=(
            ("Attention is summed over the query heads of a KV head, and the balancer takes the largest of them; the "
            "paper has no grouped queries."),
            "A later turn attends to its own entries in the high tier; at its end, entries are demoted together.",
            "In a sliding layer, entries that have left the window are demoted first.",
            "Scales are rounded up and minima down to float16, so that codes cover the range.",
            "Importance is attention to exact keys in the prompt; later, rounding in the low tier affects it.",
        ),
        unverified=(
            ("The authors published no code; group follows their tables. Two choices are kvbench's: the balancer is "
            "clamped to 1e-5 .. 1e5, and it is 1 for a channel that is zero in all keys of the prompt."),
            "A high tier of 8, 4 or 2 bits also stores balanced keys, and new entries are quantized when added to it.",
        ),
        limits=(
            "The low tier sets the smallest size: 15.6 % of 16-bit entries at 2 bits with groups of 64.",
            "Scores favor early tokens, as in H2O, and are poor predictors in small models.",
            "In plain PyTorch on a CPU a step is slower than with the full cache: unpacking costs more than it saves.",
        ),
    )

    graphable: ClassVar[str | None] = "an entry is demoted in every step, and the store counts its entries on the host."

    def __post_init__(self) -> None:
        """Refuse a high tier with fewer bits than the low one (`UserError`)."""
        super().__post_init__()
        if self.high_bits < self.low_bits:
            raise UserError(
                f"mikv: high_bits must be low_bits or more, got {self.high_bits} and {self.low_bits}: important "
                "entries are not stored in fewer bits than the others."
            )

    # Budget and bytes

    def high_entries(self, entries: int) -> int:
        """The high share of the entries, rounded to the nearest number."""
        return round(self.high_share * entries)

    def identity(self, shape: Shape) -> bool:
        """Whether every entry is exact."""
        return self.high_share == 1 and self.high_bits == EXACT

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget; refuse groups that do not divide the heads of every layer (`UserError`)."""
        for layer in shape.layers:
            for width in (layer.key_dim, layer.value_dim):
                size = Coding(self.low_bits, self.group).group(width)
                if width % size:
                    raise UserError(
                        f"mikv: groups of {size} channels do not divide heads of {width} channels. Set group to a "
                        f"divisor of {width}."
                    )
        return super().fit(budget, shape)

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Declared bytes of both tiers."""
        return self.layer(index).bytes_for(shape.layers[index], shape, entries, high=self.high_entries(entries))

    def running_bytes(self, shape: Shape) -> int:
        """Bytes for scoring, and of each channel's maximum over queries and over keys."""
        return super().running_bytes(shape) + sum(2 * MAXIMUM_BYTES * x.kv_heads * x.key_dim for x in shape.layers)

    # Storage, attention, eviction

    def layer(self, index: int) -> TieredKV:
        """A store of exact entries and their attention, which is split into two tiers after the context."""
        high = None if self.high_bits == EXACT else Coding(self.high_bits, self.group)
        return TieredKV(high=high, low=Coding(self.low_bits, self.group), share=self.high_share)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention with one softmax; records each channel's maximum in the context. [B, H_q, T, D_v]"""
        if step.moment.in_context:
            kv_heads = step.key.shape[1]
            queries = step.query.unflatten(1, (kv_heads, -1)).float().abs().amax((2, 3))  # [B, H_kv, D]
            for name, largest in (("query_max", queries), ("key_max", step.key.float().abs().amax(2))):
                kv.state[name] = torch.maximum(kv.state[name], largest) if name in kv.state else largest
        return kv.attend(step)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Split the entries into tiers at the end of the context; later demote those that exceed the high tier."""
        assert isinstance(kv, TieredKV) and kv.positions is not None
        if not step.moment.is_last:
            return
        entries = step.seen if step.window is None else min(step.seen, step.window)
        high = self.high_entries(entries)
        recent = kv.positions >= step.seen - round(high * self.recent)
        scores = kv.scores.masked_fill(recent, torch.inf)
        if step.window is not None:
            scores = scores.masked_fill(kv.positions <= step.seen - step.window, -torch.inf)
        if step.moment.in_context:
            most = kv.capacity if step.window is None else min(kv.capacity, step.window)
            kv.split(top_entries(scores, high), self._balancer(kv), self.high_entries(most))
        elif kv.n > high:
            kv.demote(scores.topk(kv.n - high, dim=-1, largest=False).indices)

    def _balancer(self, kv: LayerKV) -> Tensor:
        """The factors that multiply keys and divide queries, so that both have the same range. [B, H_kv, 1, D]"""
        largest_query, largest_key = kv.state.pop("query_max"), kv.state.pop("key_max")
        if not self.balance:
            return torch.ones_like(largest_key)[:, :, None]
        return (largest_query / largest_key).sqrt().nan_to_num(nan=1.0, posinf=1.0).clamp(*BALANCER_RANGE)[:, :, None]
