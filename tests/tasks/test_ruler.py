"""RULER's needles: wording, lengths, places and scores."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.ruler.haystack import NOISE, NeedleHaystack, NoiseHaystack, ProseHaystack, cut
from kvbench.tasks.ruler.niah import (
    Niah,
    NiahMultikey1,
    NiahMultikey2,
    NiahMultikey3,
    NiahMultiquery,
    NiahMultivalue,
    NiahSingle1,
    NiahSingle2,
    NiahSingle3,
)
from kvbench.tasks.ruler.scoring import STRING_MATCH_ALL
from kvbench.tasks.ruler.values import longest

TASKS = (
    NiahSingle1(),
    NiahSingle2(),
    NiahSingle3(),
    NiahMultikey1(),
    NiahMultikey2(),
    NiahMultikey3(),
    NiahMultivalue(),
    NiahMultiquery(),
)
NEEDLES = (NiahMultikey2(), NiahMultikey3())
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
each_needle_task = pytest.mark.parametrize("task", NEEDLES, ids=lambda task: task.name)
LINE = re.compile(r"One of the special magic (?:numbers|uuids) for ([^:]+) is: ([-0-9a-f]+)\.")
"""A needle: key and value."""
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Fixed:
    """A haystack of one known sentence on either side of the needles."""

    def text(self, n, needles):
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


A, B, C, D = (
    "8d0f2a64-1c3b-4e5f-8a7b-9c0d1e2f3a4b",
    "0a1b2c3d-4e5f-4a6b-8c7d-8e9fa0b1c2d3",
    "11111111-2222-4333-8444-555555555555",
    "66666666-7777-4888-9999-aaaaaaaaaaaa",
)
WORDS = [("red-fox", "1234567"), ("old-oak", "7654321"), ("dry-ice", "1111111"), ("big-sky", "2222222")]
ONE_KEY = [("red-fox", value) for _, value in WORDS]

GOLDEN = {
    "niah_single_1": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
        "One of the special magic numbers for red-fox is: 1234567.\n"
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
        "What is the special magic number for red-fox mentioned in the provided text? The special magic number for "
        "red-fox mentioned in the provided text is"
    ),
    "niah_single_2": GOLDEN_SINGLE,
    "niah_single_3": (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the uuid afterwards.\n"
        "Before. One of the special magic uuids for red-fox is: 8d0f2a64-1c3b-4e5f-8a7b-9c0d1e2f3a4b. After.\n"
        "What is the special magic uuid for red-fox mentioned in the provided text? The special magic uuid for red-fox "
        "mentioned in the provided text is"
    ),
    "niah_multikey_1": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
        "Before. One of the special magic numbers for red-fox is: 1234567. One of the special magic numbers for old-oak"
        " is: 7654321. One of the special magic numbers for dry-ice is: 1111111. One of the special magic numbers for "
        "big-sky is: 2222222. After.\n"
        "What is the special magic number for old-oak mentioned in the provided text? The special magic number for "
        "old-oak mentioned in the provided text is"
    ),
    "niah_multikey_2": (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\n"
        "One of the special magic numbers for red-fox is: 1234567.\n"
        "One of the special magic numbers for old-oak is: 7654321.\n"
        "What is the special magic number for red-fox mentioned in the provided text? The special magic number for "
        "red-fox mentioned in the provided text is"
    ),
    "niah_multikey_3": (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the uuid afterwards.\n"
        "One of the special magic uuids for 8d0f2a64-1c3b-4e5f-8a7b-9c0d1e2f3a4b is: "
        "0a1b2c3d-4e5f-4a6b-8c7d-8e9fa0b1c2d3.\n"
        "One of the special magic uuids for 11111111-2222-4333-8444-555555555555 is: "
        "66666666-7777-4888-9999-aaaaaaaaaaaa.\n"
        "What is the special magic uuid for 8d0f2a64-1c3b-4e5f-8a7b-9c0d1e2f3a4b mentioned in the provided text? The "
        "special magic uuid for 8d0f2a64-1c3b-4e5f-8a7b-9c0d1e2f3a4b mentioned in the provided text is"
    ),
    "niah_multivalue": (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
        "Before. One of the special magic numbers for red-fox is: 1234567. One of the special magic numbers for red-fox"
        " is: 7654321. One of the special magic numbers for red-fox is: 1111111. One of the special magic numbers for "
        "red-fox is: 2222222. After.\n"
        "What are all the special magic numbers for red-fox mentioned in the provided text? The special magic numbers "
        "for red-fox mentioned in the provided text are"
    ),
    "niah_multiquery": (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
        "Before. One of the special magic numbers for red-fox is: 1234567. One of the special magic numbers for old-oak"
        " is: 7654321. One of the special magic numbers for dry-ice is: 1111111. One of the special magic numbers for "
        "big-sky is: 2222222. After.\n"
        "What are all the special magic numbers for old-oak, big-sky, red-fox, and dry-ice mentioned in the provided "
        "text? The special magic numbers for old-oak, big-sky, red-fox, and dry-ice mentioned in the provided text are"
    ),
}
NUMBER_LINE = "One of the special magic numbers for {} is: {}.".format
UUID_LINE = "One of the special magic uuids for {} is: {}.".format
NOISE_ONE = NoiseHaystack(random.Random(0))
# Haystack, units of it, pairs, what is asked for, and the reference answer with its references.
CASES = {
    "niah_single_1": (NOISE_ONE, 19, WORDS[:1], [0], " 1234567.", ("1234567",)),
    "niah_single_2": (Fixed(), 0, WORDS[:1], [0], " 1234567.", ("1234567",)),
    "niah_single_3": (Fixed(), 0, [("red-fox", A)], [0], f" {A}.", (A,)),
    "niah_multikey_1": (Fixed(), 0, WORDS, [1], " 7654321.", ("7654321",)),
    "niah_multikey_2": (
        NeedleHaystack(random.Random(0), iter(WORDS[1:]), NUMBER_LINE),
        1,
        WORDS[:1],
        [0],
        " 1234567.",
        ("1234567",),
    ),
    "niah_multikey_3": (NeedleHaystack(random.Random(0), iter([(C, D)]), UUID_LINE), 1, [(A, B)], [0], f" {B}.", (B,)),
    "niah_multivalue": (
        Fixed(),
        0,
        ONE_KEY,
        [0],
        " 1234567, 7654321, 1111111, and 2222222.",
        ("1234567", "7654321", "1111111", "2222222"),
    ),
    "niah_multiquery": (
        Fixed(),
        0,
        WORDS,
        [1, 3, 0, 2],
        " 7654321, 2222222, 1234567, and 1111111.",
        ("7654321", "2222222", "1234567", "1111111"),
    ),
}


@each_task
def test_one_question_is_rulers_prompt(task: Niah, chars):
    """With one turn, the text without a chat template is RULER's prompt to the byte, in its singular where one is."""
    haystack, n, pairs, asked, answer, references = CASES[task.name]
    example = task.compose(haystack, pairs, asked, n, id="x")
    (turn,) = example.turns
    encoded = encode(task, example, chars)
    assert chars.decode(encoded.context + encoded.turns[0].first) == GOLDEN[task.name]
    assert (turn.answer, turn.references, turn.max_new_tokens) == (answer, references, 128)


