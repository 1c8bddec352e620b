"""Short answers: tokens in common, numbers, letters and options, by hand and against SQuAD's evaluation."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.qasper.metrics import f1_abstractive

from kvbench.errors import UserError
from kvbench.tasks.scoring.text import (
    SIGNED,
    character_f1,
    contains_words,
    find_letter,
    find_option,
    first_number,
    normalize,
    normalize_chinese,
    segment,
    word_f1,
)

WORDS = st.lists(st.sampled_from(["the", "a", "An", "cat", "Cat,", "sat.", "--", "there", "mat"]), max_size=8)


def test_normalize():
    """Case, ASCII punctuation, articles and white space go; a hyphen joins what it stood between."""
    assert normalize(" The  Well-known\nman, an A-team. ") == "wellknown man ateam"


def test_normalize_chinese():
    """Punctuation of both scripts and all white space go; the opening 《 is not in the list and stays."""
    assert normalize_chinese("《红楼梦》、 第 1 回。 OK!") == "《红楼梦第1回ok"


def test_word_f1_by_hand():
    """2 of 3 predicted words are among the gold's 4: precision 2/3, recall 1/2, F1 4/7."""
    assert word_f1("the cat sat down", "A cat sat on it") == pytest.approx(4 / 7)


@given(prediction=WORDS, gold=WORDS)
def test_word_f1_is_squads(prediction, gold):
    """SQuAD's own evaluation, as lm-eval has it."""
    one, other = " ".join(prediction), " ".join(gold)
    assert word_f1(one, other) == pytest.approx(f1_abstractive([one], [other]))


def test_word_f1_of_nothing_is_0():
    """An empty prediction has nothing in common, not even with an empty gold."""
    assert word_f1("", "cat") == word_f1("", "") == 0.0


def test_character_f1_by_hand():
    """Of 4 predicted characters 2 are among the gold's 3, a repeated one once: 2 * 2 / 7."""
    assert character_f1("北北京。市", "北京 人") == pytest.approx(4 / 7)


@pytest.mark.parametrize(
    ("prediction", "gold", "found"),
    [
        ("I know him", "no", False),
        ("No, I don't", "no", True),
        ("It was Mr Darcy himself", "Mr. Darcy", True),
        ("a butler", "The butler", True),
        ("Darcy Mr", "Mr Darcy", False),
        ("", "cat", False),
        ("", "The", False),
        ("Vitamin A.", "A", True),
        ("a vitamin", "A", False),
        ("x", "!!", False),
        ("he said !! twice", "!!", True),
        ("anything", " ", False),
    ],
)
def test_contains_words(prediction, gold, found):
    """Whole words, side by side, articles and punctuation apart, unless the gold has nothing else."""
    assert contains_words(prediction, gold) is found


@pytest.mark.parametrize(
    ("text", "unsigned", "signed"),
    [
        ("The answer is 12.", 12, 12), ("12.75 or 3", 12.75, 12.75), ("-5", 5, -5), ("x-5", 5, 5), ("none", None, None),
        ("is:-0.5", 0.5, -0.5), ("x7", 7, 7),
    ],
)
def test_first_number(text, unsigned, signed):
    """A minus counts as a sign unless it joins; a full stop as a decimal one between digits."""
    assert first_number(text) == unsigned
    assert first_number(text, SIGNED) == signed


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), (" (C) Tom", "C"), ("**D**", "D"), ("B. Tom", "B"), ("B because", "B"), ("A: Tom", "A"),
        ("Because he left", None), ("A man left", None), ("D-day", None), ("B's friend", None), ("", None), ("b", None),
        ("The answer is (B).", "B"), ("The correct answer is: C", "C"), ("Answer: D", "D"),
        ("the answer is A man", None), ("I choose option A as it fits", "A"), ("Surely (E) of these", "E"),
        ("Option A is wrong; the answer is B", "B"),
    ],
)
def test_find_letter(text, letter):
    """A letter that stands for an answer, never an article or the beginning of a word."""
    assert find_letter(text) == letter


PHRASES = (
    "@", "@.", "(@)", "@ is the correct answer", "The answer is @ because it says so", "The correct answer is @",
    "The correct answer is @ (Tom)", "The letter of the correct answer is @ as stated",
    "The correct option is @ since", "@ Tom", "@\nExplanation", "@, as", "**@** is right", "Answer: @ - Tom",
    "option @ is right", "The answer is: @ Tom", "@ isn't wrong", "@ 12/02/2002\nso there",
    "Option G is wrong: answer @",
)


@pytest.mark.parametrize("phrase", PHRASES)
def test_every_letter_is_read_alike(phrase):
    """A letter that is an article elsewhere is no harder to choose than the others."""
    assert [find_letter(phrase.replace("@", x)) for x in "ABCD"] == list("ABCD")


@pytest.mark.parametrize(
    "text",
    [
        "A man left.", "A French spy left.", "A 12-year-old boy did it", "A has-been came", "The answer is A man",
        "The answer is: A man of means", "A Tale of Two Cities", "I would say A while ago", "A by-product of it",
    ],
)
def test_an_article_is_no_letter(text):
    """Before what an article stands before."""
    assert find_letter(text) is None


OPTIONS = ("Tom", "A Tale of Two Cities", "Tom Sawyer", "...")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("It was Tom.", "A"), ("tom sawyer, or Tom", "C"), ("A Tale of two cities", "B"), ("The answer is D", "D"),
        ("A Tom", "A"), ("A A Tale of Two Cities", "A"), ("The answer is: A TALE OF TWO CITIES", "B"),
        ("B. Tom", "B"), ("Tomorrow", None), ("", None),
    ],
)
def test_find_option(text, letter):
    """By its letter, else by the text that is named first, the longest of those at one place."""
    assert find_option(text, OPTIONS) == letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [("C. S. Lewis", "A"), ("The answer is c. s. lewis.", "A"), ("C. Tom", "C"), ("C. B. B. King", "C"), ("B", "B")],
)
def test_an_initial_of_an_option_is_no_letter(text, letter):
    """Only one that stands outside of the option's text."""
    assert find_option(text, ("C. S. Lewis", "Tom", "B. B. King")) == letter


def test_segment():
    """Words of a Chinese sentence, as jieba's own manual has them."""
    assert segment("我来到北京清华大学") == ["我", "来到", "北京", "清华大学"]


def test_a_missing_package_is_named(monkeypatch):
    """Without jieba the message says how to install it."""
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(UserError, match=r"a scorer of Chinese text needs .*jieba.* pip install 'kvbench\[data\]'"):
        segment("我")
