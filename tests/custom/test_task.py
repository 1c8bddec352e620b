"""Tasks from a TOML and a JSONL file: strict reading, errors by line, contexts that are too long."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench.custom.files import TaskRecord, TaskTable
from kvbench.errors import UserError
from kvbench.hf import load_tokenizer
from kvbench.methods.baseline.full import Full
from kvbench.registry import find_task
from kvbench.runs.files import read_lines
from kvbench.runs.provenance import find_sources
from kvbench.task import Mode, Split, Turn, encode, prompt_tokens
from kvbench.text.scorers import SCORERS, contains, exact, string_match_all

pytestmark = pytest.mark.usefixtures("cache")


def read(path: Path) -> Any:
    """The class of a task file."""
    return find_task(str(path))


ROOT = Path(__file__).parents[2]
TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
TABLE = {
    "name": "capitals", "version": "3", "summary": "s", "data": "records.jsonl", "scorer": "contains@1",
    "max_new_tokens": 4, "length": 200,
}
RECORDS = [
    {"id": "fr", "context": "Paris is the capital of France.", "turns": [
        {"question": "Of France?", "answer": " Paris"}, {"question": "Of what?", "answer": " France"},
    ]},
    {"id": 7, "context": "Rome is the capital of Italy.", "turns": [{"question": "Of Italy?", "answer": " Rome"}]},
    {"id": "de", "context": "Berlin is in Germany.", "turns": [{"question": "Of Germany?", "answer": " Berlin"}]},
]


@pytest.fixture
def write(tmp_path) -> Callable[..., Path]:
    """Write the two files of a task; a record may be any text."""

    def make(records: list[Any] | None = None, **table: Any) -> Path:
        lines = [x if isinstance(x, str) else json.dumps(x) for x in (RECORDS if records is None else records)]
        (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        pairs = {key: value for key, value in {**TABLE, **table}.items() if value is not None}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in pairs.items())
        (tmp_path / "task.toml").write_text(text, encoding="utf-8")
        return tmp_path / "task.toml"

    return make


@pytest.fixture
def tokenizer(model_folder):
    """One token per byte."""
    return load_tokenizer(str(model_folder))


def examples(path: Path, tokenizer: Any, **options: Any) -> list[Any]:
    """The examples that a run would use."""
    asked = {"seed": 0, "split": Split.TEST, "n": 3, "length": 1000, "turns": 5, "mode": Mode.MULTI_TURN, **options}
    return list(read(path)().examples(**asked, tokenizer=tokenizer))


def test_a_record_becomes_an_example(write, tokenizer):
    """Templates hold the question; a turn's prefix and max_new_tokens override the table's."""
    own = {"question": "Q2", "answer": " b", "prefix": "P2", "max_new_tokens": 9, "references": ["b", "B"]}
    weighed = {"question": "Q3", "answer": " yes", "choices": [" yes", " no"]}
    records = [{"id": "x", "context": "C", "turns": [{"question": "Q1", "answer": " a\n"}, own, weighed]}]
    path = write(records, question="Question: {question}", prefix="About {question}:", joint="#", separator="+")
    (found,) = examples(path, tokenizer, n=1)
    assert (found.id, found.context, found.facts, found.joint) == ("x", "C", {}, None)
    assert found.turns == (
        Turn("Question: Q1", "About Q1:", " a\n", ("a",), 4),
        Turn("Question: Q2", "P2", " b", ("b", "B"), 9),
        Turn("Question: Q3", "About Q3:", " yes", ("yes",), 0, (" yes", " no")),
    )
    task = read(path)
    assert (task.joint, task.separator, task.name, task.version, task.suite) == ("#", "+", "capitals", "3", "custom")
    assert len(examples(path, tokenizer, n=1, turns=2)[0].turns) == 2


def test_records_come_in_the_order_of_the_file_or_of_a_seed(write, tokenizer):
    """A longer request begins with a shorter one; another seed is another order of the same records."""
    orders = [[x.id for x in examples(write(), tokenizer, seed=seed)] for seed in range(9)]
    assert orders[0] == ["fr", "7", "de"]
    assert {tuple(sorted(x)) for x in orders} == {("7", "de", "fr")}
    assert len({tuple(x) for x in orders}) > 2
    assert [x.id for x in examples(write(), tokenizer, seed=3, n=2)] == orders[3][:2]


@pytest.mark.parametrize(("score", "prediction", "references", "expected"), [
    (contains, "It is Paris.", ["Rome", "Paris"], 1.0), (contains, "it is paris", ["Paris"], 0.0),
    (exact, " Paris\n", ["Paris"], 1.0), (exact, "Paris.", ["Paris"], 0.0), (exact, "b", ["a", " b"], 1.0),
    (string_match_all, "ROME, paris", ["Paris", "Rome"], 1.0), (string_match_all, "rome", ["Paris", "Rome"], 0.5),
])
def test_the_scorers_for_tasks_without_code(score, prediction, references, expected):
    assert score(prediction, references) == expected


def test_a_scorer_may_be_a_tasks_own(write):
    """The code of that task is recorded with the run; scorer ids contain versions."""
    task = read(write(scorer="scbench-kv@1"))
    assert [x.id for x in task.scorers] == ["scbench-kv@1", "scbench-kv-strict@1"]
    assert task.owner.name in ("kv", "kv-short")
    assert find_sources(Full, task).task != find_sources(Full, read(write())).task
    assert sorted(SCORERS) == [
        "contains-strict@1", "contains@1", "exact@1", "string-match-all-strict@1", "string-match-all@1"
    ]
    with pytest.raises(UserError, match=r"unknown scorer 'contains'\. Did you mean 'contains@1'\?"):
        read(write(scorer="contains"))


def test_the_hash_of_the_records_is_the_revision(write, tmp_path):
    """The prompt's id is a hash of the keys that decide prompts; the summary changes neither."""
    task = read(write())()
    digest = hashlib.sha256((tmp_path / "records.jsonl").read_bytes()).hexdigest()
    assert task.dataset_revision == f"sha256:{digest}"
    for change in ({"prefix": "x"}, {"max_new_tokens": 5}, {"joint": " "}, {"scorer": "exact@1"}):
        other = read(write(**change))()
        assert other.prompt_id != task.prompt_id
        assert other.dataset_revision == task.dataset_revision
    assert read(write(summary="other"))().prompt_id == task.prompt_id
    assert read(write(RECORDS[:2]))().dataset_revision != task.dataset_revision


