"""Perplexity on real source text that every Python has: its own standard library.

The context is the end of a row of modules, whole lines, each module after a line with its name; it stops before a line
at the margin of the last module. The lines that follow there are the continuation, as many whole ones as fit `tokens`
tokens. It is forced after the context has been compressed, and needs no label: the log-probability of each of its
tokens is the fact `logprobs`, and agreement with the full cache is measured on the same tokens, by their distance from
the context. With several turns each goes on where the one before it ended.

A continuation is forced as an answer is generated: where a method evicts or rounds while it decodes, each token is a
decode step, so that a row is the perplexity of that method.

Context and first continuation together come within one line of the length and never exceed it. There is no chat
template: this is text, not a question.

Modules that are tables made by programs are left out, as are tests and modules with a line beyond 120 bytes, so that a
line always fits. Another Python has another text: `dataset_revision` names its version and all files drawn from.
"""

from __future__ import annotations

import hashlib
import math
import platform
import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Scorer, Task, Turn, count_prompt
from kvbench.tasks.length import Line, largest_fit
from kvbench.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST = 120
"""Most bytes of a line, its end apart."""
TABLES = {"encodings", "pydoc_data"}
TESTS = {"test", "tests", "idle_test"}
SLOPE = 10
"""Tokens of a line, roughly: where searches start."""
LEAST = 4
"""As SLOPE, of a text with few."""


@dataclass(frozen=True)
class Module:
    """The source of one module."""

    name: str
    """Its path in the library."""
    lines: tuple[str, ...]
    """With their ends."""
    margins: tuple[int, ...]
    """Numbers, from 0, of the lines after the first that begin at the margin with a word."""


@cache
def read_modules(folder: str) -> tuple[tuple[Module, ...], str]:
    """The modules of a standard library by name, and a hash of them all. Raises UserError where there are none."""
    modules, total = [], hashlib.sha256()
    root = Path(folder)
    names = sorted(sys.stdlib_module_names - TABLES)
    found = [x for name in names for x in (root / f"{name}.py", *sorted((root / name).rglob("*.py"))) if x.is_file()]
    for path in found:
        parts = path.relative_to(root).parts
        if TESTS & set(parts):
            continue
        data = path.read_bytes()
        lines = data.splitlines()
        if len(lines) < 2 or max(map(len, lines)) > LONGEST:
            continue
        text = tuple(f"{line.decode()}\n" for line in lines)
        margins = tuple(i for i, line in enumerate(text) if i and line[0].isidentifier())
        modules.append(Module("/".join(parts), text, margins))
        total.update(f"{modules[-1].name}\n{''.join(text)}\0".encode())
    if not modules:
        raise UserError(
            f"this Python's standard library has no source text in {folder}. Use a Python that was installed with it."
        )
    return tuple(modules), total.hexdigest()


def library() -> tuple[tuple[Module, ...], str]:
    """This Python's own."""
    return read_modules(sysconfig.get_paths()["stdlib"])


def token_nll(prediction: str, references: Sequence[str], *, logprobs: Sequence[Sequence[float]]) -> float:
    """Mean negative log-probability of the continuation's tokens, in nats."""
    del prediction, references
    return -fmean(logprobs[0])


def perplexity(prediction: str, references: Sequence[str], *, logprobs: Sequence[Sequence[float]]) -> float:
    """Of one continuation; a mean of these is above the perplexity of all tokens, which is exp of the mean nll."""
    return math.exp(token_nll(prediction, references, logprobs=logprobs))


