"""The first page: answers to every question that it offers, and a summary table per model.

All choices are made here, by the module of `kvbench suggest`; the page's script only looks them up.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from markupsafe import Markup

from kvbench.leaderboard.site.pages import sanitize
from kvbench.leaderboard.site.tables import Group, RankedRun
from kvbench.registry import list_models
from kvbench.report.group import VISIBILITIES, Axis
from kvbench.report.suggest import Guide, name_technique
from kvbench.report.suggestion import (
    BASELINES,
    ProtocolRuns,
    Question,
    Standing,
    Suggestion,
    Technique,
    describe_lead,
    describe_standing,
)
from kvbench.runs.results import Result
from kvbench.runs.spec import Visibility
from kvbench.task import Mode

LIMITS = {
    Axis.STORED: (0.05, 0.1, 0.25, 0.5, 0.75), Axis.READ: (0.1, 0.25, 0.5, 0.75), Axis.COMPUTED: (0.25, 0.5, 0.75),
}
"""Limits that the page offers; `kvbench suggest` takes any."""
DEFAULT = Axis.STORED, 0.25
OPTIONS = {Axis.STORED: "memory", Axis.READ: "read", Axis.COMPUTED: "computed"}
"""Options of `kvbench suggest`."""
COLUMNS = *(f"against {x}" for x in BASELINES.values()), "verdict", "stored", "read", "computed", "per token"
"""Columns of the evidence, as `describe_standing` names them, after protocol and score."""
FIELDS = "protocol", "score", "95 % interval", *COLUMNS, "since", "page", "group"
"""Texts of a run: those of `describe_standing`, and the addresses of its page and of its protocol's."""


@dataclass(frozen=True)
class Turns:
    """A mode, and one of its visibilities; None: all of them."""

    mode: Mode
    visibility: Visibility | None

    def __str__(self) -> str:
        return f"{self.mode}, {VISIBILITIES[self.visibility]}" if self.visibility else str(self.mode)

    def covers(self, example: Result) -> bool:
        """Whether a run is of this kind."""
        return self.mode == example.mode and self.visibility in (None, example.visibility)


@dataclass(frozen=True)
class SummaryCell:
    """A run in a cell of the summary."""

    row: RankedRun
    limits: tuple[int, ...]
    """The limits at which it is the technique's largest run."""
    leads: tuple[int, ...]
    """The limits at which it leads."""


@dataclass(frozen=True)
class SummaryRow:
    """A technique with its runs under each protocol of a model."""

    label: str
    example: RankedRun
    """Any of the runs."""
    cells: tuple[tuple[SummaryCell, ...], ...]


@dataclass(frozen=True)
class Summary:
    """The table of one model: techniques as rows, protocols as columns."""

    model: str
    axis: Axis
    """The quantity that the cells show next to the score."""
    groups: tuple[Group, ...]
    rows: tuple[SummaryRow, ...]


