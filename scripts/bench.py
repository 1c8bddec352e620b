"""Measures the overhead of kvbench: `make bench`, or `python scripts/bench.py [NAME]...`, with these names.

Every other number is a ratio of two times measured in turn in one process, or bytes, because absolute times of a shared
CPU vary. Writes results/bench/cpu-2-cores.json; parts that are not measured stay, each with its own machine and commit,
and so do the rows of a part that is continued: `measured` of a row is where that row was measured.

startup: CPU seconds of a new process that imports kvbench or transformers, or runs a short command.
harness: a whole run, relative to the same forward passes called directly with transformers' cache.
generate: answers with the full cache, relative to Hugging Face `generate` on the same model and prompts.
sweep: 12 methods on the same contexts with `--share-prefill`, relative to the sum of single runs, in CPU seconds.
batch: 5 questions about a context, and about 4 contexts, answered together, relative to one at a time, in CPU seconds.
step: a decode step of a tiny model, relative to transformers' own loop, and where its time passes.
memory: peak bytes of a prefill beyond those of the full cache, by length.
compression: what each method adds to a prefill of 4,096 tokens on a real model, and its decode step, in CPU seconds.
prefill: sparse prefill on a real model: share of attention that is computed, and CPU seconds over the full cache's.
reads: bytes that a decode step reads after 8,192 tokens on that model and after 16,384 on a random one, and its CPU
seconds, over the full cache's.
reuse: time to first token of reuse across prompts over a full prefill's at 2,048 and 4,096 tokens, by share computed.
lossless: tokens per second of lossless methods over plain decoding's, with the accepted tokens, in CPU seconds.
peer: prefill and answers of 5 and 20 questions, over those of kvpress's pipeline, in CPU seconds; after `make parity`.
coders: throughput of encoding and decoding keys and values, by method, over that of a memory copy, in CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_answers import bench_batch, bench_peer
from bench_coders import bench_coders
from bench_compression import bench_compression
from bench_place import find_place
from bench_reuse import bench_lossless, bench_reuse
from bench_sparse import bench_prefill, bench_reads
from bench_step import bench_step
from torch import Tensor
from transformers import DynamicCache

from kvbench.engine import agreement
from kvbench.engine.session import Session
from kvbench.hf import Model, load, load_model
from kvbench.hf.tiny import tiny_model
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.registry import find_task
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.runner import run
from kvbench.sweep.cell import ModelCache, SweepCell, group_cells, run_group
from kvbench.task import Mode, Split, encode

ROUNDS = 3
CONTEXTS = 20
NEW_TOKENS = 32
OUT = Path(__file__).parent.parent / "results" / "bench" / "cpu-2-cores.json"
LENGTHS = (8192, 16384, 32768)
SWEPT = (
    "snapkv", "knorm", "keydiff", "expected-attention", "streaming-llm", "tova", "pyramidkv", "kivi", "full-int8",
    "quest", "snapkv+adakv", "kvzip",
)


def paired(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, float]:
    """The ratio of the times of two calls, timed in turn after one warm-up."""
    ours(), theirs()
    ratios = []
    for _ in range(ROUNDS):
        times = []
        for call in (ours, theirs):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        ratios.append(times[0] / times[1])
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "rounds": ROUNDS}


def bench_harness() -> dict[str, Any]:
    """Wall time of a multi-turn run over that of its forward passes alone."""
    model = load_model("mini")
    request = Request(method="full", task="niah", mode="multi-turn", turns=3, samples=20, split="dev")
    calls: list[tuple[Tensor, int]] = []
    original = load.run_model

    def spy(module: Any, ids: Tensor, forward: Any, keep: int = 1) -> Tensor:
        calls.append((ids, forward.seen - ids.shape[1]))
        return original(module, ids, forward, keep)

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run(prepare(replace(request, out=Path(folder)), model))

    load.run_model = spy
    ours()
    load.run_model = original

    @torch.no_grad()
    def bare() -> None:
        cache = DynamicCache()
        for ids, start in calls:
            if start == 0:
                cache = DynamicCache()
            elif start < cache.get_seq_length():
                cache.crop(start - cache.get_seq_length())
            model.module(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)

    return {"forward_passes": len(calls), "run_over_bare": paired(ours, bare)}


def bench_generate() -> dict[str, Any]:
    """Answers to questions on 20 contexts, relative to `generate` with each whole prompt."""
    model = load_model("mini")
    return {"single": answers(model, 1), "multi-request": answers(model, 5)}


def answers(model: Model, turns: int) -> dict[str, Any]:
    """`turns` questions per context. kvbench prefills each context once, `generate` once per question."""
    task = find_task("niah")()
    examples = task.examples(
        seed=9, split=Split.DEV, n=CONTEXTS, length=1024, turns=turns, mode=Mode.MULTI_TURN, tokenizer=model.tokenizer
    )
    encoded = [encode(task, x, model.tokenizer) for x in examples]
    prefilled: list[int] = []

    def ours() -> list[list[int]]:
        prefilled.clear()
        made = []
        for x in encoded:
            with Session(model, Full(), capacity=len(x.context) + 200) as talk:
                talk.prefill(x.context)
                prefilled.append(talk.seen)
                for turn in x.turns:
                    with talk.fork() as branch:
                        made += branch.ask(turn.first, NEW_TOKENS).ids
        return made

    @torch.no_grad()
    def theirs() -> list[list[int]]:
        made = []
        for ids in (torch.tensor([x.context + turn.first]) for x in encoded for turn in x.turns):
            out = model.module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=sorted(model.stop_ids), pad_token_id=0,
            )
            made.append(out[0, ids.shape[1] :].tolist())
        return made

    same = sum(a == b for a, b in zip(ours(), theirs(), strict=True))
    return {
        "answers": CONTEXTS * turns, "equal_answers": same, "ours_over_generate": paired(ours, theirs),
        "tokens_prefilled_over_context_tokens": sum(prefilled) / sum(len(x.context) for x in encoded),
    }


def bench_sweep() -> dict[str, Any]:
    """CPU seconds of a sweep of 12 methods on the same contexts, over those of 12 single runs."""
    cache = ModelCache()
    request = Request(method="", task="niah", samples=4, length=1024, device="cpu", split="dev", visibility="hidden")

    def spend(folder: str, *, share: bool) -> float:
        cells = [
            SweepCell(i, name, replace(request, method=name, out=Path(folder)), {})
            for i, name in enumerate(SWEPT)
        ]
        started = time.process_time()
        for group in group_cells(cells, 1, share=share):
            agreement.forget()
            for report in run_group(group, cache, lambda *_: None):
                if report.status != "ok" or report.existing:
                    raise SystemExit(f"{report.cell.name}: {report.error or 'it was finished before'}")
        return time.process_time() - started

    ratios = []
    for number in range(ROUNDS + 1):
        with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as shared:
            times = spend(shared, share=True), spend(alone, share=False)
        if number:  # the first round loads the model and generates the prompts
            ratios.append(times[0] / times[1])
    return {
        "methods": SWEPT, "samples": request.samples, "length": request.length,
        "shared_over_single": {
            "median": statistics.median(ratios), "min": min(ratios), "max": max(ratios), "rounds": ROUNDS
        },
    }


def peak_of_prefill(method: str, length: int) -> int:
    """Peak resident bytes that a prefill adds to this process."""
    model = tiny_model(query_heads=4, kv_heads=2)
    kind = {"full": Full, "snapkv": SnapKV, "h2o": H2O}[method]
    fitted = kind().fit(None, model.shape(length))
    ids = torch.randint(64, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    with Session(model, fitted, capacity=length, chunk=1024) as warm:
        warm.prefill(ids[:2048])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's record of the peak
    before = _status("VmHWM")
    with Session(model, fitted, capacity=length, chunk=1024) as talk:
        talk.prefill(ids)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def bench_memory() -> dict[str, Any]:
    """Peak bytes beyond those of the full cache by length, each prefill in a separate process."""
    peaks = {
        method: [int(subprocess.check_output([sys.executable, __file__, "peak", method, str(n)])) for n in LENGTHS]  # noqa: S603
        for method in ("full", "snapkv", "h2o")
    }
    full = [tiny_model().shape(n).full_bytes for n in LENGTHS]
    extra = {
        method: [a - b for a, b in zip(peaks[method], peaks["full"], strict=True)] for method in ("snapkv", "h2o")
    }
    return {
        "lengths": LENGTHS, "full_cache_bytes": full, "peak_bytes": peaks, "extra_over_full_bytes": extra,
        "extra_over_full_cache": {k: [x / d for x, d in zip(v, full, strict=True)] for k, v in extra.items()},
    }


def bench_startup() -> dict[str, Any]:
    """Median CPU seconds of new processes, and the least; the last command imports torch and transformers, too."""
    command = "from kvbench.cli import main; main()"
    processes = {
        "import kvbench": ["import kvbench"],
        "kvbench --help": [command, "--help"],
        "kvbench list methods": [command, "list", "methods"],
        "import torch": ["import torch"],
        "from transformers import PreTrainedModel": ["from transformers import PreTrainedModel"],
        "kvbench plan": [command, "plan", "--method", "snapkv"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(5):
        for name, arguments in processes.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(  # noqa: S603
                [sys.executable, "-c", *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {name: {"median_s": statistics.median(x), "min_s": min(x), "rounds": len(x)} for name, x in seconds.items()}


BENCHES: dict[str, Callable[..., dict[str, Any]]] = {
    "startup": bench_startup, "harness": bench_harness, "generate": bench_generate, "sweep": bench_sweep,
    "batch": bench_batch, "step": bench_step, "memory": bench_memory, "compression": bench_compression,
    "prefill": bench_prefill, "reads": bench_reads, "coders": bench_coders, "reuse": bench_reuse, "peer": bench_peer,
    "lossless": bench_lossless,
}
RESUMED = ("compression", "prefill", "reads", "reuse", "lossless")
"""Parts that keep the rows in the file, and write next to each new one where it was measured."""


def main() -> None:
    """Run the requested measurements and save them."""
    if sys.argv[1:2] == ["peak"] and len(sys.argv) == 4:  # of `bench_memory`
        print(peak_of_prefill(sys.argv[2], int(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names or list(BENCHES)
    if unknown := sorted({*names} - {*BENCHES}):
        parser.error(f"unknown bench {', '.join(unknown)}. Allowed: {', '.join(BENCHES)}.")
    place = find_place()
    for name in names:
        before = read().get(name, {}) if name in RESUMED else {}
        found = BENCHES[name](before) if name in RESUMED else BENCHES[name]()
        print(name, json.dumps(found, indent=2), flush=True)
        save(name, {"measured": before.get("measured", place), **found})
    print(f"written to {OUT}")


def read() -> dict[str, Any]:
    """The parts in the file so far."""
    return json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}


def save(name: str, part: dict[str, Any]) -> None:
    """Replace one part of the file and leave the others."""
    found = read()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({**found, name: part}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