def test_a_byte_order_mark_is_named(write, kvbench):
    """Editors write one unseen, and "expected value at column 1" shows nothing wrong."""
    path = write()
    records = path.parent / "records.jsonl"
    records.write_bytes(codecs.BOM_UTF8 + records.read_bytes())
    printed = " ".join(kvbench("check", path, "--json").out.split())
    assert "byte order mark. Save the file as UTF-8 without it" in printed


def test_what_is_too_long_is_refused_by_name(write, tokenizer):
    """The error names the longest record, its tokens and a sufficient length, before the first example."""
    size = len("Paris is the capital of France.") + len("\nOf France?") + 4
    with pytest.raises(UserError, match=f"record 'fr' of .* has {size} tokens .*more than --length 40. Use --length "):
        read(write())().examples(
            seed=0, split=Split.TEST, n=3, length=40, turns=1, mode=Mode.SINGLE, tokenizer=tokenizer
        )
    assert len(examples(write(), tokenizer, length=size)) == 3


def test_the_middle_is_cut_where_the_table_says_so(write, tokenizer):
    """Start and end of the context fill the length; the fact `cut_tokens` counts the rest."""
    path = write(truncation="middle")
    found = examples(path, tokenizer, length=40, turns=1)
    assert [x.facts for x in found] == [{"cut_tokens": 6}, {"cut_tokens": 3}, {"cut_tokens": 0}]
    assert found[0].context == "Paris is the capital of France."[:13] + "Paris is the capital of France."[19:]
    assert read(path).truncation == "middle"
    with pytest.raises(UserError, match=r"record 'fr' of .*leave no room for the context in a length of 15"):
        examples(path, tokenizer, length=15)


