"""NOSA's gate: a score for every entry from the values of all heads, which no query changes.

It is added to the entry's logits, so that it learns from the model's own loss, and decides which blocks are read that
no query chose: `A * softplus(delta(v))` (arXiv 2510.13602). The model stays as it is. In training a block outside the
sinks, the local ones and those that its query chose is read to a share between 0 and 1, by its score among the others.
Attention that finds a key is so sharp that half a share finds it, too, so the share is taken to a power.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvbench.hf import Forward
from kvbench.hf.adapter import attached
from kvbench.method import Moment, Step
from kvbench.techniques.reading import mark_ends_and_best
from kvbench.techniques.training import WHOLE, TrainingProgress, train_part

if TYPE_CHECKING:
    from kvbench.hf import Model

RATE, CLIP, TEMPERATURE, POWER = 1e-3, 1.0, 0.03, 8.0
STRIDES, OVERLAP = 4, 2
"""Strides of a block, and strides that a compressed key averages."""
Text = tuple[Tensor, Tensor, int]
"""Ids [1, T]; the id to predict at every place, -100 elsewhere [1, T]; tokens of context."""


class ValueGate(nn.Module):
    """The gate of one layer, which prefers no entry before training; its weights have the authors' names."""

    def __init__(self, kv_heads: int, width: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.ones(kv_heads))
        self.delta = nn.Linear(kv_heads * width, kv_heads, bias=False)
        nn.init.zeros_(self.delta.weight)

    def forward(self, value: Tensor) -> Tensor:
        """Scores of entries. value: [B, H_kv, n, D_v]. Returns [B, H_kv, n] float32"""
        found: Tensor = self.A * F.softplus(self.delta(value.float().transpose(1, 2).flatten(2)))
        return found.transpose(1, 2)


def make_gates(model: Model) -> nn.ModuleList:
    """Untrained gates of all layers."""
    return nn.ModuleList(ValueGate(x.kv_heads, x.value_dim) for x in model.layers)


