"""ZipCache: salient tokens in four bits, the others in two."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.errors import UserError
from kvbench.kernels.attention_mass import attention_mass
from kvbench.method import BudgetKind, Card, Moment, Shape, Step, Upstream
from kvbench.methods.quantization.two_precisions import TwoPrecisions
from kvbench.selection import top_entries
from kvbench.store import LayerKV
from kvbench.store.segments import SegmentedKV


@dataclass(frozen=True)
class ZipCache(TwoPrecisions):
    """Quantizes every entry, salient ones in more bits: keys per channel, values per token of equalized channels."""

    important: Share = 0.6
    """Share of entries in the higher precision if there is no budget."""
    high_bits: Literal[2, 3, 4, 8] = 4
    low_bits: Literal[2, 3, 4, 8] = 2
    recent_probes: Share = 0.05
    """Share of the tokens, the last ones, that are probes."""
    random_probes: Share = 0.05
    """Share of the tokens, chosen at random, that are probes."""
    normalizer: Literal["visible", "length"] = "visible"
    """Divisor of an entry's attention: the number of probes that see it, or, as in the authors' code, the number of
    tokens from it on."""
    gap: Positive = 100
    """Number of later tokens that stay exact until they are quantized together."""

    card: ClassVar[Card] = Card(
        name="zipcache",
        title="ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
        idea="The mean attention that a token receives from the probes that see it is its saliency. "
        "Salient tokens get four bits and the others two, with few scales and minima.",
        arxiv="2405.14256",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="pooled",
        upstream=Upstream(repo="ThisisBillhe/ZipCache", commit="b6932b9", license="MIT"),
        deviations=(
            ("The attention of an entry is divided by the number of probes that see it, as in the paper's equation; "
            "the authors' code divides by the number of tokens from the entry on (normalizer=length)."),
            ("After the context each block of `gap` tokens is quantized once, with its own scales and minima; the "
            "authors restore the whole cache and quantize it again."),
            ("Later turns are split into blocks like answers, at the turn's end. The probes of a block are its own "
            "last and random tokens; the authors' code uses only the current query and supports one turn."),
            "Random probes are drawn without replacement, per layer, and are equal for all sequences of a batch.",
            ("The numbers of last and of random probes are rounded to the nearest; the authors round the first up and "
            "the second down."),
            ("Values of different heads that share a scale have the same rank by place. The authors' code ranks "
            "unimportant ones by saliency."),
            ("The range of the keys and the scales of the values' channels are per sequence; in the authors' code they "
            "are over the batch."),
            "Scales are rounded up and minima down to float16, so that codes cover the range.",
        ),
        limits=(
            "One outlier sets the range of a channel for all keys of its precision, so long contexts lose accuracy.",
            "Each block is read separately, so steps become a little slower with every block of the conversation.",
            "In plain PyTorch on a CPU a step is slower than with the full cache: unpacking costs more than it saves.",
        ),
    )

    graphable: ClassVar[str | None] = "the last entries are quantized every `gap` tokens, which changes the shapes."

    def __post_init__(self) -> None:
        """Refuse a higher precision with fewer bits than the lower one (`UserError`)."""
        super().__post_init__()
        if self.low_bits > self.high_bits:
            raise UserError(
                f"zipcache: low_bits of {self.low_bits} is above high_bits of {self.high_bits}. Use high_bits="
                f"{self.low_bits} or more."
            )

    # Budget and bytes

    def high_entries(self, entries: int) -> int:
        """All entries but the unimportant share, rounded down."""
        return entries - math.floor((1 - self.high_share) * entries + 1e-9)  # 1 - 0.6 is below 0.4

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Declared bytes of one segment in two precisions."""
        high = self.high_entries(entries)
        coded = (high, self.high_bits), (entries - high, self.low_bits)
        return self.layer(index).bytes_for(shape.layers[index], shape, entries, coded=coded)

    # Storage, attention, eviction

    def layer(self, index: int) -> SegmentedKV:
        """A store of quantized segments and an exact tail."""
        return SegmentedKV()

    def probes(self, layer: int, tokens: int, block: int = 0) -> Tensor:
        """The tokens of a block that are probes: random ones, then the last ones, ascending. [P]"""
        recent = max(1, round(self.recent_probes * tokens))
        before = tokens - recent
        generator = torch.Generator().manual_seed(layer * 1_000_003 + block)
        chosen = torch.randperm(before, generator=generator)[: round(self.random_probes * tokens)]
        return torch.cat([chosen.sort().values, torch.arange(before, tokens)])

    @functools.lru_cache(maxsize=256)  # noqa: B019  # methods are few and small
    def _list_probes(self, layer: int, tokens: int, block: int) -> tuple[int, ...]:
        """`probes` as cached integers, so that a decode step neither draws nor copies."""
        return tuple(self.probes(layer, tokens, block).tolist())

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over segments and tail; adds the attention of the probes to the scores. [B, H_q, T, D_v]"""
        assert isinstance(kv, SegmentedKV)
        count, device = step.query.shape[2], step.query.device
        options: dict[str, Any] = {"scale": step.scale, "window": step.window, "softcap": step.softcap}
        if not kv.segments:
            assert self.length is not None, "call fit first: the choice of probes depends on the length of the context"
            first = step.seen - count
            here = self.probes(step.layer, self.length)
            here = here[(here >= first) & (here < step.seen)].to(device)
            kv.scores.add_(attention_mass(
                step.query[:, :, here - first], kv.keys, here - (step.seen - kv.n), sinks=step.sinks, **options
            ))
            return kv.attend(step)
        output, lse = kv.attend_with_lse(step)
        first = kv.n - count  # the position in the tail of the first query's own entry
        for low in range(first // self.gap * self.gap, kv.n, self.gap):
            block = slice(low, min(low + self.gap, kv.n))
            probes = self._list_probes(step.layer, self.gap, len(kv.segments) + low // self.gap)
            chosen = tuple(low + x for x in probes if first <= low + x < kv.n)
            if chosen:
                here = _put_on(device, chosen)
                new = here - first
                kv.scores[:, :, block].add_(attention_mass(
                    step.query[:, :, new], kv.keys[:, :, block], here - low, lse=lse[:, :, new], **options
                ))
        return output

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Quantize the context at its end, and later entries in blocks."""
        assert isinstance(kv, SegmentedKV)
        if step.moment is Moment.CONTEXT_END:
            assert step.seen == self.length, "the context's length differs from the one that the budget was fitted to"
            self._encode(kv, step, kv.n, self.probes(step.layer, step.seen) - (step.seen - kv.n))
        elif step.moment.is_last:
            while kv.n >= self.gap:
                self._encode(kv, step, self.gap, self.probes(step.layer, self.gap, len(kv.segments)))

    def _encode(self, kv: SegmentedKV, step: Step, count: int, probes: Tensor) -> None:
        """Quantize the first entries of the tail by saliency. probes: [P], ascending, as positions in the tail."""
        entry = torch.arange(count)
        if self.normalizer == "length":
            seen_by = count - entry
        else:
            last = entry + (step.window or step.seen)  # the first query position that no longer sees the entry
            seen_by = torch.searchsorted(probes, last) - torch.searchsorted(probes, entry)
        saliency = kv.scores[:, :, :count] / seen_by.clamp_min(1).to(kv.scores.device)  # maybe no probe sees it
        important = top_entries(saliency, self.high_entries(count))
        kv.encode(count, important, self.high_bits, self.low_bits, self.gap)


@functools.lru_cache(maxsize=4096)
def _put_on(device: torch.device, index: tuple[int, ...]) -> Tensor:
    """An index on a device, copied once: a copy from the host cannot be part of a CUDA graph."""
    return torch.tensor(index, device=device)