@pytest.mark.parametrize(("options", "message"), [
    ({"n": 4}, r"capitals has 3 records, not 4\. Use --samples 3 or fewer\."),
    ({"split": Split.DEV}, r"capitals has only a test split\. Choose .*, or leave --split out\."),
])
def test_what_a_file_does_not_have_is_refused(write, tokenizer, options, message):
    """More samples than records, and the dev split."""
    with pytest.raises(UserError, match=message):
        examples(write(), tokenizer, **options)


def test_two_records_of_one_id_are_refused(write):
    """Before a run, because no command compares or shows a run whose samples share an id; 7 and "7" are one id."""
    records = [RECORDS[0], RECORDS[1], {**RECORDS[2], "id": "7"}]
    with pytest.raises(UserError, match=r"line 3: its id '7' is that of line 2, .* Give every record its own id\."):
        read(write(records))


RECORD = {"id": "a", "context": "c", "turns": [{"question": "q", "answer": "a"}]}
TURN = RECORD["turns"][0]
BAD_RECORDS = [
    ("{", "line 2: Invalid JSON: EOF while parsing an object at column 1"),
    ('{"id": "a"}', "line 2: context is missing"),
    ("[1]", "line 2: should be an object"),
    ({**RECORD, "context": " \n"}, "line 2: context = ' \\n' is empty"),
    ({**RECORD, "id": []}, "line 2: id = [] should be a valid string or a valid integer"),
    ({**RECORD, "context": 3}, "line 2: context = 3 should be a valid string"),
    ({**RECORD, "contexts": "c"}, "line 2: contexts is an unknown key"),
    ({**RECORD, "turns": []}, "line 2: turns = [] list should have at least 1 item"),
    ({**RECORD, "id": None}, "line 2: id"),
    ({**RECORD, "turns": [{"question": "q"}]}, "line 2: turns.0.answer is missing"),
    ({**RECORD, "turns": [TURN, {**TURN, "answer": ""}]}, "line 2: turns.1.answer = '' is empty"),
    ({**RECORD, "turns": [{**TURN, "references": []}]}, "line 2: turns.0.references = []"),
    ({**RECORD, "turns": [{**TURN, "max_new_tokens": 0}]}, "turns.0.max_new_tokens = 0 should be greater than"),
    ({**RECORD, "turns": [{**TURN, "max_new_tokens": "3"}]}, "turns.0.max_new_tokens = '3' should be a valid integer"),
    ({**RECORD, "turns": [{**TURN, "limit": 3}]}, "has the key limit, which is now max_new_tokens"),
    ({**RECORD, "turns": [{**TURN, "choices": ["b"]}]}, "the answer is none of the choices"),
    ({**RECORD, "turns": [{**TURN, "choices": ["a"], "max_new_tokens": 3}]}, "leave max_new_tokens out"),
    ('{"id": "a", "context": "\\ud800", "turns": []}', "line 2: Invalid JSON"),
    (json.dumps(RECORD)[:-1] + ', "context": "c"}', "line 2: has the key context twice. Leave one out"),
    (json.dumps(RECORD).replace('{"question"', '{"answer": "b", "question"'), "line 2: has the key answer twice"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("record", "message"), BAD_RECORDS, ids=[x for _, x in BAD_RECORDS])
def test_a_line_that_is_no_record_is_refused(kvbench, arguments, write, tmp_path, record, message):
    """A run prints one line with the line number and writes nothing; `kvbench check` lists all such lines."""
    path = write([RECORD, record, {**RECORD, "id": "z"}, record])
    arguments[arguments.index("--task") + 1] = str(path)
    answer = kvbench(*arguments, "--method", "full")
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()
    checked = kvbench("check", path, "--json")
    assert checked.code == 1
    assert [x["line"] for x in checked.json["findings"]] == [2, 4]
    assert message.removeprefix("line 2: ") in checked.json["findings"][0]["what"]
    assert checked.json["examples"] == 2


BAD_TABLES = [
    ({"name": None}, "name is missing"), ({"name": "a b"}, "name = 'a b' string should match"),
    ({"nam": "x"}, "unknown key 'nam'. Did you mean 'name'?"),
    ({"max_new_tokens": 0}, "max_new_tokens = 0 should be greater"),
    ({"limit": 4}, "key limit is now max_new_tokens"),
    ({"question": "Question:"}, "question = 'Question:' has no {question}"),
    ({"modes": ["multi"]}, "modes.0 = 'multi' should be 'single', 'multi-turn' or 'multi-request'"),
    ({"modes": []}, "modes = [] list should have at least 1 item"),
    ({"truncation": "left"}, "truncation = 'left' should be 'none' or 'middle'"),
    ({"data": "missing.jsonl"}, "missing.jsonl' cannot be read: No such file"),
    ({"data": "."}, "cannot be read: Is a directory"),
    ({"scorer": "contain@1"}, "unknown scorer 'contain@1'. Did you mean 'contains@1'?"),
    ({"scorer": "ruler-string-match@1"}, "unknown scorer 'ruler-string-match@1'"),
]


@pytest.mark.few(10)
@pytest.mark.parametrize(("table", "message"), BAD_TABLES, ids=[x for _, x in BAD_TABLES])
@pytest.mark.parametrize("command", ["run", "check", "show"])
def test_a_table_that_is_wrong_is_refused(kvbench, arguments, write, command, table, message):
    """In one line, by every command."""
    path = write(**table)
    arguments[arguments.index("--task") + 1] = str(path)
    answer = kvbench(*([*arguments, "--method", "full"] if command == "run" else [command, path]))
    assert (answer.code, answer.out) == (2, "")
    (line,) = answer.err.splitlines()
    assert message in line


@pytest.mark.parametrize("name", ["niah", "niah_multikey_1", "qa_1"])
@pytest.mark.parametrize("command", ["run", "check", "show"])
def test_the_name_or_alias_of_a_bundled_task_is_refused(kvbench, arguments, write, command, name):
    """Its results would be taken for those of the bundled task."""
    path = write(name=name)
    arguments[arguments.index("--task") + 1] = str(path)
    answer = kvbench(*([*arguments, "--method", "full"] if command == "run" else [command, path]))
    assert answer.code == 2
    assert f"{path} names its task '{name}', which is a task of kvbench. Give it another name." in answer.err


@pytest.mark.parametrize(("text", "message"), [
    ("name = ", "is not TOML: Invalid value (at end of document)"),
    ('name = "a"\nversion == 3\n', "is not TOML: Invalid value (at line 2, column 10)"),
])
def test_a_file_that_is_no_toml_is_refused_with_the_line(kvbench, tmp_path, text, message):
    """A missing file is refused too."""
    path = tmp_path / "task.toml"
    path.write_text(text)
    answer = kvbench("check", path)
    assert answer.code == 2
    assert message in answer.err
    assert "cannot be read: No such file" in kvbench("show", tmp_path / "none.toml").err


def test_a_file_without_records_is_refused(write):
    """Blank lines are not records."""
    with pytest.raises(UserError, match="has no records"):
        read(write(["", "  "]))


TEXTS = st.sampled_from(["a", "b c", " d", "", " ", "\n"])


@pytest.mark.slow
@given(st.fixed_dictionaries({"id": TEXTS, "context": TEXTS, "turns": st.lists(
    st.fixed_dictionaries({"question": TEXTS, "answer": TEXTS}), max_size=2
)}) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["id", "context", "turns", "question"]),
    lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["id", "context", "turns", "question", "answer"]), x),
))
def test_whatever_a_line_holds_is_a_record_or_an_error(value):
    """No other exception is raised, and required texts are not empty."""
    try:
        record = TaskRecord.model_validate_json(json.dumps(value))
    except ValidationError:
        return
    assert record.context.strip() and record.turns
    assert all(x.question.strip() and x.answer.strip() for x in record.turns)


