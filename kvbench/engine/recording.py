"""The forward passes of one exact prefill, recorded so that other methods can compress the same context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.step import Step


class InexactPrefillError(Exception):
    """A method computes other attention in its prefill than the full cache, so it cannot use a recording."""


@dataclass(frozen=True)
class Pass:
    """One forward pass over a chunk of the context."""

    start: int
    """Tokens before it."""
    ids: Tensor  # [B, T]
    steps: Sequence[Step]
    """By layer."""
    outputs: Sequence[Tensor]
    """The attention outputs by layer; empty if they are not kept. [B, H_q, T, D_v]"""
    logits: Tensor  # of the last position [B, 1, V]


@dataclass(frozen=True)
class Recording:
    """The passes of a context under the full cache: each layer's queries, keys and values, and the logits."""

    passes: Sequence[Pass]
    kernels: dict[str, str] = field(default_factory=dict)
    """The implementation of each operation that ran, as `kernels.choice.using` records it."""
    hidden: bool = False
    """Whether the steps have hidden states."""

    def find(self, start: int, ids: Tensor) -> Pass | None:
        """The recorded pass over these tokens at this place; None: there is none."""
        return next((x for x in self.passes if x.start == start and torch.equal(x.ids, ids)), None)
