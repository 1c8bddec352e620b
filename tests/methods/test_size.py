"""Methods stay short: lines without card, docstrings, comments, blank lines and imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

METHODS = Path(__file__).parents[2] / "methods"
MOST = {
    "eviction/knorm": 15, "eviction/keydiff": 15, "eviction/random": 15, "eviction/snapkv": 15, "eviction/tova": 15,
    "eviction/h2o": 15, "eviction/observed_attention": 15, "retrieval/shadowkv": 110, "quantization/mikv": 110,
    "merging/kvmerger": 130, "heads/razor_attention": 80,
}


def count_lines(source: str) -> int:
    """Lines of code but for card, docstrings, comments, blank lines and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        card = isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "card"
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if card or docstring or types or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(i not in left_out and x.strip() != "" and not x.lstrip().startswith("#") for i, x in lines)


def test_lines_are_counted():
    """Code counts, and nothing else."""
    source = '"""Doc."""\nimport a\n\n# why\nclass B:\n    card: C = C(\n        d=1)\n    e: int = 1\n    """Doc."""\n'
    assert count_lines(source) == 2


@pytest.mark.parametrize("name", MOST)
def test_methods_stay_short(name):
    """No file has more lines than its bound."""
    assert count_lines((METHODS / f"{name}.py").read_text(encoding="utf-8")) <= MOST[name]
