"""Lists that are written down again: wording, lengths, halves, and scores by position in the output."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.growth.lists import INTRO, SLACK, ListCopy, ListReverse, NumberedList, fewest, halves, right_lines

TASKS = (ListCopy(), ListReverse())
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)

ITEMS = ("red-fox 482", "old-oak 100", "dry-ice 999", "big-sky 731")
GOLDEN = {
    "list-copy": (
        "Below is a numbered list. You will be asked to write it down again.\n\n"
        "1. red-fox 482\n2. old-oak 100\n3. dry-ice 999\n4. big-sky 731\n\n"
        "Copy the list as it is, each line with its number:\n"
        "1. red-fox 482\n2. old-oak 100\n3. dry-ice 999\n4. big-sky 731\n\n"
        "Copy lines 2 to 3 of the list as they are, each line with its number:\n"
        "2. old-oak 100\n3. dry-ice 999"
    ),
    "list-reverse": (
        "Below is a numbered list. You will be asked to write it down again.\n\n"
        "1. red-fox 482\n2. old-oak 100\n3. dry-ice 999\n4. big-sky 731\n\n"
        "Write the list from its last line to its first, each line with its number:\n"
        "4. big-sky 731\n3. dry-ice 999\n2. old-oak 100\n1. red-fox 482\n\n"
        "Write lines 2 to 3 of the list from the last of them to the first, each line with its number:\n"
        "3. dry-ice 999\n2. old-oak 100"
    ),
}


@each_task
def test_the_text_is_as_written(task: NumberedList, chars):
    """Two turns with reference history, to the byte; the limit is the answer's tokens and the slack."""
    example = task.compose(ITEMS, [(1, 4), (2, 3)], id="x", tokenizer=chars)
    encoded = encode(task, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == GOLDEN[task.name]
    assert [turn.max_new_tokens for turn in example.turns] == [len(one.answer) + SLACK, len(two.answer) + SLACK]
    assert [turn.references for turn in example.turns] == [tuple(turn.answer.split("\n")) for turn in example.turns]


@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6), extra=st.integers(0, 600))
def test_prompt_and_answer_fill_the_length(task: NumberedList, mini_tokenizer, seed, turns, extra):
    """Prompt and limit never exceed the length and come within one line and its copy, from the minimum length on."""
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    longest = max(len(mini_tokenizer(f"{i}{line}\n").input_ids) for i in "12" for line in example.turns[0].references)
    assert length - 3 * longest <= used <= length


@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6))
def test_turns_ask_for_lines_of_the_list(task: NumberedList, mini_tokenizer, seed, turns):
    """Lines are numbered from 1 and distinct; each turn's reference lines are those of its range, in its direction."""
    example = task.example(random.Random(seed), id="x", length=500, turns=turns, tokenizer=mini_tokenizer)
    lines = example.context.removeprefix(INTRO).split("\n")
    assert len(lines) == example.facts["lines"]
    for i, line in enumerate(lines, 1):
        assert re.fullmatch(rf"{i}\. [a-z]{{3,6}}-[a-z]{{3,6}} [1-9][0-9]{{2}}", line)
    assert len({line.split(" ")[1] for line in lines}) == len(lines)
    assert len({turn.question for turn in example.turns}) == turns
    for (first, last), turn in zip(example.facts["ranges"], example.turns, strict=True):
        assert turn.references == tuple(lines[first - 1 : last][:: task.step])
        assert turn.answer == "\n".join(turn.references)
        assert turns == 1 or f" lines {first} to {last} of" in turn.question


