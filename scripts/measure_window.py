"""Measures which numbers SnapKV keeps, and whether one in the observation window decides it (docs/results-qwen.md).

Writes results/window/MODEL.json; the settings are those of the runs whose answers stand in the same table:

    python scripts/measure_window.py smollm2-135m --dtype float32 --length 1024 --contexts 40
    python scripts/measure_window.py qwen2.5-coder-1.5b --length 2048 --contexts 12
    python scripts/show_window.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.runs.examples import make_examples
from kvbench.runs.job import Job
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare

FOLDER = Path(__file__).parent.parent / "results" / "window"


def find_numbers(context: Sequence[int], numbers: Sequence[Sequence[int]]) -> list[range]:
    """The places of each number in the context, in tokens; each number stands there once."""
    text = list(context)
    found = [[i for i in range(len(text)) if text[i : i + len(number)] == list(number)] for number in numbers]
    assert all(len(x) == 1 for x in found), found
    return [range(start, start + len(number)) for (start,), number in zip(found, numbers, strict=True)]


def measure_kept(job: Job, context: Sequence[int]) -> Tensor:
    """The share of layers and KV heads that store each entry of the context after its compression. [T]"""
    method = job.method.fit(job.budget, job.model.shape(len(context)))
    kept = torch.zeros(len(context))
    with Session(job.model, method, track=True) as session:
        session.prefill(context)
        stored = torch.stack([x.logical_positions()[0] for x in session.layers])  # [layers, H_kv, n]
    return kept.index_add_(0, stored.flatten().long(), torch.ones(stored.numel())) / stored[..., 0].numel()


def main() -> None:
    """Write one line per context: where its last number stands, and how much is kept of what stands before the window.

    last_number: tokens between the last number and the end of the context. numbers, others: share of the layers and KV
    heads that store an entry, over the entries of whole numbers before the window and over the others before it.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--contexts", type=int, required=True)
    asked = parser.parse_args()
    request = Request(
        "snapkv", "niah_multikey_1", model=asked.model, dtype=asked.dtype, length=asked.length, samples=asked.contexts,
        budget="25%", mode="multi-request", visibility="hidden", turns=5,
    )
    try:
        job = prepare(request)
    except UserError as error:
        parser.error(str(error))
    assert isinstance(job.method, SnapKV)
    lines = []
    for _, example, encoded in make_examples(job, range(asked.contexts)):
        numbers = [x.references[0] for x in example.turns]
        places = find_numbers(encoded.context, job.model.tokenizer(numbers, add_special_tokens=False)["input_ids"])
        end = len(encoded.context)
        far = [i for x in places if x.stop <= end - job.method.window for i in x]
        others = sorted(set(range(end - job.method.window)) - {i for x in places for i in x})
        kept = measure_kept(job, encoded.context)
        lines.append({
            "last_number": end - max(x.stop for x in places), "numbers": round(float(kept[far].mean()), 4),
            "others": round(float(kept[others].mean()), 4),
        })
        print(json.dumps(lines[-1]), flush=True)
    FOLDER.mkdir(exist_ok=True)
    text = ",\n".join(json.dumps(x) for x in lines)
    (FOLDER / f"{asked.model}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
