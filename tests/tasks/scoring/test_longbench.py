"""LongBench's rules, each fault as a claim, with its repair."""

from __future__ import annotations

import pytest

from kvbench.tasks.scoring.longbench import SCORERS, VERSION_2

TASKS = {
    "narrativeqa": "qa-f1", "qasper": "qa-f1", "multifieldqa_en": "qa-f1", "multifieldqa_zh": "qa-f1-zh",
    "hotpotqa": "qa-f1", "2wikimqa": "qa-f1", "musique": "qa-f1", "dureader": "rouge-l-zh", "gov_report": "rouge-l",
    "qmsum": "rouge-l", "multi_news": "rouge-l", "vcsum": "rouge-l-zh", "trec": "classification",
    "triviaqa": "first-line-qa-f1", "samsum": "first-line-rouge-l", "lsht": "classification",
    "passage_count": "numbers", "passage_retrieval_en": "numbers", "passage_retrieval_zh": "numbers",
    "lcc": "code-similarity", "repobench-p": "code-similarity",
}
"""The card's table, 3.2."""


def score(task, prediction, *references, **facts):
    return SCORERS[task][0](prediction, references, facts)


def test_every_task_has_its_metric():
    """The 21 tasks; what is scored otherwise has another id."""
    assert {task: scorers[0].id for task, scorers in SCORERS.items()} == {
        task: f"longbench-{rule}@2e00731f" for task, rule in TASKS.items()
    }
    for scorers in SCORERS.values():
        assert len({x.id for x in scorers}) == len(scorers)


@pytest.mark.parametrize(
    ("task", "prediction", "references", "expected"),
    [
        ("qasper", "The cat sat", ["dogs", "a cat sat down"], 4 / 5),
        ("qasper", "x\ncat", ["cat"], 2 / 3),
        ("triviaqa", "\n\ncat\nQuestion: dog", ["cat"], 1.0),
        ("triviaqa", " \ncat", ["cat"], 0.0),
        ("multifieldqa_zh", "我来到北京清华大学。", ["清华大学"], 2 / 5),
        ("gov_report", "a b. c", ["a b c d"], 6 / 7),
        ("gov_report", "", ["a"], 0.0),
        ("gov_report", "...", ["a"], 0.0),
        ("samsum", "a b\nc d", ["a b"], 1.0),
        ("vcsum", "我来到北京", ["我来到清华大学"], 2 / 3),
        ("passage_count", "5 of 10, so 5", ["5"], 2 / 3),
        ("passage_count", "five", ["5"], 0.0),
        ("passage_retrieval_en", "Paragraph 15", ["Paragraph 15"], 1.0),
        ("passage_retrieval_en", "Paragraph 15 or 1", ["Paragraph 1"], 1 / 2),
        ("passage_retrieval_zh", "段落3", ["段落3"], 1.0),
    ],
)
def test_rules(task, prediction, references, expected):
    """Hand-computed: the best reference counts, and of four tasks the first line."""
    assert score(task, prediction, *references) == pytest.approx(expected, abs=1e-6)


CLASSES = ["Abbreviation", "Food", "Other entity", "entity", "Other", "location"]


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("Food", "Food", 1.0), ("Food or location", "Food", 1 / 2), ("location", "Food", 0.0), ("food", "Food", 0.0),
        ("Food\nlocation", "Food", 1.0), ("\nFood", "Food", 1.0),
    ],
)
def test_classification(prediction, gold, expected):
    """1 over the classes that the first line names."""
    for scorer in SCORERS["trec"]:
        assert scorer(prediction, [gold], {"all_classes": CLASSES}) == expected


def test_classification_passes_over_the_class_after_a_removed_one():
    """`entity` and `Other` are inside the gold's name: the official rule removes the first and keeps the second."""
    official, fixed = (x("Other entity", ["Other entity"], {"all_classes": CLASSES}) for x in SCORERS["trec"])
    assert (official, fixed) == (1 / 2, 1.0)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("abcd", 1.0), ("\n\nabcd\nx", 1.0), ("```python\n# start\n// or\nabcd\n```", 1.0), ("```", 0.0), ("", 0.0),
        ("\n \nabcd", 0.0),
    ],
)
def test_code_is_one_line(prediction, expected):
    """The first without backtick, # and //; a line of spaces counts as one."""
    for scorer in SCORERS["lcc"]:
        assert scorer(prediction, ["abcd"], {}) == expected


def test_code_similarity_depends_on_what_is_installed():
    """Without python-Levenshtein the blocks of difflib, in whole percent; else insertions and deletions."""
    official, fixed = (x("abcd", ["bcdaxx"], {}) for x in SCORERS["lcc"])
    assert (official, fixed) == (0.6, 0.6)
    official, fixed = (x("tide", ["diet"], {}) for x in SCORERS["lcc"])
    assert (official, fixed) == (0.25, 0.5)
    official, fixed = (x("ab", ["abcd"], {}) for x in SCORERS["lcc"])
    assert (official, fixed) == (0.67, 2 / 3)


@pytest.mark.parametrize(
    ("prediction", "plain", "compensated"),
    [
        ("The correct answer is (B).", 1.0, 1.0), ("**The correct answer is B**", 1.0, 1.0),
        ("The correct answer is (C)", 0.0, 0.0), ("B", 0.0, 0.25), ("The answer is (B)", 0.0, 0.25), ("", 0.0, 0.25),
        ("The correct answer is C. No: The correct answer is (B)", 1.0, 1.0), ("the correct answer is B", 0.0, 0.25),
        ("The correct answer is (insert answer here)", 0.0, 0.25),
    ],
)
def test_version_2(prediction, plain, compensated):
    """The phrase in brackets first, then without; what does not say it is wrong, or a guess among four."""
    assert [x(prediction, ["B"], {}) for x in VERSION_2] == [plain, compensated]
    assert [x.id for x in VERSION_2] == ["longbench2-choice@2e00731f", "longbench2-choice-compensated@2e00731f"]
