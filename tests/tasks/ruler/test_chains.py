"""RULER's variable tracking: wording, places, lengths, and that nothing comes twice."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.ruler.chains import VariableChain, VariableTracking, fit_shot, longest, solve, weave

TASK = VariableTracking()
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
ONE = VariableChain("12345", ("AAAAA", "BBBBB", "CCCCC", "DDDDD", "EEEEE"))
TWO = VariableChain("67890", ("FFFFF", "GGGGG", "HHHHH", "IIIII", "JJJJJ"))
SOLVED = VariableChain("54321", ("UVW", "XYZ", "KLM", "NOP", "QRS"))
GOLDEN = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "VAR UVW = 54321\n"
    "VAR XYZ = VAR UVW \n"
    "The grass is green.\n"
    "Question: Find all variables that are assigned the value 54321 in the text above. Answer: According to the chain"
    "(s) of variable assignment in the text above, 5 variables are assigned the value 54321, they are:  UVW XYZ KLM "
    "NOP QRS\n\n"
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "VAR AAAAA = 12345\n"
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    "VAR BBBBB = VAR AAAAA \n"
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    "VAR CCCCC = VAR BBBBB \n"
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    "VAR DDDDD = VAR CCCCC \n"
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    "VAR EEEEE = VAR DDDDD \n"
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
    "Question: Find all variables that are assigned the value 12345 in the text above. Answer: According to the chain"
    "(s) of variable assignment in the text above, 5 variables are assigned the value 12345, they are: "
)
LATER = (
    " AAAAA BBBBB CCCCC DDDDD EEEEE\n"
    "Question: Find all variables that are assigned the value 67890 in the text above. Answer: According to the chain"
    "(s) of variable assignment in the text above, 5 variables are assigned the value 67890, they are: "
    " FFFFF GGGGG HHHHH IIIII JJJJJ"
)
ASSIGNED = re.compile(r"^VAR ([A-Z]+) = (?:(\d+)|VAR ([A-Z]+) )$", re.MULTILINE)


def some(tokenizer, **changes):
    request = {"seed": 0, "split": Split.TEST, "n": 30, "length": 1200, "turns": 1, "mode": Mode.SINGLE}
    return list(TASK.examples(**{**request, **changes}, tokenizer=tokenizer))


def follow(text):
    """The chains that a text assigns: names by value, in order."""
    value_of, found = {}, {}
    for name, number, before in ASSIGNED.findall(text):
        value_of[name] = number or value_of[before]
        assert not before or found[value_of[before]][-1] == before
        found.setdefault(value_of[name], []).append(name)
    return found


def test_one_question_is_rulers_prompt(chars):
    """With one turn, the text without a chat template is RULER's to the byte, trailing spaces included."""
    shot = solve("VAR UVW = 54321\nVAR XYZ = VAR UVW \nThe grass is green.", SOLVED)
    example = TASK.compose(shot, [ONE], [0], 5 * 19, seed=0, id="x")
    encoded = encode(TASK, example, chars)
    assert chars.decode(encoded.context + encoded.turns[0].first) == GOLDEN
    (turn,) = example.turns
    assert (turn.answer, turn.references, turn.max_new_tokens) == (" AAAAA BBBBB CCCCC DDDDD EEEEE", ONE.names, 30)
    assert example.facts["keys"] == ["12345"]


def test_several_questions_follow_in_the_same_words(chars):
    """With two turns, the second question stands on a line after the first answer."""
    example = TASK.compose("", [TWO, ONE], [1, 0], 190, seed=0, id="x")
    encoded = encode(TASK, example, chars)
    one, two = encoded.turns
    assert chars.decode(one.answer + two.later + two.answer) == LATER


def test_chains_stand_in_order_at_distinct_lines():
    """Lines of one chain keep their order, each before a noise line of its own; a later chain may come between."""
    for seed in range(50):
        text = weave([f"noise {i}" for i in range(6)], [ONE, TWO], seed)
        lines = text.split("\n")
        assert [x for x in lines if x in ONE.lines] == ONE.lines and [x for x in lines if x in TWO.lines] == TWO.lines
        assert [x for x in lines if x.startswith("noise")] == [f"noise {i}" for i in range(6)]
        alone = [x for x in lines if x not in TWO.lines]
        assert not any(x in ONE.lines and y in ONE.lines for x, y in itertools.pairwise(alone))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5), extra=st.integers(0, 3000))
def test_prompt_fills_the_length_and_answers_follow_from_it(mini_tokenizer, seed, turns, extra):
    """Prompt and limit come within a word of the length; following the assignments gives the references."""
    length = TASK.minimum_length(turns, mini_tokenizer) + extra
    example = TASK.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(TASK, example, mini_tokenizer)) + 30
    assert length - 8 <= used <= length
    shot, text = example.context.removeprefix("Memorize").split("Memorize")
    solved, chains = follow(shot), follow(text)
    assert len(chains) == turns and len(solved) == 1 and not set(solved) & set(chains)
    for turn in example.turns:
        (value,) = re.findall(r"the value (\d{5}) in", turn.question)
        assert turn.references == tuple(chains.pop(value)) and f"the value {value}, they are: " in turn.prefix
    (names,) = solved.values()
    assert f"they are:  {' '.join(names)}\n\n" in shot
    assert all(len(name) == 3 for name in names)
    every = [name for name, _, _ in ASSIGNED.findall(example.context)]
    assert len(every) == len(set(every)) == 5 * (turns + 1) and "VAR" not in every


def test_the_example_is_rulers_size_from_4096_tokens_on(mini_tokenizer):
    """As much noise as fits 500 tokens; below 4,096 tokens five lines of it."""
    shot = fit_shot(SOLVED, 0, 4096, mini_tokenizer)
    assert 492 <= len(mini_tokenizer(shot).input_ids) <= 500
    assert fit_shot(SOLVED, 0, 4095, mini_tokenizer).count(NOISE) == 5


def test_depths_are_those_of_the_asked_lines(mini_tokenizer):
    """Depths are the places of the lines asked for, and the first of them differs from sample to sample."""
    examples = some(mini_tokenizer)
    for example in examples:
        text = example.context.split("text.\n\n")[-1]
        places = [text.index(f"VAR {name} = ") for name in example.turns[0].references]
        assert example.facts["depths"] == [round(place / len(text), 4) for place in places]
    lasts = [example.facts["depths"][-1] for example in examples]
    assert min(lasts) < 0.7 and max(lasts) > 0.95 and len(set(lasts)) > 15


def test_the_longest_name_takes_a_token_a_letter_at_most(mini_tokenizer):
    """The names with which the minimum length is measured are no shorter than random names."""
    (name,) = set(longest(5, mini_tokenizer).names)
    rng = random.Random(7)
    drawn = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(500)]
    assert len(mini_tokenizer(name).input_ids) >= max(len(ids) for ids in mini_tokenizer(drawn).input_ids)


def test_too_short_a_length_is_the_users_mistake(mini_tokenizer):
    """A length that cannot hold the chains is refused with what it needs."""
    with pytest.raises(UserError, match=r"vt with 5 turns needs \d+ tokens at least"):
        some(mini_tokenizer, length=900, turns=5)
