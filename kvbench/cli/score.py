"""`kvbench score`: score the answers of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.options import Json, Out
from kvbench.cli.output import echo, print_json


def score_command(
    run: Annotated[str, typer.Argument(help="Folder or id of a run.")],
    *,
    scorer: Annotated[str | None, typer.Option(help="A scorer of the task; default: the run's.")] = None,
    task: Annotated[
        str | None, typer.Option(
            help="path/to/file.py:Class, path/to/task.toml or lm-eval:NAME, if the run's task is not registered."
        )
    ] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> None:
    """Score the answers of a run again, without a model.

    The run is not changed.
    """
    from kvbench.analysis.formatting import print_table
    from kvbench.analysis.load import find_run
    from kvbench.analysis.metrics import Metric
    from kvbench.analysis.rescore import rescore

    record, path = rescore(find_run(run, out), scorer, task)
    mean, interval, metric = record.score.mean, record.score.ci95, Metric.of(record.score)
    print_table("", (record.scorer, record.run_id), [
        (metric.title, "none: samples failed" if mean is None else metric.write(mean)),
        ("95% CI", "-" if interval is None else metric.write_interval(interval)),
        ("samples", f"{record.n_scored} of {record.n_samples}"),
    ])
    echo(f"file: {path}")
    if as_json:
        print_json(record.model_dump(mode="json"))