def test_a_run_of_a_file(kvbench, arguments, write, tmp_path):
    """A run from the command line works in every mode and is not repeated; a changed record makes a new run."""
    records = [{**x, "turns": (x["turns"] * 2)[:2]} for x in RECORDS]
    arguments[arguments.index("--task") + 1] = str(write(records, max_new_tokens=2))
    arguments[arguments.index("--samples") + 1] = "3"
    found = {}
    for mode in ("single", "multi-turn", "multi-request"):
        answer = kvbench(*arguments, "--method", "full", "--mode", mode)
        assert answer.code == 0, answer.err
        lines = read_lines(tmp_path / "runs" / answer.json["run_id"] / "samples.jsonl")
        found[mode] = [(x.sample, x.turn) for x in lines]
        assert answer.json["task"]["dataset_revision"].startswith("sha256:")
        assert answer.json["task"]["scorer"] == "contains@1"
    assert found["single"] == [("fr", 0), ("7", 0), ("de", 0)]
    assert found["multi-turn"] == found["multi-request"] == [(x, turn) for x in ("fr", "7", "de") for turn in (0, 1)]
    assert "already finished" in kvbench(*arguments, "--method", "full").err
    write([*records[:2], {**records[2], "context": "Berlin is in Germany!"}], max_new_tokens=2)
    assert "already finished" not in kvbench(*arguments, "--method", "full").err


