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
    """Codes every row, salient ones in more bits: keys with a scale per channel, values per token of equal channels."""

    important: Share = 0.6
    """Share of entries in the higher precision, where no budget is asked for."""
    high_bits: Literal[2, 3, 4, 8] = 4
    low_bits: Literal[2, 3, 4, 8] = 2
    recent_probes: Share = 0.05
    """Share of the tokens that are probes because they are the last."""
    random_probes: Share = 0.05
    """Share of the tokens that are probes by chance."""
    normalizer: Literal["visible", "length"] = "visible"
    """What a row's attention is divided by: the probes that see it, or, as in the authors' code, all tokens from it on.
    """
    gap: Positive = 100
    """Tokens that are held exactly until they become codes together."""

    card: ClassVar[Card] = Card(
        name="zipcache",
        title="ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification",
        idea="The mean attention that a token receives from the probes that see it tells whether it is salient. "
        "Salient tokens get four bits and the others two, with parameters so few that they hardly count.",
        arxiv="2405.14256",
        year=2024,
        family="quantization",
        stages=("generation", "compression"),
        budget=BudgetKind.BITS,
        heads="pooled",
        upstream=Upstream(repo="ThisisBillhe/ZipCache", commit=None, license=None),
        deviations=(
            ("After the context each block of `gap` tokens is coded once, with parameters of its own; the authors "
            "bring the whole cache back and code it anew."),
            ("Later turns are cut into blocks like answers, at the turn's end. A block's probes are its own last and "
            "random tokens; the authors' code takes the current query alone and knows one turn."),
            "Random probes are drawn without replacement, the same for all sequences of a batch, others by layer.",
            "Keys have a range per sequence; the authors' code takes it over the batch.",
            "Scales are rounded up and minima down to float16, so that codes cover their range.",
        ),
        unverified=("Probes of a block after the context: its share of last and random tokens, as in the prompt.",),
        limits=(
            "One outlying token sets a channel's range for all keys of its precision: long contexts lose accuracy.",
            "A conversation of many blocks reads each by itself: steps get slower by a little with every block.",
            "In plain PyTorch on a CPU unpacking costs more than reading exact entries: a step is slower than full's.",
        ),
    )

    graphable: ClassVar[str | None] = "the tail becomes codes every `gap` tokens, which changes the shapes."

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.low_bits > self.high_bits:
            raise UserError(f"zipcache: low_bits of {self.low_bits} is above high_bits of {self.high_bits}.")

    # What it amounts to

    def high_entries(self, rows: int) -> int:
        """All but the whole number of unimportant entries."""
        return rows - math.floor((1 - self.high_share) * rows + 1e-9)  # 0.4 of 5 entries is 2, whatever 1 - 0.6 is

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """One segment in two precisions."""
        high = self.high_entries(entries)
        coded = (high, self.high_bits), (entries - high, self.low_bits)
        return self.layer(index).bytes_for(shape.layers[index], shape, entries, coded=coded)

    # What it does

    def layer(self, index: int) -> SegmentedKV:
        """Segments of codes and an exact tail."""
        return SegmentedKV()

    def probes(self, layer: int, tokens: int, block: int = 0) -> Tensor:
        """Which of a block's tokens are probes, ascending: the last ones, and random ones before them. [P]"""
        recent = max(1, round(self.recent_probes * tokens))
        before = tokens - recent
        generator = torch.Generator().manual_seed(layer * 1_000_003 + block)
        chosen = torch.randperm(before, generator=generator)[: round(self.random_probes * tokens)]
        return torch.cat([chosen.sort().values, torch.arange(before, tokens)])

    @functools.lru_cache(maxsize=256)  # noqa: B019  # methods are few and small
    def _list_probes(self, layer: int, tokens: int, block: int) -> tuple[int, ...]:
        """`probes` as numbers, so that a decode step draws and copies nothing."""
        return tuple(self.probes(layer, tokens, block).tolist())

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over segments and tail; probes say on the way what they look at."""
        assert isinstance(kv, SegmentedKV)
        count, device = step.query.shape[2], step.query.device
        options: dict[str, Any] = {"scale": step.scale, "window": step.window, "softcap": step.softcap}
        if not kv.segments:
            assert self.length is not None, "fit first: which tokens are probes depends on the context's length"
            first = step.seen - count
            here = self.probes(step.layer, self.length)
            here = here[(here >= first) & (here < step.seen)].to(device)
            kv.scores.add_(attention_mass(
                step.query[:, :, here - first], kv.keys, here - (step.seen - kv.n), sinks=step.sinks, **options
            ))
            return kv.attend(step)
        output, lse = kv.attend_with_lse(step)
        first = kv.n - count  # of the tail's entries, the queries' own
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
        """The context becomes codes at its end, what comes later in blocks."""
        assert isinstance(kv, SegmentedKV)
        if step.moment is Moment.CONTEXT_END:
            assert step.seen == self.length, "a context of another length than the budget was fitted to"
            self._encode(kv, step, kv.n, self.probes(step.layer, step.seen) - (step.seen - kv.n))
        elif step.moment.is_last:
            while kv.n >= self.gap:
                self._encode(kv, step, self.gap, self.probes(step.layer, self.gap, len(kv.segments)))

    def _encode(self, kv: SegmentedKV, step: Step, count: int, probes: Tensor) -> None:
        """Code the first entries of the tail by their saliency. probes: [P], ascending, as entries of the tail."""
        row = torch.arange(count)
        if self.normalizer == "length":
            seen_by = count - row
        else:
            last = row + (step.window or step.seen)  # the first entry too far away to see it
            seen_by = torch.searchsorted(probes, last) - torch.searchsorted(probes, row)
        saliency = kv.scores[:, :, :count] / seen_by.clamp_min(1).to(kv.scores.device)  # no probe may see an entry
        important = top_entries(saliency, self.high_entries(count))
        kv.encode(count, important, self.high_bits, self.low_bits, self.gap)


@functools.lru_cache(maxsize=4096)
def _put_on(device: torch.device, index: tuple[int, ...]) -> Tensor:
    """An index on a device, copied once: a copy from the host cannot be part of a CUDA graph."""
    return torch.tensor(index, device=device)
