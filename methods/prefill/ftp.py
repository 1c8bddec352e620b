"""FTP: a small trained router decides which tokens of a prompt a layer runs; the others skip it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Moment, Shape, Step, resolved
from kvbench.methods.prefill.token_router import (
    describe,
    divide,
    keep_highest,
    make_router,
    measure_received,
    train,
)
from kvbench.store import LayerKV
from kvbench.store.facts import Fact
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import find_part, get_module, get_part, load_module
from kvbench.techniques.training import draw_halves

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

TEXT = 64
"""Tokens of a text, where the router is trained when a run starts; the second half is its answer."""


@dataclass
class SkippedKV(LayerKV):
    """Entries of the tokens that ran the layer."""

    skipped: int = field(default=0, init=False)
    """Tokens of the context that skipped the layer, over all KV heads."""

    def append(self, step: Step) -> None:
        """Add a forward's entries, and count the tokens without one."""
        if step.moment.in_context:
            self.skipped += (step.seen - self.seen - step.key.shape[2]) * step.key.shape[0] * step.key.shape[1]
        super().append(step)

    def facts(self) -> dict[str, Fact]:
        """Entries that were never made."""
        return {**super().facts(), "entries_skipped": Fact(self.skipped, changed=True)}


@dataclass(frozen=True)
class FTP(Method):
    """Of a prompt, each layer runs the tokens that the router scores highest; later tokens run every layer."""

    weights: str = ""
    """A safetensors file of `scripts/train_part.py`. Empty: the shipped one, or training when a run starts."""
    steps: Positive = 4
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the router's weights."""
    trained_on: str | None = resolved()
    """The data of its training."""
    schedule: tuple[float, ...] | None = resolved()
    """How much each layer skips, relative to the others."""
    kept: tuple[int, ...] | None = resolved()
    """Tokens of the context that each layer runs; None: all."""

    card: ClassVar[Card] = Card(
        name="ftp",
        title="FTP: A Fine-grained Token-wise Pruner for Large Language Models via Token Routing",
        idea="A small network, one for all layers, scores the tokens of a prompt before each layer by place and by the "
        "attention that they received. The others skip the layer, attention and feed-forward, and get no entry there.",
        arxiv="2412.11494",
        year=2024,
        family="prefill",
        stages=("generation", "compression"),
        budget=BudgetKind.STORED,
        calibration="a router, trained",
        heads="indexed",
        upstream=None,
        deviations=(
            "This is compute pruning: the budget counts the entries that are left because tokens skipped layers.",
            "Tokens after the context run every layer; in the paper a token is skipped by a threshold.",
            ("How much each layer skips is measured once per model, one layer after the other; the paper has a "
            "genetic search. Models without shipped weights skip equally in every layer."),
            ("Without a file of weights for the model, the router is trained when a run starts, on Python's manual; "
            "that of `mini` was trained on text of the tasks (scripts/train_part.py)."),
            "Layers with a sliding window run every token.",
        ),
        unverified=(
            "No code was found, and we did not have the paper: the method follows reviews of it.",
            "The attention score is the mean over heads and queries, in the last layer that ran the token.",
            "The router that is imitated keeps a tenth of its tokens at the beginning and the others at the end.",
            "Activation, learning rate and the weights of the three losses.",
            "The context's last token runs every layer.",
        ),
        limits=(
            "The context runs in one pass, whatever --chunk says.",
            "A question that is asked later does not affect the choice.",
            "The router's weights are not counted as bytes of the cache.",
            "Training leaves out soft caps and learned sinks, so that it sees other attention in a model with them.",
            "Stores are allocated for all tokens: room for those that skip a layer counts as spare bytes.",
        ),
    )

    skips_layers: ClassVar[bool] = True
    shares_layers: ClassVar[bool] = True
    replays_context: ClassVar[bool] = False
    inexact_prefill: ClassVar[str | None] = "tokens of the context skip layers."
    recompressible: ClassVar[str | None] = "tokens that skipped a layer have no entries in it."

    def bind(self, model: Model) -> Self:
        """Find the router's weights and how much layers skip, or train it."""
        weights = tuple(float(x.window is None) for x in model.layers)
        sha256 = find_part(self, model, lambda: self._train(model, weights), f"Python's manual, {self.steps} steps")
        part = get_part(sha256)
        load_module("ftp", model, sha256, make_router)
        if "schedule" in part.facts:
            weights = tuple(json.loads(part.facts["schedule"]))
        if len(weights) != len(model.layers):
            raise UserError(
                f"ftp: the weights have a schedule of {len(weights)} layers, and {model.id} has {len(model.layers)}. "
                "Give weights that were trained for this model."
            )
        return replace(self, part=sha256, trained_on=part.data, schedule=weights)

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the schedule from a result (`UserError` unless it has a share for every layer)."""
        schedule: Any = resolution.get("schedule")
        if schedule is None:
            return self
        if len(schedule) != len(shape.layers) or not all(0 <= x <= 1 for x in schedule) or not any(schedule):
            raise UserError("ftp: the schedule does not name how much each layer of the model skips, from 0 to 1.")
        return replace(self, schedule=tuple(schedule))

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Divide a budget over the layers; refuse a model in which no layer may skip (`UserError`)."""
        fitted = super().fit(budget, shape)
        if not fitted.identity(shape) and all(x.window is not None for x in shape.layers):
            raise UserError(
                "ftp runs every token in layers with a sliding window, and this model has no others: it would have no "
                "effect. Use a model with full attention."
            )
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, kept=None)
        weights = self.schedule or tuple(float(x.window is None) for x in shape.layers)
        whole = sum(x.window is None for x in shape.layers)
        total = fitted.rows * whole + shape.length * (len(weights) - whole)
        return replace(fitted, kept=divide(weights, shape.length, total))

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """Tokens that the layer runs."""
        del window
        return None if self.kept is None else self.kept[layer]

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room for later tokens, and for the context's tokens that skip layers: stores are allocated for all."""
        return super().later_bytes(shape, tokens) + shape.full_bytes - self.declared_bytes(shape)

    def layer(self, index: int) -> LayerKV:
        """A store that counts the tokens without an entry."""
        del index
        return SkippedKV()

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context in one pass. [B, V]"""
        return session.run_chunks([torch.cat(list(chunks), dim=1)], Moment.CONTEXT_END)

    def choose_tokens(self, layer: int, ids: Tensor, shared: Mapping[str, Tensor]) -> Tensor | None:
        """The tokens that the router scores highest; all of them where the layer keeps as many. [B, m]"""
        tokens = ids.shape[1]
        if self.kept is None or self.kept[layer] >= tokens:
            return None
        received = shared.get("received", torch.zeros(ids.shape, device=ids.device))  # none before the first layer
        scores: Tensor = get_module(self.part, nn.Sequential)(describe(received, 1 - self.kept[layer] / tokens))[..., 0]
        return keep_highest(scores, self.kept[layer])

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; in the context, notes what each token received. [B, H_q, T, D_v]"""
        if step.moment.in_context and self.kept is not None and step.window is None:
            received = step.shared.get("received")
            if received is None:
                received = torch.zeros(step.positions.shape[0], step.seen, device=step.key.device)
            step.shared["received"] = received.scatter(1, step.positions, measure_received(step, kv.keys))
        return kv.attend(step)

    def _train(self, model: Model, weights: tuple[float, ...]) -> Mapping[str, Tensor]:
        """Train on the manual; untrained where no layer may skip."""
        if not any(weights):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return dict(make_router().state_dict())
        ids = calibration_ids(model, TEXT * 8)
        size = min(TEXT, ids.shape[1])
        return train(model, self.steps, weights, lambda step: draw_halves(ids, size, step))