def test_the_most_likely_choice_is_the_prediction(kvbench, arguments, write, tmp_path):
    """Nothing is generated."""
    records = [{"id": "a", "context": "c" * 30, "turns": [{"question": "q", "answer": "y", "choices": ["y", "n"]}]}]
    arguments[arguments.index("--task") + 1] = str(write(records, scorer="exact@1"))
    arguments[arguments.index("--samples") + 1] = "1"
    run = kvbench(*arguments, "--method", "full").json
    (line,) = read_lines(tmp_path / "runs" / run["run_id"] / "samples.jsonl")
    assert line.prediction in ("y", "n")
    assert line.stop_reason == "choice"


@pytest.mark.parametrize("scorer", ["contains@1", "string-match-all@1"])
def test_a_wrong_choice_that_would_count_is_refused(kvbench, write, model_folder, scorer):
    """A run names the line, and so does `check`; `exact@1` tells the choices apart, and so may references."""
    turn = {"question": "q", "answer": " 10", "choices": [" 10", " 100"]}
    records = [RECORDS[0], {"id": "a", "context": "c" * 30, "turns": [turn]}]
    message = f"scorer {scorer} counts the wrong choice ' 100' as right. Use the scorer exact@1"
    path = write(records, scorer=scorer, max_new_tokens=7)
    with pytest.raises(UserError, match=re.escape(f"records.jsonl, line 2, turn 0: {message}")):
        read(path)
    answer = kvbench("check", path, "--model", model_folder, "--json")
    assert [(x["line"], x["turn"], x["what"]) for x in answer.json["findings"]] == [(2, 0, message)]
    assert answer.code == 1
    assert kvbench("check", write(records, scorer="exact@1", max_new_tokens=7), "--model", model_folder).code == 0
    both = {**turn, "references": ["10", "100"]}
    assert read(write([{**records[1], "turns": [both]}], scorer=scorer)).scorers[0].id == scorer


@pytest.mark.parametrize("scorer", [
    "longbench-numbers@2e00731f", "infinitebench-official-code-run@88b3daa6",
])
def test_an_answer_that_the_scorer_cannot_score_is_refused(kvbench, write, model_folder, scorer):
    """A scorer of numbers reads one from the reference answer; a run names the line, and so does `check`."""
    records = [{"id": x, "context": x * 30, "turns": [{"question": "q", "answer": x}]} for x in (" 3", " third")]
    message = f"scorer {scorer} cannot score the reference answer ' third' ("
    path = write(records, scorer=scorer, max_new_tokens=7)
    with pytest.raises(UserError, match=re.escape(f"records.jsonl, line 2, turn 0: {message}")):
        read(path)
    answer = kvbench("check", path, "--model", model_folder, "--json")
    assert [(x["line"], x["turn"], x["what"].startswith(message)) for x in answer.json["findings"]] == [(2, 0, True)]
    assert answer.code == 1


def test_an_answer_that_the_scorer_does_not_apply_to_is_refused(write):
    """A list of words has no strict score, so the turn would have none, whatever the model answers."""
    colors = {"id": "a", "context": "c" * 30, "turns": [
        {"question": "q", "answer": " red and blue", "references": ["red", "blue"]}
    ]}
    message = "turn 0: scorer string-match-all-strict@1 cannot score the reference answer ' red and blue' (it does not"
    with pytest.raises(UserError, match=re.escape(message)):
        read(write([colors], scorer="string-match-all-strict@1"))
    assert read(write([colors], scorer="string-match-all@1")).scorers[1].id == "string-match-all-strict@1"


