"""InstInfer: a few channels of every key give approximate scores, and the best entries are read exactly."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial, merge_partials
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Shape, Step, resolved
from kvbench.store import LayerKV
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.reading import ReadingMethod, mark_ends_and_best

SUM_BYTES = 4
TINY = torch.finfo(torch.float32).tiny


@dataclass
class ChannelKV(ChosenKV):
    """Entries, their keys a second time by channel, and the sum of the values."""

    by_channel: Tensor | None = field(default=None, init=False)  # [B, H_kv, D, capacity]
    value_sum: Tensor | None = field(default=None, init=False)  # [B, H_kv, 1, D_v] float32

    def store_channels(self) -> None:
        """Store the keys a second time, each channel in one piece, and sum up the values."""
        batch, heads, entries, width = self.keys.shape
        self.by_channel = self.keys.new_empty((batch, heads, width, max(entries, self.capacity)))
        self.by_channel[..., :entries] = self.keys.mT
        self.value_sum = self.values.float().sum(2, keepdim=True)
        self.start({})

    def append(self, step: Step) -> None:
        """Add entries, also to the channels."""
        super().append(step)
        if self.by_channel is None:
            return
        if self.total > self.by_channel.shape[3]:
            self.reserve(0, 0)
        self.by_channel[..., self.total - step.key.shape[2] : self.total] = step.key.mT

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for more tokens in both blocks."""
        super().reserve(tokens, forward)
        if self.by_channel is not None and self.total + tokens > self.by_channel.shape[3]:
            held = self.by_channel
            self.by_channel = held.new_empty((*held.shape[:3], self.total + tokens))
            self.by_channel[..., : held.shape[3]] = held

    def add_value(self, value: Tensor) -> Tensor:
        """Add a token's value. Returns the sum up to it, which it reads. [B, H_kv, 1, D_v]"""
        assert self.value_sum is not None
        return self.scan(self.value_sum.add_(value))

    def read_channels(self, channels: Tensor, entries: int) -> Tensor:
        """These channels of the first keys. channels: [B, H_kv, r]. Returns [B, H_kv, r, n]"""
        assert self.by_channel is not None
        keys = self.by_channel[..., :entries]
        return self.scan(keys.gather(2, channels[..., None].expand(-1, -1, -1, entries)))

    def fork(self) -> LayerKV:
        """A copy with its own channels and sum, which are written in place."""
        other = super().fork()
        assert isinstance(other, ChannelKV)
        if self.by_channel is not None and self.value_sum is not None:
            other.by_channel, other.value_sum = self.by_channel.clone(), self.value_sum.clone()
        return other

    def close(self) -> None:
        """Free the entries, the channels and the sum."""
        super().close()
        self.by_channel = self.value_sum = None

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        return [*super().tensors(), *(x for x in (self.by_channel, self.value_sum) if x is not None)]

    def spare_bytes(self) -> int:
        """Bytes of both blocks that hold no entry yet."""
        unused = 0 if self.by_channel is None else self.by_channel[..., self.total :].numel() * self.by_channel.itemsize
        return super().spare_bytes() + unused


