"""dLLM-Cache: prompt features hardly change, answer features change slowly (arXiv 2506.06295)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.method import BudgetKind, Card, Shape, Upstream
from kvbench.store.positions import PositionKV, sequences


@dataclass(frozen=True)
class DllmCache(Policy):
    """prompt, answer: interval, in passes, at which all of the prompt and all of the answer are recomputed.

    The first layer recomputes everything in every pass, as in the reference.
    share: share of the answer that is recomputed in between: the tokens whose values changed most.
    """

    prompt: Positive = 50
    answer: Positive = 7
    share: Share = 0.25

    card: ClassVar[Card] = Card(
        name="dllm-cache", version="2", title="dLLM-Cache", models="diffusion",
        idea="Keys, values and the outputs of attention and feed-forward layers are cached by token. The prompt is "
             "recomputed rarely, the answer more often, and in between the tokens whose values changed most.",
        arxiv="2506.06295", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="pooled", upstream=Upstream(repo="maomaocun/dLLM-cache", commit="17235bf", license="Apache-2.0"),
        deviations=("the intervals are those of its GSM8K script for LLaDA-Instruct; the paper tunes them by task",),
        limits=(
            "the first layer is recomputed whole in every pass, as in the reference",
            "computed tokens are counted in feed-forward layers; values of all answer tokens are computed as well",
        ),
    )

    def identity(self, shape: Shape) -> bool:
        """True if every pass computes all tokens."""
        del shape
        return self.prompt == self.answer == 1

    def plan(self, d: Denoising) -> PassPlan:
        """Every token passes through the layers; each layer selects the tokens to recompute."""
        del d
        return PassPlan()

    def run(self, d: Denoising, plan: PassPlan, index: Tensor) -> Tensor:
        """All tokens through all layers; those not recomputed use the cached outputs of attention and MLP."""
        hidden = d.blocks.embed(d.ids)
        in_prompt = (d.positions < d.prompt).expand_as(d.ids)
        for layer, kv in enumerate(d.stores):
            whole_prompt, whole_answer = (layer == 0 or d.nfe % every == 0 for every in (self.prompt, self.answer))
            chosen = in_prompt if whole_prompt else torch.zeros_like(in_prompt)
            if whole_answer:
                chosen = chosen | ~in_prompt
            elif self.share > 0:
                chosen = chosen | self._changed(d, layer, kv, hidden)
            positions = self._positions(chosen)
            if positions.shape[1]:
                x = _take(hidden, positions)
                look = partial(self.look, d, kv, plan)
                angles = d.blocks.angles(x, positions)
                _put(kv, "attention", positions, d.blocks.attention(layer, x, positions, angles, look))
            hidden = hidden + kv.state["attention"]
            if positions.shape[1]:
                _put(kv, "mlp", positions, d.blocks.mlp(layer, _take(hidden, positions)))
            hidden = hidden + kv.state["mlp"]
        return _take(hidden, index)

    def _changed(self, d: Denoising, layer: int, kv: PositionKV, hidden: Tensor) -> Tensor:
        """The answer's tokens whose values differ most from the cached ones; caches all new values. [B, N]"""
        assert kv.values is not None
        new = d.blocks.values(layer, hidden[:, d.prompt :])
        old = kv.values[:, :, d.prompt :]
        likeness = torch.cosine_similarity(new.transpose(1, 2).flatten(2), old.transpose(1, 2).flatten(2), dim=-1)
        kv.read_bytes += old.nbytes + new.nbytes  # in addition to the attention's reads
        kv.values[:, :, d.prompt :] = new
        least = likeness.topk(int(self.share * likeness.shape[1]), dim=-1, largest=False).indices + d.prompt
        return torch.zeros_like(d.masked).scatter_(1, least, torch.ones_like(least, dtype=torch.bool))

    @staticmethod
    def _positions(chosen: Tensor) -> Tensor:
        """Indices of the chosen positions, equally many in every sequence. [B, m]"""
        return chosen.nonzero()[:, 1].view(len(chosen), -1)


def _take(hidden: Tensor, positions: Tensor) -> Tensor:
    return hidden[sequences(positions), positions]


def _put(kv: PositionKV, name: str, positions: Tensor, output: Tensor) -> None:
    """Cache the output of attention or MLP at these positions. output: [B, m, D]"""
    if name not in kv.state:
        kv.state[name] = output.new_zeros(len(output), kv.length, output.shape[-1])
    kv.state[name][sequences(positions), positions] = output
