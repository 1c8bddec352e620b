"""Properties of every task: determinism, splits, modes, and how text becomes ids."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys

import pytest

from kvbench.registry import list_entries
from kvbench.task import Mode, Split, Task, encode
from kvbench.tasks.prose import sentences
from kvbench.text.template import Frame

GENERATED = [x for x in (x.load() for x in list_entries("task")) if x.examples is Task.examples]
TASKS = tuple(task() for task in GENERATED)
KEYLESS = {
    "chain", "cwe", "fwe", "list-copy", "list-reverse", "math-find", "ppl-stdlib", "prefix-suffix",
    "prefix-suffix-short", "qa-facts", "recurrence", "repo-function", "running-sums",
}
"""Tasks whose questions contain none of their recorded keys."""
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def some(task, tokenizer, *, seed=0, split=Split.TEST, n=3, more=0, turns=2):
    length = max(800, task.minimum_length(2, tokenizer)) + more
    return list(task.examples(
        seed=seed, split=split, n=n, length=length, turns=turns, mode=Mode.MULTI_TURN, tokenizer=tokenizer
    ))


@pytest.mark.few(3)  # the golden outputs compare the first example of every task
@each_task
def test_examples_are_a_function_of_their_arguments(task, mini_tokenizer):
    """The same request gives the same examples, and a longer request begins with a shorter one."""
    assert some(task, mini_tokenizer, n=4)[:3] == some(task, mini_tokenizer, n=3)


@pytest.mark.slow
@each_task
def test_every_argument_changes_the_text(task, mini_tokenizer):
    """Another seed, split, length or number of turns is another text: dev and test share no value and no key."""
    base = some(task, mini_tokenizer)
    for change in ({"seed": 1}, {"split": Split.DEV}, {"more": 1}, {"turns": 1}):
        other = some(task, mini_tokenizer, **change)
        for one, two in itertools.product(base, other):
            assert not {turn.references for turn in one.turns} & {turn.references for turn in two.turns}
            assert not set(one.facts.get("keys", ())) & set(two.facts.get("keys", ()))


@pytest.mark.slow
@each_task
def test_samples_differ(task, mini_tokenizer):
    """No two samples of a request are alike, in id, context or question."""
    examples = some(task, mini_tokenizer, n=8)
    assert len({e.id for e in examples}) == len({e.context for e in examples}) == len({e.turns for e in examples}) == 8


@each_task
def test_context_and_questions_are_encoded_apart(task, mini_tokenizer):
    """Ids decode to the text of every piece, and a turn is the same ids in multi-turn and multi-request order."""
    (example,) = some(task, mini_tokenizer, n=1)
    encoded = encode(task, example, mini_tokenizer, Frame.of(mini_tokenizer))
    assert mini_tokenizer.decode(encoded.context) == example.context
    for turn, ids in zip(example.turns, encoded.turns, strict=True):
        assert mini_tokenizer.decode(ids.first) == task.joint + turn.question + turn.prefix
        assert mini_tokenizer.decode(ids.later) == task.separator + turn.question + turn.prefix
        assert mini_tokenizer.decode(ids.answer) == turn.answer


@pytest.mark.few(5)
@each_task
def test_a_context_says_as_much_of_every_question(task, mini_tokenizer):
    """The keys that questions about one context name stand in it equally often: the first is not known beforehand.

    Tasks on data sets are tested with their prompts.
    """
    for example in some(task, mini_tokenizer):
        asked = "\n".join(turn.question for turn in example.turns)
        named = [x for x in map(str, example.facts.get("keys", ())) if x in asked]
        said = {len(re.findall(rf"(?<!\w){re.escape(x)}(?!\w)", example.context)) for x in named}
        assert bool(named) == (task.name not in KEYLESS)
        assert task.leak is not None or len(said) <= 1


def test_prose_keeps_out_of_the_needles_way():
    """Generated prose has no digit and none of the needle's wording, and rarely repeats a sentence."""
    text = list(itertools.islice(sentences(random.Random(0)), 3000))
    assert not any(char.isdigit() for sentence in text for char in sentence)
    assert not any("magic" in sentence or "number" in sentence for sentence in text)
    assert all(sentence.endswith(".") and sentence[0].isupper() and sentence.count(".") == 1 for sentence in text)
    assert len(set(text)) > 2800


def test_settings_in_a_summary_are_options_to_copy():
    """`--task-set` takes one setting and is repeated for the next one."""
    summaries = [x.load().summary for x in list_entries("task")]
    found = [words for x in summaries for words in re.findall(r"--task-set ((?:\w+=\S+ ?)+)", x)]
    assert found
    assert [x for x in found if x.count("=") > 1] == []


def test_tasks_do_not_load_torch():
    """Listing tasks stays quick: their modules import neither torch nor transformers."""
    code = (
        "import sys, kvbench.tasks.growth.lists, kvbench.tasks.ruler.niah, kvbench.tasks.scbench.kv\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
