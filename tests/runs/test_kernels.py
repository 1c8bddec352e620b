"""`--kernels`: refused where it cannot be had, and what ran is in the result."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from kvbench.errors import UserError
from kvbench.log import say_once
from kvbench.registry import list_ops
from kvbench.runs.files import read_lines


def result_of(tmp_path: Path, kernels: str) -> tuple[dict[str, object], Path]:
    """The result of the one run with these kernels, and its folder."""
    for path in (tmp_path / "runs").glob("*/result.json"):
        found = json.loads(path.read_text())
        if found["kernels"]["implementation"] == kernels:
            return found, path.parent
    raise AssertionError(kernels)


def test_a_missing_implementation_is_refused(kvbench, arguments, monkeypatch):
    """The message names the operation; operations of other methods do not matter."""
    ops = {name: ["torch", "triton"] for name in list_ops()}
    monkeypatch.setattr("kvbench.runs.request.list_ops", lambda: {
        **ops, "dense_attention": ["torch"], "int8_attention": ["torch"]
    })
    answer = kvbench(*arguments, "--method", "full", "--kernels", "triton")
    assert answer.code == 2
    assert "kernels 'triton' are missing for operations of full: dense_attention. Use" in answer.err
    answer = kvbench(*arguments, "--method", "full-int8", "--kernels", "triton")
    assert "full-int8: dense_attention, int8_attention. Use" in answer.err


def test_triton_needs_its_package_and_a_gpu(kvbench, arguments, monkeypatch):
    """A CPU is accepted only with Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answer = kvbench(*arguments, "--method", "full", "--kernels", "triton")
    assert answer.code == 2
    assert "kernels 'triton' need a GPU" in answer.err
    monkeypatch.setattr("kvbench.runs.request.importlib.util.find_spec", lambda name: None)
    answer = kvbench(*arguments, "--method", "full", "--kernels", "triton")
    assert "kernels 'triton' need the package triton" in answer.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")
def test_the_interpreter_refuses_bfloat16(kvbench, arguments):
    """In bfloat16 its products are off by orders of magnitude."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    answer = kvbench(*arguments, "--method", "full", "--kernels", "triton", "--dtype", "bfloat16")
    assert answer.code == 2
    assert "interpreter multiplies bfloat16 wrongly" in answer.err


@pytest.mark.parametrize(("kernels", "noted"), [("torch", True), ("triton", False)])
def test_a_run_on_a_gpu_names_the_kernels_to_use(kvbench, arguments, monkeypatch, kernels, noted):
    """Before the model is loaded, so that the run can be started again with others."""
    def load(*_):
        raise UserError("no model is loaded here.")

    monkeypatch.setattr("kvbench.runs.prepare.find_device", lambda _: "cuda")
    monkeypatch.setattr("kvbench.runs.prepare._load", load)
    say_once.cache_clear()
    answer = kvbench(*arguments, "--method", "full", "--kernels", kernels)
    assert "no model is loaded here" in answer.err
    assert ("note: use --kernels triton on a GPU" in answer.err) == noted


def test_doctor_names_the_kernels_to_use_on_a_gpu(kvbench, monkeypatch):
    """Next to the name of the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    probes = {x["name"]: x for x in kvbench("doctor", "--json").json}
    assert probes["gpu"]["found"] == "NVIDIA H100"
    assert "use --kernels triton on a GPU" in probes["gpu"]["hint"]
    assert "--kernels flash" in probes["flash-attn"]["hint"]


def test_flash_attn_needs_its_package_a_gpu_and_sixteen_bits(kvbench, arguments, monkeypatch):
    """Each has its own message, and no other implementation replaces it."""
    find = importlib.util.find_spec
    command = [*arguments, "--method", "full", "--kernels", "flash"]
    monkeypatch.setattr("kvbench.runs.request.importlib.util.find_spec", lambda name: None)
    answer = kvbench(*command)
    assert answer.code == 2
    assert "kernels 'flash' need the package flash-attn. Install it: pip install 'kvbench[flash]'" in answer.err
    monkeypatch.setattr(
        "kvbench.runs.request.importlib.util.find_spec", lambda name: name == "flash_attn" or find(name)
    )
    answer = kvbench(*command)
    assert answer.code == 2
    assert "kernels 'flash' need a GPU" in answer.err
    monkeypatch.setattr("kvbench.runs.prepare.check_kernels_device", lambda *_: None)
    answer = kvbench(*command, "--dtype", "float32")
    assert answer.code == 2
    assert "kernels 'flash' compute in 16 bits" in answer.err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on a CPU need the interpreter")
def test_a_result_records_its_implementations(kvbench, arguments, tmp_path):
    """By operation, on the first line of a sample and in the result; the answers are the same."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    command = [*arguments, "--method", "knorm+adakv", "--samples", "1", "--mode", "multi-turn", "--turns", "2"]
    predictions = {}
    for kernels in ("torch", "triton"):
        assert kvbench(*command, "--kernels", kernels).code == 0
        result, folder = result_of(tmp_path, kernels)
        ran = {
            "dense_attention": kernels, "dense_attention.prompt": "sdpa_flash" if kernels == "torch" else kernels,
            "ragged_attention.dense_partial": kernels, "ragged_attention.merge_partials": kernels,
            "ragged_attention.ragged_partial": kernels,
        }
        assert result["kernels"] == {
            "implementation": kernels, "ops": ["dense_attention", "ragged_attention"], "ran": ran,
        }
        lines = read_lines(folder / "samples.jsonl")
        assert [x.kernels for x in lines] == [ran, {}]
        predictions[kernels] = [x.ids for x in lines]
    assert predictions["triton"] == predictions["torch"]
