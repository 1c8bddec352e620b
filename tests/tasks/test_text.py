"""Perplexity on the standard library: which text, how long, and what is made of its log-probabilities."""

from __future__ import annotations

import hashlib
import math
import platform
import random
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.text import stdlib
from kvbench.tasks.text.stdlib import StdlibPerplexity
from kvbench.text.stdlib import LONGEST, read_modules

TASK = StdlibPerplexity()
NLL, PERPLEXITY = TASK.scorers
BODY = "".join(f"def f{i}():\n    return {i}\n\n" for i in range(100, 999))
NOTES = "# e\n" * 4000


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A library of two modules, and files that are none of its text."""
    files = {
        "abc.py": BODY, "json/decoder.py": f"x = 1\n\ny = 'é'\n{NOTES}", "json/tests/test_it.py": BODY,
        "encodings/cp037.py": BODY, "sitecustomize.py": BODY, "site-packages/other.py": BODY, "this.py": "s = 1",
        "csv.py": f"{BODY}#{'x' * LONGEST}\n", "json/notes.txt": BODY,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    monkeypatch.setattr(stdlib, "library", lambda: read_modules(str(tmp_path)))
    return tmp_path


def make(tokenizer, *, seed=0, length=600, turns=1, task=TASK):
    return task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=tokenizer)


def test_which_files_are_read(small):
    """Modules of the library in a fixed order: no tests, no tables, no long lines, nothing that others installed."""
    modules, digest = read_modules(str(small))
    assert [x.name for x in modules] == ["abc.py", "json/decoder.py"]
    assert modules[1].lines[:4] == ("x = 1\n", "\n", "y = 'é'\n", "# e\n")
    assert modules[1].margins == (2,)
    text = f"abc.py\n{BODY}\0json/decoder.py\nx = 1\n\ny = 'é'\n{NOTES}\0"
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_the_revision_names_the_text(small):
    """Python's version and the hash; another text is another revision."""
    before = TASK.dataset_revision
    assert before == f"python-{platform.python_version()}:{read_modules(str(small))[1][:12]}"
    (small / "abc.py").write_text("import os\nx = 1\n")
    read_modules.cache_clear()
    assert TASK.dataset_revision.partition(":")[0] == before.partition(":")[0]
    assert TASK.dataset_revision != before


def test_a_python_without_its_source_is_refused(tmp_path):
    """It says where it looked."""
    with pytest.raises(UserError, match=f"no source text in {tmp_path}"):
        read_modules(str(tmp_path))


def test_the_text_is_as_written(small, chars):
    """Whole lines of a module up to a line at its margin, and as many whole lines after it as fit."""
    example = next(x for x in (make(chars, seed=i, length=330) for i in range(9)) if x.facts["module"] == "abc.py")
    start = example.facts["line"]
    lines = BODY.splitlines(keepends=True)
    (turn,) = example.turns
    assert lines[start - 1].startswith("def ")
    assert "".join(lines[: start - 1]).endswith(example.context)
    assert turn.answer == "".join(lines[start - 1 :])[: len(turn.answer)]
    assert turn.answer.endswith("\n") and 256 - max(map(len, lines)) < len(turn.answer) <= 256
    assert (turn.question, turn.prefix, turn.max_new_tokens) == ("", "", 0)
    assert turn.choices == turn.references == (turn.answer,)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_what_stands_before_the_module(chars):
    """Other modules, each after a line with its name."""
    found = 0
    for example in (make(chars, seed=seed, length=12_000) for seed in range(25)):
        before = "".join(BODY.splitlines(keepends=True)[: example.facts["line"] - 1])
        if example.facts["module"] == "abc.py" and len(before) < 11_000:
            assert f"# json/decoder.py\nx = 1\n\ny = 'é'\n{NOTES}# abc.py\n{before}".endswith(example.context)
            assert f"{NOTES[:400]}# abc.py\ndef f100():\n" in example.context
            found += 1
    assert found > 1


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 4), extra=st.integers(0, 2000))
def test_context_and_continuation_fill_the_length(mini_tokenizer, seed, turns, extra):
    """Together they never exceed it and come within a line, from the minimum length on; no turn exceeds its tokens."""
    length = TASK.minimum_length(turns, mini_tokenizer) + extra
    example = make(mini_tokenizer, seed=seed, length=length, turns=turns)
    encoded = encode(TASK, example, mini_tokenizer)
    used = prompt_tokens(encoded) + len(encoded.turns[0].answer)
    assert length - LONGEST <= used <= length
    assert all(TASK.tokens - LONGEST <= len(x.answer) <= TASK.tokens for x in encoded.turns)


def test_the_ids_are_those_of_the_whole_text(mini_tokenizer):
    """A continuation is cut where a tokenizer cuts too, so that it is what the model would have seen."""
    for seed in range(5):
        example = make(mini_tokenizer, seed=seed, length=1500)
        encoded = encode(TASK, example, mini_tokenizer)
        whole = mini_tokenizer(example.context + example.turns[0].answer, add_special_tokens=False).input_ids
        assert [*encoded.context, *encoded.turns[0].answer] == whole


def test_turns_go_on_in_the_module(mini_tokenizer):
    """Nothing stands between them, and together they are the module's own lines."""
    example = make(mini_tokenizer, turns=3)
    path = Path(sysconfig.get_paths()["stdlib"]) / example.facts["module"]
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(turn.answer for turn in example.turns)
    assert "".join(lines[example.facts["line"] - 1 :]).startswith(text)
    encoded = encode(TASK, example, mini_tokenizer)
    assert [(x.first, x.later) for x in encoded.turns] == [((), ())] * 3


def test_turns_that_do_not_follow_one_another_are_not_asked_for():
    """In multi-request order each would follow the context."""
    assert TASK.modes == (Mode.SINGLE, Mode.MULTI_TURN)


def test_a_module_for_each_sample(mini_tokenizer):
    """Samples are of different modules."""
    asked = {"seed": 0, "split": Split.TEST, "n": 8, "length": 600, "turns": 1, "mode": Mode.SINGLE}
    assert len({x.facts["module"] for x in TASK.examples(**asked, tokenizer=mini_tokenizer)}) >= 6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"length": 90_000}, r"length 90000 exceeds Python's standard library, which has \d+ tokens"),
        ({"turns": 99}, "no module of Python's standard library is long enough for 99 x 256 tokens"),
    ],
)
def test_what_the_library_has_not_is_the_users_mistake(chars, wanted, message):
    """It is refused with what there is, not repeated."""
    with pytest.raises(UserError, match=message):
        make(chars, **wanted)


def test_a_continuation_holds_any_line():
    """Fewer tokens than a line can have are refused."""
    with pytest.raises(UserError, match="tokens must be 122 or more, so that lines fit, got 121"):
        StdlibPerplexity(tokens=121)
    StdlibPerplexity(tokens=122)


def test_scores_of_known_probabilities():
    """Tokens of probability 1/2 and 1/8: log 4 nats each on average, a perplexity of 4; lower is better."""
    facts = {"logprobs": [[math.log(1 / 2), math.log(1 / 8)]], "module": "abc.py"}
    assert NLL("x", ("x",), facts) == pytest.approx(math.log(4))
    assert PERPLEXITY("x", ("x",), facts) == pytest.approx(4)
    assert [(x.id, x.metric, x.higher_is_better) for x in TASK.scorers] == [
        ("token-nll@1", "token_nll", False), ("perplexity@1", "perplexity", False),
    ]