def test_a_reference_answer_that_scores_nothing_is_refused(write):
    """One of answer, references and scorer is wrong, and right answers would count as wrong."""
    city = {"id": "a", "context": "c" * 30, "turns": [
        {"question": "q", "answer": " It is Paris.", "references": ["Paris"]}
    ]}
    message = "turn 0: scorer exact@1 gives the reference answer ' It is Paris.' 0 for the references 'Paris'. Correct"
    with pytest.raises(UserError, match=re.escape(message)):
        read(write([city], scorer="exact@1"))
    assert read(write([city], scorer="contains@1")).scorers[0].id == "contains@1"


def test_a_mode_that_the_table_does_not_name_is_refused(kvbench, arguments, write):
    arguments[arguments.index("--task") + 1] = str(write(modes=["single"]))
    answer = kvbench(*arguments, "--method", "full", "--mode", "multi-turn")
    assert answer.code == 2
    assert "unknown mode for task capitals 'multi-turn'" in answer.err


def test_two_files_of_one_name_are_two_cells(kvbench, write, tmp_path, model_folder):
    """A sweep tells them apart by their content."""
    paths = []
    for name, records in (("one", RECORDS[:1]), ("two", RECORDS[1:2])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "task.toml").write_text(write(records).read_text())
        (folder / "records.jsonl").write_text((tmp_path / "records.jsonl").read_text())
        paths.append(str(folder / "task.toml"))
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(
        f'out = "{tmp_path / "runs"}"\n[[grid]]\nmethod = "full"\ntask = {paths}\nmodel = "{model_folder}"\n'
        'samples = 1\ndevice = "cpu"\n'
    )
    answer = kvbench("sweep", sweep, "--json")
    assert answer.code == 0, answer.err
    assert len({x["run_id"] for x in answer.json}) == 2


def test_check_lists_errors_by_line_and_turn(kvbench, write, model_folder):
    """A correct file has none."""
    records = [
        {"id": "a", "context": "the word is sky", "turns": [
            {"question": "one?", "answer": " sky"}, {"question": "one?", "answer": " sea"},
            {"question": "Is it sky or sea?", "answer": " sky"},
        ]},
        {"id": "b", "context": "x" * 90, "turns": [{"question": "q", "answer": " x"}]},
        {"id": "a", "context": "Sky", "turns": [
            {"question": "q", "answer": " sky", "answer_in_context": False},
            {"question": "A. sea B. sky", "answer": "B"},
            {"question": "sea or sky", "answer": " sky", "choices": [" sky", " sea"], "answer_in_context": False},
            {"question": "skyscraper", "answer": " Sk"},
        ]},
    ]
    path = write(records, answer_in_context=True, length=80)
    answer = kvbench("check", path, "--model", model_folder, "--json")
    assert answer.code == 1
    assert [(x["row"], x["line"], x["turn"], x["what"]) for x in answer.json["findings"]] == [
        ("a", 1, 1, "the answer is not in the context"),
        ("a", 1, 1, "turn 0 asks the same question"),
        ("a", 1, 2, "the question contains the answer 'sky'"),
        ("b", 2, None, "96 tokens with its answer, more than the length of 80"),
        ("a", 3, None, "line 1 has the same id"),
        ("a", 3, 1, "the answer is not in the context"),
    ]
    assert answer.json["tokens"] == [3 + 2 + 4, 96]
    assert (answer.json["examples"], answer.json["turns"], answer.json["cut"]) == (3, 8, 0)
    assert "line 1 has the same id" in answer.out
    assert kvbench("check", write(max_new_tokens=7), "--model", model_folder).code == 0


def test_check_finds_answers_beyond_the_limit(kvbench, write, model_folder):
    """A reference answer that the limit cuts to a text without score; one that scores all the same is no error."""
    turns = [
        {"question": "q", "answer": " Paris"}, {"question": "r", "answer": " Paris", "max_new_tokens": 6},
        {"question": "s", "answer": " Paris", "references": ["Par"]},
        {"question": "t", "answer": " Paris", "choices": [" Paris", " Rome"]},
    ]
    answer = kvbench("check", write([{"id": "a", "context": "c", "turns": turns}]), "--model", model_folder, "--json")
    assert answer.code == 1
    assert [(x["turn"], x["what"]) for x in answer.json["findings"]] == [(0, (
        "the reference answer ' Paris' has 6 tokens, and scores nothing when it is cut at max_new_tokens = 4. Use a "
        "greater max_new_tokens"
    ))]