@dataclass(frozen=True)
class StdlibPerplexity(Task):
    """What follows in the standard library. tokens: most tokens of a continuation."""

    tokens: int = 256

    name: ClassVar[str] = "ppl-stdlib"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "text"
    summary: ClassVar[str] = "perplexity of, and agreement on, what follows in Python's standard library"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE, Mode.MULTI_TURN)
    scorers: ClassVar[tuple[Scorer, ...]] = (
        Scorer("token-nll@1", "token_nll", token_nll, higher_is_better=False, facts=("logprobs",)),
        Scorer("perplexity@1", "perplexity", perplexity, higher_is_better=False, facts=("logprobs",)),
    )
    needs: ClassVar[str | None] = "a larger model"
    joint: ClassVar[str] = ""
    separator: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse continuations that a line may not fit."""
        if self.tokens < LONGEST + 2:
            raise UserError(f"{self.name}: tokens must be {LONGEST + 2} or more, so that lines fit, got {self.tokens}.")

    @property
    def prompt_id(self) -> str:
        """What the text is made of."""
        return "text-stdlib@1"

    @property
    def dataset_revision(self) -> str:
        """Python's version and a hash of the text."""
        return f"python-{platform.python_version()}:{library()[1][:12]}"

    def frame(self, tokenizer: PreTrainedTokenizerBase) -> Frame:  # noqa: ARG002  # as every task's
        """The text alone."""
        return Frame.plain()

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """A line, a continuation and what the tokenizer adds."""
        del turns
        return LONGEST + 2 + self.tokens + tokenizer.num_special_tokens_to_add()

    def compose(self, before: Sequence[str], after: Sequence[str], *, id: str) -> Example:
        """The example of these lines, and a turn for each text that follows them."""
        turns = tuple(Turn("", "", text, (text,), 0, choices=(text,)) for text in after)
        return Example(id, "".join(before), turns)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """One example whose context and first continuation fill `length`.

        Raises:
            UserError: no module goes on for so long, or the library is shorter than the length.
        """
        modules = list(library()[0])
        rng.shuffle(modules)
        last, start = self.choose(rng, modules, turns, tokenizer)
        rest, after = list(last.lines[start:]), []
        for _ in range(turns):
            n = largest_fit(
                lambda n: count(rest[:n], tokenizer), self.tokens, least=1, line=Line(0, SLOPE), what=self.name
            )
            after.append("".join(rest[:n]))
            del rest[:n]
        before = collect(last, start, modules, length)
        budget, frame = length - count(after[:1], tokenizer), self.frame(tokenizer)

        def measure(n: int) -> int:
            return count_prompt(self, self.compose(before[-n:], after, id=id), tokenizer, frame)

        if full_lines(before) < length and (most := measure(len(before))) < budget:
            raise UserError(
                f"length {length} is beyond Python's standard library, of which {self.name} makes {most} tokens here. "
                "Use a smaller --length."
            )
        line = Line.through(measure, 1, max(2, budget // (2 * SLOPE)))
        n = largest_fit(measure, budget, least=1, line=line, what=self.name)
        facts = {"module": last.name, "line": start + 1}
        return replace(self.compose(before[-n:], after, id=id), facts=facts)

    def choose(
        self, rng: random.Random, modules: Sequence[Module], turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Module, int]:
        """The first module that goes on long enough after a line drawn from those at its margin, and that line.

        Where none does, the first that does so after the first of them.
        """
        wanted = (turns + 1) * self.tokens  # one more, because whole lines leave some tokens over
        for pick in (rng.choice, min):
            for module in (x for x in modules if x.margins):
                start = pick(module.margins)
                if count(module.lines[start : start + wanted // LEAST], tokenizer) >= wanted:
                    return module, start
        raise UserError(
            f"{self.name}: no module of Python's standard library goes on for {turns} x {self.tokens} tokens. "
            "Use a smaller --task-set tokens or fewer --turns."
        )


def count(lines: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of lines by themselves."""
    return len(tokenizer("".join(lines), add_special_tokens=False).input_ids)


def collect(last: Module, start: int, modules: Sequence[Module], length: int) -> list[str]:
    """The lines before a line of the last module, and of as many modules before it as are sure to be long enough."""
    before = [f"# {last.name}\n", *last.lines[:start]]
    for module in modules:
        if full_lines(before) >= length:
            break
        if module is not last:
            before[:0] = f"# {module.name}\n", *module.lines
    return before


def full_lines(lines: Sequence[str]) -> int:
    """Lines that are not blank: each takes a token at least."""
    return sum(not line.isspace() for line in lines)
