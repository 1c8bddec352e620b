"""RepoQA's comparison of a repeated function with the functions of its repository, as in SCBench."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from kvbench.errors import unknown
from kvbench.machine import load_extra
from kvbench.tasks.scoring.overlap import bleu

FENCED = re.compile(r"^```\w*(?>\s*\n)(.*?)^```", re.DOTALL | re.MULTILINE)
FUNCTIONS = {
    "python": "(function_definition name: (_))",
    "java": "(method_declaration name: (_))",
    "typescript": "(function_declaration name: (_))",
    "rust": "(function_item name: (_))",
    "cpp": "(function_definition declarator: (function_declarator declarator: (identifier)))",
    "go": "(function_declaration name: (_))",
}
"""Tree-sitter queries for functions, as in SCBench. They do not match C++ functions that are qualified or return a
pointer, nor methods in TypeScript or Go."""
THRESHOLD = 0.8


def find_function(prediction: str, language: str) -> str:
    """The first function in the fenced blocks of an answer; else the first block; else the answer.

    The grammars are current ones of tree-sitter; SCBench uses tree_sitter_languages, which may parse broken code
    differently.

    Raises:
        UserError: the language is not supported, or tree-sitter is not installed.
    """
    parser, cursor = _load_grammar(language)
    blocks = FENCED.findall(prediction.strip())
    for block in blocks:
        source = block.encode()
        found = cursor.captures(parser.parse(source).root_node).get("function", ())
        if found:
            first = min(found, key=lambda node: int(node.start_byte))
            return str(source[first.start_byte : first.end_byte], "utf-8")
    return blocks[0] if blocks else prediction.strip()


def passes(prediction: str, language: str, name: str, functions: Mapping[str, str]) -> bool:
    """Whether the function `name` is the most similar one, with a BLEU of at least 0.8; ties go to the first."""
    answer = find_function(prediction, language)
    similar = {other: bleu(answer, source) for other, source in functions.items()}
    best = max(similar, key=lambda other: similar[other])
    return best == name and similar[best] >= THRESHOLD


@functools.cache
def _load_grammar(language: str) -> tuple[Any, Any]:
    """The parser of a language and its query for functions."""
    if language not in FUNCTIONS:
        raise unknown("language of code", language, FUNCTIONS)
    what = f"a scorer of {language} code"
    sitter = load_extra("tree_sitter", extra="data", what=what)
    grammar = load_extra(f"tree_sitter_{language}", extra="data", what=what)
    found = sitter.Language(grammar.language_typescript() if language == "typescript" else grammar.language())
    return sitter.Parser(found), sitter.QueryCursor(sitter.Query(found, f"{FUNCTIONS[language]} @function"))
