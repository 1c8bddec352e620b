"""`--dtype auto`: the model's own element type, or float32 on a CPU that is slow in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench import machine
from kvbench.hf import load_model, predict_memory
from kvbench.machine import has_bfloat16_units

from .models import refusal


@pytest.mark.parametrize(("text", "has"), [
    ("flags\t\t: fpu avx512f avx512_bf16\n", True), ("flags\t\t: fpu amx_bf16\n", True),
    ("Features\t: fp asimd bf16\n", True), ("flags\t\t: fpu avx2 avx512f\n", False), ("processor : 0\n", True),
])
def test_units(text: str, has: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    """The flags of /proc/cpuinfo tell; without flags nothing changes."""
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "cpuinfo")
    assert has_bfloat16_units() is has


@pytest.mark.few
@pytest.mark.parametrize("asked", [None, "auto"])
def test_auto(asked: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU without units it is float32, said in one line; what is predicted has the same type."""
    assert load_model("mini", dtype=asked).dtype == "bfloat16"
    half = predict_memory("mini", asked, device="cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(machine, "has_bfloat16_units", lambda: False)
    model = load_model("mini", dtype=asked)
    assert model.dtype == "float32"
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "float32" in line and "--dtype bfloat16" in line
    assert predict_memory("mini", asked, device="cpu").stored_bytes == model.shape(1024).full_bytes
    assert model.shape(1024).full_bytes == 2 * half.stored_bytes
    assert predict_memory("mini", asked, device="cuda").stored_bytes == half.stored_bytes
    assert load_model("mini", dtype="bfloat16").dtype == "bfloat16"
    assert capsys.readouterr().err == ""


def test_unknown() -> None:
    """An unknown type is refused with the types."""
    assert "auto" in refusal("mini", dtype="float8")


@pytest.mark.slow
def test_run_and_doctor(kvbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of different types have different ids, and their bytes are those that are stored."""
    options = ["run", "--method", "full", "--task", "niah", "--length", 400, "--samples", 1, "--json"]
    options += ["--out", tmp_path]
    own = kvbench(*options, "--dtype", "auto").json
    monkeypatch.setattr(machine, "has_bfloat16_units", lambda: False)
    single = kvbench(*options).json
    assert (own["model"]["dtype"], single["model"]["dtype"]) == ("bfloat16", "float32")
    assert own["run_id"] != single["run_id"]
    assert single["memory"]["stored_bytes"] == 2 * own["memory"]["stored_bytes"]
    assert kvbench(*options, "--dtype", "float32").json["run_id"] == single["run_id"]
    monkeypatch.setattr("kvbench.cli.probes.has_bfloat16_units", lambda: False)
    (probe,) = [x for x in kvbench("doctor", "--json").json if x["name"] == "bfloat16"]
    assert "no units" in probe["found"] and "--dtype float32" in probe["hint"]
