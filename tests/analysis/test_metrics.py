"""A metric is shown with its name, its direction and its range, and perplexity as perplexity."""

from __future__ import annotations

import math

import pytest

from kvbench.analysis.formatting import format_bytes, format_seconds
from kvbench.analysis.metrics import Metric
from kvbench.bench import table
from kvbench.runs.results import Score


def metric(name, mean, *, higher=True):
    """The metric of a score."""
    return Metric.of(Score(metric=name, higher_is_better=higher, mean=mean, partial_mean=mean, ci95=None, by_turn=()))


@pytest.mark.parametrize(("name", "mean", "higher", "title"), [
    ("contains", 0.5, True, "contains ↑ (0 to 1)"), ("token_nll", 2.265, False, "perplexity ↓ (per token)"),
    ("perplexity", 9.6, False, "perplexity ↓"), ("bleu", 31.0, True, "bleu ↑"),
    ("contains", None, True, "contains ↑ (0 to 1)"),
])
def test_name_direction_and_unit(name, mean, higher, title):
    """The range only where the score is in it."""
    assert metric(name, mean, higher=higher).title == title


def test_negative_log_likelihood_is_shown_as_perplexity():
    """Scores as their exponential, differences as the change of the perplexity in percent."""
    found = metric("token_nll", 2.265, higher=False)
    assert (found.write(2.265), found.write(10.26)) == ("9.631", "28,567")
    assert found.write_interval((2.0, 2.5)) == f"[{math.exp(2.0):.3f}, {math.exp(2.5):.2f}]"
    assert found.write_difference(math.log(1.1)) == "+10.0%"
    assert found.write_difference_interval((math.log(0.9), math.log(1.2))) == "[-10.0%, +20.0%]"
    assert found.scale(math.log(7.0)) == pytest.approx(7.0)
    assert [found.write(math.log(x)) for x in (999.94, 999.96, 1000.2)] == ["999.9", "1,000", "1,000"]


def test_a_number_that_is_rounded_up_to_a_unit_has_that_unit():
    """Not 1000.00 kB, 1000.0 ms or 1e+03 us."""
    assert [format_bytes(x) for x in (999.4, 999.6, 999_994, 999_996, 1e15)] == [
        "999 B", "1.00 kB", "999.99 kB", "1.00 MB", "1000.00 TB"
    ]
    assert [format_seconds(x) for x in (0.9999, 0.99996, None)] == ["999.9 ms", "1.00 s", "-"]
    assert [table.format_seconds(x) for x in (0.0, 0.0009994, 0.0009996, 0.9994, 0.9996, 1234.0)] == [
        "0 us", "999 us", "1 ms", "999 ms", "1 s", "1,230 s"
    ]


def test_other_scores_are_shown_as_they_are():
    """With three decimals, and their intervals with two."""
    found = metric("contains", 0.5)
    assert (found.write(0.5), found.write_interval((0.25, 1.0))) == ("0.500", "[0.25, 1.00]")
    assert (found.write_difference(-0.5), found.write_difference_interval((-1.0, 0.0))) == ("-0.500", "[-1.00, +0.00]")
