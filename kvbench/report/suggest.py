"""Suggests techniques for a model, a size limit and a mode from finished runs, where a test can tell them apart.

The leaderboard's first page and `kvbench suggest` show the answers of this module.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from kvbench.analysis.compare import compare_runs, is_full, name_questions, rank_runs
from kvbench.analysis.doubts import list_doubts, state_baseline
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import fill_full_reads
from kvbench.analysis.significance import ALPHA, describe_too_few, find_least_p
from kvbench.log import count
from kvbench.registry import list_models
from kvbench.report.group import Axis, find_band, name_question
from kvbench.report.suggestion import (
    Judged,
    ProtocolRuns,
    Question,
    Standing,
    Suggestion,
    Technique,
    count_leads,
)
from kvbench.runs.results import TASKS, Result

SLACK = 1.05
"""A run may exceed the limit by this factor: methods round to whole tokens, and sinks and scores come on top."""
RANKED_FROM = 0.1
"""Score of the full cache, of 1, below which there is hardly an answer that a technique could lose."""


class Guide:
    """Answers questions from runs. Each protocol is judged once per limit."""

    def __init__(self, protocols: Iterable[ProtocolRuns]) -> None:
        self.protocols = tuple(protocols)
        self.labels = label_techniques([x.result for protocol in self.protocols for x in protocol.runs])
        self._judged: dict[tuple[str, Axis, float], Judged] = {}

    def answer(self, question: Question) -> Suggestion:
        """Order the techniques of the matching protocols: by place, then by their largest loss."""
        judged = [
            self.judge(x, question.axis, question.limit) for x in self.protocols if question.fits(x.example)
        ]
        standings: dict[str, list[Standing]] = {}
        for found in judged:
            for label, standing in found.standings.items():
                standings.setdefault(label, []).append(standing)
        leads = {label: count_leads(some) for label, some in standings.items()}
        sharing = Counter(leads.values())
        techniques = [
            Technique(
                label, some[0].run.result.method.name, tuple(some),
                1 + sum(n > leads[label] for n in leads.values()) if leads[label] else None,
                tied=bool(leads[label]) and sharing[leads[label]] > 1,
            )
            for label, some in standings.items()
        ]
        techniques.sort(key=lambda x: (-x.leads, _find_loss(x.standings), -len(x.standings), x.label))
        return Suggestion(question, tuple(judged), tuple(techniques), tuple(self._list_limits(question, judged)))

    def judge(self, protocol: ProtocolRuns, axis: Axis, limit: float) -> Judged:
        """The standing of every technique with a run within the limit."""
        key = protocol.key, axis, limit
        if key not in self._judged:
            self._judged[key] = self._judge(protocol, axis, limit)
        return self._judged[key]

    def _judge(self, protocol: ProtocolRuns, axis: Axis, limit: float) -> Judged:
        chosen: dict[str, tuple[tuple[int, str, float], FinishedRun]] = {}
        for x, level in zip(protocol.runs, protocol.levels or [""] * len(protocol.runs), strict=True):
            size, label = axis.measure(x.result), self.labels[name_technique(x.result)]
            if size is None or size > limit * SLACK or not _counts(x.result):
                continue
            place = find_band(min(size, limit)), level, size
            if label not in chosen or place > chosen[label][0]:
                chosen[label] = place, x
        runs = [x for _, x in chosen.values()]
        differences = compare_runs(protocol.full, runs) if protocol.full is not None else [None] * len(runs)
        ranks = rank_runs(runs)
        unranked = _explain_unranked(protocol, ranks)
        return Judged(protocol, {
            label: Standing(protocol, x, difference, leads=unranked is None and rank == 1)
            for label, x, difference, rank in zip(chosen, runs, differences, ranks, strict=True)
        }, unranked)

    def _list_limits(self, question: Question, judged: Sequence[Judged]) -> Iterable[str]:
        if (note := warn_of_model(question.model)) is not None:
            yield f"{note}."
        for found in judged:
            if found.standings and found.unranked is not None:
                yield f"{found.protocol.name}: {found.unranked}."
            if found.protocol.full is None:
                missing = "without a cache" if question.axis is Axis.COMPUTED else "of the full cache"
                yield f"{found.protocol.name}: no run {missing}, so losses are unknown."
            else:
                yield from (f"{found.protocol.name}: {x}" for x in list_doubts(found.protocol.full.result))
        fitting = {label for found in judged for label in found.standings}
        others = {
            self.labels[name_technique(x.result)]
            for found in judged for x in found.protocol.runs if _counts(x.result)
        } - fitting
        if others and fitting:
            yield f"No run within the limit: {', '.join(sorted(others))}."
        trained = {
            self.labels[name_technique(x.result)]
            for found in judged for x in found.protocol.runs if x.result.budget.trained
        }
        if trained:
            yield f"Not compared, because they were trained on {TASKS}: {', '.join(sorted(trained))}."
        if fitting and not any(x.time for found in judged for x in found.standings.values()):
            yield "No time per token: none of these runs is from a GPU."


def _explain_unranked(protocol: ProtocolRuns, ranks: Sequence[int | None]) -> str | None:
    full = None if protocol.full is None else protocol.full.result
    if full is not None and (warning := explain_failing(full)) is not None:
        return warning
    if len(ranks) == 1:
        return "one technique has a run, so nothing is ranked"
    contexts = protocol.example.spec.samples
    if find_least_p(contexts, len(ranks) - 1) >= ALPHA:
        return describe_too_few(contexts, len(ranks) - 1).rstrip(".")
    if len(set(ranks) - {None}) < 2:
        return f"too few to tell, no test separates the {len(ranks)} techniques with {count(contexts, 'context')}"
    return None


def group_protocols(runs: Iterable[FinishedRun]) -> list[ProtocolRuns]:
    """Group runs by their questions."""
    found: dict[str, list[FinishedRun]] = {}
    every = list(runs)
    for x in fill_full_reads(every, every):
        found.setdefault(f"{name_questions(x.result.spec)} {x.result.latency.timing}", []).append(x)
    return [
        ProtocolRuns(key, tuple(some), next((x for x in some if is_full(x.result) and x.result.status == "ok"), None))
        for key, some in sorted(found.items(), key=lambda x: name_question(x[1][0].result))
    ]


def name_technique(result: Result) -> str:
    """A key of the method and its settings; a budget is none of these."""
    return json.dumps([result.method.name, _settings(result)], sort_keys=True)


def label_techniques(results: Sequence[Result]) -> dict[str, str]:
    """A label by technique: the method's name, and the settings in which its techniques differ."""
    settings: dict[str, dict[str, dict[str, object]]] = {}
    for x in results:
        settings.setdefault(x.method.name, {})[name_technique(x)] = _settings(x)
    return {
        key: " ".join([name, *(
            f"version {value}" if field == "version" else f"{field}={value}" for field, value in own.items()
            if any(other.get(field) != value for other in several.values())
        )])
        for name, several in settings.items() for key, own in several.items()
    }