def test_several_questions_share_a_plural_introduction(chars):
    """With two turns, the introduction is RULER's plural and each question is singular, on a line after the answer."""
    task = NiahMultikey1()
    example = task.compose(Fixed(), [("red-fox", "1234567"), ("old-oak", "7654321")], [1, 0], 0, id="x")
    encoded = encode(task, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == GOLDEN_MANY


def test_a_question_may_come_again():
    """A training script may ask for any number of questions, with keys that repeat."""
    example = NiahMultiquery().compose(Fixed(), WORDS, [3, 2, 1, 0, 0, 1, 2, 3, 3, 2, 1, 0], 0, id="x")
    assert len(example.turns) == 3 and example.turns[0] == example.turns[2] != example.turns[1]
    again = NiahMultivalue().compose(Fixed(), [*ONE_KEY, ("old-oak", "3333333")], [1, 4, 0], 0, id="x")
    assert [turn.answer for turn in again.turns] == [
        " 1234567, 7654321, 1111111, and 2222222.",
        " 3333333.",
        " 1234567, 7654321, 1111111, and 2222222.",
    ]


def test_values_stand_in_the_order_of_the_context():
    """A haystack may place needles in another order than they are given in: the answer follows the text."""

    class Reversed:
        def text(self, n, needles):
            return "\n".join(reversed(needles))

    example = NiahMultivalue().compose(Reversed(), ONE_KEY, [0], 0, id="x")
    assert example.turns[0].references == ("2222222", "1111111", "7654321", "1234567")
    assert example.facts["depths"] == sorted(example.facts["depths"]) and len(example.facts["depths"]) == 4


@pytest.mark.few(3)
@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6), extra=st.integers(0, 700))
def test_prompt_fills_the_length(task: Niah, mini_tokenizer, seed, turns, extra):
    """Prompt and generation never exceed the length and come within a unit of it, from the minimum length on."""
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    line = task.needle(longest(task.key_kind, mini_tokenizer), longest(task.value_kind, mini_tokenizer))
    unit = len(mini_tokenizer(f"{line}\n").input_ids) if task in NEEDLES else 8
    assert length - unit <= used <= length


