"""Tasks in SCBench's format that are generated: names, wording, lengths, and where what is asked for stands."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.registry import list_entries
from kvbench.task import count_prompt, encode, prompt_tokens
from kvbench.tasks.ruler.chains import VariableChain
from kvbench.tasks.scbench.generated.articles import Article, ArticleSummary
from kvbench.tasks.scbench.generated.functions import Function
from kvbench.tasks.scbench.generated.generator import Generated
from kvbench.tasks.scbench.generated.hops import MultiHop
from kvbench.tasks.scbench.generated.numbers import GeneratedMathFind
from kvbench.tasks.scbench.generated.repository import RepoFunction
from kvbench.tasks.scbench.generated.shots import ManyShot, Shot
from kvbench.tasks.scbench.generated.strings import PrefixSuffixCharacters, PrefixSuffixShort

UNITS = {
    PrefixSuffixCharacters(): 30, PrefixSuffixShort(): 16, MultiHop(): 4, GeneratedMathFind(): 12, ManyShot(): 80,
    RepoFunction(): 200, ArticleSummary(): 40,
}
"""Each task with the most tokens that one of its units takes with the bundled model's tokenizer."""
TASKS = tuple(UNITS)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)

PARCELS = Function(
    "count_parcels", "def count_parcels(parcels):\n    return len(parcels)", "Purpose: Find out how many there are."
)
DROP = Function("drop_boxes", "def drop_boxes(boxes):\n    boxes.clear()", "Purpose: Forget them all.")
MILL = Article("The mill of Foxton", ("Ada Marsh will sell the mill of Foxton.", "It begins in May."), ("Ada Marsh",))
INN = Article("The inn of Ashbury", ("Leo Wyatt will heat the inn of Ashbury.", "It begins in June."), ("Leo Wyatt",))
EXAMPLES = {
    "prefix-suffix": PrefixSuffixCharacters().compose(
        ["aaaaaBBBBBcccccDDDDDeeeee", "^_`[]BBBBBcccccDDDDDzzzzz"], [1, 0], id="x"
    ),
    "prefix-suffix-short": PrefixSuffixShort().compose(["red-1234567-fox", "old-7654321-oak"], [1, 0], id="x"),
    "multi-hop": MultiHop().compose([VariableChain("12345", ("AAAAA", "BBBBB", "CCCCC"))], [0], 57, seed=0, id="x"),
    "math-find": GeneratedMathFind().compose(
        [5000000, 9000000, 1000000, 7000000, 3000000], ["second largest number", "median"], id="x"
    ),
    "many-shot": ManyShot().compose(
        [Shot("gobik", "mosk", ("tark", "mosk", "plen", "fid"))],
        [Shot("dafik", "mosk", ("fid", "plen", "tark", "mosk"))], id="x",
    ),
    "repo-function": RepoFunction().compose([PARCELS, DROP], [1, 0], id="x"),
    "article-summary": ArticleSummary().compose([MILL, INN], [1], [], seed=0, id="x"),
}
GOLDEN = {
    "prefix-suffix": (
        "Find the string with the given prefix and suffix in the list of strings below.\n\n"
        "aaaaaBBBBBcccccDDDDDeeeee\n^_`[]BBBBBcccccDDDDDzzzzz\n\n"
        'Prefix: "^_`[]"\nSuffix: "zzzzz"\nThe string with this prefix and this suffix is: '
        "^_`[]BBBBBcccccDDDDDzzzzz\n\n"
        'Prefix: "aaaaa"\nSuffix: "eeeee"\nThe string with this prefix and this suffix is: aaaaaBBBBBcccccDDDDDeeeee'
    ),
    "prefix-suffix-short": (
        "Find the string with the given prefix and suffix in the list of strings below.\n\n"
        "red-1234567-fox\nold-7654321-oak\n\n"
        'Prefix: "old-"\nSuffix: "-oak"\nThe string with this prefix and this suffix is: old-7654321-oak\n\n'
        'Prefix: "red-"\nSuffix: "-fox"\nThe string with this prefix and this suffix is: red-1234567-fox'
    ),
    "multi-hop": (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "VAR AAAAA = 12345\n"
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
        "VAR BBBBB = VAR AAAAA \n"
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
        "VAR CCCCC = VAR BBBBB \n"
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n\n"
        "Question: Find all variables that are assigned the value 12345 in the text above. Answer: According to the "
        "chain(s) of variable assignment in the text above, 3 variables are assigned the value 12345, they are:  "
        "AAAAA BBBBB CCCCC"
    ),
    "math-find": (
        "[5000000, 9000000, 1000000, 7000000, 3000000]\n\n"
        "What is the second largest number of the list?\n\nYou should answer with only one number, no other words. "
        "The second largest number of the list is: 7000000\n\n"
        "What is the median of the list?\n\nYou should answer with only one number, no other words. "
        "The median of the list is: 5000000"
    ),
    "many-shot": (
        'Q: Which group does the word "gobik" belong to?\nOptions:\n(A) tark\n(B) mosk\n(C) plen\n(D) fid\nA: (B)\n\n'
        'Q: Which group does the word "dafik" belong to?\nOptions:\n(A) fid\n(B) plen\n(C) tark\n(D) mosk\nA: (D)'
    ),
    "repo-function": (
        "Based on the function description and code context, please retrieve and repeat the exact described function "
        "from the code context in a code block wrapped by ```:\n\n"
        "def count_parcels(parcels):\n    return len(parcels)\n\n\ndef drop_boxes(boxes):\n    boxes.clear()\n\n"
        "Function description:\nPurpose: Forget them all.\ndef drop_boxes(boxes):\n    boxes.clear()\n\n"
        "Function description:\nPurpose: Find out how many there are.\n"
        "def count_parcels(parcels):\n    return len(parcels)"
    ),
    "article-summary": (
        "The mill of Foxton\nAda Marsh will sell the mill of Foxton. It begins in May.\n\n"
        "The inn of Ashbury\nLeo Wyatt will heat the inn of Ashbury. It begins in June.\n\n"
        'Summarise the article "The inn of Ashbury": who will do what, what it costs, when it begins, and who says '
        "what of it.\nSummary:\nLeo Wyatt will heat the inn of Ashbury.\nIt begins in June."
    ),
}


