"""SCBench's rules, each fault as a claim, with its repair."""

from __future__ import annotations

import re

import pytest

from kvbench.errors import UserError
from kvbench.tasks.scoring.scbench import PASSKEY, SCORERS

FAULTY = {"vt", "repoqa", "qa_eng", "qa_chn", "choice_eng", "mf", "many_shot", "repoqa_and_kv"}
SOUND = {"kv", "prefix_suffix", "summary", "summary_with_needles"}
CODE = "def alpha(values):\n    total = 0\n    for value in values:\n        total += value\n    return total"


def official(task, prediction, /, *references, **facts):
    return SCORERS[f"scbench_{task}"][0](prediction, references, facts)


def fixed(task, prediction, /, *references, **facts):
    scorer = next(x for x in SCORERS[f"scbench_{task}"] if x.id.startswith("scbench-fixed-"))
    return scorer(prediction, references, facts)


def test_every_task_has_scorers_the_official_one_first():
    """Twelve tasks; those with a known fault have a repaired one too; ids are unique within a task."""
    assert set(SCORERS) == {f"scbench_{x}" for x in FAULTY | SOUND}
    for task, scorers in SCORERS.items():
        assert scorers[0].id.startswith("scbench-official-") and scorers[0].id.endswith("@fb56c917")
        assert len({x.id for x in scorers}) == len(scorers)
        repaired = [x.id for x in scorers if re.fullmatch(r"scbench-fixed-[a-z-]+@\d", x.id)]
        assert bool(repaired) == (task.removeprefix("scbench_") in FAULTY)


@pytest.mark.parametrize(("prediction", "score"), [("it is 1a-2b", 1.0), ("1A-2B", 0.0), ("1a-2", 0.0), ("", 0.0)])
def test_strings(prediction, score):
    """The raw label inside the raw prediction."""
    assert official("kv", prediction, "1a-2b") == official("prefix_suffix", prediction, "1a-2b") == score


def test_vt_is_rounded():
    """1 of 3 names, case apart."""
    assert official("vt", "abcde and xy", "ABCDE", "FGHIJ", "KLMNO") == 0.33
    assert fixed("vt", "abcde and xy", "ABCDE", "FGHIJ", "KLMNO") == 1 / 3


@pytest.mark.parametrize(
    ("prediction", "gold", "as_published", "repaired"),
    [
        ("I know", "No", 1.0, 0.0), ("No.", "no", 1.0, 1.0), ("Mr Darcy", "Mr. Darcy", 0.0, 1.0), ("", "No", 0.0, 0.0),
        ("in the old house", "Old House", 1.0, 1.0),
    ],
)
def test_qa_eng(prediction, gold, as_published, repaired):
    """An answer inside a word counts."""
    assert official("qa_eng", prediction, gold) == as_published
    assert fixed("qa_eng", prediction, gold) == repaired


def test_qa_eng_has_infinitebenchs_f1_too():
    """Which is what papers print for the same questions: 2 of 3 words, of 2."""
    scorer = SCORERS["scbench_qa_eng"][-2]
    assert scorer.id == "infinitebench-official-qa-f1@88b3daa6"
    assert scorer("in the old house", ["Old House"], {}) == pytest.approx(4 / 5)


def test_qa_chn_is_compared_with_single_characters():
    """The whole answer scores 2 / (4 + 1) against its own best character."""
    assert official("qa_chn", "红楼梦境。", "红楼梦境") == pytest.approx(2 / 5)
    assert fixed("qa_chn", "红楼梦境。", "红楼梦境") == 1.0
    assert official("qa_chn", "红", "红楼梦境") == 1.0


@pytest.mark.parametrize(
    ("prediction", "as_published", "repaired"), [("B. Tom", 1.0, 1.0), ("Better not", 1.0, 0.0), ("(B)", 0.0, 1.0)]
)
def test_choice_eng(prediction, as_published, repaired):
    """InfiniteBench's rule, which is tested there."""
    assert official("choice_eng", prediction, "Tom", letter="B") == as_published
    assert fixed("choice_eng", prediction, "Tom", letter="B", options=["Ann", "Tom", "Bob", "Eve"]) == repaired


