"""Recurrences: wording, terms by hand, the length, and what the answer needs."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.registry import find_task
from kvbench.settings import configure
from kvbench.task import encode, prompt_tokens
from kvbench.tasks.growth.lists import SLACK
from kvbench.tasks.growth.recurrence import Recurrence, continue_terms

TASK = Recurrence(lag=3)
TEXT = (
    "Below are the first 3 terms of sequences of digits. You will be asked to continue them.\n\n"
    "A: 1 2 9\nB: 0 0 4\n\n"
    "Each further term is the last digit of the sum of the term before it and the term 3 places before it. Write terms "
    "4 to 7 of sequence A, each with its number:\n"
    "4. 0\n5. 2\n6. 1\n7. 1\n\n"
    "Each further term is the last digit of the sum of the term before it and the term 3 places before it. Write terms "
    "4 to 7 of sequence B, each with its number:\n"
    "4. 4\n5. 4\n6. 8\n7. 2"
)
"""9 + 1, 0 + 2, 2 + 9, 1 + 0; 4 + 0, 4 + 0, 4 + 4, 8 + 4."""


def test_the_text_is_as_written(chars):
    """Two turns with reference history, to the byte; the limit is the answer's tokens and the slack."""
    example = TASK.compose([[1, 2, 9], [0, 0, 4]], 4, id="x", tokenizer=chars)
    encoded = encode(TASK, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == TEXT
    assert [turn.max_new_tokens for turn in example.turns] == [19 + SLACK] * 2


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 4), lag=st.integers(2, 12), extra=st.integers(0, 400))
def test_every_line_follows_from_two_earlier_ones(mini_tokenizer, seed, turns, lag, extra):
    """Read from the text alone; the length is filled and never exceeded."""
    task = Recurrence(lag=lag)
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    starts = re.findall(r"^[A-D]: ([\d ]+)$", example.context, re.MULTILINE)
    assert len(starts) == turns
    for start, turn in zip(starts, example.turns, strict=True):
        terms = [int(x) for x in start.split()]
        for i, line in enumerate(turn.references, lag + 1):
            terms.append((terms[-1] + terms[-lag]) % 10)
            assert line == f"{i}. {terms[-1]}"
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    assert length - 20 < used <= length


def test_one_wrong_line_makes_later_ones_wrong():
    """A slip in the third line changes the next one and the one `lag` places later."""
    terms = continue_terms([1, 2, 9], 8)
    slip = continue_terms([*terms[:2], (terms[2] + 1) % 10], 5)
    assert [a != b for a, b in zip(slip, terms[3:], strict=True)] == [True, True, True, True, True]


def test_after_lag_lines_the_prompt_is_not_needed():
    """The lines go on from the answer alone."""
    terms = continue_terms([1, 2, 9], 20)
    assert continue_terms(terms[5:8], 12) == terms[8:]


@pytest.mark.parametrize("lag", ["1", "65", "many"])
def test_lags_without_a_meaning_are_refused(lag):
    """A rule looks back two terms at least."""
    with pytest.raises(UserError, match=f"lag must be .* got '?{lag}"):
        configure(find_task("recurrence"), {"lag": lag}, "--task-set", "recurrence")
