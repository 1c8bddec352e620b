"""Key-value retrieval in SCBench's format."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import encode, prompt_tokens
from kvbench.tasks.scbench import kv
from kvbench.tasks.scbench.kv import INTRO, KeyValue, KeyValueShort, KeyValueUuid

TASKS = (KeyValueUuid(), KeyValueShort())
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)

GOLDEN = (
    "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    'JSON data:\n{"red-fox": "1234567", "old-oak": "7654321"}\n\n'
    '\nKey: "old-oak"\nThe value associated with the specified key is: 7654321\n\n'
    '\nKey: "red-fox"\nThe value associated with the specified key is: 1234567'
)


def test_the_text_is_scbenchs(chars):
    """Two turns with reference history are SCBench's text, to the byte."""
    task = KeyValueShort()
    example = task.compose([("red-fox", "1234567"), ("old-oak", "7654321")], [1, 0], id="x")
    encoded = encode(task, example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first + one.answer + two.later + two.answer) == GOLDEN
    assert [(turn.references, turn.max_new_tokens, turn.prefix) for turn in example.turns] == [
        (("7654321",), 150, ""),
        (("1234567",), 150, ""),
    ]


@pytest.mark.few
@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6), extra=st.integers(0, 900))
def test_prompt_fills_the_length(task: KeyValue, mini_tokenizer, seed, turns, extra):
    """Prompt and generation never exceed the length and come within one pair of it, from the minimum length on."""
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    pair = '"{0}": "{0}", '.format("8-" * 18 if task.name == "kv" else "mmmmmm-mmmmmm")
    assert length - len(mini_tokenizer(pair).input_ids) <= used <= length


@each_task
def test_an_order_of_pairs_with_more_tokens_has_fewer_pairs(task: KeyValue, mini_tokenizer, monkeypatch):
    """As with tokenizers that merge over the border of two pairs: here every order but the first one has 100 more."""
    plain = task.example(random.Random(0), id="x", length=1024, turns=2, tokenizer=mini_tokenizer)
    count = kv.count_prompt

    def count_more(self, example, tokenizer, frame):
        return count(self, example, tokenizer, frame) + (0 if example.facts["depths"][0] < 0.01 else 100)

    monkeypatch.setattr(kv, "count_prompt", count_more)
    example = task.example(random.Random(0), id="x", length=1024, turns=2, tokenizer=mini_tokenizer)
    assert count_more(task, example, mini_tokenizer, task.frame(mini_tokenizer)) <= 1024 - kv.MAX_NEW_TOKENS
    assert example.facts["pairs"] < plain.facts["pairs"]
    assert set(example.facts["keys"]) == set(plain.facts["keys"])


@each_task
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 6))
def test_each_turn_asks_for_its_own_pair(task: KeyValue, mini_tokenizer, seed, turns):
    """The context is one JSON object; turn i asks for key i, whose value is the reference; no key is asked twice."""
    example = task.example(random.Random(seed), id="x", length=1400, turns=turns, tokenizer=mini_tokenizer)
    data = json.loads(example.context.removeprefix(INTRO))
    assert len(data) == example.facts["pairs"] == len(set(data.values()))
    assert len(set(example.facts["keys"])) == turns
    for key, turn in zip(example.facts["keys"], example.turns, strict=True):
        assert f'Key: "{key}"\n' in turn.question
        assert turn.references == (data[key],) and turn.answer == data[key]
        assert example.context.count(data[key]) == 1


def test_asked_pairs_are_anywhere(mini_tokenizer):
    """The asked pairs are spread over the whole object."""
    task = KeyValueShort()
    depths = [
        depth
        for seed in range(20)
        for depth in task.example(random.Random(seed), id="x", length=600, turns=3, tokenizer=mini_tokenizer).facts[
            "depths"
        ]
    ]
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_kv_has_uuids(mini_tokenizer):
    """Keys and values of `kv` are 36-character UUIDs of version 4."""
    example = KeyValueUuid().example(random.Random(0), id="x", length=1400, turns=1, tokenizer=mini_tokenizer)
    for text in (example.facts["keys"][0], example.turns[0].references[0]):
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", text)


@each_task
def test_too_short_a_length_is_the_users_mistake(task: KeyValue, mini_tokenizer):
    """A length that cannot hold the asked pairs is refused with the task's name and what it needs."""
    with pytest.raises(UserError, match=rf"{task.name} with 5 turns needs \d+ tokens at least"):
        task.example(random.Random(0), id="x", length=200, turns=5, tokenizer=mini_tokenizer)


@pytest.mark.parametrize(
    ("prediction", "score"), [("7654321", 1.0), (' "7654321"', 1.0), ("765432", 0.0), ("", 0.0), ("ABC", 0.0)]
)
def test_contains(prediction, score):
    """SCBench's score: the label is inside the raw prediction."""
    scorer = KeyValueShort.scorers[0]
    assert scorer.id == "scbench-kv@1"
    assert scorer.score(prediction, ("7654321",)) == score


def test_contains_regards_case():
    """SCBench compares raw text."""
    scorer = KeyValueUuid.scorers[0]
    assert scorer.score("ABC", ("abc",)) == 0.0
