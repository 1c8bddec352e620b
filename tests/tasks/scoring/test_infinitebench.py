"""InfiniteBench's rules, each fault as a claim, with its repair."""

from __future__ import annotations

import re

import pytest

from kvbench.tasks.scoring.infinitebench import SCORERS

TASKS = {
    "passkey", "number_string", "kv_retrieval", "longbook_sum_eng", "longbook_qa_eng", "longbook_qa_chn",
    "longbook_choice_eng", "longdialogue_qa_eng", "math_find", "math_calc", "code_run", "code_debug",
}
OPTIONS = ["Dr. No", "Tom", "Because", "Ann"]


def official(task, prediction, *references, **facts):
    return SCORERS[task][0](prediction, references, facts)


def fixed(task, prediction, *references, **facts):
    scorer = SCORERS[task][1]
    assert scorer.id.startswith("infinitebench-fixed-")
    return scorer(prediction, references, facts)


def test_every_task_has_scorers_the_official_one_first():
    """Twelve tasks, and ids that are unique within one and name the commit."""
    assert set(SCORERS) == TASKS
    for scorers in SCORERS.values():
        assert len({x.id for x in scorers}) == len(scorers)
        assert scorers[0].id.startswith("infinitebench-official-") and scorers[0].id.endswith("@88b3daa6")
        assert all(re.fullmatch(r"infinitebench-(fixed-[a-z-]+|official-[a-z]+-strict)@\d", x.id) for x in scorers[1:])


@pytest.mark.parametrize(
    ("task", "prediction", "references", "score"),
    [
        ("passkey", "The pass key is 71432.", ["71432"], 1.0),
        ("passkey", "key 1: 71432", ["71432"], 0.0),
        ("passkey", "071432", ["71432"], 0.0),
        ("number_string", "none", ["71432"], 0.0),
        ("kv_retrieval", 'is: "c14c-ba."', ["c14c-ba"], 1.0),
        ("kv_retrieval", "c14c-ba0", ["c14c-ba"], 0.0),
        ("kv_retrieval", "`c14c-ba`", ["c14c-ba"], 0.0),
        ("longbook_qa_eng", "The cat sat", ["a dog", "cat sat down"], 4 / 5),
        ("longbook_qa_chn", "福气龙。", ["商老太", "福气"], 4 / 5),
        ("longbook_sum_eng", "a b c", ["x", "a b"], 4 / 5),
        ("math_find", "It is 88.", ["88"], 1.0),
        ("math_find", "88.5", ["88.5"], 1.0),
        ("math_find", "88.5", ["88"], 0.0),
        ("math_find", "-88", ["88"], 1.0),
        ("math_find", "none", ["88"], 0.0),
        ("code_run", "so it returns `-12`.", ["-12"], 1.0),
        ("code_run", "-12 in all", ["-12"], 0.0),
        ("code_run", "returns -12.0", ["-12"], 0.0),
        ("code_run", "", ["-12"], 0.0),
    ],
)
def test_rules(task, prediction, references, score):
    """Hand-computed."""
    assert official(task, prediction, *references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "as_published", "repaired"),
    [
        ("B. Tom", 1.0, 1.0), ("B", 1.0, 1.0), ("Tom", 1.0, 1.0), ("I say the answer is: B", 1.0, 1.0),
        ("It is B or C", 1.0, 0.0), ("", 0.0, 0.0), ("A. Dr. No", 0.0, 0.0), ("I do not know", 0.0, 0.0),
        ("Better not", 1.0, 0.0), ("The answer is (B)", 0.0, 1.0), ("**B**", 0.0, 1.0), ("It was Tom.", 0.0, 1.0),
        ("So the answer is Bob", 1.0, 0.0), ("Option B it is", 1.0, 1.0), ("the answer is", 0.0, 0.0),
        ("AB then B", 0.0, 0.0),
    ],
)
def test_choice(prediction, as_published, repaired):
    """The first letter of a word passes for an option; one in brackets, or a text with punctuation, does not."""
    assert official("longbook_choice_eng", prediction, "Tom", letter="B") == as_published
    assert fixed("longbook_choice_eng", prediction, "Tom", letter="B", options=OPTIONS) == repaired


@pytest.mark.parametrize(
    ("prediction", "as_published", "repaired"),
    [
        ("B. run", 1.0, 1.0), ("B: run", 1.0, 1.0), ("B", 0.0, 1.0), ("(B)", 0.0, 1.0), ("C. run", 0.0, 0.0),
        ("The answer is: `run_all`", 1.0, 1.0), ("The bug is: B", 1.0, 0.0), ("The answer is: C", 0.0, 0.0),
        ("The correct option is: B", 1.0, 1.0), ("no idea", 0.0, 0.0), ("answer is:", 0.0, 0.0),
    ],
)
def test_code_debug(prediction, as_published, repaired):
    """A letter alone, which is what the task asks for, needs a full stop or colon."""
    options = ["run", "run_all", "walk", "stop"]
    assert official("code_debug", prediction, "run_all", letter="B") == as_published
    assert fixed("code_debug", prediction, "run_all", letter="B", options=options) == repaired


@pytest.mark.parametrize(
    ("prediction", "references", "as_published", "repaired"),
    [
        ("Ace Rothstein", ["ACE", "ACE ROTHSTEIN"], 1.0, 1.0),
        ("Rothstein", ["ACE", "ROTHSTEIN"], 0.0, 1.0),
        ("It is Mrs. Hall", ["MRS. HALL"], 0.0, 1.0),
        ("Face", ["ACE"], 0.0, 0.0),
    ],
)
def test_dialogue(prediction, references, as_published, repaired):
    """Only the first name counts, and only if it is one word."""
    assert official("longdialogue_qa_eng", prediction, *references) == as_published
    assert fixed("longdialogue_qa_eng", prediction, *references) == repaired


@pytest.mark.parametrize(
    ("prediction", "as_published", "repaired"),
    [
        ("[7, 12, -3, 5]", 2 / 4, 1.0), ("7, 12, 3, 5", 2 / 4, 2 / 4), ("7", 1 / 4, 1 / 4), ("12, 7", 0.0, 0.0),
        ("", 0.0, 0.0), ("7, 12, -3, 5, 6", 2 / 4, 1.0), ("9" * 5000, 0.0, 0.0),
    ],
)
def test_math_calc(prediction, as_published, repaired):
    """From the first negative number on nothing counts."""
    assert official("math_calc", prediction, "7", "12", "-3", "5") == as_published
    assert fixed("math_calc", prediction, "7", "12", "-3", "5") == repaired
