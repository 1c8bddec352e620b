"""The columns of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from kvbench.analysis.formatting import format_seconds
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import conversation_share, cut_share, distinct_read_share
from kvbench.report.group import Axis
from kvbench.runs.results import Result


@dataclass(frozen=True)
class TableColumn:
    """One column: its name, how to read its number from a result, and how to format it."""

    name: str
    about: str
    read: Callable[[Result], float | None]
    write: Callable[[float], str]
    first: Literal["ascending", "descending"]
    """Sort order at the first click."""
    narrow: bool = False
    """Whether it is also shown on a narrow screen."""
    score: bool = False
    """Whether it is the score, which is shown with its interval."""

    def cell(self, result: Result) -> tuple[float | None, str]:
        """The number and its text."""
        value = self.read(result)
        return value, "-" if value is None else self.write(value)


def choose_columns(axis: Axis, results: Iterable[Result], *, timed: bool) -> list[TableColumn]:
    """Columns with at least one number, the axis first; `timed`: whether times are comparable."""
    results = list(results)
    metric = Metric.of(results[0].score)
    first: Literal["ascending", "descending"] = "descending" if metric.higher_is_better else "ascending"
    scores = {
        SCORE: replace(
            SCORE, name=f"{'Perplexity' if metric.exponential else 'Score'} {metric.arrow}", write=metric.write,
            about=f"{metric.title}, mean over all answers, with its 95 % interval", first=first,
        ),
        **{x: replace(x, write=metric.write, first=first) for x in TURNS},
    }
    order = sorted((scores.get(x, x) for x in COLUMNS), key=lambda x: x.name.lower() != axis)
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


def _cut(result: Result) -> float | None:
    return cut_share(result) or None  # a column of zeros says nothing


def _speedup(result: Result) -> float | None:
    baseline = None if result.diffusion is None else result.diffusion.baselines.get("none")
    return None if baseline is None else baseline.speedup


SCORE = TableColumn(
    "Score", "", lambda x: x.score.mean, _decimal, "descending", narrow=True, score=True,
)
TURNS = (
    TableColumn("First turn", "mean over the first question of each context", _first, _decimal, "descending"),
    TableColumn("Later turns", "mean over the turns after it", _later, _decimal, "descending"),
)
TIME = TableColumn("Per token", "median time per output token", lambda x: x.latency.tpot_s, format_seconds, "ascending")
COLUMNS = (
    TableColumn(
        "Stored", "stored bytes of the context, as a share of the full cache", Axis.STORED.measure, _percent,
        "ascending", narrow=True,
    ),
    TableColumn(
        "Read", "bytes read per decode step, as a share of those that the full cache reads", Axis.READ.measure,
        _percent, "ascending",
    ),
    TableColumn(
        "Distinct", "the same, an entry counted once that several query heads read", distinct_read_share, _percent,
        "ascending",
    ),
    TableColumn(
        "At the end", "stored bytes at the end of the conversation, as a share of the full cache then",
        conversation_share, _percent, "ascending",
    ),
    TableColumn(
        "Computed", "positions computed per denoising step, as a share of all", Axis.COMPUTED.measure, _percent,
        "ascending", narrow=True,
    ),
    TableColumn("NFE", "denoising steps per answer", lambda x: None if x.diffusion is None else x.diffusion.nfe,
           "{:.1f}".format, "ascending"),
    SCORE,
    *TURNS,
    TableColumn("Top-1", "share of answer tokens that method and full cache predict alike",
           lambda x: None if x.agreement is None else x.agreement.top1, _decimal, "descending"),
    TableColumn("Cut", "share of answers that the length limit ended", _cut, _percent, "ascending"),
    TableColumn("Speed-up", "over running without a cache, in the same job", _speedup, "{:.2f} x".format, "descending"),
    TIME,
)
