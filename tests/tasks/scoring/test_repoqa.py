"""A repeated function is found in an answer and matched with those of its repository."""

from __future__ import annotations

import sys

import pytest

from kvbench.errors import UserError
from kvbench.tasks.scoring import repoqa
from kvbench.tasks.scoring.repoqa import find_function, passes

FUNCTIONS = {
    "python": "def add(a, b):\n    return a + b",
    "java": "int add(int a, int b) {\n  return a + b;\n}",
    "typescript": "function add(a: number, b: number): number {\n  return a + b;\n}",
    "rust": "fn add(a: i32, b: i32) -> i32 {\n    a + b\n}",
    "cpp": "int add(int a, int b) {\n  return a + b;\n}",
    "go": "func add(a int, b int) int {\n\treturn a + b\n}",
}
BEFORE = {
    "python": "import os\n\n", "java": "class A {\n", "typescript": "let x = 1;\n", "rust": "use std::io;\n",
    "cpp": "#include <a>\n", "go": "package main\n\n",
}
ALPHA = "def alpha(values):\n    total = 0\n    for value in values:\n        total += value\n    return total"
BETA = ALPHA.replace("alpha", "beta").replace("+=", "-=")


@pytest.mark.parametrize("language", FUNCTIONS)
def test_the_first_function_of_a_block_is_found(language):
    """In every language of RepoQA, without what stands around it."""
    after = "\n}" if language == "java" else ""
    answer = f"Here it is:\n```{language}\n{BEFORE[language]}{FUNCTIONS[language]}{after}\n```\nAnything else?"
    assert find_function(answer, language) == FUNCTIONS[language]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("```python\nx = 1\n```\n```\ndef f():\n    pass\n```", "def f():\n    pass"),
        ("```python\nx = 1\n```\n```\ny = 2\n```", "x = 1\n"),
        ("  def f(): pass\n", "def f(): pass"),
        ("text ```python\ndef f(): pass\n```", "text ```python\ndef f(): pass\n```"),
        ("```python\ndef f(): pass", "```python\ndef f(): pass"),
        ("```c++\nint f() { return 1; }\n```", "```c++\nint f() { return 1; }\n```"),
        ("```\ndef outer():\n    def inner():\n        pass\n```", "def outer():\n    def inner():\n        pass"),
        ("```\nx = 'é'\ndef f(): pass\n```", "def f(): pass"),
        ("", ""),
    ],
)
def test_what_is_taken_without_a_function(answer, found):
    """A later block's function, else the first block, else the answer; a fence begins its line and is closed."""
    assert find_function(answer, "python") == found


def test_empty_lines_after_an_open_fence_take_one_pass():
    """Each of them could begin the block, and looking for its end from each took hours."""
    answer = "```" + "\n" * 1_000_000 + "x"
    assert find_function(answer, "python") == answer


def test_a_repeated_function_passes():
    """The target is the most similar of the repository and similar enough, whatever the white space."""
    pool = {"alpha": ALPHA, "beta": BETA}
    assert passes(f"```python\n{ALPHA}\n```", "python", "alpha", pool)
    assert passes(ALPHA.replace("    ", "\t"), "python", "alpha", pool)


def test_another_function_is_more_similar():
    """A BLEU of 0.8 is not enough where another function is closer."""
    assert passes(BETA, "python", "alpha", {"alpha": BETA + " x", "gamma": "y"})
    assert not passes(BETA, "python", "alpha", {"alpha": BETA + " x", "beta": BETA})


def test_a_function_too_unlike_fails():
    """The best match below a BLEU of 0.8 fails, and so does an empty answer."""
    assert not passes("def alpha(values):\n    return sum(values)", "python", "alpha", {"alpha": ALPHA})
    assert not passes("", "python", "alpha", {"alpha": ALPHA})


def test_of_equals_the_first_is_the_match():
    """Two functions that do not differ but in white space: order decides, as in SCBench."""
    assert passes(ALPHA, "python", "one", {"one": ALPHA, "two": ALPHA + "\n"})
    assert not passes(ALPHA, "python", "two", {"one": ALPHA, "two": ALPHA + "\n"})


def test_an_unknown_language_is_named():
    """With those that are known."""
    with pytest.raises(UserError, match=r"unknown language of code 'cobol'.*cpp, go, java, python, rust, typescript"):
        find_function("x", "cobol")


def test_a_missing_grammar_is_named(monkeypatch):
    """Without its package the message says how to install it."""
    repoqa._load_grammar.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter_go", None)
    with pytest.raises(UserError, match=r"go code needs the package tree-sitter-go .* pip install 'kvbench\[data\]'"):
        find_function("x", "go")
