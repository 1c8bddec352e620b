"""RULER's variable tracking, `vt`: all variables that were assigned a value, over several hops among lines of noise.

With one turn the prompt equals RULER's byte for byte: a solved example and one chain of five variables. Intended
differences: places have a new random seed for each sample, no name and no value occurs twice (nor in the solved
example), and noise is cut to whole words, so that a prompt comes within one word of its length.

RULER asks for one chain. With several turns there is one chain for each turn, put into the noise as with RULER's
`num_chains`, and each turn asks for the value of its own chain in RULER's wording.

As in RULER, the solved example has as much noise as fits 500 tokens. Below 4,096 tokens, lengths that RULER does not
have, it has five lines of noise, so that it does not dominate the prompt.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Task, Turn, count_prompt
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.ruler.haystack import NOISE, cut
from kvbench.tasks.ruler.scoring import STRICT_ALL, STRING_MATCH_ALL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the value "
    "{value}, they are: "
)
HOPS = 4
MAX_NEW_TOKENS = 30
NAME_LETTERS = 5
SHOT_LETTERS = 3
SHOT_TOKENS = 500
"""Most tokens of the solved example."""
SHORT = 4096
"""RULER's shortest length; below it, the solved example is small."""
FEWEST_WORDS = (HOPS + 1) * len(NOISE.split(" "))
"""One line of noise for each line of a chain."""


@dataclass(frozen=True)
class VariableChain:
    """Variables with the same value: the first is assigned the value, each later one the previous variable."""

    value: str
    names: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The assignments in order; as in RULER, all but the first end in a space."""
        hops = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(self.names)]
        return [f"VAR {self.names[0]} = {self.value}", *hops]

    @property
    def question(self) -> str:
        """RULER's question."""
        return QUESTION.format(value=self.value)

    @property
    def prefix(self) -> str:
        """The start of the answer."""
        return PREFIX.format(n=len(self.names), value=self.value)

    @property
    def answer(self) -> str:
        """The names as in RULER's solved example, with a second space after that of the prefix."""
        return f" {' '.join(self.names)}"


def weave(lines: list[str], chains: Sequence[VariableChain], seed: int) -> str:
    """Insert the lines of each chain in order at distinct random places, one chain after the other."""
    rng = random.Random(seed)
    for chain in chains:
        places = sorted(rng.sample(range(len(lines)), len(chain.lines)))
        for before, (place, line) in enumerate(zip(places, chain.lines, strict=True)):
            lines.insert(place + before, line)
    return "\n".join(lines)


def solve(noise: str, chain: VariableChain) -> str:
    """A solved example and the empty line after it."""
    return f"{INTRO}{noise}\n{chain.question}{chain.prefix}{chain.answer}\n\n"


def draw_chains(rng: random.Random, values: Sequence[int], letters: int) -> list[VariableChain]:
    """Draw chains for these values, with distinct names of `letters` letters, none of them `VAR`."""
    size = HOPS + 1
    drawn: dict[str, None] = {}
    while len(drawn) < size * len(values):
        drawn["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        drawn.pop("VAR", None)
    names = tuple(drawn)
    return [VariableChain(str(value), names[i * size : (i + 1) * size]) for i, value in enumerate(values)]


@cache
def longest(letters: int, tokenizer: PreTrainedTokenizerBase) -> VariableChain:
    """A chain of the name with the most tokens among a thousand random names."""
    rng = random.Random(0)
    names = ["".join(rng.choices(string.ascii_uppercase, k=letters)) for _ in range(1000)]
    sizes = [len(ids) for ids in tokenizer(names, add_special_tokens=False).input_ids]
    return VariableChain("77777", (names[sizes.index(max(sizes))],) * (HOPS + 1))


@dataclass(frozen=True)
class VariableTracking(Task):
    """Find all variables with a value, in chains of assignments between lines of noise."""

    name: ClassVar[str] = "vt"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    summary: ClassVar[str] = "RULER: all variables that were assigned a value, over four hops among lines of noise"
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_ALL, STRICT_ALL)
    default_length: ClassVar[int] = 4096
    needs: ClassVar[str | None] = "a larger model"

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "ruler-vt/noise@1"

    def compose(
        self, shot: str, chains: Sequence[VariableChain], asked: Sequence[int], n: int, *, seed: int, id: str
    ) -> Example:
        """Build the example with `n` words of noise and all chains, of which some are asked for.

        shot: the solved example before it.
        seed: random seed for the places of the chains' lines.
        """
        text = weave(cut(itertools.repeat(NOISE), n), chains, seed)
        turns = [Turn(x.question, x.prefix, x.answer, x.names, MAX_NEW_TOKENS) for x in (chains[i] for i in asked)]
        lines = [line for i in asked for line in chains[i].lines]
        facts = {
            "keys": [chains[i].value for i in asked],
            "depths": [round(text.index(line) / len(text), 4) for line in lines],
        }
        return Example(id, shot + INTRO + text, tuple(turns), facts)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and answer fill `length`; UserError if it is too short."""
        values = rng.sample(range(10_000, 100_000), turns + 1)
        chains = draw_chains(rng, values[1:], NAME_LETTERS)
        (solved,) = draw_chains(rng, values[:1], SHOT_LETTERS)
        asked = rng.sample(range(turns), turns)
        shot = fit_shot(solved, rng.getrandbits(64), length, tokenizer)
        seed = rng.getrandbits(64)
        frame = self.frame(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(shot, chains, asked, n, seed=seed, id=id), tokenizer, frame)

        what = f"{self.name} with {turns} turn{'s' if turns > 1 else ''}"
        line = measure(tokenizer)
        n = largest_fit(count, length - MAX_NEW_TOKENS, least=FEWEST_WORDS, line=line, what=what)
        return self.compose(shot, chains, asked, n, seed=seed, id=id)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the longest names and least noise, generation included."""
        shot = fit_shot(longest(SHOT_LETTERS, tokenizer), 0, 0, tokenizer)
        chains = [longest(NAME_LETTERS, tokenizer)] * turns
        example = self.compose(shot, chains, range(turns), FEWEST_WORDS, seed=0, id="minimum")
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + MAX_NEW_TOKENS


def fit_shot(chain: VariableChain, seed: int, length: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The solved example for a prompt of this length."""

    def shot(n: int) -> str:
        return solve(weave(cut(itertools.repeat(NOISE), n), [chain], seed), chain)

    def count(n: int) -> int:
        return len(tokenizer(shot(n), add_special_tokens=False).input_ids)

    if length < SHORT or count(FEWEST_WORDS) > SHOT_TOKENS:
        return shot(FEWEST_WORDS)
    line = measure(tokenizer)
    return shot(largest_fit(count, SHOT_TOKENS, least=FEWEST_WORDS, line=line, what="the example of vt"))


@cache
def measure(tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of a solved example as a line over words of noise; the prompt has the same slope."""
    (chain,) = draw_chains(random.Random(0), [77777], NAME_LETTERS)

    def count(n: int) -> int:
        text = solve(weave(cut(itertools.repeat(NOISE), n), [chain], 0), chain)
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    return LengthEstimate.through(count, FEWEST_WORDS, FEWEST_WORDS + 1000)
