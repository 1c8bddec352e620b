"""RULER's common_words_extraction.py and freq_words_extraction.py, reproduced."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

from kvbench.errors import UserError
from kvbench.tasks.ruler.counts import (
    COMMON,
    CWE_INTRO,
    CWE_MAX_NEW_TOKENS,
    CWE_PREFIX,
    CWE_QUESTION,
    DOTS,
    FREQUENT,
    FWE_INTRO,
    FWE_MAX_NEW_TOKENS,
    FWE_PREFIX,
    FWE_QUESTION,
    LETTERS,
    TOKENS_PER_WORD,
    Repeats,
    count_coded,
    number,
    show_answer,
    vocabulary,
)
from kvbench.tasks.ruler.official.script import (
    OfficialTask,
    Run,
    Sample,
    ScriptError,
    draw_until,
    find_size,
    name_words,
)

PROBE = 4096
"""Words of the probe from which the search range is estimated."""
STEP = 10
STEPS = 32
"""The step of coded text is the length divided by this."""


@cache
def read_words(path: str) -> tuple[tuple[str, ...], str]:
    """Read the words of RULER's english_words.json, a JSON object of words by number, and the file's hash."""
    try:
        data = Path(path).expanduser().read_bytes()
        found = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"english_words '{path}' cannot be read: {error}. Give RULER's english_words.json.") from error
    if not isinstance(found, dict) or not all(isinstance(word, str) for word in found.values()):
        raise UserError(f"english_words '{path}' is no JSON object of words. Give RULER's english_words.json.")
    return tuple(found.values()), hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class OfficialCwe(OfficialTask):
    """RULER's cwe as published. english_words: path of RULER's larger list, for more than wonderwords' 8,166 words."""

    english_words: str = ""

    name: ClassVar[str] = "ruler-official-cwe"
    summary: ClassVar[str] = "RULER's own samples of cwe"
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = CWE_MAX_NEW_TOKENS

    @property
    def dataset_revision(self) -> str:
        """Versions and hashes of the word lists."""
        return "; ".join([name_words(), *[f"sha256:{read_words(x)[1]}" for x in [self.english_words] if x]])

    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """Draw lists of as many words as fit."""
        words = list(vocabulary())
        run.shuffle(words)
        draw = partial(self.draw, run, tuple(words))
        high = max(int(run.room // (run.measure(draw(PROBE)) / PROBE)) * 2, STEP * 2)
        size = find_size(lambda n: run.measure(draw(n)) + CWE_MAX_NEW_TOKENS, run.room, STEP, high)
        while True:
            yield draw_until(draw, lambda x: run.measure(x) + CWE_MAX_NEW_TOKENS <= run.room, size, STEP)

    def draw(self, run: Run, words: tuple[str, ...], n: int) -> Sample:
        """Draw a solved list and a list of `n` words."""
        repeats = Repeats.of(run.length)
        shot = run.rng.sample(words, repeats.shot_words)
        solved = list_words(run, shot, repeats.shot_common, repeats.shot_rare) + show_answer(shot)
        items = run.rng.sample(words if n <= len(words) else self.larger(n), n)
        text = list_words(run, items, repeats.common, repeats.rare)
        common = tuple(items[:COMMON])
        return Sample(solved + text, CWE_QUESTION, CWE_PREFIX, common, f" {number(common)}")

    def larger(self, n: int) -> tuple[str, ...]:
        """The words of the larger list; UserError if it is missing or too short."""
        if not self.english_words:
            raise UserError(
                f"{self.name} tries a list of {n} words here, and wonderwords has {len(vocabulary())}. RULER then uses "
                "scripts/data/synthetic/json/english_words.json of its repository: give it, --task-set "
                "english_words=PATH, or use a smaller --length."
            )
        words, _ = read_words(self.english_words)
        if n > len(words):
            raise UserError(
                f"{self.name} tries a list of {n} words here, and '{self.english_words}' has {len(words)}. Ask for a "
                "smaller --length."
            )
        return words


def list_words(run: Run, items: list[str], common: int, rare: int) -> str:
    """The introduction and the numbered list with the first ten words `common` times and the others `rare` times."""
    entries = items[:COMMON] * common + items[COMMON:] * rare
    run.shuffle(entries)
    return CWE_INTRO + number(entries)


@dataclass(frozen=True)
class OfficialFwe(OfficialTask):
    """RULER's fwe as published."""

    name: ClassVar[str] = "ruler-official-fwe"
    summary: ClassVar[str] = "RULER's own samples of fwe"
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = FWE_MAX_NEW_TOKENS

    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """Enlarge texts by steps until one is too long; then shorten every sample by steps until it fits."""
        room = run.room - FWE_MAX_NEW_TOKENS
        step = room // STEPS
        n = room // LETTERS
        coded = draw_coded(run, room)
        while run.measure(write(run, coded, n)) < room:
            n += step
        n -= step
        while True:
            coded, size = draw_coded(run, room), n
            while run.measure(sample := write(run, coded, size)) > room:
                size -= step
                if size <= 0:
                    raise ScriptError("no text fits, and RULER's script would not end. Use a greater --length.")
            yield sample


def draw_coded(run: Run, room: int) -> list[str]:
    """Draw distinct words of six letters in order of falling frequency; the first is dots."""
    size = room // TOKENS_PER_WORD
    if size <= FREQUENT:
        raise ScriptError(f"there are {size} coded words, too few for three answers. Use a greater --length.")
    drawn = [draw_word(run) for _ in range(size)]
    while len(set(drawn)) < size:
        drawn.append(draw_word(run))
    words = sorted(set(drawn))
    run.shuffle(words)
    return [DOTS, *words[1:]]


def draw_word(run: Run) -> str:
    """Draw a word of six lower-case letters."""
    return "".join(run.rng.choices(string.ascii_lowercase, k=LETTERS))


def write(run: Run, coded: list[str], n: int) -> Sample:
    """Build the sample of `n` words, before rounding."""
    text = [word for k, word in enumerate(coded, 1) for _ in range(count_coded(n, k))]
    run.shuffle(text)
    frequent = tuple(coded[1 : 1 + FREQUENT])
    return Sample(FWE_INTRO + " ".join(text), FWE_QUESTION, FWE_PREFIX, frequent, f" {', '.join(frequent)}.")
