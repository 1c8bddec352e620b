"""The bundled model, as it ships: small, and able to do the tasks it is there for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvbench.task import Mode, Split, encode
from kvbench.tasks.ruler.niah import NiahMultikey1, NiahSingle1, NiahSingle2
from kvbench.tasks.scbench.kv import KeyValueShort

MINI = Path(__file__).parents[2] / "kvbench" / "models" / "mini"
TASKS = (NiahSingle1(), NiahSingle2(), NiahMultikey1(), KeyValueShort())


@pytest.fixture(scope="module")
def mini():
    """The weights as shipped."""
    return AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.bfloat16).eval()


@pytest.mark.few
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_mini_answers_and_stops(task, mini, mini_tokenizer):
    """Of six fresh samples at 600 tokens greedy generation says five or more, and nothing after the answer."""
    said = []
    for example in task.examples(
        seed=7, split=Split.DEV, n=6, length=600, turns=1, mode=Mode.SINGLE, tokenizer=mini_tokenizer
    ):
        encoded = encode(task, example, mini_tokenizer)
        ids = torch.tensor([[*encoded.context, *encoded.turns[0].first]])
        out = mini.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0)
        said.append(mini_tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == example.turns[0].answer)
    assert sum(said) >= 5


def test_mini_is_small():
    """Everything of the model together is at most 12 MB."""
    assert sum(path.stat().st_size for path in MINI.iterdir()) <= 12e6


def test_the_gate_was_measured():
    """The gate's file has an accuracy for each task, mode and length of the default runs; the card shows every one."""
    rows = json.loads((MINI / "gate.json").read_text())["rows"]
    card = (MINI / "README.md").read_text()
    found = {(row["task"], row["mode"], row["length"]) for row in rows}
    assert {(task.name, mode, length) for task in TASKS for mode in Mode for length in (1024, 2048)} <= found
    columns = [(mode, length) for length in (1024, 2048, 4096) for mode in ("single", "multi-turn", "multi-request")]
    for task in {row["task"] for row in rows}:
        shares = {(row["mode"], row["length"]): f"{row['accuracy']:.3f}" for row in rows if row["task"] == task}
        (cells,) = re.findall(rf"^\| `{task}` \| (.*) \|$", card, re.MULTILINE)
        assert [x.strip("*") for x in cells.split(" | ")] == [shares.get(x, "-") for x in columns]
