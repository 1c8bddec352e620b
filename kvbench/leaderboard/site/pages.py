"""Renders the templates. Every value on a page is escaped, limited in length, and free of invisible characters."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvbench import __version__
from kvbench.analysis.doubts import list_doubts
from kvbench.analysis.formatting import format_bytes, format_interval, format_p, format_share
from kvbench.analysis.metrics import Metric
from kvbench.analysis.shares import bytes_per_token, read_share, stored_share
from kvbench.analysis.significance import UNADJUSTED
from kvbench.leaderboard.site.claims import VERDICTS, join_reasons
from kvbench.leaderboard.site.columns import TableColumn, choose_columns
from kvbench.leaderboard.site.tables import Group, RankedRun, name_machine
from kvbench.leaderboard.submission.records import LEVELS
from kvbench.log import count
from kvbench.method import Upstream
from kvbench.models.sources import SOURCES
from kvbench.report.group import VISIBILITIES, Axis, name_question, name_training
from kvbench.report.sections import list_protocol
from kvbench.report.suggest import explain_failing, warn_of_model
from kvbench.report.suggestion import name_baseline
from kvbench.runs.results import Result, Score
from kvbench.runs.spec import ModelSpec

TEMPLATES = Path(__file__).parent / "templates"
MAX_VALUE_CHARS = 2000
"""Characters of one value that a page shows."""
AXES = {
    Axis.STORED: "By stored bytes", Axis.READ: "By bytes read per decode step",
    Axis.COMPUTED: "By positions computed per denoising step",
}


@dataclass(frozen=True)
class Pages:
    """The templates, with the values that all pages share."""

    shared: Mapping[str, Any]

    def write(self, name: str, **context: Any) -> bytes:
        """Render the template of this name."""
        template = _read_templates().get_template(f"{name}.html")
        return template.render({"root": "", "here": name, **self.shared, **context}).encode()


@functools.cache
def _read_templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=sanitize, auto_reload=False,
    )
    templates.globals |= {
        "version": __version__, "levels": LEVELS, "verdicts": VERDICTS, "script": _read_script(),
        "unadjusted": UNADJUSTED,
    }
    templates.filters |= {
        "heading": name_group, "columns": name_question, "visibility": VISIBILITIES.__getitem__,
        "subtitle": describe_group, "baseline": name_baseline, "protocol": list_protocol,
        "machine": name_machine, "tables": list_tables, "small_model": warn_of_model, "failing": explain_failing,
        "doubts": list_doubts, "training": name_training,
        "after": cut_name, "mean": write_mean, "stored": stored_share, "per_token": bytes_per_token,
        "read": read_share, "share": format_share,
        "arxiv": is_arxiv, "percent": "{:.1%}".format, "bytes": format_bytes, "interval": format_interval,
        "p": format_p, "reasons": join_reasons, "weights": describe_weights,
    }
    return templates


def _read_script() -> dict[str, Markup]:
    """The inline script of pages, and its hash for the Content-Security-Policy."""
    text = (TEMPLATES / "site.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"text": Markup(text), "hash": Markup(f"'sha256-{digest}'")}  # noqa: S704  # our own file


def sanitize(value: Any) -> Any:
    """Escape invisible characters and characters that reverse text, and cut the value at MAX_VALUE_CHARS."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    more = len(value) - MAX_VALUE_CHARS
    return escape_invisible(value if more <= 0 else f"{value[:MAX_VALUE_CHARS]} ... ({more:,} more characters)")


def escape_invisible(text: str) -> str:
    """Write unprintable characters as Python escapes."""
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() or x == "\n" else x.encode("unicode_escape").decode() for x in text)


def name_group(result: Result) -> str:
    """Heading of a protocol: its mode and its questions."""
    own = ", own history" if result.mode == "multi-turn" and result.history == "own" else ""
    again = ", recompressed at each turn" if result.spec.recompress else ""
    return f"{result.mode}: {name_question(result)}{own}{again}"


def describe_group(group: Group) -> str:
    """One line with the rest of a protocol: model, contexts, scorer, machine."""
    result = group.example
    spec = result.spec
    where = f"{group.usual_machine}{', where a row names no other machine' if len(group.machines) > 1 else ''}"
    history = f" with {result.history} history" if result.mode == "multi-turn" else ""
    again = ", recompressed at each turn" if spec.recompress else ""
    contexts = count(spec.samples, "context")
    turns = f"{spec.turns} questions" if spec.turns > 1 else "one question"
    better = "" if result.score.higher_is_better else " (lower is better)"
    return (
        f"{result.model.id} in {result.model.dtype}; {contexts}, {turns} each{history}{again}; scored by "
        f"{result.task.scorer}{better}; {where}"
    )


def describe_weights(model: ModelSpec) -> str:
    """The element type, and the quantization from which the weights were made."""
    made_from = next((x.quantization for x in SOURCES.values() if x.id == model.id), None)
    return model.dtype if made_from is None else f"{model.dtype}, weights dequantized from {made_from}"


def write_mean(score: Score) -> str:
    """The mean as its metric is shown; a dash if there is none."""
    return "-" if score.mean is None else Metric.of(score).write(score.mean)


def write_value(value: object) -> str:
    """A field as in its file, text without quotation marks."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def list_tables(
    group: Group, method: str | None = None
) -> list[tuple[str, list[TableColumn], list[tuple[str, list[RankedRun]]]]]:
    """The tables of a group: title, columns and bands, the full cache first; limited to one method if given."""
    tables = []
    axes = {x.axis: [(band.title, list(band.rows)) for band in x.bands] for x in group.tables}
    for axis, bands in (axes or {Axis.of(group.example): []}).items():
        every = [(name_baseline(group.example), list(group.anchors)), *bands]
        chosen = [(title, [x for x in rows if method in (None, x.result.method.name)]) for title, rows in every]
        shown = [(title, rows) for title, rows in chosen if rows]
        if shown:
            results = [x.result for _, rows in every for x in rows]
            timed = group.example.spec.device != "cpu" and len(group.machines) == 1
            tables.append((AXES[axis], choose_columns(axis, results, timed=timed), shown))
    return tables


def cut_name(label: str, name: str) -> str:
    """A label without the method's name."""
    return label.removeprefix(name).strip()


def is_arxiv(text: str | None) -> bool:
    """Whether the text is an arXiv number, and so safe in a link."""
    return text is not None and re.fullmatch(r"\d{4}\.\d{4,5}", text, re.ASCII) is not None


def link_code(upstream: Upstream | None) -> str | None:
    """The address of a method's reference code on GitHub; None if its fields are not plain names."""
    if upstream is None or not re.fullmatch(r"[\w-]+/[\w.-]+", upstream.repo, re.ASCII):
        return None
    commit = upstream.commit if upstream.commit and re.fullmatch(r"[0-9a-f]{6,40}", upstream.commit) else None
    return f"https://github.com/{upstream.repo}{'' if commit is None else f'/tree/{commit}'}"


def name_pages(names: Iterable[str]) -> Mapping[str, str]:
    """A plain file name for each method name, unique on file systems that ignore case."""
    return {name: _name_page(name) for name in sorted(set(names))}


def _name_page(name: str) -> str:
    plain = re.sub(r"[^a-z0-9_+-]+", "-", name.lower())[:60].strip("-")
    if plain == name and not re.search(r"(^|-)[0-9a-f]{8}$", plain):
        return plain
    return f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".lstrip("-")
