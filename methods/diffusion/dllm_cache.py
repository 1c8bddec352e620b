"""dLLM-Cache: prompt features hardly change, answer features change slowly (arXiv 2506.06295)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Shape, Upstream
from kvbench.store.positions import PositionKV, sequences


@dataclass(frozen=True)
class DllmCache(Policy):
    """prompt, answer: passes between two that compute all of the prompt's, of the answer's rows; 1: every pass.

    share: of the answer's rows computed in between, those whose values changed most.
    """

    prompt: int = 50
    answer: int = 7
    share: float = 0.25

    card: ClassVar[Card] = Card(
        name="dllm-cache", title="dLLM-Cache", models="diffusion",
        idea="Keys, values and what attention and feed-forward parts added are kept for every row. Prompt rows are "
             "computed now and then, answer rows more often, and in between those whose values changed most.",
        arxiv="2506.06295", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="pooled", upstream=Upstream(repo="maomaocun/dLLM-cache", commit="17235bf", license=None),
        deviations=("the intervals are those of its GSM8K script; they are tuned for each task there",),
        limits=(
            "rows are counted where feed-forward parts run; the values of all answer rows are computed beside them",
        ),
    )

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        if self.prompt < 1 or self.answer < 1 or not 0 <= self.share <= 1:
            raise UserError(
                f"dllm-cache: prompt {self.prompt} and answer {self.answer} must be 1 or more passes, and share "
                f"{self.share} from 0 to 1."
            )

    def identity(self, shape: Shape) -> bool:
        """All rows in every pass."""
        del shape
        return self.prompt == self.answer == 1

    def plan(self, d: Denoising) -> PassPlan:
        """Every row passes; what is computed for it is decided in each layer."""
        del d
        return PassPlan()

    def run(self, d: Denoising, plan: PassPlan, rows: Tensor) -> Tensor:
        """All rows through all layers, most of them on what their branches added before."""
        hidden = d.blocks.embed(d.ids)
        in_prompt = (d.positions < d.prompt).expand_as(d.ids)
        for layer, kv in enumerate(d.stores):
            whole_prompt, whole_answer = (layer == 0 or d.nfe % every == 0 for every in (self.prompt, self.answer))
            chosen = in_prompt if whole_prompt else torch.zeros_like(in_prompt)
            if whole_answer:
                chosen = chosen | ~in_prompt
            elif self.share > 0:
                chosen = chosen | self._changed(d, layer, kv, hidden)
            places = self._positions(chosen)
            if places.shape[1]:
                x = _take(hidden, places)
                look = partial(self.look, d, kv, plan)
                _put(kv, "attention", places, d.blocks.attention(layer, x, places, d.blocks.angles(x, places), look))
            hidden = hidden + kv.state["attention"]
            if places.shape[1]:
                _put(kv, "mlp", places, d.blocks.mlp(layer, _take(hidden, places)))
            hidden = hidden + kv.state["mlp"]
        return _take(hidden, rows)

    def _changed(self, d: Denoising, layer: int, kv: PositionKV, hidden: Tensor) -> Tensor:
        """The answer's rows whose values are least like those kept; all of its values are renewed. [B, N]"""
        assert kv.values is not None
        new = d.blocks.values(layer, hidden[:, d.prompt :])
        old = kv.values[:, :, d.prompt :]
        likeness = torch.cosine_similarity(new.transpose(1, 2).flatten(2), old.transpose(1, 2).flatten(2), dim=-1)
        kv.values[:, :, d.prompt :] = new
        least = likeness.topk(int(self.share * likeness.shape[1]), dim=-1, largest=False).indices + d.prompt
        return torch.zeros_like(d.masked).scatter_(1, least, torch.ones_like(least, dtype=torch.bool))

    @staticmethod
    def _positions(chosen: Tensor) -> Tensor:
        """Positions of the chosen rows, as many in every sequence. [B, m]"""
        return chosen.nonzero()[:, 1].view(len(chosen), -1)


def _take(rows: Tensor, places: Tensor) -> Tensor:
    return rows[sequences(places), places]


def _put(kv: PositionKV, name: str, places: Tensor, rows: Tensor) -> None:
    """Keep what a branch added to rows. rows: [B, m, D]"""
    if name not in kv.state:
        kv.state[name] = rows.new_zeros(len(rows), kv.length, rows.shape[-1])
    kv.state[name][sequences(places), places] = rows
