"""Where the pages of results lie, and how a script writes tables into them.

A page has markers `<!-- begin NAME -->` and `<!-- end NAME -->`; only the text between them is replaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS, DOCS, README = ROOT / "results", ROOT / "docs", ROOT / "README.md"
MINI_PAGE, SMOLLM2_PAGE, NEEDLES_PAGE, QWEN_PAGE = (
    DOCS / f"results{x}.md" for x in ("", "-smollm2", "-smollm2-needles", "-qwen")
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, names to the left and numbers to the right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows)) + "\n"


def fill(page: str, texts: Mapping[str, str]) -> str:
    """A page with new text between its markers, each of which it must have once."""
    for name, text in texts.items():
        before, begin, rest = page.partition(f"<!-- begin {name} -->\n")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        assert begin and end and begin not in after, name
        page = before + begin + text + end + after
    return page


def take_no_arguments(doc: str | None) -> None:
    """Show the description of a script for `--help`, and refuse any other argument."""
    argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()


def write(texts: Mapping[Path, Mapping[str, str]]) -> None:
    """Write the texts of several pages between their markers."""
    for path, parts in texts.items():
        path.write_text(fill(path.read_text(encoding="utf-8"), parts), encoding="utf-8")
