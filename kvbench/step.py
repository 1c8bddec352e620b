"""One layer in one forward pass: `Step`, and `Moment`, its place in the conversation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kvbench.hf import Rope

__all__ = ["Moment", "Step"]


class Moment(StrEnum):
    """The place of a forward pass in the conversation.

    A context, and every later turn (a question, with the answer before it), may be run in several chunks. Results must
    not depend on the size of the chunks, so methods that evict continuously should evict only where `is_last`.
    """

    CONTEXT_CHUNK = "context chunk"
    """A chunk of the context that is not its last one."""
    CONTEXT_END = "context end"
    """The last chunk of the context, or all of it: the method compresses after its attention."""
    TURN_CHUNK = "turn chunk"
    """A chunk of a later turn that is not its last one."""
    TURN_END = "turn end"
    """The last chunk of a later turn, which is not compressed."""
    RECOMPRESS = "recompress"
    """The last chunk of a later turn under `--recompress`: the method compresses again."""
    DECODE = "decode"
    """A generated token."""
    DENOISE = "denoise"
    """A denoising step of a diffusion model."""

    @property
    def in_context(self) -> bool:
        """Whether the pass runs a part of the context."""
        return self in (Moment.CONTEXT_CHUNK, Moment.CONTEXT_END)

    @property
    def compresses(self) -> bool:
        """Whether the method decides now which entries stay."""
        return self in (Moment.CONTEXT_END, Moment.RECOMPRESS)

    @property
    def is_last(self) -> bool:
        """Whether no further chunk of the same context or turn follows."""
        return self not in (Moment.CONTEXT_CHUNK, Moment.TURN_CHUNK)

    @property
    def chunk(self) -> Moment:
        """The moment of the chunks before the last one."""
        return Moment.CONTEXT_CHUNK if self.in_context else Moment.TURN_CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer in one forward pass; read-only."""

    layer: int
    moment: Moment
    positions: Tensor
    """Logical positions of the new tokens. [B, T]"""
    seen: int
    """Tokens so far, those of this pass included; not the number of stored entries."""
    query: Tensor
    """Rotated. [B, H_q, T, D]"""
    key: Tensor
    """Rotated, of the new tokens only. [B, H_kv, T, D]"""
    value: Tensor
    """Of the new tokens only. [B, H_kv, T, D_v]"""
    scale: float
    window: int | None
    """A query attends to keys at distances below this; None: to all."""
    softcap: float | None
    sinks: Tensor | None
    """Learned attention-sink logits. [H_q]"""
    causal: bool
    rope: Rope
    """Rotary embedding of this layer."""
    ids: Tensor | None = None
    """Ids of the new tokens; None: a step without tokens, made in a test. [B, T]"""
    hidden: Tensor | None = None
    """Hidden states of the new tokens as the layer's attention takes them, where the method reads them
    (`Method.reads_hidden`); None: elsewhere, and where the adapter does not find them. [B, T, hidden]"""
    output: Tensor | None = None
    """Output projection, by query head, where the method compresses; None: elsewhere, and where the adapter does not
    find it. [H_q, D_v, hidden]"""

    shared: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that earlier layers of this pass left for later ones, where the method does (`Method.shares_layers`)."""

    @property
    def options(self) -> dict[str, Any]:
        """Scale, tokens so far, window and soft cap, as operations of partial attention take them."""
        return {"scale": self.scale, "seen": self.seen, "window": self.window, "softcap": self.softcap}

    def cap(self, logits: Tensor) -> Tensor:
        """Scaled logits under the layer's soft cap, if it has one."""
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def tokens(self) -> list[Step]:
        """This step for each of its new tokens alone."""
        count = self.query.shape[2]
        return [
            self.part(slice(t, t + 1), seen=self.seen - count + t + 1, moment=self.moment) for t in range(count)
        ]

    def part(self, tokens: slice, *, seen: int, moment: Moment) -> Step:
        """This step for some of its new tokens. seen: tokens so far with the last of them."""
        return replace(
            self, moment=moment, seen=seen, positions=self.positions[:, tokens], query=self.query[:, :, tokens],
            key=self.key[:, :, tokens], value=self.value[:, :, tokens],
            ids=None if self.ids is None else self.ids[:, tokens],
            hidden=None if self.hidden is None else self.hidden[:, tokens],
            output=self.output if moment.compresses else None,
        )
