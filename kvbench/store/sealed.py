"""Tensors in a safetensors file that is replaced atomically and holds a hash of its content."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


class UnsealedError(Exception):
    """A file without a hash, or with that of other content; the message is the reason."""


def write_sealed(path: Path, about: str, tensors: dict[str, Tensor]) -> None:
    """Write tensors, which are contiguous and in host memory, and a text about them.

    Raises:
        OSError, SafetensorError: the file cannot be written; the one that was there is left as it was.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, {"about": about, "sha256": hash_tensors(about, tensors)})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_sealed(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The text and the tensors of a file whose hash is right.

    Raises:
        OSError, SafetensorError: the file cannot be read.
        UnsealedError: its hash is missing or wrong.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    if "about" not in metadata or "sha256" not in metadata:
        raise UnsealedError("its metadata is missing")
    if hash_tensors(metadata["about"], tensors) != metadata["sha256"]:
        raise UnsealedError("its hash is not the one it was saved with")
    return metadata["about"], tensors


def hash_tensors(about: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the text, and of the names, types, shapes and bytes of the tensors."""
    digest = hashlib.sha256(f"{about}\n".encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
