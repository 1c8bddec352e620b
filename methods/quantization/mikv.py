"""MiKV: what an eviction policy would drop is kept at two to four bits."""

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


@dataclass(frozen=True)
class MiKV(TwoPrecisions):
    """Keeps, per KV head, H2O's entries in a high tier and all others in a low one, under one softmax."""

    important: Share = 0.2
    """Share of entries in the high tier, where no budget is asked for."""
    high_bits: Literal[16, 8, 4, 2] = 16
    """16: as the model has them; 8, 4 or 2: codes."""
    low_bits: Literal[2, 3, 4] = 2
    group: Positive | None = None
    """Channels that share a scale and a minimum; None: half of the head."""
    recent: Share = 0.5
    """Share of the high tier for the most recent entries; the others received most attention."""
    balance: bool = True
    """Move outliers of key channels into the queries before keys become codes."""

    card: ClassVar[Card] = Card(
        name="mikv",
        title="No Token Left Behind: Reliable KV Cache Compression via Importance-Aware Mixed Precision Quantization",
        idea="Entries that an eviction policy would drop hold what later turns need, and a few bits are enough for it. "
        "Important rows stay exact, the others become codes, whose key outliers a channel balancer moves into queries.",
        arxiv="2402.18096",
        year=2024,
        family="quantization",
        stages=("generation", "compression"),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=(
            ("Attention is summed over the query heads of a KV head, and the balancer takes the largest of them; the "
            "paper has no grouped queries."),
            "A later turn attends to its own entries in the high tier and demotes in bulk at its end.",
            "In a sliding layer, entries that have left the window are demoted first.",
            "Scales are rounded up and minima down to float16, so that codes cover their range.",
            "Importance counts attention before the low tier's rounding error, in the prompt, and after it, later.",
        ),
        unverified=(
            ("The authors published no code; group follows their tables. The clamp of the balancer to 1e-5 .. 1e5 is "
            "ours, and so is 1 for a channel that no key of the prompt uses, whose range nobody knows yet."),
            "A high tier of 8, 4 or 2 bits holds balanced keys too, and new entries enter it as codes.",
        ),
        limits=(
            "The low tier and its parameters are a lower bound: at 2 bits and groups of 64, 15.6 % of 16-bit entries.",
            "Scores favor early tokens, as H2O's do, and say little in small models.",
            "In plain PyTorch on a CPU unpacking costs more than reading exact entries: a step is slower than full's.",
        ),
    )

    graphable: ClassVar[str | None] = "an entry is demoted in every step, and the store counts its entries on the host."

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.high_bits < self.low_bits:
            raise UserError(
                f"mikv: high_bits must be low_bits or more, got {self.high_bits} and {self.low_bits}: important rows "
                "are not held in fewer bits than the others."
            )

    # What it amounts to

    def high_entries(self, rows: int) -> int:
        """The nearest whole number."""
        return round(self.high_share * rows)

    def identity(self, shape: Shape) -> bool:
        """Every entry exact."""
        return self.high_share == 1 and self.high_bits == EXACT

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Groups must divide every layer's heads."""
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
        """Both tiers."""
        return self.layer(index).bytes_for(shape.layers[index], shape, entries, high=self.high_entries(entries))

    # What it does

    def layer(self, index: int) -> TieredKV:
        """Exact entries with their attention; two tiers after the context."""
        high = None if self.high_bits == EXACT else Coding(self.high_bits, self.group)
        return TieredKV(high=high, low=Coding(self.low_bits, self.group), share=self.high_share)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """One softmax over both tiers; the context also says how large its channels get."""
        if step.moment.in_context:
            kv_heads = step.key.shape[1]
            queries = step.query.unflatten(1, (kv_heads, -1)).float().abs().amax((2, 3))  # [B, H_kv, D]
            for name, largest in (("query_max", queries), ("key_max", step.key.float().abs().amax(2))):
                kv.state[name] = torch.maximum(kv.state[name], largest) if name in kv.state else largest
        return kv.attend(step)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """The end of the context fills the low tier; ever after, what is too much for the high one is demoted."""
        assert isinstance(kv, TieredKV) and kv.positions is not None
        if not step.moment.is_last:
            return
        rows = step.seen if step.window is None else min(step.seen, step.window)
        high = self.high_entries(rows)
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
        """What keys are multiplied by and queries divided by: their ranges meet in the middle. [B, H_kv, 1, D]"""
        largest_query, largest_key = kv.state.pop("query_max"), kv.state.pop("key_max")
        if not self.balance:
            return torch.ones_like(largest_key)[:, :, None]
        return (largest_query / largest_key).sqrt().nan_to_num(nan=1.0, posinf=1.0).clamp(*BALANCER_RANGE)[:, :, None]
