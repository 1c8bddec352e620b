"""Locret's retaining heads: a small network per layer that predicts how much attention an entry will get.

Its input is the concatenated query, key and value of a token before rotation, so a score is known when the token is
processed and never changes. Its target is the highest attention logit that any row of an answer gives the token, over
the query heads of a KV head (arXiv 2410.01805).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.hf import Forward
from kvbench.hf.adapter import attached
from kvbench.method import Moment, Step
from kvbench.store import LayerKV
from kvbench.techniques.training import WHOLE, TrainingProgress, train_part

if TYPE_CHECKING:
    from kvbench.hf import Model

SMOOTH = 0.0025
"""Weight of the squared differences of neighbors' scores."""
RATE, WARM, CLIP = 3e-3, 50, 0.5
Text = tuple[Tensor, int]
"""Ids [1, T], and how many of them are the prompt; the others are the answer."""
Examples = list[tuple[Tensor, Tensor]]
"""Inputs [n, features] and targets [n, H_kv] of one layer, by text."""


def gather_inputs(step: Step) -> Tensor:
    """Query, key and value of every new token before rotation, over all heads. [B, T, features] float32"""
    parts = (
        step.rope.rotate(step.query, step.positions, inverse=True),
        step.rope.rotate(step.key, step.positions, inverse=True), step.value,
    )
    return torch.cat([x.transpose(1, 2).flatten(2) for x in parts], dim=-1).float()


def find_targets(step: Step, prompt: int) -> Tensor:
    """The highest logit of the answer's rows for each token of the prompt. [n, H_kv] float32"""
    heads = step.key.shape[1]
    asked = step.query[0, :, prompt:].unflatten(0, (heads, -1)).flatten(1, 2)  # [H_kv, G * rows, D]
    logits: Tensor = asked.float() @ step.key[0, :, :prompt].float().mT * step.scale
    return logits.amax(1).T


def collect(model: Model, texts: Iterable[Text]) -> list[Examples]:
    """Inputs and targets of every layer on texts."""
    found: list[Examples] = [[] for _ in model.layers]
    for ids, prompt in texts:
        stores = [LayerKV() for _ in model.layers]

        def attend(step: Step, stores: list[LayerKV] = stores, prompt: int = prompt) -> Tensor:
            found[step.layer].append((gather_inputs(step)[0, :prompt], find_targets(step, prompt)))
            stores[step.layer].append(step)
            return stores[step.layer].attend(step)

        forward = Forward(
            moment=Moment.CONTEXT_CHUNK, positions=torch.arange(ids.shape[1], device=ids.device)[None],
            seen=ids.shape[1], attend=attend, ropes=model.ropes,
        )
        with attached(model.module):
            model.run(ids, forward, 1)
    return found


def make_heads(model: Model, width: int) -> nn.ModuleList:
    """Untrained heads of all layers."""
    return nn.ModuleList(
        nn.Sequential(
            nn.Linear(x.query_heads * x.key_dim + x.kv_heads * (x.key_dim + x.value_dim), width, bias=False), nn.SiLU(),
            nn.Linear(width, x.kv_heads, bias=False),
        ) for x in model.layers
    )


def measure_loss(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Smooth L1 to the targets, and how much neighbors' scores differ. [n, H_kv] each"""
    return F.smooth_l1_loss(predicted, wanted) + SMOOTH * (predicted[1:] - predicted[:-1]).square().mean()


def train(
    model: Model, examples: list[Examples], width: int, steps: int, progress: TrainingProgress = WHOLE
) -> Mapping[str, Tensor]:
    """Train heads on the examples, one text per step; the model stays as it is. Each step reports its loss."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = make_heads(model, width).to(model.device)

    def measure(step: int) -> tuple[Tensor, Tensor]:
        pairs = [x[step % len(x)] for x in examples]
        loss = torch.stack([
            measure_loss(head(inputs), wanted) for head, (inputs, wanted) in zip(heads, pairs, strict=True)
        ]).mean()
        return loss, loss.detach()

    return train_part(
        heads, torch.optim.AdamW(heads.parameters(), lr=RATE, betas=(0.9, 0.95)), steps,
        lambda step: RATE * min(1.0, (step + 1) / WARM) * (1 - step / steps), measure,
        partial(nn.utils.clip_grad_value_, clip_value=CLIP), progress,
    )


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's correlation of two lists of scores. [n] each"""
    ranks = [x.argsort().argsort().double() for x in (one, other)]
    first, second = (x - x.mean() for x in ranks)
    return float((first * second).sum() / math.sqrt(float(first.square().sum() * second.square().sum())))


def split_blocks(length: int, block: int) -> list[tuple[int, int]]:
    """Beginning and end of each block of a text."""
    return list(pairwise([*range(0, length, block), length]))
