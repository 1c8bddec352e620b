"""Logs results to an experiment tracker. wandb and trackio share the three calls that are used."""

from __future__ import annotations

import importlib

from kvbench.log import say
from kvbench.runs.results import Result


def log_result(package: str, result: Result) -> bool:
    """Log a result as one run of project `kvbench`. A failure is printed, since the result is saved on disk."""
    try:
        tracker = importlib.import_module(package)
        tracker.init(project="kvbench", name=result.run_id, config=result.spec.model_dump(mode="json"))
        try:
            tracker.log(result.model_dump(mode="json", exclude={"spec"}))
        finally:
            tracker.finish()  # else wandb's next `init` gives this run again
    except Exception as error:  # noqa: BLE001  # a network, an account, a version
        say(f"the result is saved, but {package} did not take it: {type(error).__name__}: {error}")
        return False
    return True
