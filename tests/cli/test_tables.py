"""The table of costs has the columns that say something, and a legend of these alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.analysis.load import load_run
from kvbench.cli.tables import LEGENDS, cost_cells
from kvbench.runs.results import Result

CURATED = Path(__file__).parents[2] / "results" / "cpu-2-cores"


@pytest.fixture(scope="module")
def result() -> Result:
    """A curated result of SnapKV without cut answers, whose strict score is its score."""
    found = (load_run(x.parent).result for x in sorted(CURATED.glob("snapkv-niah*/result.json")))
    return next(x for x in found if x.output.stop_reasons.keys() == {"stop"})


def change(result: Result, name: str) -> Result:
    """The result with one thing that is worth a column."""
    assert result.memory is not None
    read = result.memory.read_bytes_per_step
    assert read is not None
    parts: dict[str, Any] = {
        "strict": {"scores": dict.fromkeys(result.scores, 0.0625)},
        "cut": {"output": result.output.model_copy(update={"stop_reasons": {"stop": 3, "length": 1}})},
        "distinct": {"memory": result.memory.model_copy(update={"distinct_read_bytes_per_step": read / 2})},
    }
    return result.model_copy(update=parts[name])


@pytest.mark.parametrize("name", LEGENDS)
def test_a_column_appears_with_its_first_value(result, name):
    """And its explanation with it."""
    legend, columns, rows = cost_cells([result, result], ["a", "b"])
    assert columns == ["method", "stored", "at end", "reads", "top-1", "per token"]
    assert not any(x in legend for x in LEGENDS.values())
    legend, columns, changed = cost_cells([result, change(result, name)], ["a", "b"])
    assert (name in columns, LEGENDS[name] in legend) == (True, True)
    assert all(len(x) == len(columns) for x in changed)
    place = columns.index(name)
    assert changed[0][place] != changed[1][place]
    assert changed[0][:place] + changed[0][place + 1:] == rows[0]
