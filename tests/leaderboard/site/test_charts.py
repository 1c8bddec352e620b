"""Charts of a protocol: the logarithmic axis, and large families in several panels."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from kvbench.leaderboard.site.charts import LEFT, MOST_CURVES, RIGHT, TICK_WIDTH, Panel, Scale, draw_families
from kvbench.leaderboard.site.listed import read_listed
from kvbench.leaderboard.site.tables import make_groups
from kvbench.report.group import Axis
from kvbench.report.suggest import label_techniques


@pytest.mark.parametrize(("narrowest", "widest"), [(0.5, 1.0), (0.1, 1.0), (0.01, 5.2), (0.07, 16.0)])
def test_every_doubling_is_as_wide_and_labels_do_not_collide(narrowest, widest):
    """100 % is always labeled; smaller sizes than the least stand at the left edge."""
    scale = Scale(Axis.STORED, narrowest, widest, 0.0, 1.0)
    assert (scale.across(0.0), scale.across(narrowest), scale.across(widest)) == (LEFT, LEFT, RIGHT)
    assert scale.across(1.0) - scale.across(0.5) == pytest.approx(
        scale.across(2 * narrowest) - scale.across(narrowest), abs=0.2
    )
    ticks = Panel("", "", scale, (), None, ()).ticks
    assert "100%" in [text for _, text in ticks]
    assert all(b - a >= TICK_WIDTH for (a, _), (b, _) in pairwise(ticks))


def test_a_large_family_has_several_panels_with_the_best_first(results):
    """No technique is lost, and every score of a panel is at least the best of the next."""
    results.add("full", "good", method="full", stored=1.0, kind="none")
    for i in range(MOST_CURVES + 1):
        scores = [[1.0, 0.0]] * i + [[0.0, 0.0]] * (MOST_CURVES - i)
        results.add(f"run{i}", scores, edit=lambda result, lines, i=i: result["method"]["settings"].update(kernel=i))
    listed, _ = read_listed(results.folder)
    (group,) = make_groups(listed)
    labels = label_techniques([x.result for x in listed])
    (axis, panels), *_ = draw_families(group, labels)
    means = [[p.row.result.score.mean for curve in x.curves for p in curve.points] for x in panels]
    assert axis is Axis.STORED
    assert [x.title for x in panels] == ["eviction, 1 of 2", "eviction, 2 of 2"]
    assert sum(map(len, means)) == MOST_CURVES + 1
    assert min(means[0]) >= max(means[1])


def test_perplexities_are_shown_as_such_and_sorted_from_the_lowest(results):
    """The scores of the runs are nats."""

    def measure(result, lines):
        result["score"] |= {"metric": "token_nll", "higher_is_better": False}

    for method, kind in (("full", "none"), ("snapkv", "stored")):
        results.add(method, [[3.0, 1.0]] * 12, method=method, kind=kind, edit=measure)
    site = results.build().folder
    (page,) = site.glob("protocols/*.html")
    for level in ("1", "2.72", "7.39"):
        assert f'text-anchor="end">{level}</text>' in page.read_text()
    heads = re.findall(r'<button type="button" data-first="(\w+)">niah', (site / "index.html").read_text())
    assert heads == ["ascending"]