def compress(x: Tensor, block: int) -> Tensor:
    """Means over two strides at every stride, four strides to a block. [B, H, n, D] -> [B, H, strides, D] float32"""
    stride, count = block // STRIDES, x.shape[2]
    strides = -(-count // stride)
    sums = F.pad(x.float(), (0, 0, 0, strides * stride - count)).unflatten(2, (strides, stride)).sum(3)
    sizes = torch.full((strides,), float(stride), device=x.device)
    sizes[-1] = count - (strides - 1) * stride
    both = F.pad(sums, (0, 0, 0, OVERLAP - 1)).unfold(2, OVERLAP, 1).sum(-1)
    return both / F.pad(sizes, (0, OVERLAP - 1)).unfold(0, OVERLAP, 1).sum(-1)[:, None]


def best_stride(scores: Tensor) -> Tensor:
    """The best score of the strides that overlap each block. [..., strides] -> [..., blocks]"""
    flat = scores.flatten(0, -2)[:, None]
    short = -flat.shape[2] % STRIDES
    padded = F.pad(flat, (OVERLAP - 1, short), value=-torch.inf)
    return F.max_pool1d(padded, STRIDES + OVERLAP - 1, STRIDES).view(*scores.shape[:-1], -1)


def score_by_query(query: Tensor, compressed: Tensor, scale: float) -> Tensor:
    """How well blocks match queries: attention over compressed keys, mean over the heads of a group.

    query: [B, H_q, T, D]. compressed: [B, H_kv, strides, D]. Returns [B, H_kv, T, blocks].
    """
    grouped = query.float().unflatten(1, (compressed.shape[1], -1))
    weights = (grouped @ compressed.float()[:, :, None].mT * scale).softmax(-1)
    return best_stride(weights.mean(2))


def mark_by_query(scores: Tensor, local: int, aware: int) -> Tensor:
    """The first block, the last `local` and of the others the best `aware`. [..., blocks] -> bool"""
    return mark_ends_and_best(scores, 1 + local + aware, 1, local)


def measure_loss(
    model: Model, gates: nn.ModuleList, text: Text, block: int, divide: Callable[[int], tuple[int, int, int]],
    *, hard: bool = False,
) -> Tensor:
    """Cross-entropy of a text's answers, whose rows read blocks of the context.

    divide: from the number of blocks to those of local, query-aware and query-agnostic choice. hard: as a run reads.
    """
    ids, labels, context = text
    place = torch.arange(ids.shape[1], device=ids.device)
    causal = place[:, None] >= place

    def attend(step: Step) -> Tensor:
        allowed = causal if step.window is None else causal & (place[:, None] - place < step.window)
        bias = torch.zeros_like(allowed, dtype=torch.float32).masked_fill(~allowed, -torch.inf)[None, None]
        if step.window is None:
            bias = bias.expand(1, step.key.shape[1], -1, -1).clone()
            scores = gates[step.layer](step.value)
            bias[:, :, context:] += scores[:, :, None]
            bias[:, :, context:, :context] += choose(step, scores[:, :, :context])
            bias = bias.repeat_interleave(step.query.shape[1] // step.key.shape[1], 1)
        with sdpa_kernel(SDPBackend.MATH):  # the fused ones have no gradient of a mask where only the mask needs one
            return F.scaled_dot_product_attention(
                step.query, step.key, step.value, attn_mask=bias.to(step.query.dtype), scale=step.scale,
                enable_gqa=True,
            )

    def choose(step: Step, scores: Tensor) -> Tensor:
        """Logarithm of how much of each entry the rows after the context read. [1, H_kv, rows, context]"""
        by_value = best_stride(compress(scores[..., None], block)[..., 0])  # [1, H_kv, blocks]
        local, aware, agnostic = divide(by_value.shape[-1])
        with torch.no_grad():
            asked = score_by_query(step.query[:, :, context:], compress(step.key[:, :, :context], block), step.scale)
            chosen = mark_by_query(asked, local, aware)  # [1, H_kv, rows, blocks]
        others = by_value[:, :, None].expand_as(chosen).masked_fill(chosen, -torch.inf)
        least = others.detach().topk(agnostic + 1, dim=-1).values[..., agnostic - 1 :].mean(-1, keepdim=True)
        least = least.nan_to_num(neginf=-1e4)
        if hard:
            share = torch.zeros_like(others).masked_fill(others <= least, -torch.inf)
        else:
            share = POWER * F.logsigmoid((others - least) / TEMPERATURE)
        return share.masked_fill(chosen, 0.0).repeat_interleave(block, 3)[..., :context]

    wanted = (labels[0] >= 0).nonzero()[:, 0]
    forward = Forward(
        moment=Moment.CONTEXT_CHUNK, positions=place[None], seen=ids.shape[1], attend=attend, ropes=model.ropes,
        gradients=True,
    )
    with attached(model.module):
        logits = model.run(ids, forward, wanted)
    return F.cross_entropy(logits[0].float(), labels[0, wanted])


def train(
    model: Model, steps: int, block: int, divide: Callable[[int], tuple[int, int, int]], draw: Callable[[int], Text],
    progress: TrainingProgress = WHOLE,
) -> Mapping[str, Tensor]:
    """Train gates on the answers of texts; the model stays as it is. Each step reports its loss."""
    gates = make_gates(model).to(model.device)
    if all(x.window is not None for x in model.layers):
        return gates.state_dict()  # no layer reads them

    def measure(step: int) -> tuple[Tensor, Tensor]:
        loss = measure_loss(model, gates, draw(step), block, divide)
        return loss, loss.detach()

    return train_part(
        gates, torch.optim.AdamW(gates.parameters(), lr=RATE, weight_decay=0.0), steps,
        lambda step: RATE * max(0.05, 1 - step / steps), measure,
        partial(nn.utils.clip_grad_norm_, max_norm=CLIP), progress,
    )
