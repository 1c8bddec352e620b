"""`kvbench suggest`: the best techniques for a model, a size limit and a mode, from finished runs."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Json, check_results
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError, unknown
from kvbench.log import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvbench.report.group import Axis
    from kvbench.report.suggestion import Question, Standing, Suggestion, Technique
    from kvbench.runs.results import Result


RUNS, CURATED = Path("runs"), Path("results")
"""The default folder of runs, and the curated results of a checkout."""


def suggest_command(
    *,
    model: Annotated[str, typer.Option(help="Model of the runs, such as mini.")],
    mode: Annotated[str, typer.Option(help="single, multi-turn or multi-request.")],
    memory: Annotated[
        str | None, typer.Option(help="Most stored bytes, as a share of the full cache, such as 25%.")
    ] = None,
    read: Annotated[str | None, typer.Option(help="Instead of --memory: most bytes read per decode step.")] = None,
    computed: Annotated[
        str | None, typer.Option(help="For diffusion models: most positions computed per denoising step.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A task; default: every task with a run.")] = None,
    visibility: Annotated[str | None, typer.Option(help="visible, hidden or first-turn; default: each.")] = None,
    results: Annotated[
        list[Path] | None, typer.Option("--results", help="Folder of runs; repeatable; default: runs and results.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Suggest techniques for a model and a size limit.

    It compares finished runs and shows the evidence. Techniques are ranked only where a paired test can tell them
    apart. The leaderboard's first page gives the same answers.
    """
    check_results(results or [])
    # A first run that is not finished does not hide the curated results.
    places = results or [x for x in (RUNS, CURATED) if any(x.rglob("result.json"))]
    if not places:
        raise UserError(
            f"there is no finished run in {RUNS}/ or {CURATED}/ here. Make runs with `kvbench run`, or give folders of "
            "runs with --results."
        )
    say("reading runs ...")
    from kvbench.analysis.load import find_runs, load_found
    from kvbench.report.suggest import Guide, group_protocols
    from kvbench.runs.files import read_file
    from kvbench.runs.results import Result

    limit = _read_limit({"stored": memory, "read": read, "computed": computed})
    _check_names(mode, visibility)
    texts = [str(x) for x in places]
    found = [(x, read_file(x / "result.json", Result)) for x in find_runs(texts)]
    question = _read_question(model, mode, limit, task, visibility, [x for _, x in found])
    runs = load_found([folder for folder, result in found if question.fits(result)], texts)
    answer = Guide(group_protocols(runs)).answer(question)
    _print_answer(answer)
    if as_json:
        print_json(_describe(answer))


def _read_limit(shares: dict[str, str | None]) -> tuple[Axis, float]:
    """The measure that is limited, and its limit.

    Raises:
        UserError: no or several limits, or a limit that is not a share.
    """
    from kvbench.budget import Budget
    from kvbench.report.group import Axis

    given = [(name, text) for name, text in shares.items() if text is not None]
    if len(given) != 1:
        raise UserError("give one limit: --memory 25%, --read 25%, or for a diffusion model --computed 25%.")
    (name, text), = given
    limit = None
    with contextlib.suppress(UserError):  # its message allows tokens, too
        limit = Budget.parse(text)
    if limit is None or limit.kind != "fraction":
        raise UserError(
            f"the limit '{text}' is not a share of the full cache. Give a percentage above 0% and up to 100%, such as "
            "25%."
        )
    return Axis(name), limit.value


def _check_names(mode: str, visibility: str | None) -> None:
    """Refuse what no run can have, before runs are read."""
    from kvbench.report.group import VISIBILITIES
    from kvbench.task import Mode

    if mode not in set(Mode):
        raise unknown("mode", mode, [str(x) for x in Mode])
    if visibility is not None and visibility not in VISIBILITIES:
        raise unknown("visibility", visibility, VISIBILITIES)


