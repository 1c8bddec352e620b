"""`kvbench explain`: why two runs of a task score differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json, Out
from kvbench.cli.output import print_json

if TYPE_CHECKING:
    from kvbench.analysis.explain import Change, ScoreShift
    from kvbench.analysis.load import FinishedRun


def explain_command(
    first: Annotated[str, typer.Argument(help="The folder or id of a run.")],
    other: Annotated[str, typer.Argument(help="Another run of the same task.")],
    *,
    run: Annotated[bool, typer.Option("--run", help="Run the first with each difference alone.")] = False,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> int:
    """Say what was asked otherwise and, with --run, how much each of it alone moves the score of the first run."""
    from kvbench.analysis.explain import find_changes, find_rerun, measure
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import find_run, load_run

    mine, theirs = (load_run(find_run(x, out)) for x in (first, other))
    changes = find_changes(mine, theirs)
    effects, notes = _measure(mine, changes, out) if run else ({}, {})
    total = measure(mine, theirs)
    rows = [
        (x.name, x.first, x.other, *_effect(effects.get(x.name)), notes.get(x.name) or _note(x, run=run))
        for x in changes
    ]
    again = find_rerun(mine)
    if again.name in notes:
        rows.append((again.name, again.first, again.other, *_effect(effects.get(again.name)), notes[again.name]))
    rows.append(("all of it", mine.folder.name, theirs.folder.name, *_effect(total), ""))
    if run and total is not None and effects:
        alone = sum(x.mean for x in effects.values())
        note = "what was not flipped, and what acts together"
        rows.append(("the rest", "", "", f"{total.mean - alone:+.3f}", "", note))
    print_table("", ("differs", "first", "other", "moves the score", "95%", ""), rows)
    if as_json:
        print_json({
            "first": mine.result.run_id, "other": theirs.result.run_id, "total": _json(total),
            "differences": [
                {"name": x.name, "first": x.first, "other": x.other, "effect": _json(effects.get(x.name)),
                 "note": notes.get(x.name) or _note(x, run=run)}
                for x in changes
            ],
        })
    return 0


def _measure(mine: FinishedRun, changes: list[Change], out: Path) -> tuple[dict[str, ScoreShift], dict[str, str]]:
    """The effect of every change that can be run, and what became of the others.

    What is flipped is run by the code that is here. So the first run is run again where it is of other code, and what
    is flipped is measured against that.
    """
    from kvbench.analysis.explain import find_rerun, measure, rescore
    from kvbench.analysis.load import load_run
    from kvbench.cli.sweep import run_cells
    from kvbench.sweep.cell import SweepCell

    effects, notes = {}, {}
    again = find_rerun(mine)
    asked = {x.name: x.request for x in (again, *changes) if x.request is not None}
    if again.request is None:
        notes[again.name] = f"cannot be run, {again.why}"
    if "scorer" in asked and (found := rescore(mine, asked["scorer"].scorer or "")) is not None:
        effects["scorer"], notes["scorer"] = found, f"the same {found.n} answers"
        del asked["scorer"]
    cells = [SweepCell(i, 1, name, replace(x, out=out), {}) for i, (name, x) in enumerate(asked.items())]
    reports = dict(zip(asked, run_cells(cells) if cells else [], strict=True))
    base = mine
    for name, report in reports.items():
        if report.folder is None or report.status != "ok":
            notes[name] = f"cannot be run: {report.error}"
            continue
        flipped = load_run(report.folder)
        found = measure(base, flipped)
        if name == again.name:
            base = flipped
        if name != again.name and flipped.result.run_id == base.result.run_id:
            notes[name] = "changes nothing: the same run"
        elif found is not None and flipped.result.run_id != mine.result.run_id:
            effects[name] = found
            alike = f"paired, {found.n} questions" if found.n else "other questions: not paired"
            notes[name] = f"{alike}; {report.folder.name}"
    return effects, notes


def _note(change: Change, *, run: bool) -> str:
    if change.request is None:
        return f"cannot be flipped: {change.why}"
    return "no score" if run else "add --run"


def _effect(effect: ScoreShift | None) -> tuple[str, str]:
    if effect is None:
        return "-", "-"
    return f"{effect.mean:+.3f}", f"[{effect.ci95[0]:+.3f}, {effect.ci95[1]:+.3f}]"


def _json(effect: ScoreShift | None) -> dict[str, object] | None:
    return None if effect is None else {"mean": effect.mean, "ci95": list(effect.ci95), "paired": effect.n}