def test_check_looks_at_what_a_cut_leaves(kvbench, write, model_folder):
    """With `answer_in_context`, an answer that the cut removed is an error."""
    records = [{"id": "a", "context": "a" * 30 + "sky" + "a" * 30, "turns": [{"question": "q", "answer": " sky"}]}]
    path = write(records, answer_in_context=True, length=40, truncation="middle")
    answer = kvbench("check", path, "--model", model_folder, "--json")
    assert [x["what"] for x in answer.json["findings"]] == ["the answer is not in the context after the cut"]
    assert answer.json["cut"] == 1
    assert kvbench("check", write(records, length=40, truncation="middle"), "--model", model_folder).code == 0
    answer = kvbench("check", write(records, length=6, truncation="middle"), "--model", model_folder, "--json")
    assert "in a length of 6" in answer.json["findings"][0]["what"]


def test_check_looks_through_a_task(kvbench, tmp_path):
    """A registered task passes; a task file with several errors has them listed."""
    answer = kvbench("check", "kv-short", "--samples", "3", "--json")
    assert (answer.code, answer.json["name"], answer.json["examples"], answer.json["turns"]) == (0, "kv-short", 3, 15)
    assert answer.json["tokens"][1] <= 1024
    path = tmp_path / "mine.py"
    path.write_text(TOYS.read_text().replace("Example(id, text,", "Example('same', ' ',").replace('f"q{i}?"', '"sky?"'))
    answer = kvbench("check", f"{path}:Toy", "--samples", "2", "--task-set", "word=sky", "--json")
    assert answer.code == 1
    found = {x["what"] for x in answer.json["findings"]}
    assert found == {
        "the context is empty", "example 0 has the same id", "turn 0 asks the same question",
        "the question contains the answer 'sky'",
    }
    long = tmp_path / "long.py"
    long.write_text(TOYS.read_text().replace("length - 20", "length + 20"))
    answer = kvbench("check", f"{long}:Toy", "--samples", "1", "--model", "mini", "--json")
    assert "tokens with its answer, more than the length of 60" in answer.json["findings"][0]["what"]


@pytest.mark.parametrize(("line", "message"), [
    (f"check {TOYS}:Toy --set x=1", "--set is for methods, and"), (f"check {TOYS}:Last --task-set x=1", "Use --set."),
    ("check niah --samples 0", "samples 0 must be 1 or more"), ("check niah --model minni", "unknown model 'minni'"),
    (f"check {TOYS}", "defines several methods and tasks: Inert, Last, Toy. Choose one"),
    ("check niahh", "unknown method or task 'niahh'. Did you mean 'niah'?"),
])
def test_a_check_of_nothing_is_refused(kvbench, line, message):
    """In one line."""
    answer = kvbench(*line.split())
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


def test_show_tells_a_task_of_a_file(kvbench, write):
    """A TOML file or a Python file."""
    answer = kvbench("show", write(), "--json")
    assert (answer.json["kind"], answer.json["name"], answer.json["scorers"]) == (
        "task", "capitals", ["contains@1", "contains-strict@1"]
    )
    assert kvbench("show", f"{TOYS}:Toy", "--json").json["name"] == "toy"
    assert kvbench("show", f"{TOYS}:Last", "--json").json["kind"] == "method"


def test_prompts_are_counted_whole(write, tokenizer):
    """`count` is the length of the whole first prompt plus its max_new_tokens."""
    task = read(write(question="Q: {question}", prefix=" A:"))()
    (first, *_) = examples(write(question="Q: {question}", prefix=" A:"), tokenizer)
    assert task.count(first, tokenizer) == prompt_tokens(encode(task, first, tokenizer)) + 4