@given(turns=st.integers(2, 12), extra=st.integers(0, 60), rng=st.randoms(use_true_random=False))
def test_halves_cover_the_list_and_differ(turns, extra, rng):
    """Every turn asks for half of the lines, no two for the same, and together they ask for all."""
    n = fewest(turns) + extra
    ranges = halves(n, rng.sample(range(turns), turns))
    assert {last - first + 1 for first, last in ranges} == {(n + 1) // 2}
    assert len(set(ranges)) == turns
    assert {i for first, last in ranges for i in range(first, last + 1)} == set(range(1, n + 1))
    assert halves(n, [0]) == [(1, n)]


@each_task
@pytest.mark.parametrize(("length", "tokens"), [(640, 256), (2176, 1024)])
def test_answers_are_long(task: NumberedList, mini_tokenizer, length, tokens):
    """With one question the answer takes nearly half of the length."""
    (example,) = task.examples(
        seed=0, split=Split.DEV, n=1, length=length, turns=1, mode=Mode.SINGLE, tokenizer=mini_tokenizer
    )
    assert tokens - 32 <= len(encode(task, example, mini_tokenizer).turns[0].answer) <= tokens + 64


@each_task
def test_turns_come_in_random_order(task: NumberedList, mini_tokenizer):
    """The first turn is not always about the same part of the list: no position of the context is favored."""
    examples = task.examples(
        seed=0, split=Split.DEV, n=20, length=400, turns=3, mode=Mode.MULTI_TURN, tokenizer=mini_tokenizer
    )
    assert len({tuple(example.facts["ranges"][0]) for example in examples}) >= 3


@each_task
@pytest.mark.parametrize("turns", [1, 5])
def test_too_short_a_length_is_the_users_mistake(task: NumberedList, mini_tokenizer, turns):
    """A length that cannot hold the fewest lines is refused with the task's name and what it needs."""
    with pytest.raises(UserError, match=rf"{task.name} with {turns} turns? needs \d+ tokens at least, and 100 are"):
        task.example(random.Random(0), id="x", length=100, turns=turns, tokenizer=mini_tokenizer)


def scores(prediction: str, references: tuple[str, ...]) -> list[float]:
    """By every scorer: all lines, then the four quarters."""
    return [scorer.score(prediction, references) for scorer in ListCopy.scorers]


EIGHT = tuple(f"{i}. red-fox {100 + i}" for i in range(1, 9))


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("\n".join(EIGHT), [1, 1, 1, 1, 1]),
        ("", [0, 0, 0, 0, 0]),
        ("The list is long. I cannot copy it.", [0, 0, 0, 0, 0]),
        ("...\n\n12345678", [0, 0, 0, 0, 0]),
        ("99. red-fox 199\n0. red-fox 100", [0, 0, 0, 0, 0]),
        # Three lines, the fourth cut short.
        ("1. red-fox 101\n2. red-fox 102\n3. red-fox 103\n4. red-fox 10", [3 / 8, 1, 0.5, 0, 0]),
        # White space before, in and after a line, and empty lines.
        ("  1.  red-fox 101 \n\n\t2. red-fox\t102\r\n", [2 / 8, 1, 0, 0, 0]),
        # The first line with a number counts, be it wrong or right.
        ("1. red-fox 999\n1. red-fox 101\n2. red-fox 102\n2. red-fox 999", [1 / 8, 0.5, 0, 0, 0]),
        # Lines in between are missing, or are no lines of the list.
        ("1. red-fox 101\nand so on\n7. red-fox 107\n8. red-fox 108\n9. red-fox 109", [3 / 8, 0.5, 0, 0, 1]),
        # A line belongs to its number, not to its words; another number's words are wrong there.
        ("1. red-fox 102\n2. red-fox 102", [1 / 8, 0.5, 0, 0, 0]),
        # Out of order: 5 comes after 6, and 8, whose line before is 5, is in order again.
        ("6. red-fox 106\n5. red-fox 105\n8. red-fox 108", [2 / 8, 0, 0, 0.5, 0.5]),
        # One jump ahead costs the line where the list goes on, and no more.
        ("8. red-fox 108\n1. red-fox 101\n2. red-fox 102\n3. red-fox 103", [3 / 8, 0.5, 0.5, 0, 0.5]),
        # A line that came wrong is not made good later.
        ("2. red-fox 999\n1. red-fox 101\n2. red-fox 102", [0, 0, 0, 0, 0]),
        # Backwards: only the first has no line before it that belongs after it.
        ("\n".join(reversed(EIGHT)), [1 / 8, 0, 0, 0, 0.5]),
        # Glued to something else, or without its full stop.
        ("x1. red-fox 101\n2 red-fox 102\n03. red-fox 103", [0, 0, 0, 0, 0]),
        # The same line for ever.
        ("3. red-fox 103\n" * 50, [1 / 8, 0, 0.5, 0, 0]),
    ],
)
def test_lines(prediction, expected):
    """The share of reference lines that the prediction holds, and the same by quarters of the answer."""
    assert scores(prediction, EIGHT) == expected


def test_quarters_of_an_uneven_list():
    """Six lines fall into quarters of 1, 2, 1 and 2: their bounds are rounded down."""
    assert scores("\n".join(EIGHT[:2]), EIGHT[:6]) == [2 / 6, 1, 0.5, 0, 0]
    assert scores("\n".join(EIGHT[2:6]), EIGHT[:6]) == [4 / 6, 0, 0.5, 1, 1]


def test_scorers_are_versioned():
    """The primary scorer comes first."""
    assert [(scorer.id, scorer.metric) for scorer in ListReverse.scorers] == [
        ("growth-lines@1", "lines"),
        ("growth-lines-q1@1", "lines_q1"),
        ("growth-lines-q2@1", "lines_q2"),
        ("growth-lines-q3@1", "lines_q3"),
        ("growth-lines-q4@1", "lines_q4"),
    ]


@each_task
@settings(max_examples=60, deadline=None)
@given(n=st.integers(4, 40), seed=st.integers(0, 10**6), data=st.data())
def test_a_prefix_of_the_answer_scores_its_share(task: NumberedList, chars, n, seed, data):
    """The reference answer scores 1 everywhere, and its first k lines score k of n, quarter by quarter."""
    items = task.draw_items(random.Random(seed), n)
    (turn,) = task.compose(items, [(1, n)], id="x", tokenizer=chars).turns
    assert scores(turn.answer, turn.references) == [1, 1, 1, 1, 1]
    k = data.draw(st.integers(0, n))
    bounds = [n * quarter // 4 for quarter in range(5)]
    assert scores("\n".join(turn.references[:k]), turn.references) == [
        k / n,
        *((min(max(k - a, 0), b - a)) / (b - a) for a, b in itertools.pairwise(bounds)),
    ]


@given(prediction=st.text(st.sampled_from("0123456789. \nred-fox\r\t٣"), max_size=120))
def test_any_prediction_scores_between_0_and_1(prediction):
    """Garbage is no error, and the quarters of an even list average to the whole."""
    whole, *quarters = scores(prediction, EIGHT)
    assert 0 <= whole <= 1 and whole == sum(quarters) / 4 == sum(right_lines(prediction, EIGHT)) / 8
