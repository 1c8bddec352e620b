"""kvbench's side: `python ours.py FOLDER` writes prompts, gates, and what every case keeps and answers, by model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from cases import CASES, FILES, FILTERS, GATES, MODELS, PREDICTOR, Case, Plan

from kvbench.budget import Budget
from kvbench.engine.session import Session
from kvbench.hf import Model, load_model
from kvbench.hf.find import find_folder
from kvbench.machine import cpu_name, find_version
from kvbench.method import Moment
from kvbench.methods.eviction.kvzap import KVzap
from kvbench.methods.eviction.qfilter import QFilter
from kvbench.methods.heads.store import HeadGroupsKV
from kvbench.registry import find_method, find_task
from kvbench.settings import configure
from kvbench.store import LayerKV
from kvbench.task import Mode, Split, encode
from kvbench.techniques.calibration import calibrated

QUESTION = 16
"""Most tokens of a question, whose logits are compared."""


def main() -> None:
    """Run every case on every model."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, plan in MODELS.items():
        model = load_model(name, dtype="float32")
        prompts = make_prompts(model, plan)
        files = {key: folder / f"{name}.{file}" for key, file in FILES.items()}
        write_gates(model, files[GATES])
        write_calibrated(model, KVzap(), files[PREDICTOR])
        write_calibrated(model, QFilter(), files[FILTERS])
        (folder / f"{name}.prompts.json").write_text(
            json.dumps({"folder": str(find_folder(name)), "prompts": prompts}), encoding="utf-8"
        )
        found: dict[str, np.ndarray] = {}
        for case in CASES:
            if case.press is not None:
                print(f"kvbench, {name}: {case.name}", flush=True)
                for i, prompt in enumerate(prompts):
                    kept, logits = run(model, case, prompt, files)
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


def write_calibrated(model: Model, method: KVzap | QFilter, path: Path) -> None:
    """Measurements of a method on the model, by layer."""
    bound = method.bind(model)
    sha256 = bound.predictor if isinstance(bound, KVzap) else bound.filters
    assert sha256 is not None
    np.savez(path, *(calibrated(sha256, layer).numpy() for layer in range(len(model.layers))))


def write_gates(model: Model, path: Path) -> None:
    """Random gates in the format of DuoAttention's authors."""
    layers, heads = len(model.layers), model.layers[0].kv_heads
    gates = torch.rand(layers, heads, generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join("\t".join(f"{x:.6f}" for x in row) + "\n" for row in gates), encoding="utf-8")


def run(
    model: Model, case: Case, prompt: dict[str, list[int]], files: Mapping[str, Path]
) -> tuple[np.ndarray, np.ndarray]:
    """Marks of the entries kept after the context [layers, H_kv, n], and the question's logits [T, V].

    Of a method that drops channels, the marks are of these [layers, H_kv, D].
    """
    context, question = prompt["context"], prompt["question"]
    settings = {key: str(files.get(value, value)) for key, value in case.settings.items()}
    method = configure(find_method(case.method), settings, "--set", case.method)
    fitted = method.bind(model).fit(Budget.parse(case.budget) if case.budget else None, model.shape(len(context)))
    with Session(model, fitted, capacity=len(context) + len(question), track=True) as session:
        session.prefill(context)
        thin = "channels" in session.layers[0].state
        columns = model.layers[0].key_dim if thin else len(context)
        kept = np.zeros((len(model.layers), model.layers[0].kv_heads, columns), dtype=bool)
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
    if "channels" in store.state:
        assert store.frozen is not None
        used = store.frozen.key.unflatten(0, (len(marks), -1)).any(dim=1)  # a channel of zeros shows on neither side
        np.put_along_axis(marks, store.state["channels"][0].numpy(), used.numpy(), axis=1)
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
