"""InfiniteBench: prompts, answers, options, cuts, data and refusals."""

# ruff: noqa: RUF001
from __future__ import annotations

import json

import huggingface_hub
import pytest

from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.registry import find_task, list_entries
from kvbench.task import Mode, Split, encode
from kvbench.tasks.longbench import hub

PROMPTS = {
    "passkey": (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information.\n\nThe text.\n\nWhat is the pass key?\n\n"
        "The pass key is"
    ),
    "number_string": (
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about the "
        "important information there.\n\nThe text.\n\nWhat is the sequence of digits?\n\n"
        "The sequence of digits is"
    ),
    "kv_retrieval": (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        'The text.\n\n\nKey: "k"\nThe value associated with the specified key is: '
    ),
    "longbook_sum_eng": "Summarize the book below.\n\nThe text.\n\nSummary:",
    "longbook_choice_eng": (
        "Read the book and answer the question.\n\nThe text.\n\n"
        "Question: The question?\nA. one\nB. two\nC. three\nD. four\n\nThe letter of the correct answer is"
    ),
    "longbook_qa_eng": (
        "Read the book and answer the question. Be very concise in your answer.\n\n"
        "The text.\n\nQuestion: The question?\nAnswer:"
    ),
    "longbook_qa_chn": "阅读以下书籍然后回答问题。\n\nThe text.\n\n问题：The question?\n答案：",
    "math_find": (
        "What is the second largest number in the following list?\n\nThe text.\n\n"
        "You should answer with only one number, no other words. The second largest number of the list is: "
    ),
    "math_calc": (
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: The text.\nValues:"
    ),
    "code_run": (
        "There is a function called func_7 in the following Python code.\n\n"
        "The text.\n\nPlease compute the exact value of func_7(-3). The value of func_7(-3) is"
    ),
    "code_debug": (
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it "
        "crash.\n\nThe text.\n\nOptions:\nA. one\nB. two\nC. three\nD. four\n\nThe correct option is:"
    ),
    "longdialogue_qa_eng": (
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and '
        "you should try to guess who that character is.\n\nThe text.\n\n"
        "The name that has been replaced with $$MASK$$ is likely"
    ),
}
"""The official ones for yarn-mistral, filled with the records below."""
MAX_NEW_TOKENS = {
    "passkey": 6, "number_string": 12, "kv_retrieval": 50, "longbook_sum_eng": 1200, "longbook_choice_eng": 40,
    "longbook_qa_eng": 40, "longbook_qa_chn": 40, "math_find": 3, "math_calc": 30_000, "code_run": 5, "code_debug": 5,
    "longdialogue_qa_eng": 40,
}
PREFIXES = {
    "passkey": "The pass key is", "number_string": "The sequence of digits is",
    "kv_retrieval": "The value associated with the specified key is: ", "longbook_sum_eng": "Summary:",
    "longbook_choice_eng": "The letter of the correct answer is", "longbook_qa_eng": "Answer:",
    "longbook_qa_chn": "答案：", "math_find": "", "math_calc": "Values:", "code_run": "The value of func_7(-3) is",
    "code_debug": "The correct option is:",
    "longdialogue_qa_eng": "The name that has been replaced with $$MASK$$ is likely",
}
OPTIONS = ["one", "two", "three", "four"]
NEW = {
    "passkey": {"input": "What is the pass key?", "answer": ["71432"]},
    "number_string": {"input": "What is the sequence of digits?", "answer": ["2200012222"]},
    "kv_retrieval": {"input": '\nKey: "k"\nThe value associated with the specified key is: ', "answer": "v"},
    "longbook_choice_eng": {"options": OPTIONS, "answer": ["two"]},
    "math_find": {
        "input": (
            "You should answer with only one number, no other words. The second largest number of the list is: "
        ),
        "answer": 88,
    },
    "math_calc": {"answer": [[12, -7, 3]]},
    "code_run": {"input": "Please give me the exact number of the return value of func_7(-3).", "answer": [-4]},
    "code_debug": {"options": OPTIONS, "answer": ["three", "C"]},
    "longdialogue_qa_eng": {"answer": ["ACE", "ACE ROTHSTEIN"]},
}
"""Where a task's record differs from that of a book: answers are texts, numbers or lists of them, as on the hub."""
REFERENCES = {
    "passkey": ("71432",), "number_string": ("2200012222",), "kv_retrieval": ("v",), "longbook_choice_eng": ("two",),
    "math_find": ("88",), "math_calc": ("12", "-7", "3"), "code_run": ("-4",), "code_debug": ("three",),
    "longdialogue_qa_eng": ("ACE", "ACE ROTHSTEIN"),
}
GOLDEN = {
    "passkey": " 71432", "number_string": " 2200012222", "kv_retrieval": "v", "longbook_choice_eng": " B",
    "longbook_qa_chn": "an answer", "math_find": "88", "math_calc": " [12, -7, 3]", "code_run": " -4",
    "code_debug": " C", "longdialogue_qa_eng": " ACE",
}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
each_task = pytest.mark.parametrize("kind", PROMPTS)


