"""Docstrings, comments and documents keep the rules of docs/glossary.md that a pattern can find."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OPENINGS = re.compile(r"^\s*(?:What|Who|Whose|Whatever|Whoever|Else)\b")
"""A docstring names its subject."""
WORDS = re.compile(
    r"\b(beside|otherwise than|comes to|meanwhile|whoever|as its own what|golden answers?|dense cache|strangers?|"
    r"parcels?|twins?)\b", re.IGNORECASE
)
BRITISH = re.compile(
    r"(?:behaviour|neighbour|favour|colour|honour)s?|licence|judgement|catalogue|artefact|labelled|modelled|"
    r"(?:quant|token|normal|serial|initial|optim|summar|synchron|recogn|organ|general|special|metr|factor|minim|maxim|"
    r"penal|random|util|priorit|vector|character|standard|equal|visual|memor)is(?:e[dsr]?|ing|ations?)\b",
    re.IGNORECASE,
)
DOCSTRING = re.compile(r'^[ \t]*r?"""(.*?)"""', re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:^|\s\s)# (.*)$", re.MULTILINE)
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
EXEMPT = {"docs/glossary.md", "tests/test_language.py", "tests/golden/record.py"}
"""The lists of such words, and the recorder of golden outputs."""


def read_prose(path: str) -> list[str]:
    """Docstrings and comments of a Python file, or the text of a document, without code."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = [*DOCSTRING.findall(text), *COMMENT.findall(text)] if path.endswith(".py") else [text]
    return [CODE.sub("", x) for x in found]


@pytest.fixture(scope="module")
def prose() -> dict[str, list[str]]:
    """The prose of every file of the repository, by path."""
    done = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True)
    files = [x for x in done.stdout.splitlines() if x not in EXEMPT and not (ROOT / x).is_symlink()]
    assert len(files) > 500
    return {x: read_prose(x) for x in files if (ROOT / x).is_file()}


@pytest.mark.parametrize("pattern", [WORDS, BRITISH], ids=["words", "spelling"])
def test_prose_uses_the_glossarys_words(prose, pattern):
    """American spelling, and one term per thing."""
    found = [f"{path}: {x.group()}" for path, texts in prose.items() for text in texts for x in pattern.finditer(text)]
    assert found == []


def test_no_docstring_opens_with_a_question_word(prose):
    """Nor a comment, in Python files."""
    assert [f"{path}: {x[:60]}" for path, texts in prose.items() for x in texts
            if path.endswith(".py") and OPENINGS.match(x)] == []


def test_the_patterns_find_what_they_are_for(tmp_path):
    """Planted in a docstring, a comment and a document; code is left alone."""
    (tmp_path / "a.py").write_text(
        'def f():\n    """What it does, beside others."""\n    beside = 1  # the neighbours normalise\n'
    )
    (tmp_path / "b.md").write_text("The golden answer of `colour`.\n")
    texts = [*read_prose(str(tmp_path / "a.py")), *read_prose(str(tmp_path / "b.md"))]
    assert [x.group() for text in texts for x in WORDS.finditer(text)] == ["beside", "golden answer"]
    assert [x.group() for text in texts for x in BRITISH.finditer(text)] == ["neighbours", "normalise"]
    assert OPENINGS.match(texts[0])
