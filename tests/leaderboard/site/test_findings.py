"""The pages of findings, on texts and on runs."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest

from kvbench.leaderboard.site.charts import TOP
from kvbench.leaderboard.site.findings import HEIGHT, draw_layers
from kvbench.reproduce.findings.statements import Figure, find_findings
from kvbench.reproduce.shape import Compared, FindingRecord, ShapeRecord
from kvbench.runs.results import Result

RECORD = Path(__file__).parents[3] / "results" / "shape" / "smollm2-135m-q4_1.json"
STATEMENTS = {
    "holds": "Rows stay.", "does not hold": "Rows <b>go</b>.", "undecided": "Rows may go.",
}


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
            for i, (verdict, statement) in enumerate(STATEMENTS.items())
        ),
        runs={"a": run.run_id, "b": "b-0"}, models=(run.model,), environment=run.environment,
    )
    path = results.folder / "shape" / "findings.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(record.model_dump_json())
    return path


@pytest.fixture
def measured(results):
    """The record of the real model, with a statement that attacks the page."""
    record = json.loads(RECORD.read_text())
    record["findings"][0] |= {"statement": "It <b>holds</b>.", "name": "../up"}
    path = results.folder / "shape" / "model.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record))
    return record


@pytest.mark.slow
def test_findings_on_runs_show_their_comparisons(results, findings):
    """The index links a page each, with statement, verdict and numbers, and a remark if it does not hold."""
    built = results.build().folder
    index = (built / "findings.html").read_text()
    assert "2 runs on mini" in index and "Rows &lt;b&gt;go&lt;/b&gt;." in index
    pages = [(built / f"findings/runs-x{i}.html").read_text() for i in range(3)]
    assert all(f'href="findings/runs-x{i}.html"' in index for i in range(3))
    assert all("+0.25 [0.12, 0.38]" in x for x in pages)
    assert ["Because." in x for x in pages] == [False, True, True]


@pytest.mark.slow
def test_each_finding_on_texts_has_a_page_with_both_numbers(results, measured):
    """The paper's number, every rule with our mean, interval and verdict, and the definition of the statistic."""
    built = results.build().folder
    index = (built / "findings.html").read_text()
    known = {x.name: x for x in find_findings("all")}
    for x in measured["findings"][1:]:
        page = html.unescape((built / f"findings/texts-{x['name']}.html").read_text())
        assert f'href="findings/texts-{x["name"]}.html"' in index
        assert (x["printed"] or "prints no number") in page
        assert known[x["name"]].definition in page
        assert "135 M parameters, bfloat16, weights dequantized from Q4_1" in page
        assert ("<svg" in page) == (known[x["name"]].figure is not None)
        for check in x["checks"]:
            low, high = check["ci95"]
            assert check["rule"] in page
            assert f'{check["mean"]:.3f} <span class="ci">[{low:.3f}, {high:.3f}]</span>' in page


def test_names_and_statements_of_a_record_are_untrusted(results, measured):
    """A name cannot leave the folder of findings, and a statement is escaped."""
    built = results.build().folder
    assert not (built / "up.html").exists()
    assert "It <b>holds" not in (built / "findings.html").read_text()
    assert "It &lt;b&gt;holds&lt;/b&gt;." in (built / "findings.html").read_text()


def test_lines_by_layer_are_drawn_to_scale():
    """The largest number lies at the top, 0 at the bottom; numbers up to 1 have the scale from 0 to 1."""
    chart = draw_layers({"x": (0.0, 2.0, 4.0), "y": (1.0, 1.0, 1.0), "z": 3.0}, Figure(title="t", lines={"a": "x"}))
    assert [p.y for p in chart.curves[0].points] == [TOP + HEIGHT, TOP + HEIGHT / 2, TOP]
    share = draw_layers({"y": (0.9, 0.8)}, Figure(title="t", axis="step", lines={"a": "y", "b": "missing"}))
    assert [x.label for x in share.curves] == ["a"]
    assert share.axis == "step"
    assert share.curves[0].points[0].y == pytest.approx(TOP + 0.1 * HEIGHT)
    assert draw_layers({"z": 3.0}, Figure(title="t", lines={"a": "z"})) is None


def test_a_damaged_record_empties_only_the_findings(results, findings):
    """The page of findings states the reason; the leaderboard still has its run."""
    findings.write_text("{")
    built = results.build()
    assert built.runs == 1
    assert "The findings cannot be shown: " in (built.folder / "findings.html").read_text()
