"""Folders of tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .models import SAVED_SEED, SERVED, build, save


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are remembered elsewhere than the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny random Llama and Qwen with their tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save(build(*SERVED[name], SAVED_SEED), folder / name) for name in ("llama", "qwen2", "mistral")}


@pytest.fixture
def llama(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the Llama's folder that a test may break."""
    return Path(shutil.copytree(saved["llama"], tmp_path / "copy"))
