"""Two models with one hash are the same model, wherever their files are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench.hf import Model, load_model

from .models import QUERY, build, rewrite


def test_hashes_stay_with_a_copy(saved: dict[str, Path], llama: Path) -> None:
    """The same files elsewhere, under other times, are the same model and tokenizer."""
    (llama / "config.json").touch()
    (llama / "README.md").write_text("a copy")
    one, other = load_model(str(saved["llama"])), load_model(str(llama))
    assert one.sha256 == other.sha256
    assert one.tokenizer_sha256 == other.tokenizer_sha256


def change_weights(folder: Path) -> None:
    rewrite(folder, lambda weights: weights[QUERY].add_(1e-3))


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def change_stop_token(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))


@pytest.mark.parametrize("change", [change_weights, change_config, change_stop_token])
def test_model_hash_follows_the_files(change: Callable[[Path], None], llama: Path) -> None:
    """Other weights, another configuration or another stop token are another model, with the same tokenizer."""
    before = load_model(str(llama))
    change(llama)
    after = load_model(str(llama))
    assert after.sha256 != before.sha256
    assert after.tokenizer_sha256 == before.tokenizer_sha256


def test_tokenizer_hash_follows_the_tokenizer(llama: Path) -> None:
    """Another vocabulary or another special token is another tokenizer, with the same model."""
    before = load_model(str(llama))
    text = (llama / "tokenizer.json").read_text()
    (llama / "tokenizer.json").write_text(text.replace('"w9"', '"nine"'))
    words = load_model(str(llama))
    (llama / "tokenizer.json").write_text(text)
    settings = json.loads((llama / "tokenizer_config.json").read_text())
    (llama / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "w7"}))
    special = load_model(str(llama))
    assert len({x.tokenizer_sha256 for x in (before, words, special)}) == 3
    assert len({x.sha256 for x in (before, words, special)}) == 1
    assert special.stop_ids == {2, 7}


@pytest.mark.parametrize("memory", ['{"half', "[]", None])
def test_hash_memory_may_be_broken(memory: str | None, saved: dict[str, Path], tmp_path: Path) -> None:
    """The file that caches hashes between runs may be cut off, invalid or unwritable, and is never needed."""
    expected = load_model(str(saved["llama"])).sha256
    shutil.rmtree(tmp_path / "cache")
    if memory is None:
        (tmp_path / "cache").write_text("no folder")
    else:
        (tmp_path / "cache" / "kvbench").mkdir(parents=True)
        (tmp_path / "cache" / "kvbench" / "hashes.json").write_text(memory)
    assert load_model(str(saved["llama"])).sha256 == expected


def test_module_in_memory() -> None:
    """A module without files is a model too; its hash is that of its parameters and configuration."""
    one, same, other = (Model.from_module(build("llama", {}, seed), id="mine") for seed in (0, 0, 1))
    assert one.sha256 == same.sha256 != other.sha256
    assert one.tokenizer.decode([7]) == "<7>"
    assert one.id == "mine"