@pytest.mark.few
@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5))
def test_each_turn_asks_for_needles_of_its_own(task: Niah, mini_tokenizer, seed, turns):
    """A turn's references are all values of the keys it names, in the order asked; no turn shares a key or a value."""
    example = task.example(random.Random(seed), id="x", length=1700, turns=turns, tokenizer=mini_tokenizer)
    keys, depths = example.facts["keys"], iter(example.facts["depths"])
    needles = LINE.findall(example.context)
    assert len(set(keys)) == len(keys) == turns * task.queries
    assert len({value for _, value in needles}) == len(needles)
    if task not in NEEDLES:
        assert len(needles) == max(task.keys, turns * task.queries) * task.values
    for i, turn in enumerate(example.turns):
        own = keys[i * task.queries : (i + 1) * task.queries]
        named = own[0] if len(own) == 1 else f"{own[0]}, {own[1]}, {own[2]}, and {own[3]}"
        assert f" for {named} mentioned" in turn.question and f" for {named} mentioned" in turn.prefix
        assert turn.references == tuple(value for key in own for other, value in needles if other == key)
        assert len(turn.references) == task.queries * task.values
        for reference in turn.references:
            place = example.context.index(f"is: {reference}.")
            start = example.context.rindex("One of the special magic", 0, place) - example.context.index("\n") - 1
            assert next(depths) == round(start / (len(example.context) - example.context.index("\n") - 1), 4)
            assert example.context.count(reference) == 1
            assert re.fullmatch(UUID if task.value_kind == "uuids" else r"[1-9]\d{6}", reference)
    assert next(depths, None) is None


@each_needle_task
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), needles=st.integers(1, 6), extra=st.integers(0, 60))
def test_a_needle_haystack_holds_as_many_lines_as_it_says(task: Niah, seed, needles, extra):
    """Every line is a needle; no key and no value comes twice; of one sample, more lines keep the fewer."""
    rng = random.Random(seed)
    pairs = task.draw_pairs(rng, needles)
    haystack = task.haystack_for(rng)
    lines, more = (task.compose(haystack, pairs, [0], n, id="x").context.split("\n")[1:] for n in (needles + extra, 70))
    assert len(lines) == 2 * needles + extra and set(lines) <= set(more)
    found = [LINE.fullmatch(line).groups() for line in lines]
    assert set(pairs) <= set(found)
    assert len({key for key, _ in found}) == len({value for _, value in found}) == len(lines)
    if task.key_kind == "uuids":
        assert all(UUID.fullmatch(part) for pair in found for part in pair)


def test_a_needle_haystack_leaves_out_what_is_asked_for():
    """A line whose key or value a needle has, or an earlier line, is not shown."""
    drawn = [
        ("red-fox", "3333333"),
        ("hot-tea", "1234567"),
        ("old-oak", "7654321"),
        ("old-oak", "4444444"),
        ("new-hat", "7654321"),
        ("dry-ice", "1111111"),
    ]
    haystack = NeedleHaystack(random.Random(0), iter(drawn), NUMBER_LINE)
    text = haystack.text(2, [NUMBER_LINE("red-fox", "1234567")])
    assert sorted(text.split("\n")) == sorted(NUMBER_LINE(*pair) for pair in WORDS[:3])


@pytest.mark.few
@each_needle_task
def test_the_minimum_length_covers_the_longest_needles_among_any_lines(task: Niah, mini_tokenizer):
    """The longest key and value fit at the minimum length, whatever lines the haystack has."""
    pair = longest(task.key_kind, mini_tokenizer), longest(task.value_kind, mini_tokenizer)
    for seed in range(100):
        haystack = task.haystack_for(random.Random(seed))
        example = task.compose(haystack, [pair], [0], haystack.least(1), id="x")
        assert prompt_tokens(encode(task, example, mini_tokenizer)) + 128 <= task.minimum_length(1, mini_tokenizer)


def test_values_of_several_keys_are_mixed():
    """With several turns, the needles of one key do not stand together."""
    runs = [
        sum(one != two for one, two in itertools.pairwise(key for key, _ in pairs))
        for pairs in (NiahMultivalue().draw_pairs(random.Random(seed), 3) for seed in range(20))
    ]
    assert sum(runs) / len(runs) > 6  # grouped: 2; 12 needles in random order: 8 on average


def test_prompt_ids_tell_wordings_and_haystacks_apart():
    """Only tasks of one template and one haystack share an id."""
    assert [task.prompt_id for task in TASKS] == [
        "ruler-niah/noise@1",
        "ruler-niah/prose@1",
        "ruler-niah/prose-uuids@1",
        "ruler-niah/prose@1",
        "ruler-niah/needle@1",
        "ruler-niah/needle-uuids@1",
        "ruler-niah/prose@1",
        "ruler-niah/prose@1",
    ]


@each_task
def test_too_short_a_length_is_the_users_mistake(task: Niah, mini_tokenizer):
    """A length that cannot hold the needles is refused with the task's name and what it needs."""
    with pytest.raises(UserError, match=rf"{task.name} with 5 turns needs \d+ tokens at least"):
        task.example(random.Random(0), id="x", length=200, turns=5, tokenizer=mini_tokenizer)


@pytest.mark.few
@each_task
def test_needles_move(task: Niah, mini_tokenizer):
    """The answer's depth differs from sample to sample (RULER's own shuffle is the same in all of them)."""
    length = 1400 if task.key_kind == "uuids" else 700
    examples = task.examples(
        seed=0, split=Split.DEV, n=30, length=length, turns=1, mode=Mode.SINGLE, tokenizer=mini_tokenizer
    )
    depths = [depth for example in examples for depth in example.facts["depths"]]
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
