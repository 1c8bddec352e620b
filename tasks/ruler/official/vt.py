"""RULER's variable_tracking.py, reproduced: one chain of five variables, after a solved example."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from kvbench.tasks.ruler.chains import (
    HOPS,
    INTRO,
    MAX_NEW_TOKENS,
    NAME_LETTERS,
    SHOT_LETTERS,
    SHOT_TOKENS,
    VariableChain,
)
from kvbench.tasks.ruler.haystack import NOISE
from kvbench.tasks.ruler.official.script import (
    SHORT,
    OfficialTask,
    Run,
    Sample,
    ScriptError,
    draw_until,
    find_size,
    guess_high,
)

SHOT_VALUE = "12345"
STEP = 10
SHOT_STEP = 5
"""Step for solved examples, and for short prompts."""


def draw_name(run: Run, letters: int) -> str:
    """Draw a name of upper-case letters."""
    return "".join(run.rng.choices(string.ascii_uppercase, k=letters))


def draw(run: Run, n: int, *, shot: bool) -> Sample:
    """Draw a chain in `n` lines of noise; `shot`: the solved example, with a fixed value and short names."""
    letters = SHOT_LETTERS if shot else NAME_LETTERS
    names = [draw_name(run, letters) for _ in range(HOPS + 1)]
    if len(set(names)) <= HOPS:
        while len(set(names)) <= HOPS:
            names.append(draw_name(run, letters))
        # The script makes a second chain of the surplus names. It has drawn the values of both when it fails.
        if not shot:
            draw_value(run)
            draw_value(run)
        raise ScriptError(
            "RULER's script drew a variable twice, which ends it with an error. Use another --seed."
        )
    chain = VariableChain(SHOT_VALUE if shot else draw_value(run), tuple(names))
    lines = [NOISE] * n
    places = sorted(run.rng.sample(range(n), len(names)))
    for before, (place, line) in enumerate(zip(places, chain.lines, strict=True)):
        lines.insert(place + before, line)
    return Sample(INTRO + "\n".join(lines), chain.question, chain.prefix, chain.names, chain.answer)


def draw_value(run: Run) -> str:
    """Draw five digits from NumPy's generator."""
    return str(run.numbers.randint(10_000, 99_999))


def rename(run: Run, shot: str) -> str:
    """Replace the names and the value of the solved example by new ones, at all their occurrences."""
    for name in shot.split()[-HOPS - 1 :]:
        shot = shot.replace(name, draw_name(run, len(name)))
    return shot.replace(SHOT_VALUE, draw_value(run))


@dataclass(frozen=True)
class OfficialVt(OfficialTask):
    """RULER's vt as published."""

    name: ClassVar[str] = "ruler-official-vt"
    summary: ClassVar[str] = "RULER's own samples of vt"
    needs: ClassVar[str | None] = "a larger model"
    max_new_tokens: ClassVar[int] = MAX_NEW_TOKENS

    def draw_samples(self, run: Run) -> Iterator[Sample]:
        """Draw the solved example once and rename its variables for each sample."""
        draw_shot, draw_bare = partial(draw, run, shot=True), partial(draw, run, shot=False)
        room = SHOT_TOKENS - run.template
        high = guess_high(run.measure(draw_shot(SHOT_STEP)), SHOT_STEP, room)
        size = find_size(lambda n: run.measure(draw_shot(n)), room, SHOT_STEP, high)
        solved = draw_until(draw_shot, lambda x: run.measure(x) <= room, size, SHOT_STEP)
        shot = f"{run.text(solved)}{solved.answer}\n"
        step, taken = STEP if run.length >= SHORT else SHOT_STEP, run.count(shot) + MAX_NEW_TOKENS
        high = guess_high(run.measure(draw_bare(step)), step, run.room)
        size = find_size(lambda n: run.measure(draw_bare(n)) + taken, run.room, step, high)

        def draw_whole(n: int) -> Sample:
            sample = draw_bare(n)
            return replace(sample, context=f"{rename(run, shot)}\n{sample.context}")

        while True:
            yield draw_until(draw_whole, lambda x: run.measure(x) + MAX_NEW_TOKENS <= run.room, size, step)
