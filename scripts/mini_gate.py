"""The gate of `mini` and `mini-hybrid`: greedy answers of the model as shipped, full cache, on the tasks' test split.

    python scripts/mini_gate.py MODEL_FOLDER      # writes its gate.json and prints the table of its card

An answer counts if each of its tokens is the argmax, not counting the end of text. This equals greedy decoding with one
forward pass for question and answer; the tasks' own scorers are never stricter.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.task import Mode, Split, Task, encode
from kvbench.tasks.ruler import niah
from kvbench.tasks.scbench.kv import KeyValueShort, KeyValueUuid

GATED: tuple[Task, ...] = (niah.NiahSingle1(), niah.NiahSingle2(), niah.NiahMultikey1(), KeyValueShort())
"""Samples of the default runs: 100 at 1,024 and 2,048 tokens."""
OTHERS: tuple[Task, ...] = (
    *(niah.NiahSingle3(), niah.NiahMultikey2(), niah.NiahMultikey3(), niah.NiahMultivalue(), niah.NiahMultiquery()),
    KeyValueUuid(),
)
TURNS = 5
GOAL = 0.97
MODES = (Mode.SINGLE, Mode.MULTI_TURN, Mode.MULTI_REQUEST)
Row = dict[str, Any]
"""task, mode, length, samples, answers, accuracy"""


@torch.inference_mode()
def answered(model: PreTrainedModel, asked: Sequence[int], answer: Sequence[int], cache: DynamicCache) -> bool:
    """Whether greedy decoding says the reference answer after these ids, on top of the cache, which then holds both."""
    logits = model(torch.tensor([[*asked, *answer]]), past_key_values=cache).logits[0]
    said: list[int] = logits[len(asked) - 1 : -1].argmax(-1).tolist()
    return said == list(answer)


@torch.inference_mode()
def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: Task, length: int, turns: int, n: int
) -> list[Row]:
    """Share of whole answers over n test samples by mode, each context prefilled once; one turn: `single`."""
    hits: dict[Mode, list[bool]] = {}
    for example in task.examples(
        seed=0, split=Split.TEST, n=n, length=length, turns=turns, mode=Mode.MULTI_TURN, tokenizer=tokenizer
    ):
        encoded = encode(task, example, tokenizer)
        cache = DynamicCache()
        model(torch.tensor([encoded.context]), past_key_values=cache, logits_to_keep=1)
        for turn in encoded.turns:
            mode = Mode.MULTI_REQUEST if turns > 1 else Mode.SINGLE
            hits.setdefault(mode, []).append(answered(model, turn.first, turn.answer, cache))
            cache.crop(-len(turn.first + turn.answer))
        for i, turn in enumerate(encoded.turns if turns > 1 else ()):
            asked = turn.later if i else turn.first
            hits.setdefault(Mode.MULTI_TURN, []).append(answered(model, asked, turn.answer, cache))
    return [
        {"task": task.name, "mode": str(mode), "length": length, "samples": n, "answers": len(found),
         "accuracy": round(sum(found) / len(found), 4)}
        for mode, found in hits.items()
    ]


def measure_in_process(job: tuple[Path, Task, int, int, int]) -> list[Row]:
    """`measure` with a model of its own, on one thread; nothing where the task does not fit the length."""
    folder, task, length, turns, n = job
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if task.minimum_length(turns, tokenizer) > length:
        return []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return measure(model, tokenizer, task, length, turns, n)


def jobs(folder: Path, samples: int) -> Iterator[tuple[Path, Task, int, int, int]]:
    """Every measurement: fewer samples for what is not in the default runs, and for 4,096 tokens."""
    for length in (1024, 2048, 4096):
        for task in (*GATED, *OTHERS):
            n = samples if task in GATED else samples // 5
            for turns in (1, TURNS):
                yield folder, task, length, turns, max(1, n if length < 4096 else samples // 10)


def gate(folder: Path, samples: int = 100) -> list[Row]:
    """The accuracies of the model in a folder, on every core, told as they come."""
    rows: list[Row] = []
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for found in pool.map(measure_in_process, jobs(folder, samples)):
            for row in found:
                print(f"gate {row['task']} {row['mode']} {row['length']}: {row['accuracy']:.3f}", file=sys.stderr)
            rows += found
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, a line per task; what misses the goal in italics."""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["task"], row["mode"], row["length"]): row["accuracy"] for row in rows}
    columns = [(mode, length) for length in lengths for mode in MODES]
    lines = [f"| task | {' | '.join(f'{mode} {length:,}' for mode, length in columns)} |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for name in dict.fromkeys(row["task"] for row in rows):
        found = [cells.get((name, mode, length)) for mode, length in columns]
        shown = ["-" if x is None else f"{x:.3f}" if x >= GOAL else f"*{x:.3f}*" for x in found]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the model, write its gate.json and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model")
    where = parser.parse_args().folder
    if not where.is_dir():
        parser.error(f"no model folder {where}")
    report = json.loads((where / "gate.json").read_text()) if (where / "gate.json").exists() else {}
    report["rows"] = gate(where)
    (where / "gate.json").write_text(json.dumps(report, indent=2) + "\n")
    print(table(report["rows"]), end="")


if __name__ == "__main__":
    main()
