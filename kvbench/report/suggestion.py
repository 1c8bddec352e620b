"""A question for the best techniques, and its answer: techniques, their runs and places, and the limits of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvbench.analysis.compare import Difference
from kvbench.analysis.formatting import format_difference, format_seconds, format_share
from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import read_share, stored_share
from kvbench.log import count
from kvbench.method import ModelKind
from kvbench.report.group import Axis, name_question, name_training
from kvbench.runs.results import Result
from kvbench.runs.spec import Visibility
from kvbench.task import Mode

LEAST_SHOWN, MOST_SHOWN = 3, 8
"""Techniques shown with their runs: as many as share the first place, within these limits."""
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
LIMITED = {
    Axis.STORED: ("stores", "of the full cache"), Axis.READ: ("reads", "of the full cache per decode step"),
    Axis.COMPUTED: ("computes", "of the positions per denoising step"),
}
"""The verb of a limit on each axis, and the whole that its share is of."""
BASELINES: dict[ModelKind, str] = {"autoregressive": "the full cache", "diffusion": "no cache"}
"""Names of the runs that others are compared with, by the kind of the model."""


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
    """Of several runs of equal settings, size and level, the first counts."""
    full: FinishedRun | None
    """A run of the full cache."""
    levels: tuple[str, ...] = ()
    """The level of verification of each run; empty: not known."""

    @property
    def example(self) -> Result:
        """A run for the fields that all share."""
        return (self.full or self.runs[0]).result

    @property
    def kind(self) -> tuple[str, int, str, str]:
        """Task, length, mode and visibility.

        For a place, protocols of one kind count once, because anyone can add more by another seed, number of contexts
        or model file.
        """
        x = self.example
        return x.task.name, x.task.length, x.mode, x.visibility

    @cached_property
    def name(self) -> str:
        """Task, length, visibility and chosen generation settings."""
        return name_question(self.example)


@dataclass(frozen=True)
class Standing:
    """A technique under one protocol: its largest run within the limit, or a better verified one of similar size."""

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
    """By `leads`; None: it leads under no protocol."""
    tied: bool
    """Whether others share the place."""

    @property
    def since(self) -> str | None:
        """The day of its newest run; None if a day is unknown."""
        days = [x.since for x in self.standings]
        return None if None in days else max(x for x in days if x is not None)

    @property
    def leads(self) -> int:
        """Number of protocols under which it leads, of each kind one."""
        return count_leads(self.standings)


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
        """Number of protocols that rank techniques, of each kind one."""
        return len({x.protocol.kind for x in self.judged if x.ranks})

    @property
    def best(self) -> tuple[Technique, ...]:
        """The techniques in first place."""
        return tuple(x for x in self.techniques if x.place == 1)

    @property
    def shown(self) -> tuple[Technique, ...]:
        """The techniques that are shown with their runs."""
        return self.techniques[:min(max(LEAST_SHOWN, len(self.best)), MOST_SHOWN)]

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

    @property
    def ranks(self) -> bool:
        """Whether there are techniques, and they are ranked."""
        return bool(self.standings) and self.unranked is None


def count_leads(standings: Iterable[Standing]) -> int:
    """Number of protocols under which a technique leads, of each kind one."""
    return len({x.protocol.kind for x in standings if x.leads})


def describe_lead(technique: Technique, answer: Suggestion) -> str:
    """Under how many protocols a technique is among the best, and whether it is calibrated or trained before a run."""
    lead = f"best or tied under {technique.leads} of {count(answer.ranked, 'protocol')}"
    if technique.place is None:
        lead = "not among the best" if answer.ranked else "not ranked"
    preparations = dict.fromkeys(name_training(x.run.result) for x in technique.standings)
    return ", ".join(filter(None, [lead, *preparations]))


def name_baseline(result: Result) -> str:
    """Name of the run that all others of a protocol are compared with."""
    return BASELINES[result.model.kind]


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
        **{
            f"against {x}": "-" if difference == "-" or x != name_baseline(result) else f"{difference} {interval}"
            for x in BASELINES.values()
        },
        "verdict": verdict or "-",
        **{name: format_share(x) for name, x in shares.items()},
        "per token": standing.time or "-", "since": standing.since or "-",
    }
