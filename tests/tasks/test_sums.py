"""Running sums: wording, sums by hand, several turns, and what one wrong line does to the score."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.task import encode, prompt_tokens
from kvbench.tasks.growth.lists import SLACK
from kvbench.tasks.growth.sums import RunningSums

TASK = RunningSums()
WHOLE, *QUARTERS = TASK.scorers
DIGITS = ("7", "5", "9", "0", "4")
SUMS = ("1. 7", "2. 2", "3. 1", "4. 1", "5. 5")  # 7, 12, 21, 21, 25
TEXT = (
    "Below is a numbered list of digits. You will be asked for their running sum.\n\n"
    "1. 7\n2. 5\n3. 9\n4. 0\n5. 4\n\n"
    "Write the last digit of the running sum of the list, line by line:\n"
    "1. 7\n2. 2\n3. 1\n4. 1\n5. 5\n\n"
    "Write the last digit of the running sum of lines 3 to 5, line by line:\n"
    "3. 9\n4. 9\n5. 3"
)
"""9, 9, 13: the second turn sums from its own first line."""


def test_the_text_is_as_written(chars):
    """Two turns with reference history, to the byte; the limit is the answer's tokens and the slack."""
    example = TASK.compose(DIGITS, [(1, 5), (3, 5)], id="x", tokenizer=chars)
    encoded = encode(TASK, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == TEXT
    assert [turn.references for turn in example.turns] == [SUMS, ("3. 9", "4. 9", "5. 3")]
    assert [turn.max_new_tokens for turn in example.turns] == [24 + SLACK, 14 + SLACK]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5), extra=st.integers(0, 400))
def test_every_line_follows_from_the_one_before(mini_tokenizer, seed, turns, extra):
    """Each sum is the last one and its own digit, modulo 10, whatever lines a turn asks for; the length is filled."""
    length = TASK.minimum_length(turns, mini_tokenizer) + extra
    example = TASK.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    digits = [int(x) for x in re.findall(r"^\d+\. (\d)$", example.context, re.MULTILINE)]
    assert len(digits) == example.facts["lines"]
    for turn, (first, last) in zip(example.turns, example.facts["ranges"], strict=True):
        numbers, sums = zip(*(map(int, line.split(". ")) for line in turn.references), strict=True)
        assert numbers == tuple(range(first, last + 1))
        assert sums[0] == digits[first - 1]
        for number, before, total in zip(numbers[1:], sums[:-1], sums[1:], strict=True):
            assert total == (before + digits[number - 1]) % 10
    used = prompt_tokens(encode(TASK, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    assert length - 40 < used <= length


@pytest.mark.parametrize(("prediction", "score", "quarters"), [
    ("\n".join(SUMS), 1.0, (1.0, 1.0, 1.0, 1.0)),
    ("1. 7\n2. 2\n3. 2\n4. 2\n5. 6", 0.4, (1.0, 1.0, 0.0, 0.0)),  # a slip, carried on
    ("1. 7\n2. 2\n3. 1", 0.6, (1.0, 1.0, 1.0, 0.0)),
    ("2. 2\n1. 7", 0.2, (0.0, 1.0, 0.0, 0.0)),  # out of order
    ("7 2 1 1 5", 0.0, (0.0, 0.0, 0.0, 0.0)),
    ("", 0.0, (0.0, 0.0, 0.0, 0.0)),
])
def test_lines_are_scored_by_number_and_order(prediction, score, quarters):
    """A wrong line takes its followers with it; by quarters: lines 1, 2, 3, and 4 with 5."""
    assert WHOLE(prediction, SUMS, {}) == pytest.approx(score)
    assert tuple(x(prediction, SUMS, {}) for x in QUARTERS) == pytest.approx(quarters)


def test_answers_are_long(mini_tokenizer):
    """64 to 256 tokens from length 208 to 576."""
    found = []
    for length in (208, 512, 576):
        example = TASK.example(random.Random(0), id="x", length=length, turns=1, tokenizer=mini_tokenizer)
        found.append(len(encode(TASK, example, mini_tokenizer).turns[0].answer))
    assert found == sorted(found)
    assert found[0] >= 64 and found[-1] <= 256