@pytest.mark.parametrize(
    ("prediction", "as_published", "repaired"),
    [("12", 1.0, 1.0), ("is 12.0", 1.0, 1.0), ("12.9", 1.0, 0.0), ("-12", 1.0, 0.0), ("1, 12", 0.0, 0.0), ("", 0, 0)],
)
def test_mf(prediction, as_published, repaired):
    """Sign and decimals are dropped."""
    assert official("mf", prediction, "12") == as_published
    assert fixed("mf", prediction, "12") == repaired


def test_mf_of_a_number_without_end():
    """A number too great for a float is a wrong one."""
    assert official("mf", "9" * 400, "12") == fixed("mf", "9" * 400, "12") == 0.0


@pytest.mark.parametrize(
    ("prediction", "as_published", "repaired"),
    [("The answer is (B)", 1.0, 0.0), ("(A)", 1.0, 1.0), ("A", 1.0, 1.0), ("(B)", 0.0, 0.0), ("", 0.0, 0.0)],
)
def test_many_shot(prediction, as_published, repaired):
    """The letter anywhere, also inside a word."""
    assert official("many_shot", prediction, "A") == as_published
    assert fixed("many_shot", prediction, "A") == repaired


def test_summary():
    """rougeLsum: 2 of 3 words, of 2."""
    assert official("summary", "the old house", "Old house") == pytest.approx(4 / 5)


@pytest.mark.parametrize(("prediction", "score"), [("It is 71432.", 1.0), ("1. 71432", 0.0), ("none", 0.0)])
def test_passkey(prediction, score):
    """The first run of digits."""
    assert PASSKEY(prediction, ["71432"], {}) == score


def test_repoqa_compares_with_the_rows_at_hand():
    """A closer function in a record that is not evaluated is not seen."""
    other = CODE.replace("alpha", "beta")
    facts = {"lang": "python", "name": "alpha", "functions": {"alpha": CODE}}
    facts["functions_all"] = {"alpha": CODE, "beta": other}
    answer = f"```python\n{other}\n```"
    assert official("repoqa", answer, CODE, **facts) == 1.0
    assert fixed("repoqa", answer, CODE, **facts) == 0.0


def judge_all(task, prediction, reference, /, **facts):
    return {x.id: x(prediction, [reference], facts) for x in SCORERS[f"scbench_{task}"]}


def test_a_summary_with_needles_has_a_whole_and_two_parts():
    """A part says nothing about the other's turns; the whole follows the turn."""
    rule = "scbench-official-summary-with-needles"
    assert judge_all("summary_with_needles", "a b c", "a b", task="scbench_summary") == {
        f"{rule}@fb56c917": 4 / 5, f"{rule}-summary@fb56c917": 4 / 5, f"{rule}-passkey@fb56c917": None,
    }
    assert judge_all("summary_with_needles", "12", "12", task="scbench_passkey") == {
        f"{rule}@fb56c917": 1.0, f"{rule}-summary@fb56c917": None, f"{rule}-passkey@fb56c917": 1.0,
    }


@pytest.mark.parametrize(("mode", "kv"), [("single", 1.0), ("multi-turn", 1.0), ("multi-request", 0.0)])
def test_repoqa_and_kv_finds_no_value_in_multi_request(mode, kv):
    """The official rule looks into the record and not into its text."""
    pool = {"alpha": CODE}
    facts = {"mode": mode, "lang": "python", "functions": pool, "functions_all": pool}
    one, other = "scbench-official-repoqa-and-kv", "scbench-fixed-repoqa-and-kv"
    assert judge_all("repoqa_and_kv", "v1", "v1", task="scbench_kv", name="", **facts) == {
        f"{one}@fb56c917": kv, f"{one}-repoqa@fb56c917": None, f"{one}-kv@fb56c917": kv,
        f"{other}@1": 1.0, f"{other}-repoqa@1": None, f"{other}-kv@1": 1.0,
    }
    assert judge_all("repoqa_and_kv", CODE, CODE, task="scbench_repoqa", name="alpha", **facts) == {
        f"{one}@fb56c917": 1.0, f"{one}-repoqa@fb56c917": 1.0, f"{one}-kv@fb56c917": None,
        f"{other}@1": 1.0, f"{other}-repoqa@1": 1.0, f"{other}-kv@1": None,
    }


def test_an_unknown_part_is_named():
    """With those that there are."""
    with pytest.raises(UserError, match=r"unknown task of a mixed turn 'scbench_mf'.*scbench_passkey, scbench_summary"):
        official("summary_with_needles", "12", "12", task="scbench_mf")
