"""The page of claims."""

from __future__ import annotations

import re

import pytest

from kvbench.leaderboard.site.claims import VERDICTS
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.paper import list_papers


def read_claims(results):
    return (results.build().folder / "claims.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_printed_number_has_its_verdict(results):
    """The matrix counts each number once, and each appears in a table of its paper."""
    page = read_claims(results)
    claims = [x for name, paper in list_papers().items() for x in list_claims(name, paper)]
    matrix = re.findall(r'<td class="n" data-sort="(\d+)">', page)
    assert len(matrix) == len(VERDICTS) * len(list_papers())
    assert sum(map(int, matrix)) == len(claims)
    details = page.partition("<details>")[2]
    cells = re.findall(r'<td class="n">([-+\d.]+)', details)
    assert sorted(cells) == sorted(f"{x.printed:.{x.table.decimals}f}" for x in claims)
    for name in list_papers():
        assert f'<div id="{name}">' in page
