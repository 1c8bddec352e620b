"""RULER's niah.py, reproduced: eight needle tasks."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import ClassVar, Literal, overload

from kvbench.errors import UserError
from kvbench.machine import find_version, load_extra
from kvbench.tasks.ruler.haystack import DEPTHS, NOISE
from kvbench.tasks.ruler.niah import (
    INTRO,
    MAX_NEW_TOKENS,
    PREFIX,
    QUESTION,
    Niah,
    NiahMultikey1,
    NiahMultikey2,
    NiahMultikey3,
    NiahMultiquery,
    NiahMultivalue,
    NiahSingle1,
    NiahSingle2,
    NiahSingle3,
    enumerate_words,
)
from kvbench.tasks.ruler.official.script import (
    COMMIT,
    SHORT,
    OfficialTask,
    Run,
    Sample,
    draw_until,
    find_size,
    guess_high,
    name_words,
)
from kvbench.tasks.ruler.values import Kind
from kvbench.tasks.words import words

FORMS: dict[str, type[Niah]] = {
    form.name: form
    for form in (
        NiahSingle1, NiahSingle2, NiahSingle3, NiahMultikey1, NiahMultikey2, NiahMultikey3, NiahMultivalue,
        NiahMultiquery,
    )
}  # fmt: skip
WORDS_STEP = 500
LINES_STEP = 25
SHORT_STEP = 5
PERCENTS = [round(100 * point / (DEPTHS - 1)) for point in range(DEPTHS)]


class Pairs(Sequence[str]):
    """The sorted distinct `adjective-noun` strings of two lists, six million in total, created on access.

    The pairs of an adjective are consecutive, except if it is a prefix of another one with a hyphen (high,
    high-pitched); the pairs of such adjectives are created and sorted together.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        heads = sorted({f"{adjective}-" for adjective in adjectives})
        self.nouns = sorted({*nouns})
        self.groups: list[str | list[str]] = []
        while heads:
            size = next((i for i, head in enumerate(heads) if not head.startswith(heads[0])), len(heads))
            mixed = size > 1
            self.groups.append(sorted({x + y for x in heads[:size] for y in self.nouns}) if mixed else heads[0])
            heads = heads[size:]
        sizes = (len(self.nouns) if isinstance(group, str) else len(group) for group in self.groups)
        self.starts = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = bisect.bisect_right(self.starts, index) - 1
        group, within = self.groups[place], index - self.starts[place]
        return group + self.nouns[within] if isinstance(group, str) else group[within]


@cache
def find_pairs() -> Pairs:
    """The pairs of wonderwords' lists."""
    return Pairs(words("adjective"), words("noun"))