class FrontPage:
    """The questions of the first page, their answers, and the summaries."""

    columns = COLUMNS

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = [x for x in groups if _list_counted(x)]
        self.guide = Guide(_make_protocol(x) for x in self.groups)
        self.examples = {x.key: x.example for x in self.guide.protocols}
        examples = list(self.examples.values())
        bundled = set(list_models())  # small ones, trained on the tasks: after all others
        runs = Counter(row.result.model.id for x in self.groups for row in x.rows)
        self.models = list(dict.fromkeys(x.model.id for x in sorted(
            examples, key=lambda x: (x.model.kind, x.model.id in bundled, -runs[x.model.id], x.model.id)
        )))
        self.turns = _list_turns(examples)
        self.tasks = [None, *sorted({x.task.name for x in examples})]
        axes = {axis for x in examples for axis in _list_axes(x)}
        self.limits = [(axis, share) for axis in Axis if axis in axes for share in LIMITS[axis]]
        self.default = self.limits.index(DEFAULT) if DEFAULT in self.limits else 0
        self.families = sorted({row.result.method.family for x in self.groups for row in x.rows})

    def list_turns(self, group: Group) -> str:
        """The numbers of the turns that cover a group."""
        return " ".join(str(i) for i, x in enumerate(self.turns) if x.covers(self.examples[group.key]))

    def list_tasks(self, group: Group) -> str:
        """The numbers of the tasks that cover a group."""
        name = self.examples[group.key].task.name
        return " ".join(str(i) for i, x in enumerate(self.tasks) if x in (None, name))

    @cached_property
    def summaries(self) -> list[Summary]:
        """A table per model."""
        return [self._summarize(x) for x in self.models]

    def _summarize(self, model: str) -> Summary:
        groups = [x for x in self.groups if self.examples[x.key].model.id == model]
        techniques: dict[str, list[RankedRun]] = {}
        for group in groups:
            for row in _list_counted(group):
                techniques.setdefault(name_technique(row.result), []).append(row)
        rows = [
            SummaryRow(self.guide.labels[key], rows[0], tuple(
                tuple(self._place(x, group) for x in group.rows if any(x is y for y in rows)) for group in groups
            ))
            for key, rows in techniques.items()
        ]
        rows.sort(key=lambda x: x.label)
        return Summary(model, _list_axes(self.examples[groups[0].key])[0], tuple(groups), tuple(rows))

    def _place(self, row: RankedRun, group: Group) -> SummaryCell:
        label = self.guide.labels[name_technique(row.result)]
        protocol = next(x for x in self.guide.protocols if x.key == group.key)
        limits, leads = [], []
        for i, (axis, share) in enumerate(self.limits):
            if axis in _list_axes(protocol.example):
                found = self.guide.judge(protocol, axis, share).standings.get(label)
                if found is not None and found.run is row.listed.run:
                    limits.append(i)
                    leads += [i] if found.leads else []
        return SummaryCell(row, tuple(limits), tuple(leads))

    def write_answers(self, pages: Mapping[str, str]) -> Markup:
        """All answers as JSON for a script element, by the numbers of model, limit, turns and task."""
        table = _Table(pages, self.groups)
        answers = {
            f"{m}.{limit}.{turns}.{task}": table.write(answer)
            for m, limit, turns, task, answer in self._answer_all()
        }
        document = {
            "usual": [self._choose_turns(x) for x in self.models], "texts": list(table.texts), "fields": FIELDS,
            "runs": table.runs, "answers": answers,
        }
        text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
        return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))  # noqa: S704  # no tag can end it

    def _choose_turns(self, model: str) -> int:
        """The number of the turns with the most runs of a model, of equals the first: a choice to start with."""
        groups = [x for x in self.groups if self.examples[x.key].model.id == model]
        runs = [sum(len(x.rows) for x in groups if turns.covers(self.examples[x.key])) for turns in self.turns]
        return runs.index(max(runs))

    def _answer_all(self) -> Iterable[tuple[int, int, int, int, Suggestion]]:
        for m, model in enumerate(self.models):
            examples = [x for x in self.examples.values() if x.model.id == model]
            for turns_index, turns in enumerate(self.turns):
                for task_index, task in enumerate(self.tasks):
                    covered = [x for x in examples if turns.covers(x) and task in (None, x.task.name)]
                    for i, (axis, share) in enumerate(self.limits):
                        if any(axis in _list_axes(x) for x in covered):
                            question = Question(model, turns.mode, axis, share, task, turns.visibility)
                            yield m, i, turns_index, task_index, self.guide.answer(question)


