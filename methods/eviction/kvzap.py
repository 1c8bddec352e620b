"""KVzap: predicts KVzip+'s scores from hidden states, so that the context is not repeated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Natural
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Step, Upstream, resolved
from kvbench.methods.eviction.kvzip_plus import KVzipPlus
from kvbench.selection import protect_last
from kvbench.store import LayerKV
from kvbench.techniques.calibration import calibrated, calibration_ids, remember
from kvbench.techniques.cascade import SharedBudgetMethod

if TYPE_CHECKING:
    from kvbench.hf import Model

TEXT = 1024
"""Tokens of a training text; the authors' texts have 750 to 1,250, so that attention is spread over as many."""
RIDGE = 1.0
"""Weight of the squared coefficients, the default of the authors' regression."""


@dataclass(frozen=True)
class KVzap(SharedBudgetMethod):
    """Keeps the last tokens and the entries with the highest predicted scores, over all heads and layers."""

    window: Natural = 128
    """Last tokens, which are always kept; at most half of the budget."""
    tokens: Annotated[int, Ge(TEXT)] = 4096
    """Tokens of text on which the predictor is trained when a run starts."""

    predictor: str | None = resolved(by_bind=True)
    """SHA-256 of the predictors of all layers."""

    signed: ClassVar[bool] = True
    card: ClassVar[Card] = Card(
        name="kvzap",
        version="2",
        title="KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
        idea="KVzip+'s scores need a second pass over the context, but they can be predicted from hidden states. "
        "A small model per layer, trained on them, scores every entry as it arrives.",
        arxiv="2601.07891",
        year=2026,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        calibration="a linear predictor of KVzip+ scores, trained on Python's manual",
        heads="pooled",
        upstream=Upstream(repo="NVIDIA/kvpress", commit="8bb29b9", license="Apache-2.0"),
        deviations=(
            ("The predictor is linear, one of the authors' two forms, with weights of its own in each layer. It is "
            "trained when a run starts, by ridge regression on the logarithm of KVzip+ scores of Python's manual; the "
            "authors train on texts of several domains and publish predictors of some models."),
            ("The budget decides the threshold on each context: the lowest score that is stored. The authors choose "
            "one threshold per model, so that the share that stays differs between contexts."),
            "Only the context is compressed; `dms` drops later entries, too.",
            "Layers with a sliding window have a budget of their own, the same share of their window.",
        ),
        limits=(
            "It is trained on the model before a run, which takes about two passes over `tokens` tokens of text.",
            "The predictor's weights, a number per hidden channel and KV head, are not counted as bytes of the cache.",
            "The manual's text differs between versions of Python; the result records a hash of the predictor.",
            "All entries of all layers are stored until the last layer has been run.",
        ),
    )

    reads_hidden: ClassVar[bool] = True

    def minimum_entries(self) -> int:
        """One token of the window and one entry to choose."""
        return 2

    def bind(self, model: Model) -> Self:
        """Train the predictor, once per process and model."""
        return replace(self, predictor=remember(KVzap, model, self.tokens, lambda: train(model, self.tokens)))

    def layer(self, index: int) -> LayerKV:
        """A store in which heads can keep unequal numbers of entries, where layers share the budget."""
        return LayerKV(ragged=self.pooled is not None and index in self.pooled)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; predicts the new entries' scores. [B, H_q, T, D_v]"""
        if self.rows is not None and step.moment.in_context:
            new = self.predict(step)
            kv.state["predicted"] = torch.cat([kv.state["predicted"], new], -1) if "predicted" in kv.state else new
        return kv.attend(step)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Compress, and forget the scores that a layer within its budget did not need."""
        super().evict(kv, step)
        if step.moment.compresses:
            kv.state.pop("predicted", None)

    def predict(self, step: Step) -> Tensor:
        """Scores of the new entries. [B, H_kv, T]"""
        assert self.predictor is not None, "bind the method to a model first"
        if step.hidden is None:
            raise UserError(
                f"{self.card.name} needs the hidden states of layer {step.layer}, and kvbench does not find its "
                "attention module. Use a method without them, such as snapkv."
            )
        weights = calibrated(self.predictor, step.layer).to(step.hidden.device)  # [hidden + 1, H_kv]
        scores: Tensor = (step.hidden.float() @ weights[:-1] + weights[-1]).mT
        return scores

    def score(self, kv: LayerKV, step: Step) -> Tensor:
        """Predicted scores; infinite for the last tokens. [B, H_kv, n]"""
        return protect_last(kv.state.pop("predicted")[..., -kv.n :], self.last(step))

    def last(self, step: Step) -> int:
        """Last tokens that a layer keeps."""
        entries = self.entries_in(step.layer, step.window)
        assert entries is not None
        return min(self.window, entries // 2)


@dataclass(frozen=True)
class Teacher(KVzipPlus):
    """KVzip+ without eviction: leaves its scores and the context's hidden states in the stores."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        if step.moment.in_context and step.hidden is not None:
            kv.state["hidden"] = step.hidden
        return kv.attend(step)

    def _keep(self, session: Session, protected: int) -> None:
        """Drop nothing."""


def train(model: Model, tokens: int) -> tuple[Tensor, ...]:
    """Linear predictors of the logarithm of KVzip+ scores, for every layer. [hidden + 1, H_kv] float32 each"""
    size = min(TEXT, model.max_length * 2 // 5)  # a text and its repetition are run together
    texts = [x for x in calibration_ids(model, tokens).split(size, dim=1) if x.shape[1] == size]
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.layers]
    for text in texts:
        teacher = replace(Teacher(), rows=size - 1, length=size)
        with Session(model, teacher, capacity=size) as session:
            session.prefill(text)
            for examples, store in zip(found, session.layers, strict=True):
                scores, hidden = store.state["score"][0].T, store.state["hidden"][0, -store.n :]  # [n, H_kv]
                known = (scores > 0).all(-1)  # the first tokens are not repeated
                examples.append((hidden[known].double(), scores[known].double().log()))
    return tuple(fit_line(*(torch.cat(x) for x in zip(*examples, strict=True))) for examples in found)


def fit_line(inputs: Tensor, targets: Tensor) -> Tensor:
    """Ridge regression; the intercept is the last line and is not penalized. [features + 1, outputs] float32

    inputs: [n, features]. targets: [n, outputs]. Both float64.
    """
    mean, center = inputs.mean(0), targets.mean(0)
    shifted = inputs - mean
    gram = shifted.T @ shifted + RIDGE * torch.eye(inputs.shape[1], dtype=inputs.dtype, device=inputs.device)
    slope = torch.linalg.solve(gram, shifted.T @ (targets - center))
    return torch.cat([slope, (center - mean @ slope)[None]]).float()
