"""`kvbench answers`: read the answers of one or two runs."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Json, Out
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError
from kvbench.log import printable, say

if TYPE_CHECKING:
    from kvbench.analysis.answers import Asked, CommonQuestions
    from kvbench.runs.journal import Line
    from kvbench.runs.spec import RunSpec

NARROWEST = 40
MOST_SHOWN = 400
"""Characters of a text that are shown; --json has all."""


def answers_command(
    runs: Annotated[list[str], typer.Argument(help="Folder or id of a run, or of two runs to compare.")],
    *,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only questions with a wrong answer.")] = False,
    sample: Annotated[str | None, typer.Option(help="Only this sample, by its number or id.")] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Show the questions of a run with answers and scores.

    Reference answers stand next to the model's own. Of two runs, changed answers come first.
    """
    from kvbench.analysis.answers import choose, read_asked
    from kvbench.analysis.load import find_run

    if len(runs) > 2:
        raise UserError(f"answers takes one or two runs, got {len(runs)}.")
    found = read_asked([find_run(x, out) for x in runs])
    shown = choose(found, wrong=wrong, sample=sample)
    width = max(NARROWEST, shutil.get_terminal_size((80, 24)).columns)
    for asked in shown:
        echo("\n".join([*_describe(asked, found.specs, width), ""]))
    echo(_summarize(found, shown))
    if shown and all(x.question is None for x in shown):
        say("the journal has no questions: kvbench 0.1 made it.")
    if as_json:
        print_json({
            "runs": [x.run_id for x in found.specs], "apart": found.apart, "answers": [_document(x) for x in shown],
        })


def _describe(asked: Asked, specs: tuple[RunSpec, ...], width: int) -> list[str]:
    """The lines of one question."""
    names = ["answer"] if len(specs) == 1 else _name(specs)
    space = max(map(len, ("reference", *names))) + 4
    score = " -> ".join(_score(x) for x in asked.lines)
    rows = [f"{_visible(asked.sample)}, question {asked.turn + 1}: {score}"]

    def add(name: str, text: str) -> None:
        indent = f"  {name}".ljust(space)
        rows.extend(textwrap.wrap(
            _visible(text), width, initial_indent=indent, subsequent_indent=" " * space, break_on_hyphens=False,
        ) or [indent])

    if asked.question is not None:
        add("question", asked.question)
    add("reference", " | ".join(asked.references))
    for name, line in zip(names, asked.lines, strict=True):
        failed = line.prediction is None
        add(name, f"failed: {line.error}" if failed else f"{str(line.prediction).strip()}  ({_ending(line)})")
    return rows


def _name(specs: tuple[RunSpec, ...]) -> list[str]:
    """Method and budget of each run; its hash where these are equal."""
    from kvbench.runs.spec import shorten

    names = [f"{x.method.name} {x.budget or ''}".strip() for x in specs]
    return names if len(set(names)) == len(names) else [shorten(x.run_id) for x in specs]


def _score(line: Line) -> str:
    if line.error is not None:
        return "failed"
    return "no score" if line.score is None else f"{line.score:.3f}"


def _ending(line: Line) -> str:
    from kvbench.cli.results import ENDINGS

    how = ENDINGS.get(line.stop_reason or "", str(line.stop_reason))
    return how if line.tokens is None or line.stop_reason == "choice" else f"{line.tokens.generated} tokens, {how}"


def _visible(text: str) -> str:
    """Text on one line, without control characters, cut where it is long."""
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} [{len(text) - MOST_SHOWN} more characters]"
    return printable(shown.replace("\n", "\\n"))


def _summarize(found: CommonQuestions, shown: list[Asked]) -> str:
    asked = found.asked
    parts = [f"{len(shown)} of {len(asked)} questions shown"]
    if found.graded:
        parts.append(f"{sum(x.wrong for x in asked)} with a wrong answer")
    if failed := sum(x.failed for x in asked):
        parts.append(f"{failed} failed")
    if len(found.specs) > 1:
        parts.append(f"{sum(x.changed for x in asked)} with changed answers")
    if found.apart:
        parts.append(f"{found.apart} that only one run was asked left out")
    return f"{', '.join(parts)}."


def _document(asked: Asked) -> dict[str, Any]:
    return {
        "sample": asked.sample, "index": asked.index, "turn": asked.turn, "question": asked.question,
        "references": asked.references, "changed": asked.changed,
        "answers": [
            {
                "prediction": x.prediction, "score": x.score, "scores": x.scores, "stop_reason": x.stop_reason,
                "tokens": None if x.tokens is None else x.tokens.generated, "error": x.error,
            }
            for x in asked.lines
        ],
    }