def _read_question(
    model: str, mode: str, limit: tuple[Axis, float], task: str | None, visibility: str | None, results: list[Result]
) -> Question:
    """The question, checked against the runs at hand.

    Raises:
        UserError: no run of this model, mode, task or visibility.
    """
    from kvbench.models.sources import result_id
    from kvbench.registry import list_entries
    from kvbench.report.suggestion import Question
    from kvbench.task import Mode

    model = result_id(model)
    if task is not None:
        task = next((x.name for x in list_entries("task") if task in x.aliases), task)
    rest = results
    for kind, wanted, read in (
        ("model", model, lambda x: x.model.id), ("mode", mode, lambda x: str(x.mode)),
        ("task", task, lambda x: x.task.name), ("visibility", visibility, lambda x: x.visibility),
    ):
        known = {read(x) for x in rest}
        rest = [x for x in rest if wanted in (None, read(x))]
        if not rest:
            raise unknown(kind, str(wanted), known, (
                f"No other {kind} has a run here: make one with `kvbench run --{kind} {wanted}`, or give other folders "
                "of runs with --results."
            ))
    return Question(model, Mode(mode), *limit, task, rest[0].visibility if visibility else None)


def _print_answer(answer: Suggestion) -> None:
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.significance import UNADJUSTED
    from kvbench.report.suggestion import describe_lead

    echo(answer.verdict)
    for x in answer.shown:
        echo(f"{_place(x)}{x.label}: {describe_lead(x, answer)}{f', newest run {x.since}' if x.since else ''}")
    for judged in answer.judged:
        found = [(x.label, judged.standings[x.label]) for x in answer.shown if x.label in judged.standings]
        if found:
            print_table(judged.protocol.name, *_list_cells(found))
    if any(y.leads for x in answer.shown for y in x.standings):
        echo(f"* best or tied under this protocol. {UNADJUSTED}")
    if others := answer.techniques[len(answer.shown):]:
        echo(f"{len(others)} more within the limit: {', '.join(x.label for x in others)}.")
    for note in answer.limits:
        echo(f"Note: {note}")


def _list_cells(found: Sequence[tuple[str, Standing]]) -> tuple[list[str], list[list[str]]]:
    """The columns of one protocol that have a value, and a row per technique."""
    from kvbench.report.suggestion import describe_standing

    rows = []
    for label, standing in found:
        x = describe_standing(standing)
        rows.append({
            "technique": f"{'* ' if standing.leads else ''}{label}",
            "score, 95 %": f"{x['score']} {x['95 % interval']}",
            "vs. full, 95 %": x["against the full cache"], "vs. no cache, 95 %": x["against no cache"],
            **{name: x[name] for name in ("stored", "read", "computed", "per token")},
        })
    columns = [name for name in rows[0] if any(row[name] != "-" for row in rows)]
    return columns, [[row[name] for name in columns] for row in rows]


def _place(technique: Technique) -> str:
    return "" if technique.place is None else f"{'=' if technique.tied else ''}{technique.place}. "


def _describe(answer: Suggestion) -> dict[str, Any]:
    return {
        "question": asdict(answer.question), "verdict": answer.verdict,
        "techniques": [
            {
                "label": x.label, "method": x.method, "place": x.place, "tied": x.tied, "leads": x.leads,
                "runs": [
                    {
                        "run_id": y.run.result.run_id, "protocol": y.protocol.name, "leads": y.leads,
                        "settings": y.run.result.method.settings, "budget": y.run.result.budget.asked,
                        "score": y.run.result.score.model_dump(mode="json", exclude={"by_turn"}),
                        "difference": None if y.difference is None else asdict(y.difference),
                        "stored_share": y.stored, "read_share": y.read, "time": y.time, "since": y.since,
                    }
                    for y in x.standings
                ],
            }
            for x in answer.techniques
        ],
        "protocols": [{"name": x.protocol.name, "unranked": x.unranked} for x in answer.judged],
        "limits": list(answer.limits),
    }
