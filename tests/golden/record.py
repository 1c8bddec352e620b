"""Records the golden outputs: `python tests/golden/record.py` adds missing entries and those of raised versions.

An entry of an unchanged version is never overwritten: where its outputs differ, raise the version of the method, policy
or task (or PROTOCOL_VERSION, where a change of the harness moves all of them), and run the command again.

Entries hold integers only. Prompts are chosen so that outputs stay the same when all weights change by 1e-5 of their
size, which is more than the rounding differences between machines.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from kvbench.check.reuse import LAYERS, split_context
from kvbench.check.trial import FORCED, LENGTH, NEVER_STOP, choose_budget, find_entries, random_ids
from kvbench.diffusion.policy import denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import VOCABULARY, tiny_diffusion, tiny_model
from kvbench.log import say
from kvbench.registry import MODELS, find_method, find_task, list_entries
from kvbench.runs.spec import PROTOCOL_VERSION
from kvbench.task import Example, Mode, Split, Task

HERE = Path(__file__).parent
COMPOSED = ("snapkv+adakv", "snapkv+kivi", "razor-attention+kivi", "snapkv+vericache")
METHODS = [x.name for x in list_entries("method")]
TASKS = [
    x.name for x in list_entries("task") if x.load().examples is Task.examples and x.load()().dataset_revision is None
]
"""Tasks that generate their examples from nothing; prompts of data sets are tested byte for byte next to the tasks."""
NOISE = 1e-5
TRIALS = 4
"""Models with noise, on which the outputs must be the same."""
QUESTIONS, ANSWER, HISTORY = (5, 9, 13), 6, 3
"""Tokens of each turn's question, of each answer, and of the reference answer that stands in its place afterwards."""
RANKED = 8
"""Most likely tokens recorded at each forced position, in order."""
PROMPT, CANVAS = 20, 16
REGIMES = {
    "one block": Sampling(steps=16, block=16), "blocks": Sampling(steps=16, block=4),
    "threshold": Sampling(steps=16, block=16, threshold=0.9),
    "random order": Sampling(steps=8, block=8, remasking="random"),
}
Output = dict[str, Any]


def compute_method(name: str, seed: int, model: Model) -> Output:
    """Kept positions, answers, rankings at forced positions and bytes of three turns. seed: of the context."""
    method = find_method(name)()
    fitted = method.bind(model).fit(choose_budget(method), model.shape(LENGTH))
    with Session(model, fitted, capacity=LENGTH + 200, track=True) as session:
        session.prefill(random_ids(LENGTH, seed))
        layers = find_entries(session)
        kept = None if layers is None else [[write_ranges(x.tolist()) for x in heads] for heads in layers]
    reuse = split_context(random_ids(LENGTH, seed)) if method.reads_parts else None
    with Session(model, fitted, capacity=LENGTH + 200, reuse=reuse) as session:
        session.prefill(random_ids(LENGTH, seed))
        tokens = []
        for turn, count in enumerate(QUESTIONS):
            answer = session.ask(
                random_ids(count, seed + turn + 10), ANSWER, history=random_ids(HISTORY, seed + turn + 20),
                stop=NEVER_STOP,
            )
            tokens.append(answer.ids[0])
        logits = session.force(FORCED)[0]
        ranking = logits.argsort(dim=-1, descending=True)[:, :RANKED].tolist()
        found = session.memory()
    return {
        "kept": kept, "tokens": tokens, "ranking": ranking,
        "bytes": {"stored": found.stored_bytes, "read per step": found.read_bytes_per_step},
    }


def compute_policy(name: str, seed: int, model: Model) -> Output:
    """The answer, its forward passes, computed entries and bytes, by regime. seed: of the prompt."""
    policy = find_method(name)()
    found = {}
    for regime, sampling in REGIMES.items():
        try:
            policy.check(sampling, CANVAS)
        except UserError:
            continue
        made = denoise(model, policy, [x % (VOCABULARY - 1) for x in random_ids(PROMPT, seed)], CANVAS, sampling)
        found[regime] = {
            "tokens": made.ids[0], "passes": made.nfe,
            "computed": round(made.computed_tokens * made.nfe * len(model.layers)),
            "bytes": {"peak": made.peak_bytes, "read": made.read_bytes},
        }
    return found


