"""SCBench's records: turns, limits, lengths, what scorers are told, and what is refused."""

from __future__ import annotations

import json

import pytest

from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.registry import find_task, list_entries
from kvbench.task import Mode, Split, Task, encode, prompt_tokens

MAX_NEW_TOKENS = {
    "scbench_kv": [150, 150], "scbench_prefix_suffix": [150, 150], "scbench_vt": [30, 30],
    "scbench_repoqa": [1024, 1024], "scbench_qa_eng": [40, 40], "scbench_qa_chn": [40, 40],
    "scbench_choice_eng": [40, 40], "scbench_mf": [5, 5], "scbench_many_shot": [10, 10], "scbench_summary": [200, 200],
    "scbench_summary_with_needles": [800, 15], "scbench_repoqa_and_kv": [1024, 80],
}
KEPT_FREE = {
    "scbench_kv": 750, "scbench_prefix_suffix": 750, "scbench_vt": 150, "scbench_repoqa": 5120, "scbench_qa_eng": 200,
    "scbench_qa_chn": 200, "scbench_choice_eng": 200, "scbench_mf": 25, "scbench_many_shot": 50,
    "scbench_summary": 1000, "scbench_summary_with_needles": 2037, "scbench_repoqa_and_kv": 2760,
}
"""Tokens for the answers of five turns: 5 times the limit, or 5 times the sum of both, halved."""
each_task = pytest.mark.parametrize("name", MAX_NEW_TOKENS)


def make(task: Task, tokenizer, **changes: object):
    asked = {"seed": 0, "split": Split.TEST, "n": 1, "length": 131_072, "turns": 5, "mode": Mode.MULTI_TURN}
    return list(task.examples(**asked | changes, tokenizer=tokenizer))


def longer(record: dict, times: int) -> dict:
    """The record with that many turns and a context of about 9,000 tokens."""
    body = "input" if "context" not in record else "context"
    text = record[body]
    long = text * 3000 if isinstance(text, list) else f"BEGIN {text}" + " and so on" * 3000 + " END"
    return record | {body: long, "multi_turns": (record["multi_turns"] * times)[:times]}


@each_task
def test_limits(name, records, task_of, mini_tokenizer):
    """New tokens of the two turns."""
    (example,) = make(task_of(name, records[name]), mini_tokenizer)
    assert [x.max_new_tokens for x in example.turns] == MAX_NEW_TOKENS[name]


def test_the_twelve_are_listed():
    """All of SCBench's tasks are found by name, say what they need, and have 131,072 tokens and 5 turns by default."""
    found = {x.name: x for x in list_entries("task") if x.name.startswith("scbench_")}
    assert found.keys() == MAX_NEW_TOKENS.keys()
    for name, entry in found.items():
        task = find_task(name)
        assert entry.facts["needs"] == "SCBench's data, a larger model"
        assert (task.default_length, task.default_turns, task.suite) == (131_072, 5, "scbench")
        assert (task.hub, task.config, task.split) == ("microsoft/SCBench", name, "test")
        assert task.revision == "283310bb8c5ba6909dd9a6b1be087d2937f76f6d"


@pytest.mark.few(8)
@each_task
@pytest.mark.parametrize(("mode", "more"), [(Mode.MULTI_TURN, 0), (Mode.MULTI_REQUEST, 1000)])
def test_the_first_prompt_leaves_room_for_five_answers(name, records, task_of, mini_tokenizer, mode, more):
    """And for 1,000 tokens more with multi-request; a context that is too long loses its middle and keeps its ends."""
    task = task_of(name, longer(records[name], 8))
    length = KEPT_FREE[name] + more + 700
    (example,) = make(task, mini_tokenizer, length=length, mode=mode)
    used = prompt_tokens(encode(task, example, mini_tokenizer))
    kept = max(KEPT_FREE[name] + more, task.reserve(example, turns=5, mode=Mode(mode), tokenizer=mini_tokenizer))
    assert length - kept - 10 <= used <= length - kept  # later turns can need more than the official reserve
    whole = make(task, mini_tokenizer, mode=mode)[0]
    assert whole.facts["cut_tokens"] == 0 and example.facts["cut_tokens"] > 5000
    assert example.context[:80] == whole.context[:80] and example.context[-80:] == whole.context[-80:]


def conversation(example, tokenizer, task) -> int:
    """Tokens of a conversation with the data's answers, up to the most of its last answer."""
    encoded = encode(task, example, tokenizer)
    later = sum(len(x.later) for x in encoded.turns[1:])
    *past, last = (len(x.answer) for x in encoded.turns)
    return prompt_tokens(encoded) + later + sum(past) + max(last, example.turns[-1].max_new_tokens)


def wordy(record: dict, times: int) -> dict:
    """The record with that many turns, whose questions have some hundred tokens each."""
    record = longer(record, times)
    return record | {"multi_turns": [{**x, "input": x["input"] + " please" * 100} for x in record["multi_turns"]]}


