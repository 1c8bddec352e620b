"""Suggests techniques for a model, a size limit and a mode from finished runs, where a test can tell them apart.

The leaderboard's first page and `kvbench suggest` show the answers of this module.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvbench.analysis.compare import Difference, compare_runs, is_full, name_questions, rank_runs
from kvbench.analysis.doubts import list_doubts
from kvbench.analysis.formatting import format_difference, format_seconds, format_share
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import fill_full_reads, read_share, stored_share
from kvbench.analysis.significance import ALPHA, describe_too_few, find_least_p
from kvbench.registry import list_models
from kvbench.report.group import Axis, name_question
from kvbench.runs.results import Result
from kvbench.runs.spec import Visibility
from kvbench.task import Mode

SLACK = 1.05
"""A run may exceed the limit by this factor: methods round to whole tokens, and sinks and scores come on top."""
RANKED_FROM = 0.1
"""Score of the full cache, of 1, below which there is hardly an answer that a technique could lose."""
SHOWN = 3
MOST_SHOWN = 8
"""Techniques shown with their runs: at least the first, and as many as share the first place up to the second."""
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
LIMITED = {
    Axis.STORED: ("stores", "of the full cache"), Axis.READ: ("reads", "of the full cache per decode step"),
    Axis.COMPUTED: ("computes", "of the positions per denoising step"),
}


@dataclass(frozen=True)
class Question:
    """A model, a mode, and the largest share of the full cache on one axis."""

    model: str
    mode: Mode
    axis: Axis
    limit: float
    task: str | None = None
    """None: every task."""
    visibility: Visibility | None = None
    """None: every visibility."""

    def fits(self, result: Result) -> bool:
        """Whether a run is of this model, mode, task and visibility."""
        return (
            (result.model.id, result.mode) == (self.model, self.mode) and self.task in (None, result.task.name)
            and self.visibility in (None, result.visibility)
        )


@dataclass(frozen=True)
class ProtocolRuns:
    """Runs of the same questions."""

    key: str
    runs: tuple[FinishedRun, ...]
    """Of several runs of equal settings and size, the first counts."""
    full: FinishedRun | None
    """A run of the full cache."""

    @property
    def example(self) -> Result:
        """A run for the fields that all share."""
        return (self.full or self.runs[0]).result

    @cached_property
    def name(self) -> str:
        """Task, length, visibility and chosen generation settings."""
        return name_question(self.example)


@dataclass(frozen=True)
class Standing:
    """A technique under one protocol: its largest run within the limit."""

    protocol: ProtocolRuns
    run: FinishedRun
    difference: Difference | None
    """To the full cache; None: there is no run of it."""
    leads: bool
    """Whether the protocol ranks, and no technique scores significantly better."""

    @property
    def stored(self) -> float | None:
        """Stored bytes as a share of the full cache."""
        return stored_share(self.run.result)

    @property
    def read(self) -> float | None:
        """Bytes read per decode step as a share of the full cache."""
        return read_share(self.run.result)

    @property
    def time(self) -> str | None:
        """Time per output token and its GPU; None for runs on a CPU, whose times are not comparable."""
        result = self.run.result
        if result.latency.tpot_s is None or result.environment.gpu is None:
            return None
        return f"{format_seconds(result.latency.tpot_s)} on {result.environment.gpu}"

    @property
    def since(self) -> str | None:
        """Day of the run."""
        found = DATE.match(self.run.result.environment.started)
        return None if found is None else found[0]


@dataclass(frozen=True)
class Technique:
    """A method with its settings, and its runs under the protocols of a question."""

    label: str
    method: str
    standings: tuple[Standing, ...]
    place: int | None
    """By the number of protocols under which it leads; None: it leads under none."""
    tied: bool
    """Whether others share the place."""

    @property
    def since(self) -> str | None:
        """The day on which all its runs were there; None if a day is unknown."""
        days = [x.since for x in self.standings]
        return None if None in days else max(x for x in days if x is not None)

    @property
    def leads(self) -> int:
        """Number of protocols under which it leads."""
        return sum(x.leads for x in self.standings)


@dataclass(frozen=True)
class Suggestion:
    """The techniques within the limit, best first, and the reasons why the answer may not hold."""

    question: Question
    judged: tuple[Judged, ...]
    """The protocols of this model, mode, task and visibility."""
    techniques: tuple[Technique, ...]
    limits: tuple[str, ...]

    @property
    def ranked(self) -> int:
        """Number of protocols that rank techniques."""
        return sum(bool(x.standings) and x.unranked is None for x in self.judged)

    @property
    def best(self) -> tuple[Technique, ...]:
        """The techniques in first place."""
        return tuple(x for x in self.techniques if x.place == 1)

    @property
    def shown(self) -> tuple[Technique, ...]:
        """The techniques that are shown with their runs."""
        return self.techniques[:min(max(SHOWN, len(self.best)), MOST_SHOWN)]

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        if not self.techniques:
            does, whole = LIMITED[self.question.axis]
            return f"No technique with a run {does} at most {self.question.limit:.0%} {whole}."
        if not self.best:
            return "Nothing can be ranked; the reasons are below."
        n, leads, names = self.ranked, self.best[0].leads, [x.label for x in self.best]
        where = "one protocol" if n == 1 else f"all of {n} protocols" if leads == n else f"{leads} of {n} protocols"
        if len(names) > 1:
            return f"{len(names)} techniques share the first place, best or tied under {where}: {', '.join(names)}."
        if n == 1:
            return f"{names[0]} is best under {where}; no other technique is tied with it."
        return f"{names[0]} is best or tied under {where}, more than any other technique."


@dataclass(frozen=True)
class Judged:
    """A protocol at one limit."""

    protocol: ProtocolRuns
    standings: Mapping[str, Standing]
    """By technique."""
    unranked: str | None
    """Why the techniques are not ranked; None: they are."""


def describe_lead(technique: Technique, answer: Suggestion) -> str:
    """Under how many protocols a technique is among the best."""
    if technique.place is None:
        return "not among the best" if answer.ranked else "not ranked"
    return f"best or tied under {technique.leads} of {count(answer.ranked, 'protocol')}"


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
        leads = {label: sum(x.leads for x in some) for label, some in standings.items()}
        sharing = Counter(leads.values())
        techniques = [
            Technique(
                label, some[0].run.result.method.name, tuple(some),
                1 + sum(n > leads[label] for n in leads.values()) if leads[label] else None,
                tied=bool(leads[label]) and sharing[leads[label]] > 1,
            )
            for label, some in standings.items()
        ]
        techniques.sort(key=lambda x: (-x.leads, -len(x.standings), max(map(_loss, x.standings)), x.label))
        return Suggestion(question, tuple(judged), tuple(techniques), tuple(self._list_limits(question, judged)))

    def judge(self, protocol: ProtocolRuns, axis: Axis, limit: float) -> Judged:
        """The standing of every technique with a run within the limit."""
        key = protocol.key, axis, limit
        if key not in self._judged:
            self._judged[key] = self._judge(protocol, axis, limit)
        return self._judged[key]

    def _judge(self, protocol: ProtocolRuns, axis: Axis, limit: float) -> Judged:
        chosen: dict[str, tuple[float, FinishedRun]] = {}
        for x in protocol.runs:
            size, label = axis.measure(x.result), self.labels[name_technique(x.result)]
            if size is None or size > limit * SLACK or not _counts(x.result):
                continue
            if label not in chosen or size > chosen[label][0]:
                chosen[label] = size, x
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
                yield f"{found.protocol.name}: no run of the full cache, so losses are unknown."
            else:
                yield from (f"{found.protocol.name}: {x}" for x in list_doubts(found.protocol.full.result))
        fitting = {label for found in judged for label in found.standings}
        others = {
            self.labels[name_technique(x.result)]
            for found in judged for x in found.protocol.runs if _counts(x.result)
        } - fitting
        if others and fitting:
            yield f"No run within the limit: {', '.join(sorted(others))}."
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


def describe_standing(standing: Standing) -> dict[str, str]:
    """A run as text, by the names of columns; a dash for what is unknown."""
    result = standing.run.result
    score, metric = result.score, Metric.of(result.score)
    difference, interval, _, verdict = format_difference(standing.difference, score)
    shares = {"stored": standing.stored, "read": standing.read, "computed": Axis.COMPUTED.measure(result)}
    return {
        "protocol": standing.protocol.name,
        "score": "-" if score.mean is None else metric.write(score.mean),
        "95 % interval": "-" if score.ci95 is None else metric.write_interval(score.ci95),
        "against the full cache": "-" if difference == "-" else f"{difference} {interval}",
        "verdict": verdict or "-",
        **{name: format_share(x) for name, x in shares.items()},
        "per token": standing.time or "-", "since": standing.since or "-",
    }


def group_protocols(runs: Iterable[FinishedRun]) -> list[ProtocolRuns]:
    """Group runs by their questions."""
    found: dict[str, list[FinishedRun]] = {}
    for x in fill_full_reads(list(runs)):
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
            f"{field}={value}" for field, value in own.items()
            if any(other.get(field) != value for other in several.values())
        )])
        for name, several in settings.items() for key, own in several.items()
    }


def _settings(result: Result) -> dict[str, object]:
    method = result.method
    return {**method.settings, "version": method.version, "code": method.code}


def _counts(result: Result) -> bool:
    return result.status == "ok" and result.score.mean is not None and not is_full(result)


def _loss(standing: Standing) -> float:
    """The loss against the full cache, or, without it, the score as a negative number."""
    score = standing.run.result.score
    mean = score.mean if standing.difference is None else standing.difference.mean
    return (mean or 0.0) * (-1 if score.higher_is_better else 1)


def explain_failing(full: Result) -> str | None:
    """Why nothing is ranked where the full cache has hardly a right answer; None if it has."""
    score = full.score
    if score.mean is None or not score.higher_is_better or score.mean >= RANKED_FROM:
        return None
    return f"the full cache itself scores {Metric.of(score).write(score.mean)}, so nothing is ranked"


def warn_of_model(name: str) -> str | None:
    """The note on a bundled model."""
    if name not in list_models():
        return None
    return f"{name} is a small model trained on these tasks and says nothing about 8B models"


def count(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
