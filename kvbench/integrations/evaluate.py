"""Scorers as `evaluate.Metric`, for predictions made outside kvbench. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.errors import UserError
from kvbench.machine import load_extra
from kvbench.registry import find_scorer
from kvbench.task import Scorer


def load_metric(scorer_id: str) -> Any:
    """Wrap the scorer with this id, of any registered task, as an `evaluate.Metric`.

    `compute(predictions=[...], references=[[...], ...], facts=[{...}, ...])` returns the mean under the metric's name,
    and `n`, the number of turns that the scorer applies to. `facts` are needed only by scorers that use facts.

    Raises:
        UserError: there is no such scorer, or `evaluate` is not installed.
    """
    scorer, _ = find_scorer(scorer_id)
    evaluate, datasets = (load_extra(x, extra="data", what="load_metric") for x in ("evaluate", "datasets"))
    base: Any = evaluate.Metric

    class ScorerMetric(base):  # type: ignore[misc]  # it has no types
        def _info(self) -> Any:
            text = datasets.Value("string")
            return evaluate.MetricInfo(
                description=f"{scorer.metric} by kvbench's scorer {scorer.id}", citation="",
                inputs_description=f"predictions: texts. references: lists of texts. facts: {_list(scorer) or 'none'}.",
                features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
            )

        def _compute(
            self, predictions: Sequence[str], references: Sequence[Sequence[str]],
            facts: Sequence[Mapping[str, object]] | None = None,
        ) -> dict[str, float]:
            return _score(scorer, predictions, references, facts)

    return ScorerMetric(keep_in_memory=True)


def _score(
    scorer: Scorer, predictions: Sequence[str], references: Sequence[Sequence[str]],
    facts: Sequence[Mapping[str, object]] | None = None,
) -> dict[str, float]:
    """Mean of the scores under the metric's name, and their number `n`."""
    known: Sequence[Mapping[str, object]] = [{}] * len(predictions) if facts is None else facts
    if len(known) != len(predictions):
        raise UserError(f"{len(known)} facts for {len(predictions)} predictions. Give one mapping for each.")
    for i, gold in enumerate(references):
        if not gold:
            raise UserError(f"prediction {i} has no reference, so nothing can be right. Give it one or leave it out.")
    for i, found in enumerate(known):
        if missing := [x for x in scorer.facts if x not in found]:
            raise UserError(
                f"scorer {scorer.id} needs the facts {_list(scorer)}, and prediction {i} has no {', '.join(missing)}. "
                "Give facts=[{...}, ...], one mapping for each prediction."
            )
    scores = [
        score for prediction, gold, found in zip(predictions, references, known, strict=True)
        if (score := scorer(prediction, gold, found)) is not None
    ]
    if not scores:
        raise UserError(f"scorer {scorer.id} applies to none of {len(predictions)} predictions.")
    return {scorer.metric: fmean(scores), "n": len(scores)}


def _list(scorer: Scorer) -> str:
    return ", ".join(scorer.facts)