def make(task: Generated, tokenizer, *, seed=0, length=2000, turns=3):
    return task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=tokenizer)


def depths_of(example, turn):
    """Of what one of three turns asks for."""
    if "depths" in example.turns[turn].facts:
        return example.turns[turn].facts["depths"]
    size = len(example.facts["depths"]) // 3
    return example.facts["depths"][turn * size : (turn + 1) * size]


def test_no_name_is_scbenchs():
    """Generated tasks are never taken for SCBench's own: they have other names, in another folder."""
    names = {x.name for x in list_entries("task") if ".scbench.generated." in x.module}
    assert names == {task.name for task in TASKS}
    assert not any(name.startswith("scbench") for name in names)


@each_task
def test_the_text_is_as_written(task: Generated, chars):
    """A conversation with reference history, to the byte."""
    encoded = encode(task, EXAMPLES[task.name], chars)
    talk = [encoded.context]
    for i, turn in enumerate(encoded.turns):
        talk += [turn.later if i else turn.first, turn.answer]
    assert "".join(map(chars.decode, talk)) == GOLDEN[task.name]


@pytest.mark.few
@each_task
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6), extra=st.integers(0, 900))
def test_prompt_fills_the_length(task: Generated, mini_tokenizer, seed, turns, extra):
    """Prompt and generation never exceed the length and come within one unit of it, from the minimum length on."""
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = make(task, mini_tokenizer, seed=seed, length=length, turns=turns)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    assert length - UNITS[task] <= used <= length


@each_task
def test_every_sample_fits_the_minimum_length(task: Generated, mini_tokenizer):
    """Its fewest units do, whatever is drawn: a run must not stop at its longest sample."""
    drawn = (task.prepare(random.Random(f"x{i}"), id="", turns=3, most=task.least(3)) for i in range(150))
    frame = task.frame(mini_tokenizer)
    sizes = [count_prompt(task, build(task.least(3)), mini_tokenizer, frame) + task.max_new_tokens for build in drawn]
    assert max(sizes) <= task.minimum_length(3, mini_tokenizer)


@each_task
def test_reference_answers_fit_their_limit(task: Generated, mini_tokenizer):
    """No answer needs more new tokens than a turn has, the end of text included."""
    for seed in range(5):
        example = make(task, mini_tokenizer, seed=seed)
        answers = [turn.answer for turn in encode(task, example, mini_tokenizer).turns]
        assert all(len(answer) < turn.max_new_tokens for answer, turn in zip(answers, example.turns, strict=True))


@each_task
def test_the_official_scorers_take_the_reference_answers(task: Generated, mini_tokenizer):
    """Every scorer gives 1 to every reference answer, whatever its turn."""
    example = make(task, mini_tokenizer)
    for turn in example.turns:
        facts = {**example.facts, **turn.facts}
        assert [scorer(turn.answer, turn.references, facts) for scorer in task.scorers] == [1.0] * len(task.scorers)


@pytest.mark.few
@each_task
def test_what_is_asked_for_is_anywhere(task: Generated, mini_tokenizer):
    """Depths of what a turn asks for are spread over the whole context, and the first turn is no exception."""
    examples = [make(task, mini_tokenizer, seed=seed) for seed in range(40)]
    for turn in range(3):
        found = [depth for example in examples for depth in depths_of(example, turn)]
        assert min(found) < 0.15 and max(found) > 0.85
        assert 0.35 < sum(found) / len(found) < 0.65


@each_task
def test_too_short_a_length_is_the_users_mistake(task: Generated, mini_tokenizer):
    """A length that cannot hold what is asked for is refused with the task's name and what it needs."""
    with pytest.raises(UserError, match=rf"^{task.name} with 5 turns needs \d+ tokens at least"):
        make(task, mini_tokenizer, length=task.max_new_tokens + 30, turns=5)