def line(kind: str = "longbook_qa_eng", **changes: object) -> dict[str, object]:
    record = {"id": 0, "context": "The text.", "input": "The question?", "answer": ["an answer"], "options": []}
    return record | NEW.get(kind, {}) | changes


def open_task(folder, *found: dict[str, object], kind: str = "longbook_qa_eng"):
    (folder / f"{kind}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in found))
    return find_task(f"infinitebench_{kind}")(data=str(folder))


def make(task, tokenizer, length: int = 100_000):
    (example,) = task.examples(
        seed=0, split=Split.TEST, n=1, length=length, turns=1, mode=Mode.SINGLE, tokenizer=tokenizer
    )
    return example


@each_task
def test_the_prompt_is_the_official_one(tmp_path, mini_tokenizer, kind):
    """Context, joint, question and prefix are the repository's text; the prefix is what the answer goes on from."""
    task = open_task(tmp_path, line(kind), kind=kind)
    example = make(task, mini_tokenizer)
    (turn,) = example.turns
    assert example.context + example.joint + turn.question + turn.prefix == PROMPTS[kind]
    assert example.context.endswith("The text.")
    assert (turn.prefix, turn.max_new_tokens) == (PREFIXES[kind], MAX_NEW_TOKENS[kind])
    encoded = encode(task, example, mini_tokenizer)
    assert mini_tokenizer.decode([*encoded.context, *encoded.turns[0].first]) == PROMPTS[kind]


@each_task
def test_a_context_says_nothing_of_its_question(tmp_path, mini_tokenizer, kind):
    """It is the same for another question, but where the task says that it is not."""
    (tmp_path / "other").mkdir()
    one, two = line(kind), line(kind, input=f"x {line(kind)['input']}".replace("second", "third").replace("_7", "_8"))
    tasks = open_task(tmp_path, one, kind=kind), open_task(tmp_path / "other", two, kind=kind)
    first, second = (make(x, mini_tokenizer) for x in tasks)
    assert (first.context == second.context) == (tasks[0].leak is None)


@each_task
def test_answers(tmp_path, mini_tokenizer, kind):
    """References are texts, and the reference answer goes on from the prompt."""
    (turn,) = make(open_task(tmp_path, line(kind), kind=kind), mini_tokenizer).turns
    assert turn.references == REFERENCES.get(kind, ("an answer",))
    assert turn.answer == GOLDEN.get(kind, " an answer")


@each_task
def test_a_perfect_answer_scores_one(tmp_path, mini_tokenizer, kind):
    """The task's first scorer, on the references that the task gives it; code_debug wants a full stop."""
    task = open_task(tmp_path, line(kind), kind=kind)
    example = make(task, mini_tokenizer)
    (turn,) = example.turns
    said = turn.answer + "." * (kind == "code_debug")
    if kind == "math_calc":
        said = said.replace("-", "")  # the official scorer drops signs, and so stops counting at -7
    expected = 1 / 3 if kind == "math_calc" else 1.0
    assert task.scorers[0](said, turn.references, example.facts) == pytest.approx(expected)
    assert task.scorers[0]("?", turn.references, example.facts) == 0.0


def test_the_prefix_follows_the_assistant_header(tmp_path, chars):
    """Where there is a chat template, and the reference answer goes on from there."""
    chars.chat_template = CHAT
    try:
        task = open_task(tmp_path, line("passkey"), kind="passkey")
        encoded = encode(task, make(task, chars), chars)
    finally:
        chars.chat_template = None
    shown = chars.decode([*encoded.context, *encoded.turns[0].first])
    assert shown.startswith("<user>There is an important info")
    assert shown.endswith("The text.\n\nWhat is the pass key?\n\n<assistant>The pass key is")


@pytest.mark.parametrize("answer", ["three", ["three"], ["three", "C"]])
def test_options_are_told_by_letter_and_text(tmp_path, mini_tokenizer, answer):
    """However the record says which one is right, the scorers get its letter and all texts."""
    task = open_task(tmp_path, line("code_debug", answer=answer), kind="code_debug")
    example = make(task, mini_tokenizer)
    assert example.facts == {"letter": "C", "options": OPTIONS, "cut_tokens": 0}
    assert example.turns[0].references == ("three",)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("The largest number of the list is: ", "What is the largest number in the following list?"),
        ("The median number of the list is: ", "What is the median number in the following list?"),
    ],
)
def test_the_number_is_named_before_the_list(tmp_path, mini_tokenizer, asked, said):
    """math_find asks before and after its list."""
    example = make(open_task(tmp_path, line("math_find", input=asked), kind="math_find"), mini_tokenizer)
    assert example.context == f"{said}\n\nThe text."


