"""CompressKV: a few retrieval heads of each layer choose the tokens that all its heads keep."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Odd, Positive
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Moment, Shape, Step, Upstream, resolved
from kvbench.selection import ScoredMethod, pool_before
from kvbench.store import LayerKV
from kvbench.store.scores import attention_mass_of, window_weights_of
from kvbench.techniques.calibration import calibration_ids

if TYPE_CHECKING:
    from kvbench.hf import Model

CHUNK = 512
Heads = tuple[tuple[int, ...], ...]
"""Query heads by layer, ascending."""
_FOUND: dict[tuple[str, str, int, int, int], Heads] = {}


@dataclass(frozen=True)
class CompressKV(ScoredMethod):
    """Keeps the observation window and the tokens that the layer's retrieval heads attend to, the same in all heads."""

    window: Positive = 8
    kernel: Annotated[int, Ge(1), Odd] = 5
    voters: Positive = 4
    """Query heads of each layer that choose; all heads where there are no more."""
    tokens: Positive = 1024
    """Tokens of each text in which a needle is copied, to find the retrieval heads."""
    needle: Positive = 32
    """Tokens of a needle."""
    trials: Positive = 4
    """Texts, with needles at different depths."""

    heads: tuple[tuple[int, ...], ...] | None = resolved(by_bind=True)
    """The query heads of each layer that choose."""

    card: ClassVar[Card] = Card(
        name="compresskv",
        title="CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before Generation",
        idea="Most heads attend to sinks and recent tokens, whatever the text, and outvote those that retrieve. "
        "So a few retrieval heads per layer choose the tokens, for all heads of the layer.",
        arxiv="2508.02401",
        year=2025,
        family="allocation",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="512",
        calibration="retrieval heads, in four passes",
        heads="indexed",
        upstream=Upstream(repo="TUDa-HWAI/CompressKV", commit="e8af510", license=None),
        deviations=(
            ("Every layer has the same budget. The paper's layers share one in proportion to errors that its authors "
            "measure on LongBench itself."),
            ("Retrieval heads are found while a needle of random tokens is copied, token by token as it stands in the "
            "text. The authors let the model answer questions about needles, which small models cannot, and count an "
            "answer if it has more than half of the needle's words."),
            ("A copied token counts once for a head; the authors' code counts it once for each of its places in the "
            "needle."),
        ),
        unverified=("tokens, needle, trials: chosen for small models; the authors use texts of up to 50,000 tokens.",),
        limits=(
            "Entries are chosen by the last tokens: a question that is asked later does not affect the choice.",
            "In a layer with at most `voters` query heads all of them choose, so that none is left out.",
            "A model that copies nothing has no retrieval heads, so that the choice of heads is noise.",
        ),
    )

    def minimum_entries(self) -> int:
        """The window and one entry to choose."""
        return self.window + 1

    def bind(self, model: Model) -> Self:
        """Find the retrieval heads, once per process and model."""
        key = model.sha256, model.dtype, self.tokens, self.needle, self.trials
        if key not in _FOUND:
            _FOUND[key] = rank_heads(find_scores(model, self.tokens, self.needle, self.trials))
        return replace(self, heads=tuple(tuple(sorted(x[: self.voters])) for x in _FOUND[key]))

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the heads from a result (`UserError` unless they are heads of every layer)."""
        heads: Any = resolution.get("heads")
        if heads is None:
            return self
        counts = [x.query_heads for x in shape.layers]
        if len(heads) != len(counts) or any(not 0 <= x < n for row, n in zip(heads, counts, strict=True) for x in row):
            raise UserError("compresskv: the heads do not name query heads of every layer of the model.")
        return replace(self, heads=tuple(tuple(x) for x in heads))

    def layer(self, index: int) -> LayerKV:
        """A store that also keeps the last queries, until the compression."""
        return LayerKV(queries=self.window)

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Pooled mean attention of the window in the voting heads, for all heads; infinite in it. [B, H_kv, n]"""
        assert kv.recent_queries is not None and self.heads is not None
        mass = attention_mass_of(kv.recent_queries, kv, step, list(self.heads[step.layer]))
        mean = pool_before(mass / self.window, self.window, self.kernel, "avg").mean(1, keepdim=True)
        return mean.expand(-1, kv.keys.shape[1], -1)


@dataclass(frozen=True)
class NeedleRecorder(Method):
    """The full cache; sums up each head's attention to the needle while it is copied."""

    start: int = 0
    """Position of the needle in the text."""
    needle: int = 0
    copy: int = 0
    """Position of the copy; the query before each of its tokens predicts it."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; adds attention to the needle to the state. [B, H_q, T, D_v]"""
        here = (step.positions[0] >= self.copy - 1) & (step.positions[0] < self.copy + self.needle - 1)
        gone = step.seen - kv.n  # entries that a sliding window has left behind
        low, high = max(0, self.start - gone), max(0, self.start + self.needle - gone)
        found = step.query.new_zeros(step.query.shape[1], dtype=torch.float64)
        if here.any() and high:
            weights = torch.cat([x[..., here, :] for x in window_weights_of(step.query, kv, step)], dim=-1)
            found = weights[..., low:high].sum((0, 3, 4)).flatten().double()
        kv.state["score"] = kv.state["score"] + found if "score" in kv.state else found
        return kv.attend(step)


def find_scores(model: Model, tokens: int, needle: int, trials: int) -> list[Tensor]:
    """Mean attention of each query head to the needle per copied token, by layer. [H_q] each

    Raises:
        UserError: a text has no room for a needle and its copy.
    """
    ids = calibration_ids(model, tokens)
    room = ids.shape[1] - 2 * needle
    if room < 2:
        raise UserError(
            f"compresskv: a text of {ids.shape[1]} tokens has no room for needle={needle} and its copy. Use "
            f"--set needle={max(1, ids.shape[1] // 4)} or less, or larger tokens."
        )
    totals = [torch.zeros(x.query_heads, dtype=torch.float64) for x in model.layers]
    for trial in range(trials):
        numbers = random.Random(trial)
        chosen = ids[:, torch.tensor(numbers.sample(range(ids.shape[1]), needle), device=ids.device)]
        start = 1 + int((room - 2) * trial / max(1, trials - 1))
        text = torch.cat([ids[:, :start], chosen, ids[:, start:room], chosen], dim=1)
        recorder = NeedleRecorder(start=start, needle=needle, copy=room + needle)
        with Session(model, recorder, capacity=text.shape[1]) as session:
            for chunk in text.split(CHUNK, dim=1):
                session.forward(chunk, Moment.CONTEXT_CHUNK)
            found = [x.state["score"].cpu() for x in session.layers]
        totals = [a + b / (needle * trials) for a, b in zip(totals, found, strict=True)]
    return totals


def rank_heads(scores: list[Tensor]) -> Heads:
    """The query heads of each layer, the one with the highest score first."""
    return tuple(tuple(x.argsort(descending=True, stable=True).tolist()) for x in scores)