class _Table:
    """Texts and runs of the answers, each written once and named by its number."""

    def __init__(self, pages: Mapping[str, str], groups: Iterable[Group]) -> None:
        self.pages = pages
        self.names = {id(row.listed.run): row.listed.name for group in groups for row in group.rows}
        self.texts: dict[str, int] = {}
        self.runs: list[list[Any]] = []
        self._known: dict[int, int] = {}

    def write(self, answer: Suggestion) -> dict[str, Any]:
        """An answer: its verdict, limits and command, the order of all techniques, and the best with their runs."""
        return {
            "verdict": self._text(answer.verdict), "limits": [self._text(x) for x in answer.limits],
            "command": self._text(_write_command(answer.question)),
            "order": [self._text(x.label) for x in answer.techniques],
            "best": [self._write_technique(x, answer) for x in answer.shown],
        }

    def _write_technique(self, technique: Technique, answer: Suggestion) -> dict[str, Any]:
        place = "" if technique.place is None else f"{'=' if technique.tied else ''}{technique.place}"
        missing = [x.protocol.name for x in answer.judged if x.ranks and technique.label not in x.standings]
        return {
            "label": self._text(technique.label), "page": self._text(f"methods/{self.pages[technique.method]}.html"),
            "place": self._text(place), "leads": self._text(describe_lead(technique, answer)),
            "since": self._text(f"newest run {technique.since}" if technique.since else "date unknown"),
            "runs": [self._number(x) for x in technique.standings],
            "led": [int(x.leads) for x in technique.standings],
            "missing": [self._text(x) for x in missing],
        }

    def _number(self, standing: Standing) -> int:
        """The number of a run, and of its difference among the techniques of this limit."""
        key = id(standing)
        if key not in self._known:
            self._known[key] = len(self.runs)
            described = describe_standing(standing)
            texts = {**described, "page": f"runs/{self.names[id(standing.run)]}/index.html",
                     "group": f"protocols/{standing.protocol.key}.html"}
            self.runs.append([[self._text(texts[x]) for x in FIELDS], _draw_interval(standing)])
        return self._known[key]

    def _text(self, text: str) -> int:
        return self.texts.setdefault(sanitize(text), len(self.texts))


def _draw_interval(standing: Standing) -> list[float] | None:
    """Lower end, mean and upper end in percent; None for a score that is no share."""
    score = standing.run.result.score
    if score.mean is None or score.ci95 is None or not 0 <= score.ci95[0] <= score.ci95[1] <= 1:
        return None
    return [round(100 * x, 1) for x in (score.ci95[0], score.mean, score.ci95[1])]


def _write_command(question: Question) -> str:
    """The command that prints the same answer."""
    words = ["kvbench", "suggest", "--model", question.model, f"--{OPTIONS[question.axis]}", f"{question.limit:.0%}",
             "--mode", question.mode]
    words += [] if question.task is None else ["--task", question.task]
    words += [] if question.visibility is None else ["--visibility", question.visibility]
    return shlex.join([*words, "--results", "results"])


def _list_counted(group: Group) -> list[RankedRun]:
    """The runs of techniques that count: neither failed nor of the full cache."""
    return [x for x in group.rows if x.listed.counted and x.result.status == "ok" and x not in group.anchors]


def _make_protocol(group: Group) -> ProtocolRuns:
    """The counted runs of a group, most trusted first."""
    counted = sorted((x.listed for x in group.rows if x.listed.counted), key=lambda x: x.priority, reverse=True)
    full = group.anchors[0].listed.run if group.anchors else None
    return ProtocolRuns(group.key, tuple(x.run for x in counted), full, tuple(x.level for x in counted))


def _list_axes(example: Result) -> tuple[Axis, ...]:
    return (Axis.COMPUTED,) if example.model.kind == "diffusion" else (Axis.STORED, Axis.READ)


def _list_turns(examples: Iterable[Result]) -> list[Turns]:
    """The modes, each followed by its visibilities if it has several."""
    found: dict[Mode, set[Visibility]] = {}
    for x in examples:
        found.setdefault(x.mode, set()).add(x.visibility)
    turns = []
    for mode in (x for x in (Mode.MULTI_TURN, Mode.MULTI_REQUEST, Mode.SINGLE) if x in found):
        turns.append(Turns(mode, None))
        if len(found[mode]) > 1:
            turns += [Turns(mode, x) for x in sorted(found[mode])]
    return turns
