"""The page of claims."""

from __future__ import annotations

import re

import pytest

from kvbench.leaderboard.site.claims import VERDICTS
from kvbench.reproduce.claims import list_claims
from kvbench.reproduce.paper import list_papers
from kvbench.reproduce.shape import Compared, FindingRecord, ShapeRecord
from kvbench.runs.results import Result

FINDINGS = {
    "holds": "Rows stay.", "does not hold": "Rows <b>go</b>.", "undecided": "Rows may go.",
}


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
        assert f'<h3 id="{name}">' in page


@pytest.fixture
def findings(results):
    """A record of three findings."""
    def compare(verdict):
        return Compared(
            more="a/later", less="b/later", by=0.1, mean_more=0.75, mean_less=0.5, ci95=(0.125, 0.375), p=0.004,
            p_adjusted=0.012, contexts=(0.25,), bytes_more=0.25, bytes_less=0.25, equal_bytes=True, verdict=verdict,
        )

    run = Result.model_validate_json((results.add("a") / "result.json").read_text())
    record = ShapeRecord(
        findings=tuple(
            FindingRecord(name=f"x{i}", source="a paper", arxiv="2404.14469", statement=statement, verdict=verdict,
                          remark="Because.", comparisons=(compare(verdict),))
            for i, (verdict, statement) in enumerate(FINDINGS.items())
        ),
        runs={"a": run.run_id, "b": "b-0"}, models=(run.model,), environment=run.environment,
    )
    path = results.folder / "shape" / "findings.json"
    path.parent.mkdir()
    path.write_text(record.model_dump_json())
    return path


def test_findings_show_their_comparisons(results, findings):
    """Each finding shows statement, verdict and numbers, and a remark if it does not hold."""
    page = read_claims(results)
    assert "2 runs on mini" in page
    assert "Rows &lt;b&gt;go&lt;/b&gt;." in page
    assert "+0.25 [0.12, 0.38]" in page
    assert page.count("Because.") == 2
    assert "Not tested here yet" not in page


def test_a_damaged_record_empties_only_the_claims(results, findings):
    """The claims page states the reason; the leaderboard still has its run."""
    findings.write_text("{")
    built = results.build()
    assert built.runs == 1
    assert "The verdicts cannot be shown: " in (built.folder / "claims.html").read_text()
