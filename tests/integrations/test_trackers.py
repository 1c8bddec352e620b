"""Results go to experiment trackers, each as a run of its own."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from kvbench.integrations.trackers import log_result
from kvbench.runs.files import read_file
from kvbench.runs.results import Result

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"


def test_a_result_after_a_failed_one_has_a_run_of_its_own(monkeypatch):
    """wandb's `init` gives the run that is open, if one is."""
    results = [read_file(x, Result) for x in sorted(CURATED.glob("*/result.json"))[:2]]
    opened, logged = [], {}

    def init(*, name, **_):
        if not opened:
            opened.append(name)

    def log(document):
        if document["run_id"] == results[0].run_id:
            raise OSError("no network")
        logged[opened[0]] = document["run_id"]

    monkeypatch.setitem(sys.modules, "tracker", types.SimpleNamespace(init=init, log=log, finish=opened.clear))
    assert [log_result("tracker", x) for x in results] == [False, True]
    assert logged == {results[1].run_id: results[1].run_id}
