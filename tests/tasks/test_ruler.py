"""RULER's needles: wording, lengths, places and scores."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Split, encode, prompt_tokens
from kvbench.tasks.ruler.haystack import NOISE, NoiseHaystack, ProseHaystack, cut
from kvbench.tasks.ruler.niah import Niah, NiahMultikey1, NiahSingle1, NiahSingle2
from kvbench.tasks.ruler.scoring import STRING_MATCH_ALL

TASKS = (NiahSingle1(), NiahSingle2(), NiahMultikey1())
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


class Fixed:
    """A haystack of one known sentence on either side of the needles."""

    def text(self, words, needles):
        return " ".join(["Before.", *needles, "After."])


GOLDEN_SINGLE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the number afterwards.\n"
    "Before. One of the special magic numbers for red-fox is: 1234567. After.\n"
    "What is the special magic number for red-fox mentioned in the provided text? The special magic number for red-fox "
    "mentioned in the provided text is"
)
GOLDEN_MANY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n"
    "Before. One of the special magic numbers for red-fox is: 1234567. One of the special magic numbers for old-oak is:"
    " 7654321. After.\n"
    "What is the special magic number for old-oak mentioned in the provided text? The special magic number for old-oak "
    "mentioned in the provided text is 7654321.\n"
    "What is the special magic number for red-fox mentioned in the provided text? The special magic number for red-fox "
    "mentioned in the provided text is 1234567."
)


def test_one_question_is_rulers_prompt(chars):
    """With one turn, the text without a chat template is RULER's singular prompt to the byte."""
    task = NiahSingle2()
    example = task.compose(Fixed(), [("red-fox", "1234567")], [0], 0, id="x")
    encoded = encode(task, example, chars)
    assert chars.decode(encoded.context + encoded.turns[0].first) == GOLDEN_SINGLE
    assert (example.turns[0].answer, example.turns[0].references, example.turns[0].limit) == (
        " 1234567.",
        ("1234567",),
        128,
    )


def test_several_questions_share_a_plural_introduction(chars):
    """With two turns, the introduction is RULER's plural and each question is singular, on a line after the answer."""
    task = NiahMultikey1()
    example = task.compose(Fixed(), [("red-fox", "1234567"), ("old-oak", "7654321")], [1, 0], 0, id="x")
    encoded = encode(task, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == GOLDEN_MANY


@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6), extra=st.integers(0, 700))
def test_prompt_fills_the_length(task: Niah, mini_tokenizer, seed, turns, extra):
    """Prompt and generation never exceed the length and come within a word of it, from the minimum length on."""
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].limit
    assert length - 8 <= used <= length


@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 8))
def test_each_turn_asks_for_its_own_needle(task: Niah, mini_tokenizer, seed, turns):
    """Turn i names key i, whose needle holds its reference, which occurs once in the context; no key is asked twice."""
    example = task.example(random.Random(seed), id="x", length=1100, turns=turns, tokenizer=mini_tokenizer)
    keys = example.facts["keys"]
    assert len(set(keys)) == turns
    assert example.context.count("One of the special magic numbers for ") == max(task.keys, turns)
    for key, depth, turn in zip(keys, example.facts["depths"], example.turns, strict=True):
        (reference,) = turn.references
        assert f" for {key} mentioned" in turn.question and f" for {key} mentioned" in turn.prefix
        assert f"One of the special magic numbers for {key} is: {reference}." in example.context
        assert example.context.count(reference) == 1
        assert len(reference) == 7 and 0.0 <= depth <= 1.0


@each_task
def test_too_short_a_length_is_the_users_mistake(task: Niah, mini_tokenizer):
    """A length that cannot hold the needles is refused with the task's name and what it needs."""
    with pytest.raises(UserError, match=rf"{task.name} with 5 turns needs \d+ prompt tokens"):
        task.example(random.Random(0), id="x", length=200, turns=5, tokenizer=mini_tokenizer)


