"""Perplexity on the source code of Python's standard library, which needs no data set.

The context is the end of a concatenation of modules in whole lines, each module after a line with its name; it ends
before an unindented line of the last module. The continuation is the lines that follow, as many whole lines as fit
`tokens` tokens. It is teacher-forced after the context has been compressed: the log-probability of each token is the
fact `logprobs`, and agreement with the full cache is measured on the same tokens, by their distance from the context.
With several turns, each continues where the previous one ended.

If a method evicts or quantizes during decoding, each token of a continuation is one decode step, so that the result is
the perplexity of that method.

Context and first continuation come within one line of the length and never exceed it. There is no chat template.

Generated tables, tests and modules with a line of more than 120 bytes are left out, so that a line always fits. The
text depends on the Python version: `dataset_revision` has the version and a hash of all files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Scorer, Task, Turn, count_prompt
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.text.stdlib import LONGEST, Module, library, name_revision
from kvbench.text.template import Frame

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLOPE = 10
"""Typical tokens of a line, where searches start."""
LEAST = 4
"""Tokens of a line in text with few tokens."""


def token_nll(prediction: str, references: Sequence[str], *, logprobs: Sequence[Sequence[float]]) -> float:
    """Mean negative log-probability of the continuation's tokens, in nats."""
    del prediction, references
    return -fmean(logprobs[0])


def perplexity(prediction: str, references: Sequence[str], *, logprobs: Sequence[Sequence[float]]) -> float:
    """Perplexity of one continuation; the mean over continuations is above the corpus perplexity, exp(mean NLL)."""
    return math.exp(token_nll(prediction, references, logprobs=logprobs))


@dataclass(frozen=True)
class StdlibPerplexity(Task):
    """Perplexity of the text that follows in the standard library. tokens: most tokens of a continuation."""

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
        """Check that every line fits a continuation."""
        if self.tokens < LONGEST + 2:
            raise UserError(f"{self.name}: tokens must be {LONGEST + 2} or more, so that lines fit, got {self.tokens}.")

    @property
    def prompt_id(self) -> str:
        """The id of the text's source and format."""
        return "text-stdlib@1"

    @property
    def dataset_revision(self) -> str:
        """Python's version and a hash of the text."""
        return name_revision(library()[1])

    def frame(self, tokenizer: PreTrainedTokenizerBase) -> Frame:  # noqa: ARG002  # overrides
        """No chat template."""
        return Frame.plain()

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the longest line, a continuation and the tokenizer's special tokens."""
        del turns
        return LONGEST + 2 + self.tokens + tokenizer.num_special_tokens_to_add()

    def compose(self, before: Sequence[str], after: Sequence[str], *, id: str) -> Example:
        """Build the example with these lines as context, and one turn for each continuation."""
        turns = tuple(Turn("", "", text, (text,), 0, choices=(text,)) for text in after)
        return Example(id, "".join(before), turns)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose context and first continuation fill `length`.

        Raises:
            UserError: no module is long enough, or the library is shorter than `length`.
        """
        modules = list(library()[0])
        rng.shuffle(modules)
        last, start = self.choose(rng, modules, turns, tokenizer)
        rest, after = list(last.lines[start:]), []
        for _ in range(turns):
            n = largest_fit(
                lambda n: count(rest[:n], tokenizer), self.tokens, least=1, line=LengthEstimate(0, SLOPE),
                what=self.name,
            )
            after.append("".join(rest[:n]))
            del rest[:n]
        before = collect(last, start, modules, length)
        budget, frame = length - count(after[:1], tokenizer), self.frame(tokenizer)

        def measure(n: int) -> int:
            return count_prompt(self, self.compose(before[-n:], after, id=id), tokenizer, frame)

        if full_lines(before) < length and (most := measure(len(before))) < budget:
            raise UserError(
                f"length {length} exceeds Python's standard library, which has {most} tokens for {self.name} here. "
                "Use a smaller --length."
            )
        line = LengthEstimate.through(measure, 1, max(2, budget // (2 * SLOPE)))
        n = largest_fit(measure, budget, least=1, line=line, what=self.name)
        facts = {"module": last.name, "line": start + 1}
        return replace(self.compose(before[-n:], after, id=id), facts=facts)

    def choose(
        self, rng: random.Random, modules: Sequence[Module], turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[Module, int]:
        """Choose the first module with enough text after a random unindented line, and that line.

        If there is none, choose the first module with enough text after its first unindented line.
        """
        wanted = (turns + 1) * self.tokens  # one more, because whole lines do not fill `tokens`
        for pick in (rng.choice, min):
            for module in (x for x in modules if x.margins):
                start = pick(module.margins)
                if count(module.lines[start : start + wanted // LEAST], tokenizer) >= wanted:
                    return module, start
        raise UserError(
            f"{self.name}: no module of Python's standard library is long enough for {turns} x {self.tokens} tokens. "
            "Use a smaller --task-set tokens or fewer --turns."
        )


def count(lines: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the concatenated lines."""
    return len(tokenizer("".join(lines), add_special_tokens=False).input_ids)


def collect(last: Module, start: int, modules: Sequence[Module], length: int) -> list[str]:
    """Lines for a context of `length` tokens or more: the last module up to `start`, after other modules."""
    before = [f"# {last.name}\n", *last.lines[:start]]
    for module in modules:
        if full_lines(before) >= length:
            break
        if module is not last:
            before[:0] = f"# {module.name}\n", *module.lines
    return before


def full_lines(lines: Sequence[str]) -> int:
    """Number of lines that are not blank, each of which has at least one token."""
    return sum(not line.isspace() for line in lines)
