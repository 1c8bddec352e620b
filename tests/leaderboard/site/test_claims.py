"""The page of claims."""

from __future__ import annotations

import re

import pytest

from kvbench.leaderboard.site import claims
from kvbench.leaderboard.site.claims import VERDICTS
from kvbench.leaderboard.site.listed import read_listed
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.paper import list_papers


def read_page(results):
    return (results.build().folder / "claims.html").read_text(encoding="utf-8")


def test_only_verified_runs_are_judged(results, monkeypatch):
    """Of copies the most trusted comes last, and the last counts."""
    results.send(results.add("sent", verified=False), "ada")
    results.verify(results.folder / "sent", "L0")
    results.add("own")
    results.add("unverified", method="knorm", verified=False)
    judged = []
    monkeypatch.setattr(claims, "list_judgments", lambda _, runs: judged.extend(runs) or [])
    runs, _ = read_listed(results.folder)
    report = claims.read_claims(results.folder, runs)
    assert [x.folder.name for x in judged] == ["sent", "own"]
    assert report.problem is None


@pytest.mark.slow
def test_every_printed_number_has_its_verdict(results):
    """The matrix counts each number once, and each appears in a table of its paper."""
    page = read_page(results)
    claims = [x for name, paper in list_papers().items() for x in list_claims(name, paper)]
    matrix = re.findall(r'<td class="n" data-sort="(\d+)">', page)
    assert len(matrix) == len(VERDICTS) * len(list_papers())
    assert sum(map(int, matrix)) == len(claims)
    details = page.partition("<details>")[2]
    cells = re.findall(r'<td class="n">([-+\d.]+)', details)
    assert sorted(cells) == sorted(f"{x.printed:.{x.table.decimals}f}" for x in claims)
    for name in list_papers():
        assert f'<div id="{name}">' in page
