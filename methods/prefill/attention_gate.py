"""SeerAttention's gates: small projections of pooled queries and keys that predict the attention of blocks.

A block's queries are pooled by their mean, its keys by maximum, minimum and mean, both before rotation. Each head
projects them, rotates them to the block's first position, and their products are the gate's logits. The target is the
largest attention weight of every pair of blocks, divided by the sum of its row (arXiv 2410.13276).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.engine.session import Session
from kvbench.method import Method, Moment, Step
from kvbench.store import LayerKV
from kvbench.techniques.training import WHOLE, TrainingProgress, train_part

if TYPE_CHECKING:
    from kvbench.hf import Model, Rope

POOLED_KEYS = 3
"""Maximum, minimum and mean."""
RATE, WARM, CLIP = 1e-2, 20, 1.0


class Gate(nn.Module):
    """The projections of one layer, by head; the authors' gates leave queries as they are, and have keys for each."""

    def __init__(self, query_heads: int, kv_heads: int, width: int, *, projects_queries: bool = True) -> None:
        super().__init__()
        projection = torch.randn(query_heads, width, width) * width**-0.5
        self.query = nn.Parameter(projection) if projects_queries else None
        self.key = nn.Parameter(torch.randn(kv_heads, POOLED_KEYS * width, width) * (POOLED_KEYS * width) ** -0.5)

    def forward(self, query: Tensor, key: Tensor, rope: Rope, positions: Tensor) -> Tensor:
        """Logarithms of the predicted shares; -inf for later blocks. [B, H_q, c, c]

        query: pooled, [B, H_q, c, D]. key: pooled, [B, H_kv, c, 3 * D]. positions: of the blocks, [B, c].
        """
        queries = rope.rotate(query if self.query is None else query @ self.query, positions)
        key = key.repeat_interleave(len(self.key) // key.shape[1], dim=1)
        keys = rope.rotate(key @ self.key, positions).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = queries @ keys.mT * queries.shape[3] ** -0.5
        later = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
        shares: Tensor = logits.masked_fill(later, -torch.inf).log_softmax(-1)
        return shares


@dataclass(frozen=True)
class PooledBlocks:
    """A layer's pooled vectors of a text, and the shares to predict."""

    query: Tensor  # [1, H_q, c, D]
    key: Tensor  # [1, H_kv, c, 3 * D]
    positions: Tensor  # [1, c]
    target: Tensor  # [1, H_q, c, c]


def pool(step: Step, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled queries [B, H_q, c, D] and keys [B, H_kv, c, 3 * D] of a prompt, and the blocks' positions [B, c].

    A last block with fewer tokens counts its last one as often as it takes.
    """
    def divide(x: Tensor) -> Tensor:
        plain = step.rope.rotate(x.float(), step.positions, inverse=True)
        missing = -plain.shape[2] % block
        whole = torch.cat([plain, plain[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
        divided: Tensor = whole.unflatten(2, (-1, block))
        return divided

    keys = divide(step.key)
    pooled = torch.cat([keys.amax(3), keys.amin(3), keys.mean(3)], dim=-1)
    return divide(step.query).mean(3), pooled, step.positions[:, ::block]


def find_target(step: Step, block: int) -> Tensor:
    """The largest attention weight of every pair of blocks, as shares of its row. [B, H_q, c, c]"""
    keys = step.key.float().repeat_interleave(step.query.shape[1] // step.key.shape[1], dim=1)
    logits = step.query.float() @ keys.mT * step.scale
    later = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
    weights = logits.masked_fill(later, -torch.inf).softmax(-1)
    largest = F.max_pool2d(weights, block, ceil_mode=True)
    return largest / largest.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Watcher(Method):
    """The full cache; keeps examples of one prompt, for each size of blocks."""

    blocks: tuple[int, ...] = (64,)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        for block in self.blocks:
            parts = (*pool(step, block), find_target(step, block))
            kv.state.update({f"{block}/{i}": x for i, x in enumerate(parts)})
        return kv.attend(step)


def collect(model: Model, texts: Iterable[Tensor], blocks: Sequence[int]) -> list[list[PooledBlocks]]:
    """Examples of every layer on texts, for each size of blocks. texts: ids, [1, T] each"""
    found: list[list[PooledBlocks]] = [[] for _ in model.layers]
    for ids in texts:
        with Session(model, Watcher(blocks=tuple(blocks)), capacity=ids.shape[1]) as session:
            session.forward(ids, Moment.CONTEXT_CHUNK)
            for examples, store in zip(found, session.layers, strict=True):
                examples += [PooledBlocks(*(store.state[f"{block}/{i}"] for i in range(4))) for block in blocks]
    return found


def make_gates(model: Model, *, projects_queries: bool = True, key_heads: int = 0) -> nn.ModuleList:
    """Untrained gates of all layers. key_heads: projections of keys in each; 0: one for each KV head."""
    return nn.ModuleList(
        Gate(x.query_heads, key_heads or x.kv_heads, x.key_dim, projects_queries=projects_queries)
        for x in model.layers
    )


def measure_divergence(gate: nn.Module, example: PooledBlocks, rope: Rope) -> Tensor:
    """Kullback-Leibler divergence of the predicted shares from the target, mean over rows and heads. []"""
    predicted = gate(example.query, example.key, rope, example.positions)
    later = torch.ones_like(predicted[0, 0], dtype=torch.bool).triu(1)
    known = example.target.clamp_min(1e-9).log() - predicted.masked_fill(later, 0.0)
    found: Tensor = (example.target * known.masked_fill(later, 0.0)).sum(-1).mean()
    return found


def train(
    model: Model, examples: list[list[PooledBlocks]], steps: int, progress: TrainingProgress = WHOLE
) -> Mapping[str, Tensor]:
    """Train gates on the examples, one per step; the model stays as it is. Each step reports its loss."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gates = make_gates(model).to(model.device)

    def measure(step: int) -> tuple[Tensor, Tensor]:
        loss = torch.stack([
            measure_divergence(gate, some[step % len(some)], rope)
            for gate, some, rope in zip(gates, examples, model.ropes, strict=True)
        ]).mean()
        return loss, loss.detach()

    return train_part(
        gates, torch.optim.AdamW(gates.parameters(), lr=RATE), steps,
        lambda step: RATE * min(1.0, (step + 1) / WARM) * (1 - step / steps), measure,
        partial(nn.utils.clip_grad_norm_, max_norm=CLIP), progress,
    )