def test_the_middle_is_cut_from_the_whole_prompt(tmp_path, chars):
    """Of 300 characters 150 are the beginning's and 150 the end's, prefix included."""
    task = open_task(tmp_path, line("passkey", context="ab" * 1000), kind="passkey")
    example = make(task, chars, 300 + 6)
    (turn,) = example.turns
    whole = PROMPTS["passkey"].replace("The text.", "ab" * 1000)
    assert example.context + example.joint + turn.question + turn.prefix == whole[:150] + whole[-150:]
    assert example.facts["cut_tokens"] == len(whole) - 300


def test_all_tasks_are_listed():
    """Twelve, each with what it needs."""
    entries = [x for x in list_entries("task") if x.facts["family"] == "infinitebench"]
    assert {x.name for x in entries} == {f"infinitebench_{kind}" for kind in PROMPTS}
    assert {x.facts["needs"] for x in entries} == {"InfiniteBench's data, a larger model"}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("passkey", {"answer": []}, "answer must hold a text or number, or several"),
        ("passkey", {"answer": [[1], [2]]}, "answer must hold a text or number, or several"),
        ("passkey", {"answer": None}, "column answer is NoneType"),
        ("code_debug", {"options": ["one"]}, "options must be four texts"),
        ("code_debug", {"options": "abcd"}, "options must be four texts"),
        ("code_debug", {"answer": "five"}, "the answer 'five' is none of the options"),
        ("longbook_choice_eng", {"answer": ["two", "E"]}, "the answer 'two' is none of the options"),
        ("longbook_choice_eng", {"answer": ["one", "two", "B"]}, "the answer 'one' is none of the options"),
        ("code_run", {"answer": "many"}, "answer must be numbers"),
        ("code_run", {"answer": 3.5}, "answer is 3.5, and a function returns a whole number"),
        ("passkey", {"answer": True}, "column answer is bool, not str or int or float or list"),
        ("code_run", {"input": "What is returned?"}, "input calls no function such as func_1(2)"),
        ("math_find", {"input": "Which?"}, "input names no number, as in `The largest number of`"),
        ("longbook_qa_eng", {"context": ""}, "column context is empty"),
    ],
)
def test_a_wrong_row_is_refused(tmp_path, mini_tokenizer, kind, changes, said):
    """By its number, with what is wrong."""
    with pytest.raises(UserError, match="record 0 of ") as caught:
        make(open_task(tmp_path, line(kind, **changes), kind=kind), mini_tokenizer)
    assert said in str(caught.value)


def test_the_hub_is_asked_for_the_tasks_file(tmp_path, monkeypatch, mini_tokenizer):
    """At the pinned commit, which names the data."""
    hub.open_file.cache_clear()
    asked = []
    open_task(tmp_path, line("passkey"), kind="passkey")

    def fetch(*arguments, **options):
        asked.append((arguments, options))
        return str(tmp_path / "passkey.jsonl")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    task = find_task("infinitebench_passkey")()
    assert make(task, mini_tokenizer).turns[0].references == ("71432",)
    assert task.dataset_revision == "90f0394333616266d9fe85824ceaf505093cbaa5"
    options = {"repo_type": "dataset", "revision": "90f0394333616266d9fe85824ceaf505093cbaa5"}
    assert asked == [(("xinrongzhang2022/InfiniteBench", "passkey.jsonl"), options)]
    hub.open_file.cache_clear()


def test_a_run(tmp_path, capsys):
    """Two records of passkey from a folder to scores."""
    noise = "The grass is green. The sky is blue. " * 100
    open_task(tmp_path, *(line("passkey", context=noise) for _ in range(2)), kind="passkey")
    assert call([
        "run", "--method", "full", "--task", "infinitebench_passkey", "--task-set", f"data={tmp_path}", "--model",
        "mini", "--length", "300", "--samples", "2", "--device", "cpu", "--out", str(tmp_path / "runs"), "--json",
    ]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (journal,) = (tmp_path / "runs").glob("*/samples.jsonl")
    lines = [json.loads(x) for x in journal.read_text().splitlines()]
    assert (result["status"], result["spec"]["task"]["scorer"]) == ("ok", "infinitebench-official-digits@88b3daa6")
    assert [x["references"] for x in lines] == [["71432"]] * 2
    assert all(x["facts"]["cut_tokens"] > 0 and len(x["ids"]) <= 6 for x in lines)


def test_a_run_over_the_wrong_file(tmp_path, capsys):
    """One line and exit code 2."""
    open_task(tmp_path, {"text": "?"}, kind="code_run")
    assert call([
        "run", "--method", "full", "--task", "infinitebench_code_run", "--task-set", f"data={tmp_path}", "--model",
        "mini", "--length", "300", "--device", "cpu", "--out", str(tmp_path / "runs"),
    ]) == 2
    assert "has no column context, input, answer" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
