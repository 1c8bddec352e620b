"""ReasonCACHE's prefixes: trained keys and values that stand before a text in every layer (arXiv 2602.02366).

They start as the entries of a demonstration, so that without a step of training they are in-context learning from it.
The model stays as it is: the loss is that of the answers. In training a prefix stands at positions 0 to m - 1, and the
text after it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from kvbench.hf import Forward
from kvbench.hf.adapter import attached
from kvbench.kernels.dense_attention.torch import WITHOUT_CUDNN
from kvbench.method import Moment, Step
from kvbench.techniques.training import WHOLE, TrainingProgress, train_part

if TYPE_CHECKING:
    from kvbench.hf import Model

RATE, WARM, CLIP = 0.15, 10, 1.0
Batch = tuple[Tensor, Tensor]
"""Ids, and the id to predict at every place, -100 where there is none. [B, T] each"""


class Prefix(nn.Module):
    """Trained keys, rotated to positions 0 to m - 1, and values of every layer. [H_kv, m, D] each"""

    def __init__(self, model: Model, entries: int) -> None:
        super().__init__()
        self.keys, self.values = (
            nn.ParameterList(nn.Parameter(torch.zeros(x.kv_heads, entries, width)) for x, width in sizes)
            for sizes in ([(x, x.key_dim) for x in model.layers], [(x, x.value_dim) for x in model.layers])
        )

    @property
    def entries(self) -> int:
        """Entries per KV head."""
        return int(self.keys[0].shape[1])

    def attend(self, step: Step) -> Tensor:
        """Attention of a whole text over the prefix and itself, with gradients. [B, H_q, T, D_v]"""
        batch, count = step.query.shape[0], step.query.shape[2]
        keys = torch.cat([self.keys[step.layer].expand(batch, -1, -1, -1).to(step.key.dtype), step.key], dim=2)
        values = torch.cat([self.values[step.layer].expand(batch, -1, -1, -1).to(step.value.dtype), step.value], dim=2)
        place = torch.arange(keys.shape[2], device=keys.device)
        ahead = place[-count:, None] - place
        mask = (ahead >= 0) & (ahead < (step.window or keys.shape[2]))
        with sdpa_kernel(list(WITHOUT_CUDNN)):
            return F.scaled_dot_product_attention(
                step.query, keys, values, attn_mask=mask, scale=step.scale, enable_gqa=True
            )

    def take(self, model: Model, demonstration: Tensor) -> None:
        """Start as the entries of a demonstration's last tokens, moved to the first positions. demonstration: [1, n]"""
        count, entries = demonstration.shape[1], self.entries

        def attend(step: Step) -> Tensor:
            last = slice(count - entries, count)
            back = torch.full((1, entries), entries - count, device=step.key.device)
            self.keys[step.layer].data.copy_(step.rope.shift(step.key[:, :, last], back)[0])
            self.values[step.layer].data.copy_(step.value[0, :, last])
            with sdpa_kernel(list(WITHOUT_CUDNN)):
                return F.scaled_dot_product_attention(
                    step.query, step.key, step.value, is_causal=True, scale=step.scale, enable_gqa=True
                )

        place = torch.arange(count, device=demonstration.device)[None]
        forward = Forward(
            moment=Moment.CONTEXT_CHUNK, positions=place, seen=count, attend=attend, ropes=model.ropes
        )
        with attached(model.module):
            model.run(demonstration, forward, 1)


def predict(model: Model, prefix: Prefix, ids: Tensor, places: Tensor, *, gradients: bool = False) -> Tensor:
    """Logits at these places [K] of texts after the prefix. ids: [B, T]. Returns [B, K, V]"""
    positions = torch.arange(prefix.entries, prefix.entries + ids.shape[1], device=ids.device).expand_as(ids)
    forward = Forward(
        moment=Moment.CONTEXT_CHUNK, positions=positions, seen=ids.shape[1], attend=prefix.attend, ropes=model.ropes,
        gradients=gradients,
    )
    with attached(model.module):
        return model.run(ids, forward, places)


def train(
    model: Model, entries: int, steps: int, demonstration: Tensor, draw: Callable[[int], Batch],
    progress: TrainingProgress = WHOLE,
) -> dict[str, Tensor]:
    """Train a prefix on answers; the model stays as it is. Each step reports its loss.

    demonstration: whose last entries it starts as [1, n]. draw: the batch of a step.
    """
    prefix = Prefix(model, entries).to(model.device)
    prefix.take(model, demonstration)

    def measure(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = draw(step)
        wanted = (labels >= 0).any(0).nonzero()[:, 0]
        logits = predict(model, prefix, ids, wanted, gradients=True).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, wanted].flatten())
        return loss, loss.detach()

    return train_part(
        prefix, torch.optim.Adam(prefix.parameters(), lr=RATE), steps,
        lambda step: RATE * min(1.0, (step + 1) / WARM) * max(0.02, 1 - step / steps), measure,
        partial(nn.utils.clip_grad_norm_, max_norm=CLIP), progress,
    )