@pytest.mark.parametrize("name", ["scbench_kv", "scbench_qa_eng", "scbench_summary_with_needles"])
@pytest.mark.parametrize("turns", [1, 5])
def test_a_conversation_fits_the_length(name, turns, records, task_of, mini_tokenizer):
    """Later questions and answers may take more than the runner reserves; then the context loses more."""
    record = wordy(records[name], 5)
    record["multi_turns"][0]["answer"] = "long " * 900
    task = task_of(name, record)
    (example,) = make(task, mini_tokenizer, length=7000, turns=turns)
    assert example.facts["cut_tokens"] > 0
    assert 6980 <= conversation(example, mini_tokenizer, task) <= 7000


def test_a_long_record_is_refused_before_the_first_runs(records, task_of, tmp_path, capsys):
    """With own history later questions come on top of the answers' room: the second record exceeds the model."""
    record = records["scbench_kv"]
    task = task_of("scbench_kv", record, wordy(record, 5))
    code = call([
        "run", "--task", "scbench_kv", "--task-set", f"data={task.data}", "--length", "8192", "--model", "mini",
        "--method", "full", "--samples", "2", "--mode", "multi-turn", "--history", "own", "--device", "cpu", "--out",
        str(tmp_path / "runs"),
    ])
    assert code == 2
    assert "length 8192 with 5 turns needs up to" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_a_first_prompt_leaves_room_for_its_own_answer(records, task_of, mini_tokenizer):
    """Half of both limits is less than the first, where one question is asked."""
    task = task_of("scbench_repoqa_and_kv", longer(records["scbench_repoqa_and_kv"], 8))
    (example,) = make(task, mini_tokenizer, length=2000, turns=1, mode=Mode.SINGLE)
    assert 960 <= prompt_tokens(encode(task, example, mini_tokenizer)) <= 2000 - 1024


def test_turns_are_cut_to_what_is_asked_for(records, task_of, mini_tokenizer):
    """Five of eight; a record with fewer stays shorter; the first record says for how many answers room is left."""
    record = records["scbench_kv"]
    task = task_of("scbench_kv", longer(record, 3), longer(record, 8))
    three, five = make(task, mini_tokenizer, n=2, length=3000)
    assert (len(three.turns), len(five.turns)) == (3, 5)
    for example in (three, five):
        assert 2540 <= prompt_tokens(encode(task, example, mini_tokenizer)) <= 3000 - 3 * 150


@each_task
def test_the_right_answer_is_right(name, records, task_of, mini_tokenizer):
    """Each scorer finds the facts that it asks for and gives the data's answer 1, or has nothing to say of the turn."""
    task = task_of(name, records[name])
    (example,) = make(task, mini_tokenizer)
    for scorer in task.scorers:
        found = set()
        for turn in example.turns:
            answer = f"```\n{turn.answer}\n```" if "def" in turn.answer else turn.facts.get("letter", turn.answer)
            found.add(scorer(answer, turn.references, {**example.facts, **turn.facts}))
        assert found - {None} == {1.0}


def test_the_functions_of_a_repository(records, task_of, mini_tokenizer):
    """Those of the records and turns asked for, and those of all records; other repositories' are not among them."""
    record = records["scbench_repoqa"]
    more = record | {"multi_turns": [{"input": "?", "answer": "def h(): pass", "name": "h"}]}
    other = more | {"repo": "me/two"}
    task = task_of("scbench_repoqa", record, more, other)
    f, g, h = "def f(x):\n    return x + 1", "def g():\n    return 0", "def h(): pass"
    one = make(task, mini_tokenizer, turns=1)[0].facts
    assert (one["functions"], one["functions_all"]) == ({"f": f}, {"f": f, "g": g, "h": h})
    first, second, third = (x.facts["functions"] for x in make(task, mini_tokenizer, n=3))
    assert first == second == {"f": f, "g": g, "h": h} and third == {"h": h}
    assert one["lang"] == "python"


def test_a_mixed_turn_says_what_it_is_of(records, task_of, mini_tokenizer):
    """A value has no name, and is no function of its repository."""
    (example,) = make(task_of("scbench_repoqa_and_kv", records["scbench_repoqa_and_kv"]), mini_tokenizer)
    assert [dict(x.facts) for x in example.turns] == [
        {"task": "scbench_repoqa", "name": "f"}, {"task": "scbench_kv", "name": ""},
    ]
    assert example.facts["functions"] == {"f": "def f(x):\n    return x + 1"}


def test_an_option_has_its_letter(records, task_of, mini_tokenizer):
    """The letter of the option that is the answer, and all four options."""
    one, two = make(task_of("scbench_choice_eng", records["scbench_choice_eng"]), mini_tokenizer)[0].turns
    assert dict(one.facts) == {"options": ["a dog", "a cat", "a hat", "a bat"], "letter": "B"}
    assert (two.facts["letter"], two.references) == ("A", ("Ann",))


