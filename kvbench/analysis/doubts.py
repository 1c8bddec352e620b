"""Reasons to doubt a score: a failing full cache, a budget without effect, bad answers, training, pooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvbench.analysis.compare import is_full
from kvbench.analysis.shares import cut_share
from kvbench.runs.pooling import is_narrow
from kvbench.runs.results import TASKS, Result
from kvbench.text.scorers import name_strict

FAILING = 0.5
"""Mean below which the full cache fails a task."""
MUCH = 0.1
"""Difference of the strict score that is reported."""
OFTEN = 0.5
"""Share of cut answers that is reported."""
FEW_TOKENS = 1.5
"""Mean tokens of an answer below which most answers are one token."""


def fails(full: Result) -> bool:
    """Whether the full cache fails the task, for metrics of which higher is better."""
    score = full.score
    return score.mean is not None and score.higher_is_better and score.mean < FAILING


def state_baseline(full: Result, score: str) -> str:
    """That a run with which others are compared has this score, which a diffusion model has without a cache."""
    if full.model.kind == "diffusion":
        return f"the model itself scores {score} without a cache"
    return f"the full cache itself scores {score}"


def find_strict(result: Result) -> float | None:
    """Mean by the strict scorer of the run's scorer, for which the first value named counts; None if there is none."""
    return result.scores.get(name_strict(result.task.scorer))


def list_doubts(result: Result) -> Iterator[str]:
    """Sentences on why the score of a run may not be what it seems."""
    mean, strict, cut = result.score.mean, find_strict(result), cut_share(result)
    if result.budget.trained:
        yield f"trained on {TASKS}: compare it with the full cache, not with methods without training."
    if mean is None:
        return
    if is_full(result) and fails(result):
        stated = state_baseline(result, f"{mean:.3f}")
        yield f"{stated}: the model fails this task, so differences between methods say little."
    effect, agreement = result.effect, result.agreement
    lossless = effect is not None and effect.n == 0 and effect.n_identity
    if lossless and agreement is not None and agreement.kl == 0 and result.budget.asked is not None:
        yield (
            "the budget holds the whole context, so the method changed nothing and this is the score of the full "
            "cache. A smaller budget or a longer context shows its effect."
        )
    if lossless and result.reuse is not None and result.reuse.reused_share == 0:
        yield "no entry of an earlier prompt was reused, so this is the score of a full prefill."
    if strict is not None and mean - strict >= MUCH:
        yield (
            f"{result.score.metric} gives {mean:.3f}, but {strict:.3f} if the first value named counts: answers name "
            "other values first, as a copy of the context does."
        )
    if cut is not None and cut >= OFTEN:
        yield f"the length limit cut {cut:.0%} of the answers."
    shortest = _find_shortest(result)
    if result.visibility == "visible" and _computes_prompts_exactly(result) and shortest < FEW_TOKENS:
        yield (
            f"answers have {shortest:.1f} tokens, and the prefill predicts the first one before the cache is "
            "compressed: the score hardly depends on the method. Use --visibility hidden."
        )
    kernel, tokens = result.method.settings.get("kernel"), result.output.reference_tokens
    if strict is not None and tokens is not None and is_narrow(kernel, tokens):
        yield (
            f"scores are pooled over {kernel} tokens, and the values of an answer have {tokens:.0f} in all under this "
            "tokenizer: only part of a value may be kept."
        )


def _computes_prompts_exactly(result: Result) -> bool:
    """Whether a method other than the full cache leaves the forward pass of the prompt as it is."""
    changes = "generation" in result.method.card["stages"] or result.reuse is not None
    return not (changes or is_full(result) or result.model.kind == "diffusion")


def _find_shortest(result: Result) -> float:
    """Mean tokens of a reference answer, or of the answers if they are shorter and not chosen among given ones."""
    output = result.output
    generated = sum(n for reason, n in output.stop_reasons.items() if reason != "choice")
    found = [output.tokens / generated] if generated else []
    return min(found if output.reference_tokens is None else [*found, output.reference_tokens], default=float("inf"))


def group_doubts(runs: Iterable[tuple[str, Result]]) -> list[str]:
    """Every doubt once, after the labels of the runs that it is about."""
    labels: dict[str, list[str]] = {}
    for label, result in runs:
        for doubt in list_doubts(result):
            labels.setdefault(doubt, []).append(label)
    return [f"{', '.join(names)}: {doubt}" for doubt, names in labels.items()]
