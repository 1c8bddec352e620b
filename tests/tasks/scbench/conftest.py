"""Small records in SCBench's schema, a tokenizer with a chat template, and the tasks on a file of such records."""

from __future__ import annotations

import copy
import json

import pytest

from kvbench.registry import find_task

RECORDS = {
    "scbench_kv": {
        "id": 0, "context": 'JSON data:\n{"a": "1", "b": "2"}',
        "multi_turns": [
            {"input": '\nKey: "a"\nThe value associated with the specified key is: ', "answer": "1"},
            {"input": '\nKey: "b"\nThe value associated with the specified key is: ', "answer": "2"},
        ],
    },
    "scbench_prefix_suffix": {
        "id": 0, "context": "['abc', 'xyz']",
        "multi_turns": [
            {"input": "Which string starts with a and ends with c?", "answer": "abc"},
            {"input": "Which string starts with x and ends with z?", "answer": "xyz"},
        ],
    },
    "scbench_vt": {
        "index": 0, "length": 9, "input": "Track the variables.\n\nVAR AB = 17 VAR CD = VAR AB VAR EF = 23",
        "multi_turns": [
            {"input": "Which are assigned 17?", "answer": ["AB", "CD"]},
            {"input": "Which are assigned 23?", "answer": ["EF"]},
        ],
    },
    "scbench_repoqa": {
        "id": 0, "context": "def f(x):\n    return x + 1\n\ndef g():\n    return 0", "lang": "python", "repo": "me/one",
        "multi_turns": [
            {"input": "It adds one.", "answer": "def f(x):\n    return x + 1", "name": "f"},
            {"input": "It gives nothing.", "answer": "def g():\n    return 0", "name": "g"},
        ],
    },
    "scbench_qa_eng": {
        "id": 0, "context": "Ann has a cat.",
        "multi_turns": [
            {"input": "What does Ann have?", "answer": "a cat"}, {"input": "Who has {it}?", "answer": "Ann"},
        ],
    },
    "scbench_qa_chn": {
        "id": 0, "context": "安有一只猫。",
        "multi_turns": [{"input": "安有什么？", "answer": "猫"}, {"input": "谁有猫？", "answer": "安"}],  # noqa: RUF001
    },
    "scbench_choice_eng": {
        "id": 0, "context": "Ann has a cat.",
        "multi_turns": [
            {"input": "What does Ann have?", "answer": "a cat", "options": ["a dog", "a cat", "a hat", "a bat"]},
            {"input": "Who has it?", "answer": "Ann", "options": ["Ann", "Bob", "Cid", "Dan"]},
        ],
    },
    "scbench_mf": {
        "id": 0, "context": [12, 5, 40],
        "multi_turns": [
            {
                "input": "You should answer with only one number, no other words. The largest number of the list is: ",
                "answer": 40,
            },
            {
                "input": "You should answer with only one number, no other words. The median number of the list is: ",
                "answer": 12,
            },
        ],
    },
    "scbench_many_shot": {
        "id": 0, "context": "Q: 1+1? (A) 2 (B) 3\nA: A", "task": "date_understanding",
        "multi_turns": [
            {"input": "Q: 1+2?\n(A) 2\n(B) 3\nA: ", "answer": "B"},
            {"input": "Q: 2?\n(A) 2\n(B) 3\nA: ", "answer": "A"},
        ],
    },
    "scbench_summary": {
        "id": 0, "context": "Paper 1: cats.\nPaper 2: dogs.",
        "multi_turns": [
            {"input": "Summarise paper 1.", "answer": "It is about cats."},
            {"input": "Summarise paper 2.", "answer": "It is about dogs."},
        ],
    },
    "scbench_summary_with_needles": {
        "id": 0, "context": "Paper 1: cats. The pass key is 71432.",
        "multi_turns": [
            {"input": "Summarise paper 1.", "answer": "It is about cats.", "task": "scbench_summary"},
            {"input": "What is the pass key?", "answer": "71432", "task": "scbench_passkey"},
        ],
    },
    "scbench_repoqa_and_kv": {
        "id": 0, "context": 'def f(x):\n    return x + 1\n{"a": "1"}', "lang": "python", "repo": "me/one",
        "multi_turns": [
            {"input": "It adds one.", "answer": "def f(x):\n    return x + 1", "name": "f", "task": "scbench_repoqa"},
            {"input": "The value of a?", "answer": "1", "name": None, "task": "scbench_kv"},
        ],
    },
}
"""The tasks' records by name, two turns each."""
TEMPLATE = (
    "{% for x in messages %}[{{ x.role }}]{{ x.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def records():
    """A copy of the records, to be changed."""
    return copy.deepcopy(RECORDS)


@pytest.fixture(scope="session")
def chatty(mini_tokenizer):
    """The bundled model's tokenizer with a chat template."""
    found = copy.deepcopy(mini_tokenizer)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def task_of(tmp_path):
    """The task of a name on records of the test's own."""

    def make(name, *found):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in found))
        return find_task(name)(data=str(path))

    return make
