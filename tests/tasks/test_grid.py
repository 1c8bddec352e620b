"""A needle at every depth of every length: which cells, where the needle goes, and as many samples for each."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.grid.needle import DepthHaystack, NeedleGrid
from kvbench.tasks.ruler.haystack import ProseHaystack
from kvbench.tasks.ruler.niah import MAX_NEW_TOKENS

SMALL = NeedleGrid(lengths=3, depths=3, shortest=400)
TEXT = ("One two three.", "Four five.", "Six seven eight nine.", "Ten.")
"""14, 10, 21 and 4 characters."""


def make(task, tokenizer, *, n, length=800, seed=0):
    asked = {"seed": seed, "split": Split.TEST, "n": n, "length": length, "turns": 1, "mode": Mode.SINGLE}
    return list(task.examples(**asked, tokenizer=tokenizer))


def haystack(depth, tokenizer):
    return DepthHaystack(ProseHaystack(random.Random(0), itertools.cycle(TEXT)), depth, tokenizer)


@pytest.mark.parametrize(
    ("depth", "expected", "true_depth"),
    [
        # Tokens are characters, each sentence with the space before it: 15, 11, 22 and 5, together 53.
        (0, "NEEDLE One two three. Four five. Six seven eight nine. Ten.", 0),
        (28, "NEEDLE One two three. Four five. Six seven eight nine. Ten.", 0),  # token 14, within the first sentence
        (29, "One two three. NEEDLE Four five. Six seven eight nine. Ten.", 100 * 15 / 53),  # token 15, right after it
        (90, "One two three. Four five. NEEDLE Six seven eight nine. Ten.", 100 * 26 / 53),  # token 47
        (99, "One two three. Four five. Six seven eight nine. NEEDLE Ten.", 100 * 48 / 53),
        (100, "One two three. Four five. Six seven eight nine. Ten. NEEDLE", 100),
    ],
)
def test_the_needle_goes_back_to_the_end_of_a_sentence(chars, depth, expected, true_depth):
    """From the token at its depth; at 100 percent it is appended."""
    hay = haystack(depth, chars)
    assert hay.text(10, ["NEEDLE"]) == expected
    assert hay.true_depth == pytest.approx(true_depth)


def test_appended_after_a_cut_sentence(chars):
    """The prose is cut to words; no needle stands within a sentence but there."""
    assert haystack(100, chars).text(7, ["NEEDLE"]) == "One two three. Four five. Six seven NEEDLE"
    assert haystack(99, chars).text(7, ["NEEDLE"]) == "One two three. Four five. NEEDLE Six seven"


def test_the_prompt_is_rulers(chars):
    """Wording to the byte, with one key and its number."""
    example = make(SMALL, chars, n=1, length=1000)[0]
    (key,), (value,) = example.facts["keys"], example.turns[0].references
    intro = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    needle = f"One of the special magic numbers for {key} is: {value}."
    assert example.context.startswith(f"{intro}{needle} ")
    (turn,) = example.turns
    assert turn.question == f"What is the special magic number for {key} mentioned in the provided text?"
    assert turn.prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert (turn.answer, turn.max_new_tokens, len(value)) == (f" {value}.", 128, 7)


def test_the_cells():
    """Evenly spaced, both ends included, the longest first."""
    assert SMALL.cells(801) == [
        (801, 0), (801, 50), (801, 100), (600, 0), (600, 50), (600, 100), (400, 0), (400, 50), (400, 100),
    ]
    assert NeedleGrid(lengths=1, depths=2).cells(2048) == [(2048, 0), (2048, 100)]
    card = NeedleGrid().cells(5120)
    assert {length for length, _ in card} == {512 + 512 * i for i in range(10)}
    assert sorted({depth for _, depth in card}) == pytest.approx([100 * i / 9 for i in range(10)])


def test_samples_go_through_the_grid_again_and_again(mini_tokenizer):
    """Sample i is of cell i modulo cells, with words and a value of its own."""
    examples = make(SMALL, mini_tokenizer, n=18)
    found = Counter((x.facts["length"], x.facts["depth"]) for x in examples)
    assert found == dict.fromkeys(SMALL.cells(800), 2)
    assert [(x.facts["length"], x.facts["depth"]) for x in examples] == SMALL.cells(800) * 2
    assert len({x.turns[0].references for x in examples}) == 18


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(402, 1500))
def test_prompts_fill_their_lengths(mini_tokenizer, seed, length):
    """Prompt and limit come within a word of the cell's length; the needle stands within a sentence of its depth."""
    for example in make(SMALL, mini_tokenizer, n=9, length=length, seed=seed):
        used = prompt_tokens(encode(SMALL, example, mini_tokenizer)) + MAX_NEW_TOKENS
        size, depth, true_depth = (example.facts[x] for x in ("length", "depth", "true_depth"))
        assert size - 8 <= used <= size
        sentence = 100 * 45 / (size - MAX_NEW_TOKENS - 150)
        assert depth - sentence <= true_depth <= depth


def test_a_sample_is_a_function_of_its_number(mini_tokenizer):
    """Not of how many were made before it: a run that goes on makes the same."""
    asked = {"seed": 0, "split": Split.TEST, "length": 800, "turns": 1, "tokenizer": mini_tokenizer}
    assert SMALL.generate(13, **asked) == make(SMALL, mini_tokenizer, n=14)[13]


@pytest.mark.parametrize("samples", [1, 99, 101, 250])
def test_samples_that_are_not_as_many_for_each_cell(samples):
    """Refused with the numbers that work."""
    with pytest.raises(UserError, match=r"100 cells, and .* samples cannot be divided equally. Use --samples 100,"):
        NeedleGrid().check_samples(samples)
    NeedleGrid().check_samples(300)
    NeedleGrid(lengths=5, depths=2).check_samples(30)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (NeedleGrid(shortest=100), r"shortest=100 tokens have no room for a needle. Use --task-set shortest=\d+"),
        (NeedleGrid(haystack="nowhere.txt"), "haystack file 'nowhere.txt' cannot be read"),
    ],
)
def test_a_grid_that_cannot_be(mini_tokenizer, task, message):
    """Before any work."""
    with pytest.raises(UserError, match=message):
        task.minimum_length(1, mini_tokenizer)


@pytest.mark.parametrize("counts", [{"lengths": 0}, {"depths": 1}])
def test_no_grid(counts):
    """Fewer than a row of two."""
    with pytest.raises(UserError, match="a grid has lengths=1 or more and depths=2 or more"):
        NeedleGrid(**counts)


def test_the_minimum_length_keeps_lengths_apart(mini_tokenizer):
    """No two columns of a grid are the same."""
    least = SMALL.minimum_length(1, mini_tokenizer)
    assert least == 402
    assert len(set(SMALL.cells(least))) == 9
    assert len(set(SMALL.cells(least - 1))) < 9
