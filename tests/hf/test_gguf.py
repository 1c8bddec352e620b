"""GGUF files: converted exactly and checked, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.errors import UserError
from kvbench.hf import gguf
from kvbench.models.sources import models_folder

from .tiny_gguf import write_gguf


def test_weights_and_tokenizer(tmp_path: Path) -> None:
    """A float32 file gives back every bit of the weights, rotary pairs in transformers' order, and its own splits."""
    original = write_gguf(tmp_path / "a.gguf")
    header = gguf.convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert (header.quantization, header.dtype, header.architecture) == ("F32", torch.float32, "llama")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, weight in original.state_dict().items():
        assert torch.equal(loaded[key], weight), key
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12") == ["1", "2"]
    assert "transformers_version" not in (tmp_path / "out" / "config.json").read_text()


def test_quantized(tmp_path: Path) -> None:
    """Quantized weights are stored in bfloat16, and with GPT-2's splits two digits are one token."""
    original = write_gguf(tmp_path / "a.gguf", "Q8_0", "gpt-2")
    header = gguf.convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert (header.quantization, header.dtype) == ("Q8_0", torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for key, weight in original.state_dict().items():
        assert (loaded[key] - weight).abs().max() <= weight.abs().max() / 64, key
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("12") == ["12"]


@pytest.mark.parametrize(("options", "says"), [
    ({"kind": "I8"}, "unsupported quantization, I8"),
    ({"split": "klingon"}, "rule 'klingon'"),
    ({"architecture": "abacus"}, "abacus"),
    ({"leave_out": "blk.1.attn_k.weight"}, "k_proj"),
])
def test_refused(options: dict[str, str], says: str, tmp_path: Path) -> None:
    """A file that cannot be converted exactly is refused with the reason."""
    write_gguf(tmp_path / "a.gguf", **options)
    with pytest.raises(UserError) as caught:
        gguf.convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_truncated(share: float, tmp_path: Path) -> None:
    """A file that ends early is refused before anything is made of it."""
    path = tmp_path / "a.gguf"
    write_gguf(path)
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(UserError, match="not a whole GGUF file"):
        gguf.read_gguf(path)


def test_no_gguf(tmp_path: Path) -> None:
    """Neither another file nor no file."""
    (tmp_path / "a.gguf").write_text("hello")
    for name, says in (("a.gguf", "not a whole GGUF file"), ("b.gguf", "does not exist")):
        with pytest.raises(UserError, match=says):
            gguf.read_gguf(tmp_path / name)


def test_random_weights_fail_the_check(kvbench, tmp_path: Path, cache: Path) -> None:
    """A file whose model predicts English no better than chance is refused, and nothing is left."""
    write_gguf(tmp_path / "a.gguf")
    answer = kvbench("run", "--method", "full", "--task", "niah", "--model", tmp_path / "a.gguf")
    assert answer.code == 2 and "bits per byte" in answer.err
    assert [x.name for x in models_folder().iterdir() if x.name != ".lock"] == []


def test_run_on_a_file(kvbench, arguments: list[str], tmp_path: Path, cache: Path, monkeypatch) -> None:
    """A run takes a path to a file, which is converted once; it can be listed and removed."""
    monkeypatch.setattr(gguf, "MOST_BITS", 20.0)
    path = tmp_path / "a.gguf"
    write_gguf(path, "Q8_0")
    arguments[arguments.index("--model") + 1] = str(path)
    answer = kvbench(*arguments, "--method", "full", "--dtype", "float32")
    assert answer.code == 0, answer.err
    assert answer.json["model"]["id"] == str(path)
    monkeypatch.setattr(gguf, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert kvbench("show", path, "--json").code == 0
    found = kvbench("models", "list", "--json").json[-1]
    assert found["original"] == str(path) and found["quantization"].startswith("weights dequantized from Q8_0")
    assert kvbench("models", "remove", found["name"]).code == 0
    assert kvbench("models", "list", "--json").json[-1]["name"] != found["name"]
