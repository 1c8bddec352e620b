"""All files of the site, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvbench.analysis.compare import is_full
from kvbench.analysis.formatting import format_difference
from kvbench.analysis.metrics import Metric
from kvbench.analysis.significance import name_too_few
from kvbench.leaderboard.site import run_facts
from kvbench.leaderboard.site.charts import Panel, draw_families, draw_method
from kvbench.leaderboard.site.claims import ClaimsReport
from kvbench.leaderboard.site.export import ADDED_FIELDS, list_rows, write_json, write_parquet
from kvbench.leaderboard.site.findings import Findings
from kvbench.leaderboard.site.guide import FrontPage
from kvbench.leaderboard.site.heatmap import draw_heatmap
from kvbench.leaderboard.site.listed import Problem
from kvbench.leaderboard.site.pages import TEMPLATES, Pages, link_code, name_pages, write_value
from kvbench.leaderboard.site.tables import Group, RankedRun
from kvbench.leaderboard.site.traces import Traces
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import VERIFICATION
from kvbench.leaderboard.verification.lookup import UnverifiableError, find_known_method
from kvbench.method import Card
from kvbench.runs.command import write_command
from kvbench.runs.results import Result

MAX_LISTED = 64
"""Turns and layers that a run's page shows."""


@dataclass(frozen=True)
class MethodPage:
    """A method with all its runs."""

    name: str
    card: Card
    result: Result
    """The run whose card is shown."""
    groups: tuple[tuple[Group, tuple[RankedRun, ...]], ...]

    @property
    def runs(self) -> int:
        """Number of runs."""
        return sum(len(rows) for _, rows in self.groups)


def list_files(
    groups: Sequence[Group], problems: Sequence[Problem], claims: ClaimsReport, findings: Findings, traces: Traces
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every file. The same runs give the same files."""
    rows = [row for group in groups for row in group.rows]
    names = name_pages(x.result.method.name for x in rows)
    pages = Pages({"pages": names, "count": len(rows), "groups": groups})
    front = FrontPage(groups)
    methods = [_gather(name, groups) for name in names]
    yield "index.html", pages.write("index", problems=problems, front=front, answers=front.write_answers(names))
    yield "methods.html", pages.write("methods", methods=methods)
    yield "claims.html", pages.write("claims", claims=claims)
    yield "findings.html", pages.write("findings", findings=findings)
    for text_finding in findings.on_texts:
        yield text_finding.path, pages.write("finding", root="../", finding=text_finding, on_texts=True)
    for run_finding in findings.on_runs:
        yield run_finding.path, pages.write("finding", root="../", finding=run_finding, on_texts=False)
    yield "traces.html", pages.write("traces", boards=traces.boards, problems=traces.problems)
    yield "about.html", pages.write("about", own_columns=[(name, words) for name, (_, words) in ADDED_FIELDS.items()])
    labels = front.guide.labels
    for group in groups:
        yield f"protocols/{group.key}.html", pages.write(
            "protocol", root="../", group=group, charts=draw_families(group, labels),
            families=sorted({x.result.method.family for x in group.rows}),
        )
    for method in methods:
        yield f"methods/{names[method.name]}.html", pages.write(
            "method", root="../", method=method, facts=_describe_method(method), code=link_code(method.card.upstream),
            charts=_draw_curves(method, labels),
        )
    for group in groups:
        yield from _write_runs(pages, group)
    yield "style.css", (TEMPLATES / "style.css").read_bytes()
    flat = list_rows(groups)
    yield "results.json", write_json(flat, problems)
    yield "results.parquet", write_parquet(flat)


def _gather(name: str, groups: Sequence[Group]) -> MethodPage:
    """Collect a method's runs, with its registered card, or else the card of its most trusted run."""
    found = [(group, tuple(x for x in group.rows if x.result.method.name == name)) for group in groups]

    result = max((row.listed for _, rows in found for row in rows), key=lambda x: x.priority).result
    return MethodPage(name, _find_card(result), result, tuple((group, rows) for group, rows in found if rows))


def _find_card(result: Result) -> Card:
    """The registered card with the run's settings, or else the run's own."""
    try:
        return find_known_method(result.spec)[0].own_card
    except (UnverifiableError, RefusedError):
        return Card.model_validate(result.method.card)


def _describe_method(method: MethodPage) -> list[tuple[str, str]]:
    card = method.card
    settings: dict[str, set[str]] = {}
    runs = [row.result for _, rows in method.groups for row in rows]
    before = {_find_card(run).calibration or "nothing" for run in runs}
    for run in runs:
        for key, value in run.method.settings.items():
            settings.setdefault(key, set()).add(write_value(value))
    return [
        ("family", method.result.method.family), ("version", card.version), ("budget kind", card.budget.value),
        ("the paper's budget", card.paper_budget or "none"), ("heads", card.heads),
        ("changes", ", ".join(card.stages) or "nothing"), ("before a run", "; ".join(sorted(before))),
        *((f"setting {key}", ", ".join(sorted(values))) for key, values in settings.items()),
    ]


def _draw_curves(method: MethodPage, labels: Mapping[str, str]) -> dict[str, list[tuple[Group, Panel]]]:
    """The panels of a method by model; none for the full cache, which is a line in those of others."""
    found: dict[str, list[tuple[Group, Panel]]] = {}
    for group, rows in method.groups:
        for panel in () if is_full(rows[0].result) else draw_method(group, rows, labels):
            found.setdefault(group.example.model.id, []).append((group, panel))
    return found


def _write_runs(pages: Pages, group: Group) -> Iterator[tuple[str, bytes]]:
    bands = {row.listed.name: band for table in group.tables for band in table.bands for row in band.rows}
    for row in group.rows:
        listed, result = row.listed, row.result
        files = dict(listed.files)
        if listed.verification is not None:
            files[VERIFICATION] = f"{listed.verification.model_dump_json(indent=1)}\n".encode()
        place = f"runs/{listed.name}"
        yield f"{place}/index.html", pages.write(
            "run", root="../../", group=group, row=row, band=bands.get(listed.name), most=MAX_LISTED,
            metric=Metric.of(result.score),
            difference=_compare(row), scores=[(name, f"{x:.3f}") for name, x in result.scores.items()],
            memory=run_facts.list_memory(result), effect=run_facts.list_effect(result),
            diffusion=run_facts.list_diffusion(result), times=run_facts.list_times(result),
            place=run_facts.list_place(result),
            settings=[(key, write_value(x)) for key, x in result.method.settings.items()],
            heatmap=draw_heatmap(listed.run), command=write_command(result.spec), tuned_on=listed.tuned_on,
            downloads=[(name, len(content)) for name, content in sorted(files.items())],
        )
        yield from ((f"{place}/{name}", content) for name, content in sorted(files.items()))


def _compare(row: RankedRun) -> tuple[str, ...] | None:
    """The difference to the full cache as text; None if there is none.

    A difference that is not significant need not be small: ten contexts against ten other runs detect little.
    """
    found = row.difference
    if found is None or found.mean is None:
        return None
    *numbers, verdict = format_difference(found, row.result.score)
    if found.within_noise:
        verdict = f"not significant with {found.contexts} contexts, adjusted for the number of rows in the table"
    if found.too_few:
        verdict = name_too_few(found.contexts)
    return (*numbers, verdict)
