"""Variable tracking over several short chains, after SCBench's Retr.MultiHop.

Wording, chains and noise are those of RULER (`vt`), as in SCBench; chains have two hops, as SCBench describes its own.
There is one chain more than there are questions, so that not all variables are asked for. RULER's solved example is
left out. As in SCBench, a blank line separates context and question.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Turn, count_prompt
from kvbench.tasks.ruler.chains import INTRO, NAME_LETTERS, VariableChain, draw_chains, longest, weave
from kvbench.tasks.ruler.haystack import NOISE, cut
from kvbench.tasks.scbench.generated.generator import Generated, depths
from kvbench.tasks.scoring.scbench import SCORERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOPS = 2
LINES = HOPS + 1


@dataclass(frozen=True)
class MultiHop(Generated):
    """Find all variables with a value, in several chains of assignments between lines of noise."""

    name: ClassVar[str] = "multi-hop"
    summary: ClassVar[str] = "SCBench Retr.MultiHop format: all variables that were assigned a value, over two hops"
    scorers: ClassVar[tuple[Scorer, ...]] = SCORERS["scbench_vt"]
    default_length: ClassVar[int] = 4096
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = 30
    unit_tokens: ClassVar[int] = 1

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "multi-hop/noise@1"

    def least(self, turns: int) -> int:
        """The words of one line of noise for each line of a chain."""
        del turns
        return LINES * (NOISE.count(" ") + 1)

    def compose(self, chains: Sequence[VariableChain], asked: Sequence[int], n: int, *, seed: int, id: str) -> Example:
        """Build the example with `n` words of noise and all chains, of which some are asked for.

        seed: random seed for the places of the chains' lines.
        """
        text = weave(cut(itertools.repeat(NOISE), n), chains, seed)
        reference = [chains[i] for i in asked]
        turns = tuple(Turn(x.question, x.prefix, x.answer, x.names, self.max_new_tokens) for x in reference)
        facts = {
            "keys": [x.value for x in reference], "depths": depths(text, [line for x in reference for line in x.lines]),
            "chains": len(chains),
        }
        return Example(id, INTRO + text, turns, facts)

    def prepare(self, rng: random.Random, *, id: str, turns: int, most: int) -> Callable[[int], Example]:
        """Draw everything but the number of units; a unit is a word of noise."""
        del most
        values = rng.sample(range(10_000, 100_000), turns + 1)
        chains = [replace(x, names=x.names[:LINES]) for x in draw_chains(rng, values, NAME_LETTERS)]
        asked, seed = rng.sample(range(len(chains)), turns), rng.getrandbits(64)
        return lambda n: self.compose(chains, asked, n, seed=seed, id=id)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the longest names and one unit more than the fewest, generation included."""
        chain = longest(NAME_LETTERS, tokenizer)
        chains = [replace(chain, names=chain.names[:LINES])] * (turns + 1)
        example = self.compose(chains, range(turns), self.least(turns) + 1, seed=0, id="")
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + self.max_new_tokens
