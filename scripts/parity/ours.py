"""kvbench's side: `python ours.py FOLDER` writes prompts, gates, and what every case keeps and answers, by model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from cases import CASES, GATES, MODELS, Case, Plan

from kvbench.budget import Budget
from kvbench.engine.session import Session
from kvbench.hf import Model, load_model
from kvbench.hf.find import find_folder
from kvbench.machine import cpu_name, find_version
from kvbench.method import Moment
from kvbench.methods.heads.store import HeadGroupsKV
from kvbench.registry import find_method, find_task
from kvbench.settings import configure
from kvbench.store import LayerKV
from kvbench.task import Mode, Split, encode

QUESTION = 16
"""Most tokens of a question, whose logits are compared."""


def main() -> None:
    """Run every case on every model."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, plan in MODELS.items():
        model = load_model(name, dtype="float32")
        prompts = make_prompts(model, plan)
        gates = write_gates(model, folder / f"{name}.gates.tsv")
        (folder / f"{name}.prompts.json").write_text(
            json.dumps({"folder": str(find_folder(name)), "prompts": prompts}), encoding="utf-8"
        )
        found: dict[str, np.ndarray] = {}
        for case in CASES:
            if case.press is not None:
                print(f"kvbench, {name}: {case.name}", flush=True)
                for i, prompt in enumerate(prompts):
                    kept, logits = run(model, case, prompt, gates)
                    found |= {f"{case.name}/{i}/kept": kept, f"{case.name}/{i}/logits": logits}
        facts = {
            "versions": {x: find_version(x) for x in ("kvbench", "torch", "transformers")},
            "methods": {x.method: find_method(x.method).card.version for x in CASES}, "machine": cpu_name(),
        }
        np.savez(folder / f"{name}.ours.npz", facts=np.array(json.dumps(facts)), **found)


def make_prompts(model: Model, plan: Plan) -> list[dict[str, list[int]]]:
    """Contexts of a needle task, cut at their end to the plan's length, and questions."""
    examples = find_task("niah")().examples(
        seed=1, split=Split.DEV, n=plan.prompts, length=2 * plan.length, turns=1, mode=Mode.SINGLE,
        tokenizer=model.tokenizer,
    )
    prompts = []
    for example in examples:
        encoded = encode(find_task("niah")(), example, model.tokenizer)
        prompts.append({
            "context": list(encoded.context[: plan.length]), "question": list(encoded.turns[0].first[:QUESTION]),
        })
    return prompts


def write_gates(model: Model, path: Path) -> Path:
    """Random gates in the format of DuoAttention's authors."""
    layers, heads = len(model.layers), model.layers[0].kv_heads
    gates = torch.rand(layers, heads, generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join("\t".join(f"{x:.6f}" for x in row) + "\n" for row in gates), encoding="utf-8")
    return path


def run(model: Model, case: Case, prompt: dict[str, list[int]], gates: Path) -> tuple[np.ndarray, np.ndarray]:
    """Marks of the entries kept after the context [layers, H_kv, n], and the question's logits [T, V]."""
    context, question = prompt["context"], prompt["question"]
    settings = {key: str(gates) if value == GATES else value for key, value in case.settings.items()}
    method = configure(find_method(case.method), settings, "--set", case.method)
    fitted = method.bind(model).fit(Budget.parse(case.budget), model.shape(len(context)))
    with Session(model, fitted, capacity=len(context) + len(question), track=True) as session:
        session.prefill(context)
        kept = np.zeros((len(model.layers), model.layers[0].kv_heads, len(context)), dtype=bool)
        for marks, store in zip(kept, session.layers, strict=True):
            mark(marks, store)
        logits = session.forward(torch.tensor([question]), Moment.TURN_END, keep=len(question))
    return kept, logits[0].float().numpy()


def mark(marks: np.ndarray, store: LayerKV) -> None:
    """Set the marks of the entries in a store. marks: [H_kv, n]"""
    if isinstance(store, HeadGroupsKV):
        for heads, part in store.groups:
            inside = np.zeros_like(marks[: len(heads)])
            mark(inside, part)
            marks[heads.numpy()] = inside
        return
    assert store.positions is not None
    parts = list(store.positions[0])
    if store.frozen is not None:
        assert store.frozen.position is not None
        parts = [torch.cat(x) for x in zip(store.frozen.position.split(store.frozen.counts), parts, strict=True)]
    for row, positions in zip(marks, parts, strict=True):
        row[positions.long().numpy()] = True


if __name__ == "__main__":
    main()
