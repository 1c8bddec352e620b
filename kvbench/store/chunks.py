"""KV entries of pieces of text, kept to be used in other prompts.

A chunk is found by a hash of what its entries depend on: the model, the method and its settings, the chat template, the
code, the tokens before it when it was run, and its own tokens. Everything else is a miss. On disk a chunk is one file
that is replaced atomically and holds a hash of its content, so that a damaged file is a miss, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from kvbench.log import say, say_once
from kvbench.store.entries import storage_bytes
from kvbench.store.sealed import UnsealedError, read_sealed, write_sealed

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Chunk:
    """The entries of a piece of text, by layer, and the statistics that a method keeps with them."""

    keys: list[Tensor]
    """Before rotation. [1, H_kv, T, D]"""
    values: list[Tensor]
    """[1, H_kv, T, D_v]"""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """Statistics of a method."""

    @property
    def length(self) -> int:
        """Tokens."""
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of entries and notes."""
        return storage_bytes([*self.keys, *self.values, *self.notes.values()])


@dataclass(frozen=True)
class Owner:
    """All that entries depend on besides their text; chunks of one owner are never given to another."""

    model: str
    """Id and hash of the model, and the element type."""
    method: str
    """Name, version and settings."""
    template: str | None
    """Hash of the chat template."""
    origin: str = ""
    """The code that computes entries, and the kind of device that it runs on."""

    @property
    def sha(self) -> str:
        """A hash of all of it."""
        return _hash(astuple(self))


def name_chunk(before: Sequence[int], ids: Sequence[int], also: Sequence[int] = ()) -> str:
    """A hash of a chunk's tokens, of those before it when it was run, and of what else it depends on."""
    return _hash([list(before), list(ids), list(also)])


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


@dataclass
class ChunkStore:
    """Chunks by owner and tokens, in memory, and in files if there is a folder.

    device: where chunks from files are put.
    """

    folder: Path | None = None
    device: str = "cpu"
    hits: int = 0
    misses: int = 0
    mismatched: int = 0
    """Misses of chunks that are there for other owners, or damaged."""
    refused: int = 0
    """Chunks that could not be written to the folder; this sample still uses them."""
    loaded: int = 0
    """Chunks that were read from files: an earlier run or sample computed them."""
    _held: dict[tuple[str, str], Chunk] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks in memory."""
        return sum(x.nbytes for x in self._held.values())

    def get(self, owner: Owner, name: str) -> Chunk | None:
        """The chunk with this name; None: a miss."""
        found = self._held.get((owner.sha, name))
        if found is None and self.folder is not None:
            found = self._read(owner, name)
        if found is not None:
            self.hits += 1
            return found
        self.misses += 1
        others = any(key == name for _, key in self._held)
        if others or (self.folder is not None and any(self.folder.glob(f"*/{name}{SUFFIX}"))):
            self.mismatched += 1
        return None

    def put(self, owner: Owner, name: str, chunk: Chunk) -> None:
        """Keep a chunk, and write it to the folder if there is one."""
        self._held[owner.sha, name] = chunk
        if self.folder is not None:
            self._write(owner, name, chunk)

    def _path(self, owner: Owner, name: str) -> Path:
        assert self.folder is not None
        return self.folder / owner.sha / f"{name}{SUFFIX}"

    def _write(self, owner: Owner, name: str, chunk: Chunk) -> None:
        path = self._path(owner, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(path, _describe(owner, name), _flatten(chunk))
        except (OSError, SafetensorError) as error:
            say_once(
                f"chunks could not be written to {self.folder}: {error}. Later samples and runs compute them again."
            )
            self.refused += 1

    def _read(self, owner: Owner, name: str) -> Chunk | None:
        path = self._path(owner, name)
        if not path.is_file():
            return None
        try:
            about, tensors = read_sealed(path)
        except (OSError, SafetensorError, UnsealedError):
            about, tensors = "", {}
        if about != _describe(owner, name):
            say(f"{path} is damaged or of another model, method or text: it is not used, and computed again.")
            return None
        chunk = _unflatten({key: x.to(self.device) for key, x in tensors.items()})
        self._held[owner.sha, name] = chunk
        self.loaded += 1
        return chunk


def _describe(owner: Owner, name: str) -> str:
    return f"{owner.sha}/{name}"


def _flatten(chunk: Chunk) -> dict[str, Tensor]:
    named = {f"note {name}": x for name, x in chunk.notes.items()}
    for i, (key, value) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
        named |= {f"key {i}": key, f"value {i}": value}
    return {name: x.contiguous().cpu() for name, x in named.items()}


def _unflatten(tensors: dict[str, Tensor]) -> Chunk:
    count = sum(x.startswith("key ") for x in tensors)
    return Chunk(
        [tensors[f"key {i}"] for i in range(count)], [tensors[f"value {i}"] for i in range(count)],
        {name.removeprefix("note "): x for name, x in tensors.items() if name.startswith("note ")},
    )
