"""mini-hybrid: its layout, its cache, its rotation, and that its one global layer finds what windows cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kvbench.analysis.load import load_run
from kvbench.budget import Budget
from kvbench.engine.session import Session
from kvbench.hf import load_model
from kvbench.hf.find import find_folder
from kvbench.method import Moment
from kvbench.registry import find_method
from kvbench.task import Mode, Split, encode
from kvbench.tasks.ruler import niah

ROOT = Path(__file__).parents[2]
WINDOW, GLOBAL, LENGTH = 64, 2, 400


def test_the_table_of_its_card_is_that_of_the_results():
    """Stored bytes, scores and entries kept, of every run in results/mini-hybrid."""
    page = (find_folder("mini-hybrid") / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+%) \| (\d\.\d\d) \| ([\d, ]+) \|$", page, re.MULTILINE)
    found = [load_run(x.parent).result for x in (ROOT / "results" / "mini-hybrid").glob("*/result.json")]
    assert sorted(rows) == sorted(
        (x.method.name, f"{x.memory.ratio:.0%}", f"{x.score.mean:.2f}",
         ", ".join(f"{n:.0f}" for n in x.effect.entries_kept_by_layer)) for x in found
    )


@pytest.fixture(scope="module")
def model():
    """The model as shipped."""
    return load_model("mini-hybrid")


@pytest.fixture(scope="module")
def asked(model):
    """A needle in a context, more than three windows before its question, as context, question and answer."""
    task = niah.NiahSingle2()
    for example in task.examples(
        seed=0, split=Split.DEV, n=20, length=1024, turns=1, mode=Mode.SINGLE, tokenizer=model.tokenizer
    ):
        found = encode(task, example, model.tokenizer)
        text = model.tokenizer.decode(found.context[: -4 * WINDOW])
        if example.turns[0].references[0] in text:
            return found.context, found.turns[0].first, found.turns[0].answer
    raise AssertionError("no needle is far from its question")


def answer(model, asked, method):
    """The answer's tokens that are most likely at their places."""
    context, question, wanted = asked
    ids = [*question, *wanted]
    with Session(model, method, capacity=len(context) + len(ids)) as session:
        session.prefill(list(context))
        found = session.forward(torch.tensor([ids]), Moment.TURN_END, keep=len(wanted) + 1)
    return found[0, :-1].argmax(-1).tolist(), list(wanted)


def test_three_layers_slide_and_rotate_and_one_does_neither(model):
    """Read from the config, and found by the load check in what the layers do."""
    assert [x.window for x in model.layers] == [WINDOW, WINDOW, None, WINDOW]
    assert [x.angles is not None for x in model.ropes] == [True, True, False, True]
    assert all(x.trusted and x.movable for x in model.ropes)


def test_turning_keys_leaves_those_of_the_global_layer(model):
    """Rotation to a position and shifts change the keys of the others only."""
    x, places = torch.randn(1, 2, 3, 64, dtype=torch.float32), torch.tensor([[5, 60, 300]])
    for index, rope in enumerate(model.ropes):
        assert torch.equal(rope.rotate(x, places), x) is (index == GLOBAL)
        assert torch.equal(rope.shift(x, places), x) is (index == GLOBAL)


def test_the_full_cache_is_that_of_the_hybrid(model):
    """Windows hold their own entries: 400 and three times 64, not four times 400; a budget is a share of that."""
    entry = 2 * (64 + 64) * 2
    assert model.shape(LENGTH).full_bytes == (LENGTH + 3 * WINDOW) * entry
    method = find_method("knorm")().bind(model).fit(Budget.parse("50%"), model.shape(LENGTH))
    with Session(model, method, capacity=LENGTH) as session:
        session.prefill(list(range(1, LENGTH + 1)))
        assert [x.n for x in session.layers] == [32, 32, 200, 32]


def test_a_needle_beyond_every_window_is_found_by_the_global_layer(model, asked):
    """The answer is right, and wrong if that layer keeps its last entries only."""
    said, wanted = answer(model, asked, find_method("full")())
    assert said == wanted
    method = find_method("streaming-llm")().bind(model).fit(Budget("rows", WINDOW), model.shape(len(asked[0])))
    assert answer(model, asked, method)[0] != wanted


@pytest.mark.parametrize("name", ["shadowkv", "kvzip", "triattention", "kvmerger", "quest"])
def test_methods_with_the_whole_budget_are_the_full_cache(model, asked, name):
    """Those that turn keys, score them, merge them or choose pages."""
    method = find_method(name)().bind(model).fit(Budget.parse("100%"), model.shape(len(asked[0])))
    said, wanted = answer(model, asked, method)
    assert said == wanted
