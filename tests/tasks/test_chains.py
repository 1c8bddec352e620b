"""Links that are followed step by step: wording, lengths, chains apart, and what a wrong step costs."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import encode, prompt_tokens
from kvbench.tasks.growth.chains import INTRO, SLACK, Chain

TASK = Chain()
ONE = ("red-fox", "old-oak", "dry-ice", "big-sky", "wet-sand")
TWO = ("icy-bay", "hot-tea", "new-car", "raw-egg", "sad-owl")
"""Two chains of four steps."""


def test_the_text_is_as_written(chars):
    """Two turns with reference history, to the byte; the links are those of all chains, shuffled by the seed."""
    example = TASK.compose([ONE, TWO], 2, seed=3, id="x", tokenizer=chars)
    encoded = encode(TASK, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == (
        "Below is a list of links, each from one name to another. You will be asked to follow them.\n\n"
        "red-fox -> old-oak\nhot-tea -> new-car\nraw-egg -> sad-owl\ndry-ice -> big-sky\n"
        "old-oak -> dry-ice\nnew-car -> raw-egg\nicy-bay -> hot-tea\nbig-sky -> wet-sand\n\n"
        "Start at red-fox and follow the links for 4 steps. "
        "Write the name that each step leads to, one per line:\n"
        "old-oak\ndry-ice\nbig-sky\nwet-sand\n\n"
        "Start at icy-bay and follow the links for 4 steps. "
        "Write the name that each step leads to, one per line:\n"
        "hot-tea\nnew-car\nraw-egg\nsad-owl"
    )
    assert [turn.max_new_tokens for turn in example.turns] == [len(one.answer) + SLACK, len(two.answer) + SLACK]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5), extra=st.integers(0, 600))
def test_prompt_and_answer_fill_the_length(mini_tokenizer, seed, turns, extra):
    """Prompt and limit never exceed the length and come within one step of every chain, from the minimum length on."""
    length = TASK.minimum_length(turns, mini_tokenizer) + extra
    example = TASK.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(TASK, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    links = example.context.removeprefix(INTRO).split("\n")
    longest = max(len(mini_tokenizer(f"{link}\n").input_ids) for link in links)
    assert length - (max(2, turns) + 1) * longest <= used <= length


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5))
def test_each_turn_follows_a_chain_of_its_own(mini_tokenizer, seed, turns):
    """Links lead from start to end without a name twice, chains share no name, and there are two at least."""
    example = TASK.example(random.Random(seed), id="x", length=1200, turns=turns, tokenizer=mini_tokenizer)
    lines = example.context.removeprefix(INTRO).split("\n")
    assert all(re.fullmatch(r"[a-z]{3,6}-[a-z]{3,6} -> [a-z]{3,6}-[a-z]{3,6}", line) for line in lines)
    links = dict(line.split(" -> ") for line in lines)
    assert links == example.facts["links"] and len(links) == len(lines)
    seen = set()
    for turn in example.turns:
        at = turn.facts["start"]
        for step in turn.references:
            assert at not in seen
            seen.add(at)
            at = links[at]
            assert at == step
        assert at not in links
        seen.add(at)
        assert f"Start at {turn.facts['start']} and follow the links for {len(turn.references)} steps." in turn.question
    assert len(lines) == max(2, turns) * len(example.turns[0].references)


def test_too_short_a_length_is_the_users_mistake(mini_tokenizer):
    """With the task's name."""
    with pytest.raises(UserError, match="chain with 2 turns needs"):
        TASK.example(random.Random(0), id="x", length=80, turns=2, tokenizer=mini_tokenizer)


LINKS = {**dict(pairwise(ONE)), **dict(pairwise(TWO))}


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (ONE[1:], [1, 1, 1, 1, 1, 1]),
        ((), [0, 0, 0, 0, 0, 0]),
        (("I cannot follow links.",), [0, 0, 0, 0, 0, 0]),
        # Cut short in the third line.
        (("old-oak", "dry-ice", "big"), [2 / 4, 1, 1, 0, 0, 2 / 4]),
        # White space and empty lines.
        (("  old-oak", "", "dry-ice\r", " ", "big-sky", "wet-sand"), [1, 1, 1, 1, 1, 1]),
        # A slip into the other chain, followed from there: three wrong places, one wrong step.
        (("old-oak", "new-car", "raw-egg", "sad-owl"), [1 / 4, 1, 0, 0, 0, 3 / 4]),
        # A step left out: out of place from then on, and one wrong step.
        (("dry-ice", "big-sky", "wet-sand"), [0, 0, 0, 0, 0, 2 / 4]),
        # A step said twice.
        (("old-oak", "old-oak", "dry-ice", "big-sky"), [1 / 4, 1, 0, 0, 0, 3 / 4]),
        # A name that is none, and back in place: right there, but not from where it came.
        (("old-oak", "dry-oak", "big-sky", "wet-sand"), [3 / 4, 1, 0, 1, 1, 2 / 4]),
        # Beyond the end nothing counts.
        ((*ONE[1:], "hot-tea", "red-fox"), [1, 1, 1, 1, 1, 1]),
        # The links themselves are not the names.
        (tuple(f"{a} -> {b}" for a, b in pairwise(ONE)), [0, 0, 0, 0, 0, 0]),
    ],
)
def test_steps(prediction, expected):
    """In place by the reference chain: all and quarters; and by the prediction's own step before."""
    facts = {"start": "red-fox", "links": LINKS, "other": 1}
    assert [scorer("\n".join(prediction), ONE[1:], facts) for scorer in TASK.scorers] == expected


def test_scorers_are_versioned():
    """The primary scorer comes first."""
    assert [(scorer.id, scorer.metric) for scorer in TASK.scorers] == [
        ("growth-chain@1", "chain"), ("growth-chain-q1@1", "chain_q1"), ("growth-chain-q2@1", "chain_q2"),
        ("growth-chain-q3@1", "chain_q3"), ("growth-chain-q4@1", "chain_q4"), ("growth-steps@1", "steps"),
    ]
