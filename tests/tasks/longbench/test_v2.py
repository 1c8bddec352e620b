"""LongBench v2: the prompt, its facts, and what is refused."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.registry import find_task
from kvbench.task import Mode, Split
from kvbench.tasks.longbench import v2

PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\nThe text.\n</text>\n\n"
    "What is the correct answer to this question: Why?\nChoices:\n(A) one\n(B) two\n(C) three\n(D) four\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)


def line(**changes: object) -> dict[str, object]:
    return {
        "_id": "abc", "domain": "Code", "sub_domain": "Repositories", "difficulty": "hard", "length": "short",
        "question": "Why?\n", "choice_A": "one", "choice_B": " two", "choice_C": "three", "choice_D": "four",
        "answer": "B", "context": "\nThe text.\n",
    } | changes


def open_task(folder, *found: dict[str, object]):
    (folder / "data.json").write_text(json.dumps(found))
    return find_task("longbench2")(data=str(folder))


def make(task, tokenizer, length: int = 10_000):
    (example,) = task.examples(
        seed=0, split=Split.TEST, n=1, length=length, turns=1, mode=Mode.SINGLE, tokenizer=tokenizer
    )
    return example


def test_the_prompt_is_the_official_one(tmp_path, chars):
    """The prompt is prompts/0shot.txt, with the record's texts stripped; 128 tokens; the letter is the reference."""
    example = make(open_task(tmp_path, line()), chars)
    (turn,) = example.turns
    assert example.context + example.joint + turn.question + turn.prefix == PROMPT
    assert example.context.endswith("<text>\nThe text.")
    assert (turn.max_new_tokens, turn.references, turn.answer) == (128, ("B",), " The correct answer is (B).")
    assert example.facts == {
        "_id": "abc", "domain": "Code", "sub_domain": "Repositories", "difficulty": "hard", "length": "short",
        "cut_tokens": 0,
    }


def test_the_words_are_the_repositorys():
    """The hash is that of prompts/0shot.txt at 2e00731f, and still was at 072a5a73."""
    marks = {f"choice_{x}": f"$C_{x}$" for x in "ABCD"}
    text = v2.PROMPT.format(context="$DOC$", question="$Q$", **marks)
    assert sha256(text.encode()).hexdigest() == "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950"


def test_the_default_length_leaves_120000_tokens_of_prompt():
    """The chat template's own among them."""
    assert find_task("longbench2").default_length - 128 == 120_000


def test_the_middle_is_cut_from_the_whole_prompt(tmp_path, chars):
    """Of 600 characters 300 are the beginning's and 300 the end's, question included."""
    example = make(open_task(tmp_path, line(context="ab" * 1000)), chars, 600 + 128)
    (turn,) = example.turns
    whole = PROMPT.replace("The text.", "ab" * 1000)
    assert example.context + example.joint + turn.question == whole[:300] + whole[-300:]


def test_other_columns_are_left_alone(tmp_path, chars):
    """A record may have further columns of any type, as the retrieved passages of LongBench's RAG runs."""
    task = open_task(tmp_path, line(retrieved_context=[{"content": "The text."}], judge=None))
    assert make(task, chars).context.endswith("<text>\nThe text.")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"answer": "E"}, "record 0 of .*: answer is 'E', not A, B, C or D. Give longbench2 the data of"),
        ({"choice_D": None}, "column choice_D is NoneType"),
        ({"context": ""}, "column context is empty"),
    ],
)
def test_a_wrong_row_is_refused(tmp_path, chars, changes, said):
    with pytest.raises(UserError, match=said):
        make(open_task(tmp_path, line(**changes)), chars)


def test_a_run(tmp_path, capsys):
    """Both official scorers, on a record from a file."""
    open_task(tmp_path, line())
    assert call([
        "run", "--method", "full", "--task", "longbench2", "--task-set", f"data={tmp_path}", "--model", "mini",
        "--length", "600", "--samples", "1", "--device", "cpu", "--out", str(tmp_path / "runs"), "--json",
    ]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (journal,) = (tmp_path / "runs").glob("*/samples.jsonl")
    (found,) = map(json.loads, journal.read_text().splitlines())
    assert (result["status"], result["spec"]["task"]["scorer"]) == ("ok", "longbench2-choice@2e00731f")
    assert set(found["scores"]) == {"longbench2-choice@2e00731f", "longbench2-choice-compensated@2e00731f"}
    assert found["facts"]["difficulty"] == "hard"
