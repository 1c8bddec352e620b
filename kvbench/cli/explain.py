"""`kvbench explain`: which settings make two runs of a task score differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json, Out
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError
from kvbench.log import count

if TYPE_CHECKING:
    from kvbench.analysis.explain import Change, ScoreShift
    from kvbench.analysis.load import FinishedRun
    from kvbench.runs.options import Request


def explain_command(
    first: Annotated[str, typer.Argument(help="Folder or id of a run.")],
    other: Annotated[str, typer.Argument(help="Folder or id of another run of the same task.")],
    *,
    run: Annotated[bool, typer.Option("--run", help="Repeat the first run with each difference alone.")] = False,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the settings in which two runs differ.

    With --run it measures the effect of each one on the score.
    """
    from kvbench.analysis.explain import find_changes, find_rerun, measure
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import find_run, load_run
    from kvbench.runs.spec import shorten

    mine, theirs = (load_run(find_run(x, out)) for x in (first, other))
    changes = find_changes(mine, theirs)
    effects, notes = _measure(mine, changes, out) if run else ({}, {})
    total = measure(mine, theirs)
    rows = [
        (
            x.name.removeprefix("spec."), x.first, x.other, _effect(effects.get(x.name)),
            notes.get(x.name) or _note(x, run=run),
        )
        for x in changes
    ]
    rerun = find_rerun(mine)
    if rerun.name in notes:
        rows.append((rerun.name, rerun.first, rerun.other, _effect(effects.get(rerun.name)), notes[rerun.name]))
    paired = "" if total is None else _pairing(total)
    rows.append(("total", shorten(mine.folder.name), shorten(theirs.folder.name), _effect(total), paired))
    remainder = None
    if run and total is not None and effects:
        remainder = total.mean - sum(x.mean for x in effects.values())
        rows.append(("remainder", "", "", f"{remainder:+.3f}", "differences not run, and interactions"))
    print_table("", ("difference", "first", "other", "effect on score, 95%", ""), rows)
    if not changes:
        echo("No setting, version or machine differs.")
    if as_json:
        print_json({
            "first": mine.result.run_id, "other": theirs.result.run_id, "total": _json(total),
            "differences": [
                {"name": x.name, "first": x.first, "other": x.other, "effect": _json(effects.get(x.name)),
                 "note": notes.get(x.name) or _note(x, run=run)}
                for x in changes
            ],
            "remainder": remainder,
        })


def _measure(
    mine: FinishedRun, changes: list[Change], out: Path
) -> tuple[dict[str, ScoreShift], dict[str, str]]:
    """Effect and note of every change, by name; a change that cannot be run has only a note.

    The new runs use the current code. If that differs from the first run's code, the first run is repeated, and
    effects are measured against the repetition.

    Raises:
        UserError: `out` holds the first run, or its repetition, computed by other code, so it cannot be repeated there.
    """
    from kvbench.analysis.explain import find_rerun, measure, measure_scorer
    from kvbench.analysis.load import load_run
    from kvbench.cli.sweep import run_cells
    from kvbench.runs.prepare import prepare
    from kvbench.runs.runner import find_existing
    from kvbench.sweep.cell import SweepCell

    effects, notes = {}, {}
    rerun = find_rerun(mine)
    requests = {x.name: x.request for x in (rerun, *changes) if x.request is not None}
    if rerun.request is None:
        notes[rerun.name] = f"cannot be run, {rerun.why}"
    if "scorer" in requests and (found := measure_scorer(mine, requests["scorer"].scorer or "")) is not None:
        effects["scorer"], notes["scorer"] = found, f"on the same {found.n} answers"
        del requests["scorer"]
    for name, same in _find_duplicates(requests).items():
        notes[name] = "no effect: the same run" if same == rerun.name else f"the same run as {same}"
        del requests[name]
    cells = [SweepCell(i, name, replace(x, out=out), {}) for i, (name, x) in enumerate(requests.items())]
    if rerun.request is not None:
        kept = find_existing(prepare(replace(rerun.request, out=out)))
        if kept is not None and (differing := (*kept.code_changes, *kept.bound_changes)):
            raise UserError(
                f"{kept.folder} holds the first run as other code computed it ({'; '.join(differing)}), so it cannot "
                "be repeated there, and effects would include those of the code. Give the runs by their folders, and "
                "another --out."
            )
    reports = dict(zip(requests, run_cells(cells) if cells else [], strict=True))
    base = mine
    for name, report in reports.items():
        if report.folder is None or report.status != "ok":
            notes[name] = f"cannot be run: {report.error}"
            continue
        if report.changes:
            notes[name] = f"not measured: other code computed {report.folder} ({'; '.join(report.changes)})"
            continue
        changed = load_run(report.folder)
        found = measure(base, changed)
        if name == rerun.name:
            base = changed
        if name != rerun.name and changed.result.run_id == base.result.run_id:
            notes[name] = "no effect: the same run"
        elif found is not None and changed.result.run_id != mine.result.run_id:
            effects[name] = found
            notes[name] = f"{_pairing(found)}; {report.folder.name}"
    return effects, notes


def _find_duplicates(requests: dict[str, Request]) -> dict[str, str]:
    """Names of requests that resolve to the same run as an earlier one, with its name."""
    from kvbench.runs.request import check
    from kvbench.sweep.check import describe_run

    first: dict[object, str] = {}
    keys = {name: (describe_run(check(x)), x.model, x.device, x.dtype) for name, x in requests.items()}
    return {name: same for name, key in keys.items() if (same := first.setdefault(key, name)) != name}


def _pairing(shift: ScoreShift) -> str:
    return f"paired on {count(shift.n, 'question')}" if shift.n else "different questions, not paired"


def _note(change: Change, *, run: bool) -> str:
    if change.request is None:
        return f"cannot be run alone: {change.why}"
    return "no score" if run else "add --run"


def _effect(effect: ScoreShift | None) -> str:
    if effect is None:
        return "-"
    ends = effect.ci95
    return f"{effect.mean:+.3f}" if ends is None else f"{effect.mean:+.3f}\n[{ends[0]:+.3f}, {ends[1]:+.3f}]"


def _json(effect: ScoreShift | None) -> dict[str, object] | None:
    return None if effect is None else {"mean": effect.mean, "ci95": effect.ci95, "paired": effect.n}