def test_the_files_that_the_documents_show_work(kvbench, tmp_path, model_folder):
    """docs/adding_a_task.md shows all keys of the TOML file, and its files pass `kvbench check`."""
    text = (ROOT / "docs" / "adding_a_task.md").read_text(encoding="utf-8")
    (table,), (record,) = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("toml", "json"))
    (tmp_path / "capitals.toml").write_text(table)
    (tmp_path / "capitals.jsonl").write_text(record)
    answer = kvbench("check", tmp_path / "capitals.toml", "--model", model_folder, "--json")
    assert (answer.code, answer.json["examples"], answer.json["findings"]) == (0, 1, [])
    assert set(tomllib.loads(table)) == set(TaskTable.model_fields)


@pytest.mark.parametrize(("records", "options", "message"), [
    ([2, 2], "--turns 7", "records of capitals have 2 turns each, not 7. Use --turns 2 or fewer."),
    ([1, 3], "", "of capitals have unequal numbers of turns: 'r0' has 1, 'r1' 3. A run asks 3 questions"),
])
def test_a_run_asks_as_many_questions_as_it_records(kvbench, write, records, options, message):
    """More than a record has are refused with the most that all have."""
    path = write([make_record(f"r{i}", 40, *"?" * turns) for i, turns in enumerate(records)])
    line = f"run --method full --task {path} --samples 2 --mode multi-turn {options}"
    answer = kvbench(*line.split())
    assert answer.code == 2
    assert message in answer.err


def test_a_file_asks_its_own_number_of_questions(write, run_records):
    """Without --turns, and the result has their number."""
    answer = run_records(write([make_record("a", 40, "?", "!"), make_record("b", 40, "?", "!")]), "full",
                         "--mode", "multi-turn")
    assert (answer.json["spec"]["turns"], answer.json["n_questions"]) == (2, 4)
    assert "2 contexts x 2 questions" in answer.out


def test_a_record_beyond_the_model_fails_and_is_not_scored(write, run_records):
    """The second record, with its second question, exceeds the model's 512 positions and is not scored."""
    records = [make_record("near", 40, "?", "?"), make_record("far", 40, "?", "b" * 600)]
    answer = run_records(write(records), "full", "--mode", "multi-turn", "--turns", "2")
    assert answer.code == 1
    assert (answer.json["status"], answer.json["n_scored"], answer.json["n_failed"]) == ("failed", 1, 1)
    assert answer.json["score"]["mean"] is None
    assert answer.json["error"].startswith("1 of 2 samples failed; the first: length 200 with 2 turns needs up to 6")
    assert "tokens, and model" in answer.json["error"]


def test_a_record_too_short_for_the_budget_fails_alone(write, run_records):
    """A quarter of its tokens is no more than the method's sinks: the sample fails and the run has a result."""
    answer = run_records(write([make_record("long", 150, "?"), make_record("short", 1, "?")]), "streaming-llm")
    assert answer.code == 1
    assert (answer.json["status"], answer.json["n_scored"], answer.json["n_failed"]) == ("failed", 1, 1)
    assert answer.json["error"].startswith("1 of 2 samples failed; the first: budget 25%")
    assert "sample 1 failed: budget 25%" in answer.err


def test_records_of_one_name_are_not_paired(write, run_records, kvbench, tmp_path):
    """`kvbench compare` refuses results in which two records have the same id, as tasks of a Python file may."""
    found = run_records(write([make_record("same", 40, "?"), make_record("other", 50, "?")]), "full")
    assert found.json["n_scored"] == 2
    journal = tmp_path / "runs" / found.json["run_id"] / "samples.jsonl"
    journal.write_text(journal.read_text().replace('"sample":"other"', '"sample":"same"'))
    answer = kvbench("compare", *[journal.parent] * 2)
    assert answer.code == 2
    assert "has two samples with the id 'same', numbers 0 and 1" in answer.err


def make_record(name: str, letters: int, *questions: str) -> dict[str, Any]:
    """A record whose context has this many letters, one token each."""
    return {"id": name, "context": "a" * letters, "turns": [{"question": x, "answer": "a"} for x in questions]}


@pytest.fixture
def run_records(kvbench, model_folder, tmp_path) -> Callable[..., Any]:
    """Run two records of a task."""

    def make(path: Path, method: str, *more: str) -> Any:
        return kvbench(
            "run", "--task", path, "--method", method, "--model", model_folder, "--samples", "2", "--device", "cpu",
            "--out", tmp_path / "runs", "--json", *more,
        )

    return make