@dataclass(frozen=True)
class InstInfer(ReadingMethod):
    """Reads, per KV head, the entries with the highest approximate scores; the mean value stands for all others."""

    channels: Positive | None = None
    """Channels of a key that give its approximate score. None: a quarter of them."""
    recent: Natural | None = None
    """Last entries, which are always read. None: a quarter of the budget."""

    key_channels: int | None = resolved()
    """The number of channels, as resolved."""
    last: int | None = resolved()
    """The number of last entries, as resolved."""

    card: ClassVar[Card] = Card(
        name="instinfer",
        title="InstInfer: In-Storage Attention Offloading for Cost-Effective Long-Context LLM Inference",
        idea="The channels in which a query is largest decide most of its logits, so a token reads only those of all "
        "keys, then the best entries whole. The mean of all values stands for the entries that are not read.",
        arxiv="2409.04992",
        year=2024,
        family="retrieval",
        stages=("retrieval",),
        budget=BudgetKind.READ,
        paper_budget="12.5%",
        heads="independent",
        upstream=None,
        deviations=(
            ("Its selection, SparF, in a form like SparQ's (arXiv 2312.04985), with keys stored a second time by "
            "channel; neither the drive nor its format is simulated. On such a drive only a query and an output cross "
            "the link in each layer."),
            ("A group of query heads chooses channels by the sum of their magnitudes and entries by the sum of their "
            "shares, and reads them once."),
            "Each token of a question chooses its own entries, as if it were decoded.",
        ),
        unverified=(
            "No code is published. We read a part of the paper; the selection there is SparQ's.",
            "channels: a quarter of the channels; the paper gives only the compression of all reads, 1/8 by default.",
            "recent: a quarter of the budget.",
        ),
        limits=("It saves reads and costs memory: keys are stored twice.", "The prompt is run with full attention."),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the budget, the channels and the recent entries."""
        fitted = super().fit(budget, shape)
        width = min(x.key_dim for x in shape.layers)
        if self.channels is not None and self.channels > width:
            raise UserError(
                f"instinfer: channels is {self.channels}, and keys of the model have {width}. Use --set channels=1 to "
                f"{width}, or leave it out for {max(1, width // 4)}."
            )
        last = self.recent
        if last is None and fitted.rows is not None:
            last = max(1, fitted.rows // 4)
        return replace(fitted, key_channels=self.channels or max(1, width // 4), last=last)

    def minimum_entries(self) -> int:
        """The recent entries and one to choose."""
        return 2 if self.recent is None else self.recent + 1

    def layer(self, index: int) -> LayerKV:
        """A store with keys by channel."""
        return ChannelKV()

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Store keys by channel."""
        del step
        assert isinstance(kv, ChannelKV)
        kv.store_channels()

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the best entries, and the mean value with the approximate share of the others."""
        assert isinstance(kv, ChannelKV) and self.rows and self.key_channels and self.last is not None
        grouped = step.query[:, :, 0].float().unflatten(1, (kv.keys.shape[1], -1))  # [B, H_kv, G, D]
        magnitude = grouped.abs()
        channels = magnitude.sum(2).topk(self.key_channels, dim=-1).indices  # [B, H_kv, r]
        keys = kv.read_channels(channels, seen).float()
        part = channels[:, :, None].expand(-1, -1, grouped.shape[2], -1)
        covered = magnitude.gather(3, part).sum(-1) / magnitude.sum(-1).clamp_min(1e-12)  # [B, H_kv, G]
        logits = grouped.gather(3, part) @ keys * step.scale / covered.clamp_min(1e-12).sqrt()[..., None]
        shares = logits.softmax(-1)  # [B, H_kv, G, n]
        mask = mark_ends_and_best(shares.sum(2), self.rows, 0, self.last)
        chosen = kv.read(step, mask)
        # Of a group, a head may have no share of what is read: the mean value then stands for all of its attention.
        alpha = (shares * mask[:, :, None]).sum(-1).flatten(1)[..., None].clamp_min(TINY)  # [B, H_q, 1]
        mean = (kv.add_value(step.value) / seen).repeat_interleave(grouped.shape[2], dim=1)
        rest = Partial(mean, chosen.lse + ((1 - alpha).clamp_min(0) / alpha).log())
        return Partial(merge_partials([chosen, rest]), torch.logaddexp(chosen.lse, rest.lse))

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the keys by channel and of the sum of the values."""
        return layer.kv_heads * (shape.length * layer.key_dim * shape.itemsize + layer.value_dim * SUM_BYTES)

    def copied_bytes(self, shape: Shape) -> int:
        """Bytes of the keys by channel and of the sum of the values, which are written in place."""
        if self.identity(shape):
            return 0
        return sum(self.index_bytes(x, shape) for i, x in enumerate(shape.layers) if self.chooses(i, x.window))

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of some channels of all keys, of the sum of the values, and of the entries read."""
        assert self.key_channels is not None
        scanned = shape.length * self.key_channels * shape.itemsize + layer.value_dim * SUM_BYTES
        return self.entry_bytes(layer, shape) + layer.kv_heads * scanned
