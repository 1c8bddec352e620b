"""scripts/gpu_suite.sh: stages run independently, finished ones are not repeated, and missing packages are named."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from kvbench.bench.forecast import make_methods, read_budget
from kvbench.bench.records import Bench
from kvbench.bench.state import Setting, open_context
from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.hf import Model, predict_memory
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction.keydiff import KeyDiff
from kvbench.registry import find_method, list_entries
from kvbench.step import Moment

STAGES = ["methods", "core", "all", "answers", "lengths", "largest", "long", "diffusion"]
"""Those of one job of `kvbench bench`."""
ROOT = Path(__file__).parents[2]
BIN = str(Path(sys.executable).parent)


def suite(*arguments, path=BIN):
    """Run the script with a folder in front of the PATH."""
    return subprocess.run(
        [ROOT / "scripts" / "gpu_suite.sh", *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}, "PATH": f"{path}:{os.environ['PATH']}"},
    )


def test_unknown_stages_are_refused():
    """With the list of stages."""
    done = suite("--dry", "speed")
    assert done.returncode == 2
    stages = "probe methods core tests all answers lengths largest long models diffusion invariants"
    assert f"unknown 'speed'. Stages: {stages}." in done.stderr


@pytest.mark.parametrize(("arguments", "words", "code"), [
    (["--help"], "scripts/gpu_suite.sh [--dry] [--out DIR]", 0), (["--dry", "--out"], "--out needs a folder", 2),
])
def test_help_is_shown_and_an_option_without_a_value_is_named(arguments, words, code):
    done = suite(*arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (code, code // 2)
    assert words in done.stdout + done.stderr


def test_missing_packages_are_named_at_once(tmp_path):
    """With the command that downloads them; nothing runs before."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$2" in *pydantic_core*) exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--wheels", tmp_path / "none", "--out", tmp_path / "out", path=tmp_path)
    assert done.returncode == 2
    assert "Python lacks pydantic_core, and" in done.stderr
    assert f"-d {tmp_path / 'none'} pydantic" in done.stderr
    assert not (tmp_path / "out").exists()


