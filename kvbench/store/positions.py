"""Entries by position, overwritten in place: the store of diffusion models.

Every token attends to every token and changes while others do, so there is no order of arrival: an entry is where its
token is, and is as old as the step that computed it last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from kvbench.kernels.dense_attention import dense_attention
from kvbench.kernels.dense_attention.torch import WITHOUT_CUDNN
from kvbench.step import Step
from kvbench.store.entries import storage_bytes


def attend_rows(step: Step) -> Tensor:
    """Attention of a step's entries over themselves, each over all. [B, H_q, m, D_v]"""
    return attend_over(step, step.key, step.value)


def attend_over(step: Step, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of a step's entries over these, in any order: their keys are rotated. [B, H_q, m, D_v]

    keys: [B, H_kv, n, D]. values: [B, H_kv, n, D_v]. mask: which of them to look at [B, 1, 1, n]; None: all.
    """
    if step.softcap is not None or step.sinks is not None or step.window is not None:
        raise NotImplementedError("diffusion models with soft caps, sinks or windows are refused at load")
    if mask is None:
        return dense_attention(step.query, keys, values, scale=step.scale, seen=keys.shape[2], causal=False)
    with sdpa_kernel(list(WITHOUT_CUDNN)):
        return F.scaled_dot_product_attention(
            step.query, keys, values, attn_mask=mask, scale=step.scale, enable_gqa=step.query.shape[1] != keys.shape[1]
        )


def sequences(places: Tensor) -> Tensor:
    """Index of each sequence, to go with places in it: `entries[sequences(places), places]`. [B, m] -> [B, 1]"""
    return torch.arange(len(places), device=places.device)[:, None]


@dataclass
class PositionKV:
    """Keys and values of one layer, a place for every position of the sequence.

    length: positions of the sequence.
    """

    length: int
    read_bytes: int = field(default=0, init=False)
    """Of the keys and values that attention looked at so far."""
    keys: Tensor | None = field(default=None, init=False)  # [B, H_kv, N, D]
    values: Tensor | None = field(default=None, init=False)  # [B, H_kv, N, D_v]
    state: dict[str, Tensor] = field(default_factory=dict, init=False)
    """Tensors that a method keeps per layer besides the entries; counted with them."""

    def write(self, step: Step) -> None:
        """Put the step's entries where their tokens are. Two entries of one position must be equal."""
        every = sequences(step.positions)
        for entries, new in zip(self.reserve(step), (step.key, step.value), strict=True):
            entries.transpose(1, 2)[every, step.positions] = new.transpose(1, 2)  # scatter_ would copy all entries

    def reserve(self, step: Step) -> tuple[Tensor, Tensor]:
        """Keys and values of all places, allocated by the first step."""
        if self.keys is None or self.values is None:
            batch, heads, _, key_dim = step.key.shape
            self.keys = step.key.new_zeros(batch, heads, self.length, key_dim)
            self.values = step.value.new_zeros(batch, heads, self.length, step.value.shape[-1])
        return self.keys, self.values

    def attend(self, step: Step, read: Tensor | None = None) -> Tensor:
        """Attention of the step's entries over entries by position. [B, H_q, m, D_v]

        read: places to look at [B, N]; None: all.
        """
        assert self.keys is not None and self.values is not None, "write first"
        if read is None:
            return self.attend_over(step, self.keys, self.values)
        counts = read.sum(-1)
        if counts.min() < counts.max():  # no rectangle: look at all, and weigh some with nothing
            return self.attend_over(step, self.keys, self.values, read[:, None, None])
        places = read.nonzero()[:, 1].view(len(read), -1)
        keys, values = (x.transpose(1, 2)[sequences(places), places].transpose(1, 2) for x in (self.keys, self.values))
        return self.attend_over(step, keys, values)

    def attend_over(self, step: Step, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention over these entries, counted. [B, H_q, m, D_v]"""
        self.read_bytes += keys.nbytes + values.nbytes
        return attend_over(step, keys, values, mask)

    def attend_after_prefix(self, step: Step, count: int) -> Tensor:
        """Attention of all tokens over themselves, of the first `count` over these only. [B, H_q, N, D_v]"""
        parts = [(slice(0, count), count), (slice(count, None), step.key.shape[2])]
        return torch.cat([
            self.attend_over(replace(step, query=step.query[:, :, rows]), step.key[:, :, :end], step.value[:, :, :end])
            for rows, end in parts if end > 0
        ], dim=2)

    def nbytes(self) -> int:
        """Bytes of the storages."""
        return storage_bytes(x for x in (self.keys, self.values, *self.state.values()) if x is not None)
