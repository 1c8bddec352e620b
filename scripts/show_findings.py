"""Writes the tables of docs/findings.md and draws docs/findings.png from the records of three models.

The command line makes the records:

    kvbench models add smollm2-135m
    kvbench reproduce --shape all --model smollm2-135m
    kvbench models add qwen2.5-coder-1.5b
    kvbench reproduce --shape all --model qwen2.5-coder-1.5b --samples 4
    kvbench reproduce --shape all --model mini-hybrid
    python scripts/show_findings.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert
from pages import DOCS, RESULTS, take_no_arguments, write

from kvbench.reproduce.findings.records import FindingsRecord
from kvbench.reproduce.findings.statements import find_findings
from kvbench.reproduce.findings.steps import METHODS, PART
from kvbench.runs.files import read_file

RECORD = RESULTS / "shape" / "smollm2-135m-q4_1.json"
LARGER = RESULTS / "shape" / "qwen2.5-coder-1.5b-q4_k_m.json"
HYBRID = RESULTS / "shape" / "mini-hybrid.json"
PAGE = DOCS / "findings.md"
PICTURE = DOCS / "findings.png"
AFTER = (32, 64, 128, 192, 256)
"""Tokens after which the table of divergence by step has a column."""


def write_table(record: FindingsRecord) -> str:
    """A row per check, under its finding's statement."""
    lines = [
        "| finding | from | printed | check | here, 95 % interval over texts | verdict |",
        "| --- | --- | --- | --- | ---: | --- |",
    ]
    for x in record.findings:
        for i, check in enumerate(x.checks):
            low, high = check.ci95
            first = (f"`{x.name}`: {x.statement}", x.source, x.printed or "-") if i == 0 else ("", "", "")
            verdict = f"**{x.verdict}**" if i == 0 and len(x.checks) == 1 else check.verdict
            if i == 0 and len(x.checks) > 1:
                verdict = f"{check.verdict}; finding **{x.verdict}**"
            here = f"{check.mean:.3f} [{low:.3f}, {high:.3f}]"
            lines.append(f"| {' | '.join(first)} | `{check.rule}` | {here} | {verdict} |")
    return "\n".join(lines)


def write_comparison(records: Sequence[FindingsRecord]) -> str:
    """A row per check, with its mean and verdict on each model."""
    names = [x.model.id.rsplit("-q4", 1)[0] for x in records]
    lines = [f"| finding | check | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"]
    for findings in zip(*(x.findings for x in records), strict=True):
        assert len({x.name for x in findings}) == 1, findings
        for i, checks in enumerate(zip(*(x.checks for x in findings), strict=True)):
            cells = [f"{x.mean:.3f} [{x.ci95[0]:.3f}, {x.ci95[1]:.3f}] {x.verdict}" for x in checks]
            lines.append(f"| {'' if i else f'`{findings[0].name}`'} | `{checks[0].rule}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_count(record: FindingsRecord) -> str:
    """One sentence with the count of each verdict."""
    counts = Counter(x.verdict for x in record.findings)
    return f"Of {len(record.findings)} findings, " + ", ".join(f"{n} {'are ' * (x == 'undecided')}{x}" for x, n in (
        ("hold", counts["holds"]), ("do not hold", counts["does not hold"]), ("undecided", counts["undecided"])
    )) + "."


def write_reasons(*records: FindingsRecord) -> str:
    """The remarks on findings that do not hold on one of the models."""
    failed = {x.name for record in records for x in record.findings if x.verdict != "holds"}
    return "\n".join(f"- `{x.name}`: {x.remark}" for x in find_findings("all") if x.remark and x.name in failed)


def write_definitions() -> str:
    """A row per finding."""
    rows = [f"| `{x.name}` | {x.definition} |" for x in find_findings("all")]
    return "\n".join(["| finding | its statistics |", "| --- | --- |", *rows])


def write_steps(record: FindingsRecord) -> str:
    """A row per method: the summed divergence after some tokens, and the agreement."""
    found = next(x for x in record.findings if x.name == "mean-divergence").means
    lines = [
        f"| method | {' | '.join(f'{x} tokens' for x in AFTER)} | nats per token | second half | agreement |",
        f"| --- |{' ---: |' * (len(AFTER) + 3)}",
    ]
    for name, budget in METHODS.items():
        sums = found[f"{name}_sum"]
        assert isinstance(sums, tuple), name
        cells = [f"{sums[x // PART - 1]:.2f}" for x in AFTER]
        half, agreement = found[f"{name}_second_half"], found[f"{name}_agreement"]
        lines.append(
            f"| `{name}`, {budget or '2 bits'} | {' | '.join(cells)} | {sums[-1] / len(sums) / PART:.3f} "
            f"| {half:.2f} | {agreement:.2f} |"
        )
    return "\n".join(lines)


def draw(record: FindingsRecord) -> bytes:
    """The figures of all findings, as small multiples by layer or along their own axis."""
    means = {x.name: x.means for x in record.findings}
    panels = []
    for finding in (x for x in find_findings("all") if x.figure and x.name in means):
        assert finding.figure is not None
        title, lines = finding.figure.title, finding.figure.lines
        rows: list[dict[str, Any]] = []
        for name, statistic in lines.items():
            numbers = means[finding.name][statistic]
            assert isinstance(numbers, tuple), statistic
            rows += [{"place": i, "value": x, "line": name} for i, x in enumerate(numbers)]
        legend = alt.Legend(title=None, orient="bottom") if len(lines) > 1 else None
        panels.append(alt.Chart(alt.Data(values=rows)).mark_line(point=alt.OverlayMarkDef(size=14)).encode(
            x=alt.X("place:Q", title=finding.figure.axis), y=alt.Y("value:Q", title=None),
            color=alt.Color("line:N", legend=legend),
        ).properties(title=alt.TitleParams(title, fontSize=11), width=300, height=150))
    chart = alt.concat(*panels, columns=2).resolve_scale(color="independent")
    picture: bytes = vl_convert.vegalite_to_png(chart.to_dict(validate=False), scale=1.5)
    return picture


def make_texts() -> dict[Path, dict[str, str]]:
    """The tables by their markers."""
    record, larger, hybrid = (read_file(x, FindingsRecord) for x in (RECORD, LARGER, HYBRID))
    parts = {
        "count": write_count(record), "findings": write_table(record), "reasons": write_reasons(record, larger),
        "definitions": write_definitions(), "hybrid": write_table(hybrid), "hybrid reasons": write_reasons(hybrid),
        "steps": write_steps(record), "larger": write_comparison((record, larger)), "larger count": write_count(larger),
    }
    return {PAGE: {name: f"{text}\n" for name, text in parts.items()}}


if __name__ == "__main__":
    take_no_arguments(__doc__)
    PICTURE.write_bytes(draw(read_file(RECORD, FindingsRecord)))
    write(make_texts())
