"""HTML pages in one file: scripts come from Python packages, nothing is fetched, all untrusted text is escaped."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.machine import load_extra

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 84rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.25rem; padding-top: 0.75rem; border-top: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
p { margin: 0.25rem 0; max-width: 60rem; }
a { color: #0b5394; }
a:focus-visible, summary:focus-visible, [tabindex]:focus-visible { outline: 2px solid #0b5394; outline-offset: 2px; }
summary { cursor: pointer; margin: 0.5rem 0; }
ul { margin: 0.25rem 0; max-width: 60rem; padding-left: 1.2rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem 1.5rem; }
.chart { width: 100%; min-height: 4rem; overflow: hidden; }
.narrow { max-width: 44rem; }
.note, caption { color: #555; font-size: 0.9rem; text-align: left; }
.failed { color: #b00020; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15rem 0.6rem; text-align: right; white-space: nowrap; }
td.failed { min-width: 16rem; white-space: normal; overflow-wrap: anywhere; }
th { background: #f4f4f4; font-weight: 600; }
th[scope=row], .text { text-align: left !important; }
tbody th[scope=row] { position: sticky; left: 0; background: #fff; }
tr.shaded td, tbody tr.shaded th { background: #eef3f8; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0.25rem 0; font-size: 0.9rem; }
dt { color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.25rem; } }
"""

SCRIPT = """
const draw = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    draw.unobserve(target);
    const spec = JSON.parse(document.getElementById(target.dataset.chart).textContent);
    vegaEmbed(target, spec, {
      ast: true, logLevel: 1, actions: { export: true, source: false, compiled: false, editor: false },
    });
  }
}, { rootMargin: "400px" });
for (const place of document.querySelectorAll("[data-chart]")) draw.observe(place);
for (const table of document.querySelectorAll("table.rows")) {
  new DataTable(table, {
    paging: false, order: [], autoWidth: false, layout: { topStart: "search", topEnd: "info", bottomStart: null },
    language: { info: "_TOTAL_ rows", infoEmpty: "no rows", infoFiltered: "of _MAX_", search: "Filter:" },
    columnDefs: [{ targets: "pick", columnControl: [["searchList"]] }],
  });
  const scroll = table.parentElement;
  scroll.tabIndex = 0;
  scroll.role = "region";
  scroll.ariaLabel = table.caption.textContent;
}
"""
"""Draws charts when they scroll into view, and makes tables sortable. Without it, tables are still shown.

`ast`: expressions are interpreted, so that the page needs no `eval`. `logLevel` 1: errors only, since empty layers
cause warnings.
"""


@functools.cache
def read_vega() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, with an expression interpreter in place of `eval`.

    Raises:
        UserError: vl-convert is not installed.
    """
    script: str = load_extra("vl_convert", extra="report", what="a page").javascript_bundle()
    return script


@functools.cache
def read_datatables() -> tuple[str, str]:
    """DataTables as a script and a style sheet. The module's export becomes a global, for use in an inline script.

    Raises:
        UserError: itables is not installed, or its bundle does not contain DataTables as expected.
    """
    folder = Path(load_extra("itables", extra="report", what="a page").__file__).parent / "html"
    script, style = ((folder / name).read_text(encoding="utf-8") for name in ("dt_bundle.js", "dt_bundle.css"))
    exports = re.search(r"export\s*\{[^}]*?(\w+) as default[^}]*\};?", script)
    if exports is None:
        raise UserError("this itables exports no DataTables. Install the one of constraints.txt.")
    return f"{script[: exports.start()]}window.DataTable={exports[1]};{script[exports.end() :]}", style


def write_page(title: str, body: str) -> bytes:
    """Write a page around an HTML body. Its policy allows its own scripts by hash, and no network access.

    Raises:
        UserError: a package of the extra is not installed.
    """
    tables, style = read_datatables()
    scripts = [x.replace("</script", "<\\/script") for x in (read_vega(), tables, SCRIPT)]
    hashes = " ".join(f"'sha256-{_encode(hashlib.sha256(x.encode()).digest())}'" for x in scripts)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}"
    code = "".join(f'<script type="module">{x}</script>\n' for x in scripts)
    page = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}{STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}"
        f"{code}</html>\n"
    )
    return page.encode("utf-8", "replace")  # half of a surrogate pair cannot be encoded


def write_chart(spec: dict[str, Any] | None, name: str, title: str = "") -> str:
    """A container for a chart and its escaped specification; empty for None."""
    if spec is None:
        return ""
    data = json.dumps(spec, separators=(",", ":")).replace("<", "\\u003c")
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    return (
        f'<figure>{caption}<div class="chart" data-chart="{name}"></div></figure>\n'
        f'<script type="application/json" id="{name}">{data}</script>\n'
    )


def write_download(name: str, media: str, content: str) -> str:
    """A link that saves a file embedded in the page."""
    data = _encode(content.encode("utf-8", "replace"))
    return f'<a download="{escape(name)}" href="data:{media};base64,{data}">{escape(name)}</a>'


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
