"""Following links: a long answer in which every line depends on the previous one.

The context is a shuffled list of links between names, `amber-fox -> tall-lamp`, that form chains of equal length. The
question gives the first name of a chain and asks for the names that follow, one per line, to its end. Each turn asks
for another chain, and there are always at least two chains.

The length includes the first prompt and max_new_tokens, which is the reference answer's tokens plus SLACK. Chains have
as many steps as fit.

The score `chain` is the share of steps whose line (empty lines not counted) equals that of the reference chain. After
a wrong step the rest is wrong too, unless the answer returns to the right place of the chain. `chain_q1` to `chain_q4`
are the same score over the quarters of the reference answer: the error as a function of output position. `steps`
checks whether each line is the target of the link from the previous line, be that right or wrong: a single slip costs
one step, which separates errors from their consequences.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Task, Turn, count_prompt
from kvbench.tasks.growth.lists import SHORT, SLACK, longest
from kvbench.tasks.growth.quarters import QUARTERS, score_quarters, share
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.words import draw_keys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = "Below is a list of links, each from one name to another. You will be asked to follow them.\n\n"
QUESTION = (
    "Start at {start} and follow the links for {steps} steps. Write the name that each step leads to, one per line:\n"
)
MIN_LINK_TOKENS = 6
"""Lower bound on the tokens of two names of two words, an arrow and a line break, for any tokenizer."""


def read_steps(prediction: str, n: int) -> list[str]:
    """The first `n` non-empty lines with normalized white space, padded with empty ones."""
    lines = [" ".join(line.split()) for line in prediction.split("\n") if line.strip()][:n]
    return lines + [""] * (n - len(lines))


def match_chain(prediction: str, references: Sequence[str]) -> list[bool]:
    """For each reference step, whether the prediction has it at its position."""
    steps = read_steps(prediction, len(references))
    return [step == reference for step, reference in zip(steps, references, strict=True)]


def match_links(prediction: str, references: Sequence[str], *, start: str, links: Mapping[str, str]) -> list[bool]:
    """For each predicted step, whether it is the target of the link from the previous predicted step."""
    steps = read_steps(prediction, len(references))
    return [links.get(before) == step for before, step in pairwise([start, *steps])]


@dataclass(frozen=True)
class Chain(Task):
    """Follow links from a start."""

    name: ClassVar[str] = "chain"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "growth"
    summary: ClassVar[str] = "a shuffled list of links, to be followed step by step"
    scorers: ClassVar[tuple[Scorer, ...]] = (
        *score_quarters("growth-chain", "chain", match_chain),
        Scorer("growth-steps@1", "steps", partial(share, match_links), facts=("start", "links")),
    )
    needs: ClassVar[str | None] = "a larger model"
    joint: ClassVar[str] = "\n\n"
    separator: ClassVar[str] = "\n\n"

    @property
    def prompt_id(self) -> str:
        """The prompt's id."""
        return "growth-chain@1"

    def compose(
        self, chains: Sequence[Sequence[str]], turns: int, *, seed: int, id: str, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Build the example with all links, shuffled by `seed`, that asks for the first `turns` chains."""
        links = [link for chain in chains for link in pairwise(chain)]
        random.Random(seed).shuffle(links)
        asked = []
        for start, *steps in chains[:turns]:
            answer = "\n".join(steps)
            most = len(tokenizer(answer, add_special_tokens=False).input_ids) + SLACK
            question = QUESTION.format(start=start, steps=len(steps))
            asked.append(Turn(question, "", answer, tuple(steps), most, facts={"start": start}))
        text = "\n".join(f"{first} -> {second}" for first, second in links)
        return Example(id, INTRO + text, tuple(asked), {"links": dict(links)})

    def count(self, chains: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of the first prompt plus its max_new_tokens."""
        example = self.compose(chains, 1, seed=0, id="", tokenizer=tokenizer)
        return count_prompt(self, example, tokenizer, self.frame(tokenizer)) + example.turns[0].max_new_tokens

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and max_new_tokens fill `length`; UserError if it is too short."""
        n_chains = max(2, turns)
        most = max(QUARTERS, length // (MIN_LINK_TOKENS * n_chains)) + 1
        names = draw_keys(rng, n_chains * (most + 1), SHORT)
        seed = rng.getrandbits(64)
        what = f"{self.name} with {turns} turn{'s' if turns > 1 else ''}"
        line = measure(self, n_chains, tokenizer)
        steps = largest_fit(
            lambda n: self.count(cut_chains(names, n_chains, n), tokenizer), length, least=QUARTERS, line=line,
            what=what,
        )
        return self.compose(cut_chains(names, n_chains, steps), turns, seed=seed, id=id, tokenizer=tokenizer)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of chains with one step per quarter, all with the longest words, generation included."""
        n_chains = max(2, turns)
        # Words may have more tokens at the start of a line; the tokens of one more step are a margin for them.
        name = f"{longest('adjective', ' ', tokenizer)}-{longest('noun', '-', tokenizer)}"
        return self.count([[name] * (QUARTERS + 2)] * n_chains, tokenizer)


def cut_chains(names: Sequence[str], chains: int, steps: int) -> list[Sequence[str]]:
    """Chains with `steps` steps; a chain begins with the same names for any number of steps."""
    return [names[i : chains * (steps + 1) : chains] for i in range(chains)]


@cache
def measure(task: Chain, chains: int, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of first prompts and answers as a line over the number of steps."""
    names = draw_keys(random.Random(0), chains * 25, SHORT)
    return LengthEstimate.through(lambda n: task.count(cut_chains(names, chains, n), tokenizer), QUARTERS, 24)