def compute_task(name: str) -> Output:
    """A hash of the first test example, by mode."""
    task, tokenizer = find_task(name)(), AutoTokenizer.from_pretrained(MODELS / "mini")
    found = {}
    for mode in task.modes:
        turns = 1 if mode is Mode.SINGLE else 2
        length = max(800, task.minimum_length(turns, tokenizer))
        example = next(iter(task.examples(
            seed=0, split=Split.TEST, n=1, length=length, turns=turns, mode=mode, tokenizer=tokenizer,
        )))
        found[str(mode)] = hash_example(task, example)
    return found


def hash_example(task: Task, example: Example) -> str:
    """A hash of all fields of an example, and of the texts that its task puts between them."""
    document = [asdict(example), task.joint, task.separator]
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def find_version(kind: str, name: str) -> Output:
    """The versions that an entry is recorded for."""
    if kind == "methods":
        return {"version": find_method(name)().card.version, "protocol": PROTOCOL_VERSION}
    return {"version": find_task(name).version, "protocol": PROTOCOL_VERSION}


def find_model(name: str) -> Model:
    """The tiny model that a method or policy runs on."""
    method = find_method(name)
    if method.card.models == "diffusion":
        return tiny_diffusion(shifted=True)
    return tiny_model(layers=LAYERS) if method.reads_parts else tiny_model()


def compute(kind: str, name: str, seed: int = 0, model: Model | None = None) -> Output:
    """The outputs of a method, policy or task."""
    if kind == "tasks":
        return compute_task(name)
    way = compute_policy if find_method(name).card.models == "diffusion" else compute_method
    return way(name, seed, model or find_model(name))


def find_names(kind: str) -> list[str]:
    """Every name that has an entry in the file of a kind."""
    return TASKS if kind == "tasks" else [*METHODS, *COMPOSED]


def read(kind: str) -> dict[str, Output]:
    """The entries of `methods.json` or `tasks.json`, by name."""
    path = HERE / f"{kind}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def record(kind: str, name: str) -> Output:
    """A new entry: of the first seed whose outputs are the same on models with noise."""
    versions = find_version(kind, name)
    if kind == "tasks":
        return {**versions, "output": compute(kind, name)}
    model = find_model(name)
    for seed in range(1, 1000):
        output = compute(kind, name, seed, model)
        if all(compute(kind, name, seed, x) == output for x in add_noise(model)):
            return {**versions, "seed": seed, "output": output}
    raise SystemExit(f"{name}: no prompt has outputs that small noise leaves as they are.")


@functools.cache
def add_noise(model: Model) -> list[Model]:
    """Copies of a model whose weights differ by NOISE of their size."""
    made = []
    for seed in range(TRIALS):
        module = copy.deepcopy(model.module)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator))
        made.append(Model.from_module(module, id=f"{model.id}-noise{seed}", masking=model.masking))
    return made


def write_ranges(positions: list[int]) -> str:
    """Ascending positions as text: [0, 1, 2, 7] is "0-2 7"."""
    runs: list[list[int]] = []
    for x in positions:
        if runs and runs[-1][1] == x - 1:
            runs[-1][1] = x
        else:
            runs.append([x, x])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def update(kind: str) -> list[str]:
    """Record what is missing or has another version; names whose outputs differ under an unchanged version."""
    old, new, refused = read(kind), {}, []
    for name in sorted(find_names(kind)):
        entry = old.get(name)
        if entry is None or any(entry[key] != value for key, value in find_version(kind, name).items()):
            say(f"{kind}: recording {name}")
            entry = record(kind, name)
        elif compute(kind, name, entry.get("seed", 0)) != entry["output"]:
            refused.append(name)
        new[name] = entry
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in new.items())
    (HERE / f"{kind}.json").write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    return refused


def main() -> int:
    """Update both files. Exit code 1: an entry would change under an unchanged version."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # head profiles of the tiny models
        refused = [name for kind in ("methods", "tasks") for name in update(kind)]
    for name in refused:
        say(f"{name}: the outputs differ and the version is the same. Raise the version, then run this again.")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
