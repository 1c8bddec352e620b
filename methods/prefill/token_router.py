"""FTP's router: one small network for all layers that decides which tokens of a prompt a layer runs.

It reads four numbers of a token: its place, the attention that it received in the last layer that ran it, the rank of
that attention, and the share of tokens that the layer skips. In training a token's part of a layer is multiplied by its
gate, whose gradient is that of its probability; the loss is the distance from the whole model's answers, the imitation
of a router that keeps the first and the last tokens, and the distance from the wanted share (arXiv 2412.11494).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvbench.hf import Forward
from kvbench.hf.adapter import attached, decoder_layers
from kvbench.kernels.column_sums import column_sums
from kvbench.method import Moment, Step
from kvbench.techniques.training import WHOLE, TrainingProgress, train_part

if TYPE_CHECKING:
    from kvbench.hf import Model

HIDDEN = 64
RATE, CLIP, GUIDE, SHARE = 3e-3, 1.0, 0.1, 1.0
"""Learning rate, clipping, and the weights of imitation, which falls to zero, and of the distance from the share."""
SHARES = (0.4, 0.5, 0.6, 0.7)
"""Shares of skipped tokens, mean over the layers that may skip, of which a step of training takes one."""
FIRST = 0.1
"""Share of the kept tokens that are the first ones, for the router that is imitated."""
Text = tuple[Tensor, Tensor, int]
"""Ids [1, T]; the id to predict at every place, -100 elsewhere [1, T]; tokens of the prompt, which may be skipped."""
Gates = Callable[[int, Tensor, int], Tensor]
"""From a layer, the features of its tokens [1, n, 4] and how many it keeps, to the gate of each. [1, n]"""


def make_router() -> nn.Sequential:
    """An untrained router."""
    return nn.Sequential(nn.Linear(4, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))


def describe(received: Tensor, share: float) -> Tensor:
    """The router's four inputs, from the attention that each token received. [B, n] -> [B, n, 4]"""
    count = received.shape[1]
    place = torch.linspace(0, 1, count, device=received.device).expand_as(received)
    rank = received.argsort(dim=1, stable=True).argsort(dim=1) / max(1, count - 1)
    return torch.stack([place, (received * count).clamp_max(10) / 10, rank, torch.full_like(place, share)], dim=-1)


def measure_received(step: Step, keys: Tensor) -> Tensor:
    """Attention that each entry received, mean over query heads and over the queries that see it. [B, n]"""
    sums = column_sums(step.query, keys, scale=step.scale, seen=step.seen, window=step.window, positions=None,
                       softcap=step.softcap, sinks=step.sinks)
    count = keys.shape[2]
    return sums.sum(1) / step.query.shape[1] / torch.arange(count, 0, -1, device=keys.device)


def keep_highest(scores: Tensor, count: int) -> Tensor:
    """Ascending places of the last token and of the highest scores; of equal ones the first. [B, n] -> [B, count]"""
    scores = torch.cat([scores[:, :-1], torch.full_like(scores[:, -1:], torch.inf)], dim=1)
    return scores.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values


def score_static(features: Tensor) -> Tensor:
    """The router that is imitated: some of the first tokens, and the last ones. [B, n, 4] -> [B, n]"""
    place, share = features[..., 0], features[..., 3]
    return torch.where(place < FIRST * (1 - share), 2 - place, place)


def divide(weights: Sequence[float], length: int, total: int) -> tuple[int, ...]:
    """Tokens that each layer runs, `total` in all: layers skip by their weights, and run one token at least."""
    skips, left = [0] * len(weights), length * len(weights) - total
    while left:
        open_layers = [i for i, x in enumerate(weights) if x > 0 and skips[i] < length - 1]
        assert open_layers, "the layers that may skip tokens run one token each"
        share = left / sum(weights[i] for i in open_layers)
        for i in sorted(open_layers, key=lambda i: (-weights[i], i)):
            more = min(length - 1 - skips[i], left, max(1, int(share * weights[i])))
            skips[i], left = skips[i] + more, left - more
    return tuple(length - x for x in skips)


