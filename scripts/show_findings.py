"""Writes the table of docs/findings.md and draws docs/findings.png from the record of a model.

Only the text between the markers `<!-- begin NAME -->` and `<!-- end NAME -->` is replaced. The command line makes the
record:

    kvbench models add smollm2-135m
    kvbench reproduce --shape all --model smollm2-135m
    python scripts/show_findings.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from kvbench.findings.records import FindingsRecord
from kvbench.runs.files import read_file

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "results" / "shape" / "smollm2-135m-q4_1.json"
PAGE = ROOT / "docs" / "findings.md"
PICTURE = ROOT / "docs" / "findings.png"
PANELS = (
    ("Attention below 1 % of the row's maximum", {"share": ("sparse-attention", "by_layer")}),
    ("Attention received by a fifth of the tokens", {"share": ("heavy-hitters", "top_fifth_by_layer")}),
    ("Entropy of attention over its maximum", {"entropy": ("entropy-by-depth", "by_layer")}),
    ("Attention in Quest's quarter of pages over the best quarter", {"recall": ("page-bounds", "by_layer")}),
    ("SnapKV's window: choice that is still attended 256 tokens later", {"hits": ("observation-window", "by_layer")}),
    ("Energy at ShadowKV's rank", {
        "keys before rotation": ("low-rank-keys", "plain_by_layer"),
        "rotated keys": ("low-rank-keys", "rotated_by_layer"), "values": ("low-rank-keys", "value_by_layer"),
    }),
)
"""Title and lines of each panel: a finding and the name of its statistic by layer."""


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


def draw(record: FindingsRecord) -> bytes:
    """Small multiples by layer."""
    means = {x.name: x.means for x in record.findings}
    panels = []
    for title, lines in PANELS:
        rows: list[dict[str, Any]] = []
        for name, (finding, statistic) in lines.items():
            numbers = means[finding][statistic]
            assert isinstance(numbers, tuple), statistic
            rows += [{"layer": i, "value": x, "line": name} for i, x in enumerate(numbers)]
        legend = alt.Legend(title=None, orient="bottom") if len(lines) > 1 else None
        panels.append(alt.Chart(alt.Data(values=rows)).mark_line(point=alt.OverlayMarkDef(size=14)).encode(
            x=alt.X("layer:Q", title="layer"), y=alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("line:N", legend=legend),
        ).properties(title=alt.TitleParams(title, fontSize=11), width=300, height=150))
    chart = alt.concat(*panels, columns=2).resolve_scale(color="independent")
    picture: bytes = vl_convert.vegalite_to_png(chart.to_dict(validate=False), scale=1.5)
    return picture


def main() -> None:
    """Replace the table and draw the picture."""
    record = read_file(RECORD, FindingsRecord)
    page = PAGE.read_text(encoding="utf-8")
    table = write_table(record)
    found, count = re.subn(
        r"(<!-- begin findings -->\n).*?(<!-- end findings -->)", lambda x: f"{x[1]}{table}\n{x[2]}", page,
        flags=re.DOTALL,
    )
    assert count == 1, f"{PAGE} has the markers once"
    PAGE.write_text(found, encoding="utf-8")
    PICTURE.write_bytes(draw(record))


if __name__ == "__main__":
    main()
