"""Flux Attention's routers: a small network per layer that decides whether the layer reads every entry.

Its input is the mean query of a prompt's first and last tokens before rotation, over all heads. In training a gate
between 0 and 1 is drawn for every layer and prompt, which mixes both kinds of attention. The model stays as it is: the
loss is that of the answers, and of layers that are not sparse enough (arXiv 2604.07394).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

POOL = 100
"""First tokens, and last ones, whose queries a router reads."""
RATE, CLIP, SPARSITY_WEIGHT, TEMPERATURE = 1e-3, 1.0, 8.0, 0.5
Text = tuple[Tensor, Tensor, int]
"""Ids [1, T]; the id to predict at every place, -100 elsewhere [1, T]; how many tokens the router sees."""
Blocks = Callable[[int], tuple[int, Tensor]]
"""From a number of tokens to the tokens of a block, and the blocks that a sparse layer reads. [n, n] bool"""


def make_routers(model: Model) -> nn.ModuleDict:
    """Untrained routers of the layers without a sliding window, by layer; every other one starts sparse."""
    routers = nn.ModuleDict()
    for index, shape in enumerate(model.layers):
        if shape.window is not None:
            continue
        width = shape.key_dim
        last = nn.Linear(width, 2)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.copy_(torch.tensor([0.5, -0.5]) * (-1) ** len(routers))
        routers[str(index)] = nn.Sequential(
            nn.Linear(width, 8 * width), nn.SiLU(), nn.Linear(8 * width, 2 * width),
            nn.Linear(2 * width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width), nn.SiLU(), last,
        )
    return routers


def pool_queries(step: Step, seen: int) -> Tensor:
    """Mean query before rotation of the first and the last of `seen` tokens, over all heads. [B, D] float32"""
    positions, query = step.positions[:, :seen], step.query[:, :, :seen]
    if seen > 2 * POOL:
        positions = torch.cat([positions[:, :POOL], positions[:, -POOL:]], dim=1)
        query = torch.cat([query[:, :, :POOL], query[:, :, -POOL:]], dim=2)
    return step.rope.rotate(query, positions, inverse=True).float().mean((1, 2))


def opens(router: nn.Module, pooled: Tensor) -> Tensor:
    """Whether a layer reads every entry. [B] bool"""
    logits: Tensor = router(pooled)
    return logits[:, 1] > logits[:, 0]


def mark_stream(count: int, sinks: int, local: int, device: torch.device | str = "cpu") -> Tensor:
    """The first blocks, and the last ones up to the own one, of every block of queries. [count, count] bool"""
    block = torch.arange(count, device=device)
    ahead = block[:, None] - block
    return (ahead >= 0) & ((ahead < local) | (block < sinks))


def attend_over(step: Step, mask: Tensor) -> Tensor:
    """Attention of a whole prompt over the entries in a mask [T, T], with gradients. [B, H_q, T, D_v]"""
    with sdpa_kernel(list(WITHOUT_CUDNN)):
        return F.scaled_dot_product_attention(
            step.query, step.key, step.value, attn_mask=mask, scale=step.scale, enable_gqa=True
        )


def run_gated(
    model: Model, text: Text, blocks: Blocks, gate: Callable[[int, Tensor], Tensor]
) -> tuple[Tensor, dict[int, Tensor]]:
    """The loss of a text's answers, and the gates by layer. gate: from a layer and its pooled queries to its gate."""
    ids, labels, seen = text
    size, chosen = blocks(ids.shape[1])
    place = torch.arange(ids.shape[1], device=ids.device)
    ahead = place[:, None] - place
    sparse = chosen[place // size][:, place // size] & (ahead >= 0)
    gates: dict[int, Tensor] = {}

    def attend(step: Step) -> Tensor:
        if step.window is not None:
            return attend_over(step, (ahead >= 0) & (ahead < step.window))
        gates[step.layer] = opened = gate(step.layer, pool_queries(step, seen))
        return opened * attend_over(step, ahead >= 0) + (1 - opened) * attend_over(step, sparse)

    wanted = (labels[0] >= 0).nonzero()[:, 0]
    forward = Forward(
        moment=Moment.CONTEXT_CHUNK, positions=place[None], seen=ids.shape[1], attend=attend, ropes=model.ropes,
        gradients=True,
    )
    with attached(model.module):
        logits = model.run(ids, forward, wanted)
    return F.cross_entropy(logits[0].float(), labels[0, wanted]), gates


def train(
    model: Model, steps: int, sparsity: float, blocks: Blocks, draw: Callable[[int], Sequence[Text]],
    progress: TrainingProgress = WHOLE,
) -> dict[str, Tensor]:
    """Train routers on texts; the model stays as it is. Each step reports its loss.

    sparsity: the least share of sparse layers, mean over a step's texts. draw: the texts of a step.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        routers = make_routers(model).to(model.device)
    if not len(routers):
        return {}  # every layer has a sliding window, which `fit` refuses

    def measure(step: int) -> tuple[Tensor, Tensor]:
        noise = torch.Generator().manual_seed(step)

        def gate(layer: int, pooled: Tensor) -> Tensor:
            logits = routers[str(layer)](pooled)
            share = torch.rand((), generator=noise).clamp(1e-4, 1 - 1e-4)
            return torch.sigmoid((logits[0, 1] - logits[0, 0] + (share / (1 - share)).log()) / TEMPERATURE)

        losses, sparse = [], []
        for text in draw(step):
            loss, gates = run_gated(model, text, blocks, gate)
            losses.append(loss)
            sparse.append(1 - torch.stack(list(gates.values())).mean())
        short = (sparsity - torch.stack(sparse).mean()).clamp_min(0)
        total = torch.stack(losses).mean() + SPARSITY_WEIGHT * short
        return total, total.detach()

    return train_part(
        routers, torch.optim.AdamW(routers.parameters(), lr=RATE, weight_decay=0.0), steps,
        lambda step: RATE * max(0.05, 1 - step / steps), measure,
        partial(nn.utils.clip_grad_norm_, max_norm=CLIP), progress,
    )