def _settings(result: Result) -> dict[str, object]:
    method = result.method
    return {**method.settings, "version": method.version, "code": method.code}


def _counts(result: Result) -> bool:
    trained = result.budget.trained  # on the tasks that it would be suggested for
    return result.status == "ok" and result.score.mean is not None and not is_full(result) and not trained


def _find_loss(standings: Sequence[Standing]) -> tuple[bool, float]:
    """Whether no loss against the full cache is known, and the largest loss or, without any, the worst score."""
    losses, scores = [], []
    for x in standings:
        score = x.run.result.score
        sign = -1 if score.higher_is_better else 1
        scores.append(sign * (score.mean or 0.0))
        if x.difference is not None and x.difference.mean is not None:
            losses.append(sign * x.difference.mean)
    return not losses, max(losses or scores)


def explain_failing(full: Result) -> str | None:
    """Why nothing is ranked where the model without a method has hardly a right answer; None if it has."""
    score = full.score
    if score.mean is None or not score.higher_is_better or score.mean >= RANKED_FROM:
        return None
    return f"{state_baseline(full, Metric.of(score).write(score.mean))}, so nothing is ranked"


def warn_of_model(name: str) -> str | None:
    """The note on a bundled model."""
    if name not in list_models():
        return None
    return f"{name} is a small model trained on these tasks and says nothing about 8B models"
