"""Results in somebody's experiment tracker. wandb and trackio share the three calls that are needed."""

from __future__ import annotations

import importlib

from kvbench.results import Result


def log_result(package: str, result: Result) -> None:
    """Log a result as one run of project `kvbench`."""
    tracker = importlib.import_module(package)
    tracker.init(project="kvbench", name=result.run_id, config=result.spec.model_dump(mode="json"))
    tracker.log(result.model_dump(mode="json", exclude={"spec"}))
    tracker.finish()