def test_failed_tests_do_not_keep_stages_from_running(tmp_path):
    """The suite goes on and ends with code 1."""
    python = tmp_path / "python3"
    python.write_text('#!/bin/sh\ncase "$*" in *pytest*) echo one failed; exit 1;; *) exit 0;; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--out", tmp_path / "out", "tests", "core", path=tmp_path)
    assert done.returncode == 1
    assert "one failed" in done.stderr and "tests failed" in done.stderr
    assert "gpu_suite: core took" in done.stderr


def test_an_interrupted_stage_of_an_earlier_call_is_continued(tmp_path):
    """--from copies its file to the new folder; a stage that is done is not run again."""
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "core.json").write_text('{"status": "done", "cells": [{"outcome": "skipped"}]}')
    (earlier / "probe.json").write_text("{}")
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    done = suite("--dry", "--from", earlier, "--out", tmp_path / "out", "probe", "core", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "probe is done" in done.stderr and "core took" in done.stderr
    assert (tmp_path / "out" / "core.json").read_text() == (earlier / "core.json").read_text()


def test_a_stage_whose_gpu_is_lost_is_tried_again(tmp_path):
    """kvbench bench ends with code 3 and continues in a new process, three times at most."""
    python = tmp_path / "python3"
    calls = tmp_path / "calls"
    lost = f'echo call >>{calls}; echo "{{}}" >{tmp_path}/core.json; exit 3'
    python.write_text(f'#!/bin/sh\ncase "$*" in *--seconds*) {lost};; esac\n')
    python.chmod(0o755)
    done = suite("--dry", "--out", tmp_path, "core", path=tmp_path)
    assert done.returncode == 1
    assert calls.read_text().split() == ["call"] * 3


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Threads and command lines of `kvbench bench` by stage, as a machine with a GPU runs them."""
    folder = tmp_path_factory.mktemp("suite")
    python, log = folder / "python3", folder / "calls"
    python.write_text(
        f'#!{sys.executable}\nimport json, os, sys\nif "get_device_name" in " ".join(sys.argv): print("h100")\n'
        'if "list_entries" in sys.argv[-1]: exec(sys.argv[-1])\n'
        'call = os.environ["OMP_NUM_THREADS"], *sys.argv[3:]\n'
        f'if "bench" in sys.argv: open("{log}", "a").write(json.dumps(call) + "\\n")\n'
    )
    python.chmod(0o755)
    suite("--out", folder, *STAGES, "models", path=folder)
    found = [json.loads(x) for x in log.read_text().splitlines()]
    return {Path(x[x.index("--out") + 1]).stem: x for x in found}


@pytest.fixture(scope="module")
def requests(commands):
    """The jobs of the stages, parsed by the command line."""
    asked = []

    def run(request):
        asked.append(request)
        raise UserError("not run.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.bench.run.run_bench", run)
        for _threads, *line in commands.values():
            call(line)
    return dict(zip(commands, asked, strict=True))


outline = functools.cache(predict_memory)


@pytest.mark.slow
def test_the_stages_of_a_gpu_are_commands_of_kvbench(commands, requests):
    """Their options, models and methods exist, their times fit into eight minutes, and core methods come first.

    ShadowKV gathers values on the host, with eight threads; one job has both clocks, so that operations are compared
    once.
    """
    assert len(requests) == 11
    assert {threads for threads, *_ in commands.values()} == {"8"}
    assert requests["core"].timings == requests["all"].timings == ("kernel", "step")
    assert sum(x.seconds + 60 for name, x in requests.items() if name not in STAGES) <= 480  # the three of `models`
    for name, request in requests.items():
        kind = outline(request.model).kind
        made = make_methods(request.methods, {}, request.model, kind)
        assert request.kernels == "triton" and request.device == "cuda"
        assert request.seconds + 60 <= 480
        if name == "all":
            assert list(made)[2:8] == ["snapkv", "adakv", "kivi", "quest", "h2o", "shadowkv"]
            others = [x for x in list_entries("method") if x.models == "autoregressive" and x.name not in made]
            assert {x.name for x in others if x.facts["family"] != "prefill"} == {"keyformer", "leoam"}


MOST_FLOPS = 5e14
"""Products of the synthetic contexts of a cell: about a second of an H100."""
MOST_BYTES = 6e13
"""Bytes that its operations write: with as many read, 40 s at 3 TB/s."""
MOST_LAUNCHES = 1e6
"""Operations that it launches: 10 s at 10 us each, fewer than one per token and layer at 32,768 tokens."""
MOST_CALLS = 1e6
"""Python functions that a decode step calls: a few tenths of a second, in a cell of about 300 steps."""
WIDTH, HEADS, LAYERS = 128, 8, 2


@functools.cache
def wide_model():
    """Two layers with heads as wide as those of Llama-3.1-8B, a quarter as many."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 4, head_dim=WIDTH,
    )
    return Model.from_module(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


class Work(TorchDispatchMode):
    """Counts operations and the bytes of all results, views aside."""

    total = launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.launches += 1
            self.total += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        return out


def count_calls(run):
    """Python functions that a call runs, built-in ones included."""
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def count_work(name, length):
    """Products, bytes written and operations of one layer for a synthetic context at 25 %; calls of a step after it."""
    model = wide_model()
    made = find_method(name)().bind(model)
    method = made.fit(read_budget("25%", made), model.shape(length))
    flops, work = FlopCounterMode(display=False), Work()
    with ExitStack() as counted, ExitStack() as opened:
        counted.enter_context(work)
        counted.enter_context(flops)
        session = opened.enter_context(open_context(Setting(model, state="synthetic"), method, length, 1)).session
        counted.close()
        token = torch.zeros((1, 1), dtype=torch.long)
        session.forward(token, Moment.DECODE)  # imports, tables and offsets
        calls = count_calls(lambda: session.forward(token, Moment.DECODE))
    return np.array([flops.get_total_flops(), work.total, work.launches, calls]) / LAYERS


@pytest.mark.few
@pytest.mark.parametrize("name", [x.name for x in list_entries("method") if x.models == "autoregressive"])
def test_the_synthetic_context_of_a_cell_takes_bounded_time(name, requests):
    """A stage of synthetic contexts would end before its cells if one context took minutes, as H2O's once did.

    So it would if Python chose what a step reads, as LeoAM does. Counted at two lengths, from which the linear and the
    quadratic part follow, in all heads and layers of the model.
    """
    short, long = 384, 768
    try:
        one, two = count_work(name, short), count_work(name, long)
    except UserError as refusal:  # its cells are refused
        assert "synthetic entries" in str(refusal)  # noqa: PT017  # for no other reason
        return
    square = ((two - 2 * one) / (2 * short**2)).clip(0)
    line = (one - square * short**2) / short
    more = (two - one).clip(0)[2:] / (long - short)
    for request in requests.values():
        if request.state == "synthetic" and name in make_methods(request.methods, {}, request.model, "autoregressive"):
            shape = outline(request.model).shape
            layers, batch = len(shape.layers), 1 if "max" in request.batches else max(int(x) for x in request.batches)
            scale = shape.layers[0].query_heads / HEADS * shape.layers[0].key_dim / WIDTH
            for length in request.lengths:
                at = f"for {length} tokens x {batch}"
                flops, written, *_ = layers * batch * (line * length + square * length**2)
                launches, calls = layers * (one[2:] + more * (length - short))
                assert scale * flops <= MOST_FLOPS, f"{scale * flops:.1e} products {at}"
                assert scale * written <= MOST_BYTES, f"{scale * written:.1e} bytes {at}"
                assert launches <= MOST_LAUNCHES, f"{launches:.1e} launches {at}"
                assert batch * calls <= MOST_CALLS, f"{batch * calls:.1e} calls of a step {at}"


def test_a_pass_of_all_queries_over_the_prompt_is_noticed(requests, monkeypatch):
    """H2O's column sums without the closed form for equal queries."""
    monkeypatch.setattr("kvbench.kernels.column_sums.torch.is_repeated", lambda *_: False)
    with pytest.raises(AssertionError, match="products for 32768 tokens x 4"):
        test_the_synthetic_context_of_a_cell_takes_bounded_time("h2o", requests)


@pytest.mark.parametrize(("method", "fault", "message"), [
    (KeyDiff, lambda kv: [x.norm() for x in kv.keys.unbind(2)], "launches for 32768 tokens x 4"),
    (Full, lambda kv: [abs(x) for x in range(10 * kv.n)], "calls of a step for 32768 tokens x 4"),
])
def test_python_loops_over_tokens_are_noticed(requests, monkeypatch, method, fault, message):
    """In the compression, and in the attention of a step."""
    of = "score" if method is KeyDiff else "attend"
    found = getattr(method, of)
    monkeypatch.setattr(method, of, lambda self, kv, step: (fault(kv), found(self, kv, step))[1])
    with pytest.raises(AssertionError, match=message):
        test_the_synthetic_context_of_a_cell_takes_bounded_time(method.card.name, requests)


@pytest.mark.slow
def test_every_stage_runs_on_a_cpu_and_is_not_run_again(tmp_path):
    """Each writes a complete file; a second call prints the same table and runs nothing."""
    stages = ["probe", "methods", "core", "tests", "all", "answers", "lengths", "largest", "long", "models",
              "diffusion", "invariants"]
    first = suite("--dry", "--out", tmp_path, *stages)
    assert first.returncode == 0, first.stderr
    texts = {"tests", "invariants"}
    assert {x.name for x in tmp_path.iterdir()} == {f"{x}.txt" if x in texts else f"{x}.json" for x in stages}
    for stage in set(stages) - texts - {"probe"}:
        bench = Bench.model_validate_json((tmp_path / f"{stage}.json").read_text())
        assert bench.status == "done"
        refused = {x.method.name for x in bench.cells if x.outcome == "refused"}
        assert refused == ({"cachegen", "kvtc"} if stage == "methods" else set())  # their bytes depend on the text
        assert {x.outcome for x in bench.cells} <= {"ok", "refused"}
    again = suite("--dry", "--out", tmp_path, *stages)
    assert again.stdout == first.stdout
    assert again.stderr.count(" is done: ") == len(stages)