def run_gated(
    model: Model, ids: Tensor, places: Tensor, prompt: int, kept: Sequence[int], gates: Gates | None
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits at some places [1, K, V], and the gates of each layer's prompt tokens.

    kept: tokens of the prompt that each layer keeps. gates: None: the whole model, without gradients.
    """
    count = ids.shape[1]
    own = torch.arange(count, device=ids.device)
    ahead = own[:, None] - own
    found: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {"received": torch.zeros(1, prompt, device=ids.device)}

    def attend(step: Step) -> Tensor:
        visible = (ahead >= 0) & (ahead < (step.window or count))
        keys, values = (x.repeat_interleave(step.query.shape[1] // x.shape[1], 1) for x in (step.key, step.value))
        logits = step.query.float() @ keys.float().mT * step.scale
        logits = logits.masked_fill(~visible, -torch.inf)
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        gate = found.get(step.layer)
        if gate is not None:
            seen = F.pad(gate, (0, count - prompt), value=1.0)[:, None, None].expand(-1, -1, count, -1)
            weights = weights * torch.where(ahead == 0, torch.ones_like(seen), seen)
        weights = weights / weights.sum(-1, keepdim=True)
        if gates is not None:
            with torch.no_grad():
                part = weights[:, :, :prompt, :prompt]
                runs = (gate if gate is not None else torch.ones_like(state["received"])).detach()
                mass = (part.mean(1) * runs[:, :, None]).sum(1)
                seen_by = runs.flip(1).cumsum(1).flip(1)  # queries that run the layer and see the token
                state["received"] = torch.where(runs > 0.5, mass / seen_by.clamp_min(1), state["received"])
        return (weights @ values.float()).to(values.dtype)

    handles = []
    if gates is not None:
        for index, layer in enumerate(decoder_layers(model.module)):
            if kept[index] == prompt:
                continue
            kept_share = 1 - kept[index] / prompt

            def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], index: int = index,
                       share: float = kept_share) -> None:
                state[f"in {index}"] = args[0] if args else named["hidden_states"]
                found[index] = gates(index, describe(state["received"], share), kept[index])

            def after(_: nn.Module, __: Any, output: Any, index: int = index) -> Any:
                first = output[0] if isinstance(output, tuple) else output
                gate = F.pad(found[index], (0, count - prompt), value=1.0)[..., None]
                mixed = (state[f"in {index}"] + gate * (first - state[f"in {index}"])).to(first.dtype)
                return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

            handles += [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]
    forward = Forward(
        moment=Moment.CONTEXT_CHUNK, positions=own[None], seen=count, attend=attend, ropes=model.ropes,
        gradients=gates is not None,
    )
    try:
        with attached(model.module):
            return model.run(ids, forward, places), found
    finally:
        for handle in handles:
            handle.remove()


def train(
    model: Model, steps: int, weights: Sequence[float], draw: Callable[[int], Text], progress: TrainingProgress = WHOLE
) -> dict[str, Tensor]:
    """Train the router on texts, one per step; the model stays as it is. Each step reports the answers' distance.

    weights: how much each layer skips, relative to the others. draw: the text of a step.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        router = make_router().to(model.device)

    def measure(step: int) -> tuple[Tensor, Tensor]:
        ids, labels, prompt = draw(step)
        places = (labels[0] >= 0).nonzero()[:, 0]
        skipped = SHARES[step % len(SHARES)]
        may = sum(x > 0 for x in weights)
        kept = divide(weights, prompt, round((1 - skipped) * prompt * may) + prompt * (len(weights) - may))
        extra: list[Tensor] = []
        fading = GUIDE * max(0.0, 1 - 2 * step / steps)

        def gate(_: int, features: Tensor, count: int) -> Tensor:
            logits = router(features)[..., 0]
            chance = torch.sigmoid(logits)
            hard = torch.zeros_like(chance).scatter_(1, keep_highest(logits, count), 1.0)
            wanted = torch.zeros_like(chance).scatter_(1, keep_highest(score_static(features), count), 1.0)
            extra.append(fading * F.binary_cross_entropy_with_logits(logits, wanted))
            extra.append(SHARE * (chance.mean() - count / chance.shape[1]).square())
            return hard + chance - chance.detach()

        whole, _ = run_gated(model, ids, places, prompt, kept, None)
        logits, _ = run_gated(model, ids, places, prompt, kept, gate)
        distance = F.kl_div(logits[0].float().log_softmax(-1), whole[0].float().log_softmax(-1),
                            reduction="batchmean", log_target=True)
        return distance + torch.stack(extra).sum(), distance.detach()

    return train_part(
        router, torch.optim.AdamW(router.parameters(), lr=RATE, weight_decay=0.0), steps,
        lambda step: RATE * max(0.05, 1 - step / steps), measure,
        partial(nn.utils.clip_grad_norm_, max_norm=CLIP), progress,
    )
