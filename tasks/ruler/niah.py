"""RULER's eight needle-in-a-haystack tasks.

With one turn the prompt equals RULER's byte for byte: template, answer prefix, and the singular form that RULER uses
for one value of one key. Intended differences (`ruler-official-niah` reproduces RULER exactly): places have a new
random seed for each sample, while a fresh `Random(42)` puts RULER's answer at the same rank in all samples; no key and
no value occurs twice; and the haystack is generated prose or a local text file (`--task-set haystack=PATH`).

With several turns, each turn asks for keys of its own in RULER's wording for one question: the context has at least as
many keys as all turns ask for, each with the variant's number of values, and its introduction has RULER's plural form.

The length is RULER's: the first prompt plus max_new_tokens (128) never exceeds it. The haystack is cut to whole words
(or whole lines, if lines are needles), so that the prompt comes within one word or line of it.
"""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from kvbench.task import Example, Scorer, Task, Turn, count_prompt, encode, prompt_tokens
from kvbench.tasks.length import LengthEstimate, largest_fit
from kvbench.tasks.ruler.haystack import Haystack, NeedleHaystack, NoiseHaystack, ProseHaystack, read_sentences
from kvbench.tasks.ruler.scoring import STRICT_ALL, STRING_MATCH_ALL
from kvbench.tasks.ruler.values import Kind, draw, longest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INTRO = (
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n"
)
NEEDLE = "One of the special magic {type} for {key} is: {value}."
QUESTION = "What are all the special magic {type} for {query} mentioned in the provided text?"
PREFIX = " The special magic {type} for {query} mentioned in the provided text are"
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"))
"""RULER's replacements for a single value, in its order; the type also loses its last letter."""
MAX_NEW_TOKENS = 128


