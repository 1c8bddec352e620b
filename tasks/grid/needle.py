"""Needle grid: the number of one key in prose, over a grid of lengths and depths, with several samples per cell.

This is Greg Kamradt's test as one run over the whole grid. It has RULER's needle and question instead of the sandwich
of the original, which models answer without the text: the value is drawn for every sample, and the score is whether the
answer contains it.

Lengths are evenly spaced from `shortest` to the length of the run, depths from 0 to 100 percent of the prose. The
needle follows the last sentence that ends before its depth; at 100 percent it is appended. Tokens are counted by
sentence, including the space before it. The facts `length` and `depth` name the cell; `true_depth` is the depth
reached.

The longest prompts come first, so that a length that does not fit is found before any work.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from typing import TYPE_CHECKING, ClassVar

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Split, count_prompt
from kvbench.tasks.length import largest_fit
from kvbench.tasks.ruler.haystack import Haystack, ProseHaystack, cut
from kvbench.tasks.ruler.niah import MAX_NEW_TOKENS, EssayNiah, measure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class DepthHaystack(Haystack):
    """Prose with a needle at a given depth. Units are words."""

    prose: ProseHaystack
    depth: float
    """Depth of the needle in percent of the prose's tokens."""
    tokenizer: PreTrainedTokenizerBase
    sizes: dict[str, int] = field(default_factory=dict)
    """Tokens by sentence, filled on demand."""
    true_depth: float = 0.0
    """Depth reached by the needle of the last text, in percent."""

    def least(self, needles: int) -> int:
        """Fewest units, as for prose."""
        return self.prose.least(needles)

    def text(self, n: int, needles: Sequence[str]) -> str:
        """The prose of `n` words with the needles, one after the other."""
        parts = cut(self.prose.units(), n)
        before = list(accumulate(map(self.size, parts), initial=0))
        place = bisect_right(before, before[-1] * self.depth / 100) - 1
        self.true_depth = 100 * before[place] / before[-1]
        return " ".join([*parts[:place], *needles, *parts[place:]])

    def size(self, sentence: str) -> int:
        """Tokens of a sentence within a text."""
        if sentence not in self.sizes:
            self.sizes[sentence] = len(self.tokenizer(f" {sentence}", add_special_tokens=False).input_ids)
        return self.sizes[sentence]


@dataclass(frozen=True)
class NeedleGrid(EssayNiah):
    """One key and its number, over a grid. haystack: as in RULER's tasks; shortest: tokens of the shortest prompts."""

    lengths: int = 10
    depths: int = 10
    shortest: int = 512

    name: ClassVar[str] = "needle-grid"
    suite: ClassVar[str] = "grid"
    summary: ClassVar[str] = "the number of one key hidden in prose, over a grid of lengths and depths"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    default_length: ClassVar[int] = 2048
    default_turns: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Check that lengths and depths form a grid."""
        if self.lengths < 1 or self.depths < 2:
            raise UserError(
                f"{self.name}: a grid has lengths=1 or more and depths=2 or more, got {self.lengths} and {self.depths}."
            )

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the haystack."""
        return f"needle-grid/{self.haystack_id}@1"

    def check_samples(self, samples: int) -> None:
        """Raise a UserError if the samples cannot be divided equally among the cells."""
        cells = self.lengths * self.depths
        if samples % cells:
            raise UserError(
                f"{self.name} has {self.lengths} lengths x {self.depths} depths = {cells} cells, and {samples} samples "
                f"cannot be divided equally. Use --samples {cells}, {2 * cells}, {3 * cells}, ..., or change "
                "--task-set lengths or depths."
            )

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """The least length at which all lengths differ; UserError if `shortest` is too short for a needle."""
        least = super().minimum_length(turns, tokenizer)
        if self.shortest < least:
            raise UserError(
                f"{self.name}: prompts of shortest={self.shortest} tokens have no room for a needle. "
                f"Use --task-set shortest={least} or more."
            )
        return self.shortest + self.lengths - 1

    def cells(self, length: int) -> list[tuple[int, float]]:
        """Length and depth of each cell."""
        step = (length - self.shortest) / max(1, self.lengths - 1)
        lengths = [round(length - step * i) for i in range(self.lengths)]
        return list(product(lengths, [100 * i / (self.depths - 1) for i in range(self.depths)]))

    def generate(
        self, index: int, *, seed: int, split: Split, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate the example of cell `index`, counted cyclically through the grid."""
        cells = self.cells(length)
        size, depth = cells[index % len(cells)]
        rng = random.Random(f"{self.name}@{self.version}/{split}/{seed}/{length}/{turns}/{index}")
        pairs, name = self.draw_pairs(rng, 1), f"{split}-{seed}-{index}"
        haystack, frame = DepthHaystack(self.haystack_for(rng), depth, tokenizer), self.frame(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(haystack, pairs, [0], n, id=name), tokenizer, frame)

        line = measure(self, 1, tokenizer)
        n = largest_fit(count, size - MAX_NEW_TOKENS, least=haystack.least(1), line=line, what=self.name)
        example = self.compose(haystack, pairs, [0], n, id=name)
        facts = {"length": size, "depth": round(depth, 4), "true_depth": round(haystack.true_depth, 4)}
        return replace(example, facts={**example.facts, **facts})
