"""kvpress's records of RULER: the prompt, which records are taken, the score, and what is refused."""

from __future__ import annotations

import json

import pytest

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode
from kvbench.tasks.ruler.kvpress import KvpressRuler
from kvbench.text.template import Frame

CONTEXT = "A special magic number is hidden within the following text.\nOne two three.\n"
QUESTION = "What is the special magic number for x mentioned in the provided text? "
PREFIX = "The special magic number for x mentioned in the provided text is"
PLAIN = (
    "A special magic number is hidden within the following text.\nOne two three.\n"
    "What is the special magic number for x mentioned in the provided text? \n"
    "The special magic number for x mentioned in the provided text is"
)
CHAT = (
    "<user>A special magic number is hidden within the following text.\nOne two three.\n"
    "What is the special magic number for x mentioned in the provided text? <assistant>"
    "The special magic number for x mentioned in the provided text is"
)


def record(**changes: object) -> dict[str, object]:
    return {
        "context": CONTEXT, "question": QUESTION, "answer_prefix": PREFIX, "answer": ["12", "34"],
        "task": "niah_single_1", "max_new_tokens": 128,
    } | changes


def write(folder, *records):
    path = folder / "4096.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    return str(folder)


def some(task, tokenizer, **changes):
    request = {"seed": 0, "split": Split.TEST, "n": 1, "length": 400, "turns": 1, "mode": Mode.SINGLE}
    return list(task.examples(**{**request, **changes}, tokenizer=tokenizer))


def test_the_prompt_is_kvpresses(tmp_path, chars):
    """Context, question, what the template has between user and assistant (else a line break), answer prefix."""
    task = KvpressRuler(data=write(tmp_path, record()))
    (example,) = some(task, chars)
    encoded = encode(task, example, chars)
    assert chars.decode(encoded.context + encoded.turns[0].first) == PLAIN
    assert chars.decode(encoded.context) == CONTEXT
    chat = Frame("<user>", "<assistant>", "", "sha", special=False)
    framed = task.compose(record(), mode=Mode.SINGLE, turns=1, frame=chat)
    encoded = encode(task, framed, chars, chat)
    assert chars.decode(encoded.context + encoded.turns[0].first) == CHAT
    (turn,) = example.turns
    assert (turn.references, turn.max_new_tokens, example.facts["task"]) == (("12", "34"), 128, "niah_single_1")


def test_records_of_a_task_are_taken_in_order(tmp_path, chars):
    """A task's records in the order of the file for seed 0 and in another for any other; all of them by default."""
    kinds = ["vt", "qa_1", "vt", "cwe", "vt", "vt"]
    folder = write(tmp_path, *(record(task=kind, question=f"{i} ") for i, kind in enumerate(kinds)))
    mixed, only = KvpressRuler(data=folder), KvpressRuler(data=folder, task="vt")
    assert [x.id for x in some(mixed, chars, n=6)] == [f"row-{i}" for i in range(6)]
    assert [x.id for x in some(only, chars, n=4)] == ["row-0", "row-2", "row-4", "row-5"]
    shuffled = [x.id for x in some(only, chars, n=4, seed=3)]
    assert sorted(shuffled) == ["row-0", "row-2", "row-4", "row-5"] and shuffled != sorted(shuffled)
    with pytest.raises(UserError, match=r"has 4 records of task vt in .*: use --samples 4 or fewer"):
        some(only, chars, n=5)
    with pytest.raises(UserError, match=r"has no records of task fwe\. Use another --task-set task, or give"):
        some(KvpressRuler(data=folder, task="fwe"), chars)


def test_nothing_is_cut(tmp_path, chars):
    """A record that does not fit is refused, and says what to do; one that fits to the token is taken."""
    task = KvpressRuler(data=write(tmp_path, record()))
    fits = len(PLAIN) + 128
    assert some(task, chars, length=fits)[0].context == CONTEXT
    with pytest.raises(UserError, match=r"row-0 of ruler-kvpress has \d+ tokens more than fit .* greater --length"):
        some(task, chars, length=fits - 1)


def test_dev_is_refused(tmp_path, chars):
    """The data has a test split only."""
    with pytest.raises(UserError, match="only a test split"):
        some(KvpressRuler(data=write(tmp_path, record())), chars, split=Split.DEV)


@pytest.mark.parametrize("changes", [{"answer": []}, {"answer": [3]}, {"answer": [""]}, {"max_new_tokens": 0}])
def test_records_that_cannot_be_scored_are_refused(tmp_path, chars, changes):
    """No answer, one that is no text or empty, and no token to answer with."""
    with pytest.raises(UserError, match="answer is no list of texts, or has no tokens"):
        some(KvpressRuler(data=write(tmp_path, record(**changes))), chars)


@pytest.mark.parametrize(
    ("prediction", "references", "task", "score"),
    [
        (" 12 and 56", ["12", "34"], "niah_single_1", 0.5),
        (" 12 and 56", ["12", "34"], "qa_2", 1.0),
        ("1\n2", ["12"], "vt", 1.0),
        ("ABC", ["abc"], "cwe", 1.0),
        ("", ["a"], "qa_1", 0.0),
    ],
)
def test_string_match(prediction, references, task, score):
    """Any reference for questions about documents, the share of them otherwise; control characters are removed."""
    scorer = KvpressRuler.scorers[0]
    assert scorer(prediction, references, {"task": task}) == score


def test_the_strict_score_is_never_above_the_published_one():
    """Of an answer without the reference's punctuation."""
    facts = {"task": "qa_1"}
    published, strict = (x("St Louis", ["St. Louis"], facts) for x in KvpressRuler.scorers)
    assert (published, strict) == (0.0, 0.0)
    assert KvpressRuler.scorers[1]("St. Louis", ["St. Louis"], facts) == 1.0


def test_the_commit_is_pinned(tmp_path):
    """A folder named by another commit is refused; one without a name is named by the hash of its files."""
    assert KvpressRuler(data=write(tmp_path, record())).dataset_revision.startswith("sha256:")
    other = tmp_path / ("0" * 40)
    other.mkdir()
    with pytest.raises(UserError, match="pinned at 24adceac8a0e6532936e8d721cd9e9084d2e4686"):
        _ = KvpressRuler(data=write(other, record())).dataset_revision