def enumerate_words(parts: Sequence[str]) -> str:
    """Join several keys as RULER does, `a, b, c, and d`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"


@dataclass(frozen=True)
class Niah(Task):
    """Base class of the variants, which differ in class variables and haystack."""

    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "ruler"
    scorers: ClassVar[tuple[Scorer, ...]] = (STRING_MATCH_ALL, STRICT_ALL)
    keys: ClassVar[int] = 1
    """Fewest hidden keys, not counting the lines of a haystack of needles."""
    values: ClassVar[int] = 1
    """Values per key, each in a needle of its own."""
    queries: ClassVar[int] = 1
    """Keys per question."""
    key_kind: ClassVar[Kind] = "words"
    value_kind: ClassVar[Kind] = "numbers"

    @property
    @abstractmethod
    def haystack_id(self) -> str:
        """Name of the haystack."""

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the haystack and the kind of values unless they are numbers."""
        kind = "" if self.value_kind == "numbers" else f"-{self.value_kind}"
        return f"ruler-niah/{self.haystack_id}{kind}@1"

    @abstractmethod
    def haystack_for(self, rng: random.Random) -> Haystack:
        """Create the haystack of one sample."""

    def word(self, template: str, query: str = "", *, singular: bool) -> str:
        """Fill a template with type and query, in RULER's plural or singular form."""
        kind: str = self.value_kind
        if singular:
            kind = kind[:-1]
            for old, new in SINGULAR:
                template = template.replace(old, new)
        return template.format(type=kind, query=query)

    def needle(self, key: str, value: str) -> str:
        """The sentence that is hidden."""
        return NEEDLE.format(type=self.value_kind, key=key, value=value)

    def draw_pairs(self, rng: random.Random, keys: int) -> list[tuple[str, str]]:
        """Draw keys with all their values, in the order in which they are hidden."""
        names, found = draw(rng, self.key_kind, keys), draw(rng, self.value_kind, keys * self.values)
        pairs = [(names[i // self.values], value) for i, value in enumerate(found)]
        if self.values > 1:
            rng.shuffle(pairs)
        return pairs

    def compose(
        self, haystack: Haystack, pairs: Sequence[tuple[str, str]], asked: Sequence[int], n: int, *, id: str
    ) -> Example:
        """Build the example with `n` units of haystack and all pairs, of which some are asked for.

        asked: indices of pairs; each asks for all values of its key, and `queries` consecutive ones make one question.
        """
        needles = [self.needle(key, value) for key, value in pairs]
        text = haystack.text(n, needles)
        places = [text.index(needle) for needle in needles]
        of: dict[str, list[int]] = {}
        for i in sorted(range(len(pairs)), key=places.__getitem__):
            of.setdefault(pairs[i][0], []).append(i)
        asked_keys = [pairs[i][0] for i in asked]
        groups = [asked_keys[i : i + self.queries] for i in range(0, len(asked), self.queries)]
        one = self.queries * self.values == 1
        turns = []
        for keys in groups:
            values = tuple(pairs[i][1] for key in keys for i in of[key])
            question, prefix = (
                self.word(template, enumerate_words(keys), singular=one) for template in (QUESTION, PREFIX)
            )
            turns.append(Turn(question, prefix, f" {enumerate_words(values)}.", values, MAX_NEW_TOKENS))
        facts = {
            "keys": asked_keys,
            "depths": [round(places[i] / len(text), 4) for key in asked_keys for i in of[key]],
        }
        return Example(id, self.word(INTRO, singular=one and len(turns) == 1) + text, tuple(turns), facts)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and answer fill `length`; UserError if it is too short."""
        n_asked = turns * self.queries
        n_keys = max(self.keys, n_asked)
        pairs = self.draw_pairs(rng, n_keys)
        first = [i for i, (key, _) in enumerate(pairs) if key not in {pair[0] for pair in pairs[:i]}]
        asked = [first[i] for i in rng.sample(range(n_keys), n_asked)]
        haystack = self.haystack_for(rng)
        frame = self.frame(tokenizer)

        def count(n: int) -> int:
            return count_prompt(self, self.compose(haystack, pairs, asked, n, id=id), tokenizer, frame)

        what = f"{self.name} with {turns} turn{'s' if turns > 1 else ''}"
        line = measure(self, n_keys, tokenizer)
        n = largest_fit(count, length - MAX_NEW_TOKENS, least=haystack.least(len(pairs)), line=line, what=what)
        return self.compose(haystack, pairs, asked, n, id=id)

    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """Tokens of an example with the longest keys and values and a short haystack, generation included."""
        n_asked = turns * self.queries
        needles = max(self.keys, n_asked) * self.values
        pair = longest(self.key_kind, tokenizer), longest(self.value_kind, tokenizer)
        haystack = self.haystack_for(random.Random(0))
        example = self.compose(haystack, [pair] * needles, range(n_asked), haystack.short(needles), id="minimum")
        return prompt_tokens(encode(self, example, tokenizer)) + MAX_NEW_TOKENS


@cache
def measure(task: Niah, n_keys: int, tokenizer: PreTrainedTokenizerBase) -> LengthEstimate:
    """Estimate the tokens of prompts as a line over units of haystack."""
    rng = random.Random(0)
    pairs = task.draw_pairs(rng, n_keys)
    haystack, frame = task.haystack_for(rng), task.frame(tokenizer)
    least = haystack.least(len(pairs))

    def count(n: int) -> int:
        return count_prompt(task, task.compose(haystack, pairs, range(task.queries), n, id=""), tokenizer, frame)

    return LengthEstimate.through(count, least, least + haystack.stretch)


@dataclass(frozen=True)
class NoiseNiah(Niah):
    """Needles on lines of their own among noise lines."""

    @property
    def haystack_id(self) -> str:
        """RULER's noise."""
        return "noise"

    def haystack_for(self, rng: random.Random) -> NoiseHaystack:
        """Noise lines."""
        return NoiseHaystack(rng)


@dataclass(frozen=True)
class NeedleNiah(Niah):
    """Needles among lines that are needles themselves."""

    @property
    def haystack_id(self) -> str:
        """RULER's needle lines."""
        return "needle"

    def haystack_for(self, rng: random.Random) -> NeedleHaystack:
        """Needle lines."""
        drawn = random.Random(rng.getrandbits(64))
        return NeedleHaystack(rng, self.endless(drawn), self.needle)

    def endless(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        """An endless stream of pairs."""
        while True:
            yield from self.draw_pairs(rng, 1)


@dataclass(frozen=True)
class EssayNiah(Niah):
    """Needles between sentences. haystack: `prose` (generated), or the path of a text file."""

    haystack: str = "prose"

    @property
    def haystack_id(self) -> str:
        """Generated prose; a file is named by its hash."""
        return "prose" if self.haystack == "prose" else f"file:{read_sentences(self.haystack)[1][:12]}"

    def haystack_for(self, rng: random.Random) -> ProseHaystack:
        """Generated sentences, or those of the file from its start, repeated where it ends (as RULER does)."""
        found = None if self.haystack == "prose" else itertools.cycle(read_sentences(self.haystack)[0])
        return ProseHaystack(rng, found)


@dataclass(frozen=True)
class NiahSingle1(NoiseNiah):
    """One needle among noise lines."""

    name: ClassVar[str] = "niah_single_1"
    summary: ClassVar[str] = "RULER: the number of one key hidden among lines of noise"


@dataclass(frozen=True)
class NiahSingle2(EssayNiah):
    """One needle in prose."""

    name: ClassVar[str] = "niah_single_2"
    summary: ClassVar[str] = "RULER: the number of one key hidden in prose"


@dataclass(frozen=True)
class NiahSingle3(EssayNiah):
    """One needle in prose, its value a UUID."""

    name: ClassVar[str] = "niah_single_3"
    summary: ClassVar[str] = "RULER: the UUID of one key hidden in prose"
    value_kind: ClassVar[Kind] = "uuids"


@dataclass(frozen=True)
class NiahMultikey1(EssayNiah):
    """Four needles in prose; `niah` by its short name, as the variant whose distractors separate methods best."""

    name: ClassVar[str] = "niah_multikey_1"
    aliases: ClassVar[tuple[str, ...]] = ("niah",)
    summary: ClassVar[str] = "RULER: the number of one key among four keys hidden in prose"
    keys: ClassVar[int] = 4


@dataclass(frozen=True)
class NiahMultikey2(NeedleNiah):
    """One needle among lines that are needles."""

    name: ClassVar[str] = "niah_multikey_2"
    summary: ClassVar[str] = "RULER: the number of one key among lines that each hold one"


@dataclass(frozen=True)
class NiahMultikey3(NeedleNiah):
    """One needle among lines that are needles, all of UUIDs."""

    name: ClassVar[str] = "niah_multikey_3"
    summary: ClassVar[str] = "RULER: the UUID of one UUID among lines that each hold a pair"
    needs: ClassVar[str | None] = "a larger model"
    key_kind: ClassVar[Kind] = "uuids"
    value_kind: ClassVar[Kind] = "uuids"


@dataclass(frozen=True)
class NiahMultivalue(EssayNiah):
    """Four values of one key in prose."""

    name: ClassVar[str] = "niah_multivalue"
    summary: ClassVar[str] = "RULER: the four numbers of one key hidden in prose"
    needs: ClassVar[str | None] = "a larger model"
    values: ClassVar[int] = 4


@dataclass(frozen=True)
class NiahMultiquery(EssayNiah):
    """Four keys of one question in prose."""

    name: ClassVar[str] = "niah_multiquery"
    summary: ClassVar[str] = "RULER: the numbers of four keys hidden in prose, asked for at once"
    needs: ClassVar[str | None] = "a larger model"
    keys: ClassVar[int] = 4
    queries: ClassVar[int] = 4