@each_task
def test_needles_move(task: Niah, mini_tokenizer):
    """The answer's depth differs from sample to sample (RULER's own shuffle is the same in all of them)."""
    examples = task.examples(seed=0, split=Split.DEV, n=30, length=700, turns=1, tokenizer=mini_tokenizer)
    depths = [example.facts["depths"][0] for example in examples]
    assert min(depths) < 0.2 and max(depths) > 0.8 and len(set(depths)) > 10


def test_noise_needles_stand_on_lines_of_their_own():
    """Noise lines are RULER's, and each needle is inserted as one more line."""
    lines = NoiseHaystack(random.Random(0)).text(5 * 19, ["one", "two"]).split("\n")
    assert sorted(lines) == sorted([NOISE] * 5 + ["one", "two"])


def test_haystack_is_cut_to_whole_words():
    """The last sentence is cut after a word, the others are kept whole."""
    assert cut(iter(["One two three.", "Four five six."]), 5) == ["One two three.", "Four five"]


def test_a_longer_haystack_starts_with_the_shorter_one():
    """Prose of one sample is one text, whatever its length: searching for a length does not change the words."""
    haystack = ProseHaystack(random.Random(3))
    assert haystack.text(200, []).startswith(haystack.text(50, []))


def test_prose_depths_are_rulers():
    """Needles stand between sentences, at int(sentences * depth / 100) of depths drawn without replacement."""
    haystack = ProseHaystack(random.Random(1), iter([f"S{i}." for i in range(100)]))
    words = haystack.text(100, [f"needle{i}" for i in range(40)]).split(" ")
    places = [word for word in words if word.startswith("needle")]
    assert places == [f"needle{i}" for i in range(40)]
    before = [sum(word.startswith("S") for word in words[: words.index(name)]) for name in places]
    assert before == [int(100 * round(100 * i / 39) / 100) for i in range(40)]


def test_a_file_is_a_haystack_of_its_own(tmp_path: Path, mini_tokenizer):
    """A local text is used from its start, and its hash is in the prompt_id."""
    path = tmp_path / "essay.txt"
    path.write_text("The cat sat on\nthe mat.  It was warm! " * 60)
    task = NiahSingle2(haystack=str(path))
    example = task.example(random.Random(0), id="x", length=600, turns=1, tokenizer=mini_tokenizer)
    assert "The cat sat on the mat. It was warm!" in example.context
    assert task.prompt_id.startswith("ruler-niah/file:") and len(task.prompt_id) == len("ruler-niah/file:@1") + 12
    assert NiahSingle2().prompt_id == "ruler-niah/prose@1"


@pytest.mark.parametrize("text", [None, "Too short a text.", b"\xff\xfe\x00"])
def test_an_unusable_file_is_the_users_mistake(tmp_path: Path, mini_tokenizer, text):
    """A file that is missing, too small or no text is named with the next step."""
    path = tmp_path / "essay.txt"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=r"essay\.txt'.*generated prose"):
        NiahSingle2(haystack=str(path)).example(random.Random(0), id="x", length=600, turns=1, tokenizer=mini_tokenizer)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        (" 1234567.", ["1234567"], 1.0),
        ("The number is 12345678", ["1234567"], 1.0),
        (" 123456", ["1234567"], 0.0),
        ("123\n4567", ["1234567"], 0.0),
        ("123\x024567", ["123\n4567"], 1.0),
        ("", ["1234567"], 0.0),
        ("7654321 and 1111111", ["7654321", "1234567"], 0.5),
        ("RED-FOX", ["red-fox"], 1.0),
        ("  \x00 a b \x1f ", ["a b"], 1.0),
    ],
)
def test_string_match_all(prediction, references, score):
    """RULER's score: the share of references inside the cleaned prediction, without regard to case."""
    assert STRING_MATCH_ALL.score(prediction, references) == score
