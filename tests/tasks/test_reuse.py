"""Prompts whose documents occurred in earlier prompts."""

from __future__ import annotations

import json
import math

import pytest

from kvbench.custom.task import read_task
from kvbench.errors import UserError
from kvbench.registry import find_scorer, find_task
from kvbench.task import Mode, Split, encode
from kvbench.tasks.reuse.documents import INSTRUCTION, is_chosen, weigh_choices

NAMES = ["reuse-order", "reuse-hops", "reuse-edit", "reuse-agents"]


def make(name, tokenizer, n=3, length=700, turns=2, **settings):
    """Examples of a task."""
    return list(find_task(name)(**settings).examples(
        seed=0, split=Split.TEST, n=n, length=length, turns=turns, mode=Mode.MULTI_TURN, tokenizer=tokenizer
    ))


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_a_part_are_the_same_in_every_prompt(name, mini_tokenizer):
    """So that chunks fit; and the parts make up the context."""
    for example in make(name, mini_tokenizer):
        encoded = encode(find_task(name)(), example, mini_tokenizer)
        assert tuple(x for part in encoded.parts for x in part) == encoded.context
        known = {part for prompt in encoded.earlier for part in prompt}
        texts = {part for prompt in example.earlier for part in prompt}
        for text, ids in zip(example.parts, encoded.parts, strict=True):
            assert (text in texts) == (ids in known)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_fills_its_length_within_a_sentence(name, mini_tokenizer):
    """With the longest choice."""
    for example in make(name, mini_tokenizer, length=900):
        encoded = encode(find_task(name)(), example, mini_tokenizer)
        turn = encoded.turns[0]
        assert 860 <= len(encoded.context) + len(turn.first) + max(map(len, turn.choices)) <= 900


def test_order_keeps_the_documents_and_changes_their_order(mini_tokenizer):
    """The earlier prompts have the same documents in the reverse order, and rotated by one document."""
    for example in make("reuse-order", mini_tokenizer, documents=5):
        assert {x[0] for x in (example.parts, *example.earlier)} == {INSTRUCTION}
        now = example.parts[1:]
        assert [x[1:] for x in example.earlier] == [now[::-1], now[1:] + now[:1]]


def test_an_edit_changes_one_value_and_one_document(mini_tokenizer):
    """The other documents are as they were; the old value is a choice and is gone from the prompt."""
    for example in make("reuse-edit", mini_tokenizer, n=6):
        (before,) = example.earlier
        other = [(x, y) for x, y in zip(before, example.parts, strict=True) if x != y]
        assert len(other) == 2
        spare = example.turns[0].choices[-1].strip(" .")
        assert spare in "".join(before) and spare not in example.context


def test_agents_write_behind_the_reports_before_theirs(mini_tokenizer):
    """Each earlier prompt ends in the report that the next one has, too; instructions and notes differ."""
    for example in make("reuse-agents", mini_tokenizer):
        _, *reports = example.parts
        for i, prompt in enumerate(example.earlier):
            assert list(prompt[2:]) == reports[: i + 1]
            assert prompt[0] != INSTRUCTION


def test_hops_need_two_documents(mini_tokenizer):
    """One document has the name that the question asks for, and another has the number of that name."""
    for example in make("reuse-hops", mini_tokenizer):
        for turn in example.turns:
            name, value = turn.references[0].split(".")[0], turn.references[0][-7:]
            (first,) = [x for x in example.parts if f"{turn.prefix[1:]} {name}." in x]
            (second,) = [x for x in example.parts if f"for {name} is: {value}." in x]
            assert first != second and value not in first


def test_a_wrong_hop_is_a_wrong_choice(mini_tokenizer):
    """Another name with its own value, and the right name with another value, are choices and score 0."""
    for example in make("reuse-hops", mini_tokenizer):
        for turn in example.turns:
            name = turn.references[0].split(".")[0]
            wrong = [x for x in turn.choices if not is_chosen(x, turn.references)]
            assert len(wrong) == len(turn.choices) - 1 == 7
            assert sum(x.startswith(f" {name}.") for x in wrong) == 4
            assert sum(x[1:].partition(". ")[2] in example.context for x in wrong) == 3


def test_the_right_choice_is_in_every_prompt(mini_tokenizer):
    """And is the reference."""
    for name in NAMES:
        for example in make(name, mini_tokenizer):
            for turn in example.turns:
                assert turn.choices[turn.facts["answer"]] == turn.answer == f" {turn.references[0]}."
                assert turn.references[0][-7:] in example.context


def test_the_graded_score_is_the_log_probability_among_the_choices():
    """Worked out by hand: sums of -1 and -3, the second asked for."""
    found = weigh_choices("", [], logprobs=[[-0.5, -0.5], [-1.0, -2.0]], answer=1)
    assert found == pytest.approx(3 + math.log(math.exp(-1) + math.exp(-3)))


def write_task(folder, **record):
    """A task of one record in files."""
    (folder / "t.jsonl").write_text(json.dumps(
        {"id": "a", "turns": [{"question": "Which?", "answer": " two"}], **record}
    ))
    (folder / "t.toml").write_text(
        'name = "t"\nversion = "1"\nsummary = "s"\ndata = "t.jsonl"\nscorer = "exact@1"\nmax_new_tokens = 4\n'
    )
    return read_task(folder / "t.toml", find_scorer)


def test_a_file_can_name_parts_and_earlier_prompts(tmp_path, mini_tokenizer):
    """The parts make up the context."""
    parts, earlier = ["Read.\n", "one\n", "two\n"], [["Read.\n", "two\n"], ["one\n"]]
    kind = write_task(tmp_path, parts=parts, earlier=earlier)
    (example,) = kind().examples(
        seed=0, split=Split.TEST, n=1, length=100, turns=1, mode=Mode.SINGLE, tokenizer=mini_tokenizer
    )
    assert example.context == "Read.\none\ntwo\n"
    assert example.parts == tuple(parts)
    assert example.earlier == (("Read.\n", "two\n"), ("one\n",))


@pytest.mark.parametrize(("record", "words"), [
    ({"parts": ["a"], "context": "a"}, "leave the context out"),
    ({"context": "a", "earlier": [["a"]]}, "no parts"),
])
def test_a_file_with_a_context_twice_is_refused(record, words, tmp_path):
    """In one line that names the mistake."""
    with pytest.raises(UserError, match=words):
        write_task(tmp_path, **record)