@pytest.mark.parametrize("mode", Mode)
def test_the_mode_is_a_fact(records, task_of, mini_tokenizer, mode):
    """The official scorer of the mixed task looks at it."""
    assert make(task_of("scbench_kv", records["scbench_kv"]), mini_tokenizer, mode=mode)[0].facts["mode"] == str(mode)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("scbench_kv", {"multi_turns": []}, "record 0 of {data}: column multi_turns is empty."),
        ("scbench_kv", {"multi_turns": ["?"]}, "record 0, turn 0 of {data} is str, not an object."),
        ("scbench_kv", {"multi_turns": [{"input": "?"}]}, "has no column answer; it has input, and needs input (str)"),
        ("scbench_kv", {"multi_turns": [{"input": "?", "answer": ""}]}, "turn 0 of {data}: the answer is empty"),
        ("scbench_vt", {"multi_turns": [{"input": "?", "answer": "AB"}]}, "column answer is str, not list."),
        ("scbench_vt", {"multi_turns": [{"input": "?", "answer": []}]}, "the answer is empty"),
        ("scbench_vt", {"multi_turns": [{"input": "?", "answer": [1]}]}, "the answer is no list of names"),
        ("scbench_vt", {"input": " "}, "column input is empty."),
        ("scbench_mf", {"context": "[1, 2]"}, "column context is str, not list."),
        ("scbench_mf", {"context": [1, "2"]}, "column context is no list of int"),
        ("scbench_mf", {"context": [1, True]}, "column context is no list of int"),
        ("scbench_mf", {"context": []}, "column context is empty."),
        ("scbench_mf", {"multi_turns": [{"input": "Which?", "answer": 1}]}, "the input has no 'The ... is'"),
        (
            "scbench_choice_eng", {"multi_turns": [{"input": "?", "answer": "a", "options": ["a", "b"]}]},
            "options are not four texts",
        ),
        (
            "scbench_choice_eng", {"multi_turns": [{"input": "?", "answer": "e", "options": ["a", "b", "c", "d"]}]},
            "the answer is none of the options",
        ),
        ("scbench_repoqa", {"lang": "cobol"}, "unknown language of code 'cobol'. Allowed: cpp, go, java,"),
        ("scbench_repoqa", {"repo": 7}, "column repo is int, not str."),
        (
            "scbench_repoqa_and_kv", {"multi_turns": [{"input": "?", "answer": "x", "task": "scbench_vt"}]},
            "task scbench_vt is none of scbench_repoqa, scbench_kv",
        ),
        (
            "scbench_repoqa_and_kv", {"multi_turns": [{"input": "?", "answer": "x", "task": "scbench_repoqa"}]},
            "the function has no name",
        ),
    ],
)
def test_a_wrong_record_is_refused(records, task_of, mini_tokenizer, name, change, said):
    """One line with the record, and the turn where it is one."""
    task = task_of(name, records[name] | change)
    with pytest.raises(UserError) as caught:
        make(task, mini_tokenizer)
    assert said.format(data=task.data) in str(caught.value) and "\n" not in str(caught.value)


def test_another_tasks_data_is_refused(records, task_of, tmp_path, mini_tokenizer):
    """scbench_vt's records have no context, which every other task reads."""
    path = tmp_path / "scbench_vt.jsonl"
    path.write_text(json.dumps(records["scbench_vt"]))
    with pytest.raises(UserError, match="has no column context; it has index, length, input, multi_turns"):
        make(find_task("scbench_kv")(data=str(path)), mini_tokenizer)


@pytest.mark.few
@pytest.mark.parametrize(("name", "mode"), [("scbench_kv", "multi-request"), ("scbench_choice_eng", "multi-turn")])
def test_a_run_from_the_command_line(records, task_of, tmp_path, capsys, name, mode):
    """A record's two turns are answered, scored and written down, and the result names the data and what was cut."""
    task = task_of(name, longer(records[name], 2))
    code = call([
        "run", "--task", name, "--task-set", f"data={task.data}", "--length", "1600", "--model", "mini", "--method",
        "full", "--samples", "1", "--mode", mode, "--device", "cpu", "--out", str(tmp_path / "runs"), "--json",
    ])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    (folder,) = (tmp_path / "runs").iterdir()
    spec = json.loads((folder / "spec.json").read_text())
    assert spec["task"]["dataset_revision"] == task.dataset_revision and spec["task"]["truncation"] == "middle"
    lines = [json.loads(x) for x in (folder / "samples.jsonl").read_text().splitlines()]
    assert [x["turn"] for x in lines] == [0, 1] and all(x["score"] in (0.0, 1.0) for x in lines)
    assert lines[0]["sample"] == "row-0" and lines[0]["facts"]["cut_tokens"] > 5000


def test_too_many_samples_end_a_request(records, task_of, tmp_path, capsys):
    """Exit code 2 and one line, before anything is written."""
    task = task_of("scbench_kv", records["scbench_kv"])
    code = call([
        "run", "--task", "scbench_kv", "--task-set", f"data={task.data}", "--length", "1600", "--model", "mini",
        "--method", "full", "--samples", "2", "--mode", "multi-turn", "--device", "cpu", "--out",
        str(tmp_path / "runs"),
    ])
    assert code == 2
    assert "scbench_kv has 1 records: use --samples 1 or fewer." in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