@cache
def read_essays(path: str) -> tuple[tuple[str, ...], str]:
    """Read the words of the essays and the file's hash, from JSON `{"text": ...}` or plain text."""
    try:
        data = Path(path).expanduser().read_bytes()
        text = data.decode()
        found = json.loads(text)["text"] if path.endswith(".json") else text
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(
            f"haystack '{path}' cannot be read ({type(error).__name__}). Give the PaulGrahamEssays.json that RULER's "
            'download_paulgraham_essay.py makes, {"text": ...}, or a text file.'
        ) from error
    if not isinstance(found, str) or not found.strip():
        raise UserError(f"haystack '{path}' has no text. Give the essays again.")
    return tuple(re.sub(r"\s+", " ", found).split(" ")), hashlib.sha256(data).hexdigest()


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences with NLTK; UserError if NLTK or its model is missing."""
    tokenize = load_extra("nltk.tokenize", extra="data", what="RULER's essay haystack")
    try:
        return list(tokenize.sent_tokenize(text))
    except LookupError as error:
        raise UserError(
            "RULER's essay haystack is split into sentences by NLTK's model punkt_tab, which is not installed. On a "
            "machine with network access, run: python -m nltk.downloader -d DIR punkt_tab; then copy DIR to "
            "~/nltk_data, or set NLTK_DATA=DIR."
        ) from error


@lru_cache(maxsize=8)  # all samples of a run have the same number of words, except those that are drawn again
def cut_essays(path: str, n: int) -> tuple[str, ...]:
    """The sentences of the first `n` words; the essays repeat if they have fewer."""
    found, _ = read_essays(path)
    repeats = -(-n // len(found))
    return tuple(split_sentences(" ".join((found * repeats)[:n]).strip()))


def draw_part(rng: random.Random, kind: Kind) -> str:
    """Draw a key or value of a kind."""
    if kind == "words":
        return rng.choice(find_pairs())
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@dataclass(frozen=True)
class OfficialNiah(OfficialTask):
    """RULER's needle tasks as published. task: its name in RULER; haystack: path of the essays, for five tasks."""

    task: Literal[
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery",
    ] = "niah_single_1"  # fmt: skip
    haystack: str = ""

    name: ClassVar[str] = "ruler-official-niah"
    summary: ClassVar[str] = "RULER's own samples of the needle tasks: --task-set task=niah_single_1 to niah_multiquery"
    needs: ClassVar[str | None] = "the essays' file for five of the eight"
    max_new_tokens: ClassVar[int] = MAX_NEW_TOKENS

    @property
    def form(self) -> Niah:
        """The task that defines wording, kinds and numbers."""
        return FORMS[self.task]()

    @property
    def in_essays(self) -> bool:
        """Whether the haystack is the essays."""
        return self.form.haystack_id == "prose"

    @property
    def essays(self) -> str:
        """The path of the essays."""
        if not self.haystack:
            raise UserError(
                f"{self.task} of {self.name} hides needles in Paul Graham's essays, which kvbench may not "
                "redistribute. Give the PaulGrahamEssays.json that RULER's download_paulgraham_essay.py creates, "
                f"--task-set haystack=PATH; or use the task {self.task}, which has generated prose."
            )
        return self.haystack

    @property
    def prompt_id(self) -> str:
        """The prompt's id, with the task."""
        return f"ruler-official/{self.task}@{COMMIT}"

    @property
    def dataset_revision(self) -> str:
        """Versions of the word lists and of NLTK, and the hash of the essays."""
        if not self.in_essays:
            return name_words()
        return f"{name_words()}; nltk=={find_version('nltk')}; sha256:{read_essays(self.essays)[1]}"

    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """Draw haystacks of as many units as fit."""
        draw = partial(self.draw, run)
        step = WORDS_STEP if self.in_essays else LINES_STEP if run.length >= SHORT else SHORT_STEP
        high = guess_high(run.measure(draw(step)), step, run.room)
        size = find_size(lambda n: run.measure(draw(n)) + MAX_NEW_TOKENS, run.room, step, high)
        while True:
            yield draw_until(draw, lambda x: run.measure(x) + MAX_NEW_TOKENS <= run.room, size, step)

    def draw(self, run: Run, n: int) -> Sample:
        """Draw a sample with `n` units of haystack."""
        form, rng = self.form, run.rng
        pairs = [
            (key, [draw_part(rng, form.value_kind) for _ in range(form.values)])
            for key in (draw_part(rng, form.key_kind) for _ in range(form.keys))
        ]
        needles = [form.needle(key, value) for key, values in pairs for value in values]
        run.shuffle(needles)
        text = self.hide_in_essays(run, n, needles) if self.in_essays else self.hide_in_lines(run, n, needles)
        asked = [pairs[i] for i in rng.sample(range(form.keys), form.queries)]
        query, values = enumerate_words([key for key, _ in asked]), tuple(x for _, found in asked for x in found)
        one = form.queries * form.values == 1
        intro, question, prefix = (form.word(x, query, singular=one) for x in (INTRO, QUESTION, PREFIX))
        return Sample(intro + text, question, prefix, values, f" {enumerate_words(values)}.")

    def hide_in_lines(self, run: Run, n: int, needles: Sequence[str]) -> str:
        """Insert the needles at distinct places among lines of noise or of other needles."""
        form, rng = self.form, run.rng
        if form.haystack_id == "noise":
            lines = [NOISE] * n
        else:
            lines = [form.needle(draw_part(rng, form.key_kind), draw_part(rng, form.value_kind)) for _ in range(n)]
        places = sorted(rng.sample(range(n), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def hide_in_essays(self, run: Run, n: int, needles: Sequence[str]) -> str:
        """Insert the needles between sentences, each after its own percentage of them."""
        sentences = cut_essays(self.essays, n)
        ends = sorted(int(len(sentences) * (percent / 100)) for percent in run.rng.sample(PERCENTS, len(needles)))
        parts: list[str] = []
        for start, end, needle in zip([0, *ends], ends, needles, strict=False):
            parts += [" ".join(sentences[start:end]), needle]
        return " ".join([*parts, " ".join(sentences[ends[-1] :])])
