"""The numbers that a table shows of a run, one column each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from kvbench.analysis.formatting import format_seconds
from kvbench.leaderboard.site.tables import Axis
from kvbench.runs.results import Result


@dataclass(frozen=True)
class Column:
    """What it is called, where its number is, and how that is written."""

    name: str
    about: str
    read: Callable[[Result], float | None]
    write: Callable[[float], str]
    first: Literal["ascending", "descending"]
    """The order in which it is sorted at first."""
    narrow: bool = False
    """Whether a telephone has room for it."""

    def cell(self, result: Result) -> tuple[float | None, str]:
        """The number, and as text."""
        value = self.read(result)
        return value, "-" if value is None else self.write(value)


def choose_columns(axis: Axis, results: Iterable[Result], *, timed: bool) -> list[Column]:
    """Those in which these results have anything, what the axis measures first; `timed`: times can be compared."""
    results = list(results)
    upwards = all(x.score.higher_is_better for x in results)
    score = SCORE if upwards else replace(SCORE, first="ascending")
    order = sorted((score if x is SCORE else x for x in COLUMNS), key=lambda x: x.name.lower() != axis)
    return [
        x for x in order
        if any(x.read(result) is not None for result in results) and (timed or x is not TIME)
    ]


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _decimal(value: float) -> str:
    return f"{value:.3f}"


def _first(result: Result) -> float | None:
    turns = result.score.by_turn
    return turns[0].mean if len(turns) > 1 and result.status == "ok" else None


def _later(result: Result) -> float | None:
    means = [x.mean for x in result.score.by_turn[1:] if x.mean is not None]
    return fmean(means) if means and result.status == "ok" else None


def _speedup(result: Result) -> float | None:
    beside = None if result.diffusion is None else result.diffusion.baselines.get("none")
    return None if beside is None else beside.speedup


SCORE = Column(
    "Score", "mean over all answers, with its 95 % interval", lambda x: x.score.mean, _decimal, "descending",
    narrow=True,
)
TIME = Column("Per token", "median seconds of a token", lambda x: x.latency.tpot_s, format_seconds, "ascending")
COLUMNS = (
    Column("Held", "bytes that hold the context, of the dense cache's", Axis.STORED.measure, _percent, "ascending",
           narrow=True),
    Column("Read", "bytes that a decode step reads, of the dense cache's", Axis.READ.measure, _percent, "ascending"),
    Column("Computed", "rows that a pass computes, of all", Axis.COMPUTED.measure, _percent, "ascending", narrow=True),
    Column("Passes", "forward passes of an answer", lambda x: None if x.diffusion is None else x.diffusion.nfe,
           "{:.1f}".format, "ascending"),
    SCORE,
    Column("First turn", "mean over the first question of each context", _first, _decimal, "descending"),
    Column("Later turns", "mean over the turns after it", _later, _decimal, "descending"),
    Column("Top-1", "share of tokens that are the dense cache's most likely ones too",
           lambda x: None if x.agreement is None else x.agreement.top1, _decimal, "descending"),
    Column("Speed-up", "over no cache in the same job", _speedup, "{:.2f} x".format, "descending"),
    TIME,
)
