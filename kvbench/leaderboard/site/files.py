"""All files of the site, by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.analysis.formatting import format_difference
from kvbench.leaderboard.site import run_facts
from kvbench.leaderboard.site.charts import draw_group, draw_heatmap, place_curve
from kvbench.leaderboard.site.claims import ClaimsReport
from kvbench.leaderboard.site.export import ADDED_FIELDS, list_rows, write_json, write_parquet
from kvbench.leaderboard.site.listed import Problem
from kvbench.leaderboard.site.pages import TEMPLATES, Pages, name_pages, tag_group, write_value
from kvbench.leaderboard.site.tables import Group, RankedRun
from kvbench.leaderboard.submission.records import VERIFICATION
from kvbench.leaderboard.verification.lookup import UnverifiableError, find_known_method
from kvbench.leaderboard.verification.outcome import RefusedError
from kvbench.method import Card
from kvbench.runs.command import write_command
from kvbench.runs.results import Result

FILTERS = {
    "model": "Model", "suite": "Suite", "task": "Task", "mode": "Mode", "visibility": "Visibility",
}
"""Fields that all runs of a group share."""
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
    groups: Sequence[Group], problems: Sequence[Problem], claims: ClaimsReport
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of every file. The same runs give the same files."""
    rows = [row for group in groups for row in group.rows]
    names = name_pages(x.result.method.name for x in rows)
    pages = Pages({"pages": names, "count": len(rows), "groups": groups})
    filters = [
        *((key, title, sorted({tag_group(x.example)[key] for x in groups})) for key, title in FILTERS.items()),
        ("family", "Family", sorted({x.result.method.family for x in rows})),
        ("machine", "Machine", sorted({y for x in groups for y in x.machines})),
    ]
    charts = {x.key: draw_group(x) for x in groups}
    methods = [_gather(name, groups) for name in names]
    yield "index.html", pages.write("index", problems=problems, filters=filters, charts=charts)
    yield "methods.html", pages.write("methods", methods=methods)
    yield "claims.html", pages.write("claims", claims=claims)
    yield "about.html", pages.write("about", own_columns=[(name, words) for name, (_, words) in ADDED_FIELDS.items()])
    for method in methods:
        yield f"methods/{names[method.name]}.html", pages.write("method", root="../", **_describe_method(method))
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
    try:
        card = find_known_method(result.spec)[0].card
    except (UnverifiableError, RefusedError):
        card = Card.model_validate(result.method.card)
    return MethodPage(name, card, result, tuple((group, rows) for group, rows in found if rows))


def _describe_method(method: MethodPage) -> dict[str, Any]:
    card, upstream = method.card, method.card.upstream
    settings: dict[str, set[str]] = {}
    for run in (row.result for _, rows in method.groups for row in rows):
        for key, value in run.method.settings.items():
            settings.setdefault(key, set()).add(write_value(value))
    code = "none" if upstream is None else ", ".join(
        x for x in (upstream.repo, upstream.commit, upstream.license) if x is not None
    )
    described = [
        ("family", method.result.method.family), ("version", card.version), ("budget kind", card.budget.value),
        ("the paper's budget", card.paper_budget or "none"), ("heads", card.heads),
        ("changes", ", ".join(card.stages) or "nothing"), ("reference code", code),
        *((f"setting {key}", ", ".join(sorted(values))) for key, values in settings.items()),
    ]
    curves = [x for group, rows in method.groups if (x := place_curve(group, rows)) is not None]
    return {"method": method, "facts": described, "curves": curves}


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
    return (*numbers, verdict)
