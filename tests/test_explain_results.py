"""The script that measures which entries questions and answers read: hand-computed cases."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kvbench.hf import load_model
from kvbench.registry import find_task
from kvbench.task import Mode, Split, encode

SCRIPT = Path(__file__).parent.parent / "scripts" / "explain_results.py"


@pytest.fixture(scope="module")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("explain_results", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
    return module


def test_the_value_of_every_turn_is_found(script):
    """Each token of the value stands where it is copied from, and is predicted one position earlier."""
    model, task = load_model("mini", dtype="float32"), find_task("niah_multikey_1")()
    (example,) = task.examples(
        seed=3, split=Split.DEV, n=1, length=600, turns=3, mode=Mode.MULTI_TURN, tokenizer=model.tokenizer
    )
    encoded = encode(task, example, model.tokenizer)
    turns = list(script.find_turns(encoded, [x.references[0] for x in example.turns], model.tokenizer))
    whole = [*encoded.context]
    for i, turn in enumerate(encoded.turns):
        whole += [*(turn.later if i else turn.first), *turn.answer]
    assert len(turns) == 3
    for turn, asked in zip(turns, example.turns, strict=True):
        assert all(whole[row + 1] == whole[column] for row, column in turn.copies)
        copied = model.tokenizer.decode([whole[column] for _, column in turn.copies])
        assert copied.strip() == asked.references[0]
        assert len(turn.entries) == len(turn.copies) + script.AFTER


def test_a_value_at_the_end_of_the_context_is_found_whole(script):
    """The answer ` 12.` has two digits in tokens of their own, which end the context; nothing stands after them."""
    class Letters:
        decode = staticmethod(lambda ids: "".join(map(chr, ids)))

    class Made:
        context, answer = tuple(map(ord, "is 12")), tuple(map(ord, " 12."))

    class Asked:
        first = later = tuple(map(ord, "which?"))
        answer = Made.answer

    Made.turns = [Asked]
    (turn,) = script.find_turns(Made, ["12"], Letters)
    assert turn.copies == ((11, 3), (12, 4))
    assert turn.entries == [3, 4]


def test_what_is_kept_is_weighted_by_the_attention(script):
    """One head reads entry 5 with 0.6 and entry 6 with 0.2, and keeps only entry 5; the other reads nothing."""
    turn = script.Turn(20, 24, 26, ((24, 5), (25, 6)))
    weights = torch.tensor([[0.6, 0.2, 0.0, 0.0], [0.0] * 4])
    kept = [torch.tensor([0, 5]), torch.tensor([0, 1])]
    assert script.judge([kept], [[weights]], [turn]) == pytest.approx((0.75, 0.0))
    kept[0] = torch.tensor([5, 6])
    assert script.judge([kept], [[weights]], [turn]) == pytest.approx((1.0, 1.0))


def test_reading_is_the_largest_attention_of_question_or_answer(script):
    """A question token gives 0.5 to the first token of the value, an answer token 0.3; 0.05 does not count."""
    length, turn = 30, script.Turn(20, 24, 26, ((24, 5), (25, 6)))
    attention = torch.zeros(2, length, length)
    attention[0, 21, 5], attention[1, 24, 5], attention[1, 25, 6] = 0.5, 0.3, 0.05

    class Made:
        key = torch.randn(1, length, 4, generator=torch.Generator().manual_seed(0))

    Made.attention = attention
    seen = script.Reading(20, [turn])
    seen.see(Made)
    assert seen.read[0][0].tolist() == [[0.5, 0.0, 0.0, 0.0]]
    assert (seen.by_question, seen.by_answer) == (0.5, pytest.approx(0.3))
    assert seen.copied == pytest.approx((0.3 + 0.05) / 2)
