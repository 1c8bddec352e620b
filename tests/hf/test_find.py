"""Names of models and devices lead somewhere, or to one line that says where else to go."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from kvbench import registry
from kvbench.hf import find, load_model

from .models import refusal


def test_bundled_name(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundled model loads by its bare name, from any working directory."""
    shutil.copytree(saved["llama"], tmp_path / "bundled" / "mini")
    monkeypatch.setattr(registry, "MODELS", tmp_path / "bundled")
    monkeypatch.chdir("/")
    assert registry.list_models() == ["mini"]
    assert load_model("mini").id == "mini"


def test_unknown_name(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name is answered with the nearest one, the list, and what else may stand there."""
    shutil.copytree(saved["llama"], tmp_path / "bundled" / "mini")
    monkeypatch.setattr(registry, "MODELS", tmp_path / "bundled")
    text = refusal("minni")
    assert text.startswith("unknown model 'minni'. Did you mean 'mini'? Allowed: mini.")
    assert text.endswith("Or give a local folder, or a hub id such as org/name.")
    for name in ("", "random:", "./nowhere", "/no/where", "~/nowhere", "a/b/c"):
        assert refusal(name).startswith("unknown model")
    assert refusal("./nowhere").startswith("unknown model './nowhere': no such folder.")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "mps", ""])
def test_unknown_device(device: str, saved: dict[str, Path]) -> None:
    """A device that does not exist anywhere is answered with those that do."""
    text = refusal(saved["llama"], device=device)
    assert text.startswith(f"unknown device '{device}'.")
    assert ("Use --device cuda;" in text) == (device == "gpu")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_absent_device(device: str, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that this machine lacks is refused with what was seen and what works."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = refusal(saved["llama"], device=device)
    assert text == f"device '{device}' is not on this machine (0 GPUs seen). Use --device cpu."


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked once and for ten seconds at most, and the refusal says where else the model was looked for."""
    asked = []

    def offline(_: object, source: str, *, timeout: float) -> object:
        asked.append((source, timeout))
        raise ConnectionError("no route")

    monkeypatch.setattr(find.HfApi, "model_info", offline)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits to try again"))
    text = refusal("nobody-here/no-such-model")
    assert asked == [("nobody-here/no-such-model", 10)]
    assert "the hub cannot be reached (no route)" in text and "local folder" in text


def test_hub_id_in_the_cache(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a network, a model that was fetched before loads with its revision."""
    cached = tmp_path / "hub" / "models--org--name"
    shutil.copytree(saved["llama"], cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")

    def offline(*_: object, **__: object) -> object:
        raise ConnectionError("no route")

    asked = []

    def download(*names: str, **options: Any) -> str:
        asked.append(options)
        return huggingface_hub.snapshot_download(*names, cache_dir=tmp_path / "hub", **options)

    monkeypatch.setattr(find.HfApi, "model_info", offline)
    monkeypatch.setattr(find, "snapshot_download", download)
    loaded = load_model("org/name")
    assert (loaded.id, loaded.revision) == ("org/name", "0123abcd")
    assert "the hub cannot be reached (no route): using org/name as it was fetched last" in capsys.readouterr().err
    # The hub takes a copy without its other files, such as README.md, only for a call that does not ask for them; and
    # it notes the newest revision, which the offline call asks for, only for a call that asks for no revision.
    monkeypatch.setattr(find.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(find, "snapshot_download", lambda *_, **options: asked.append(options) or str(cached))
    find.find_folder("org/name", weights=True)
    find.find_copy("org/name", "0" * 40)
    assert [(x.get("revision"), x.get("local_files_only", False)) for x in asked[-2:]] == [
        (None, False), ("0" * 40, True)
    ]
    assert all("*.json" in x["allow_patterns"] for x in asked)
    assert loaded.sha256 == load_model(str(saved["llama"])).sha256


@pytest.mark.parametrize(
    ("kind", "says"), [(RepositoryNotFoundError, "no such repository"), (GatedRepoError, "is gated")]
)
def test_hub_says_no(kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that is not there, or not for everyone, is refused with what to do."""

    def refuse(*_: object, **__: object) -> object:
        raise kind.__new__(kind)

    monkeypatch.setattr(find.HfApi, "model_info", refuse)
    text = refusal("org/name")
    assert says in text and "hf auth login" in text
