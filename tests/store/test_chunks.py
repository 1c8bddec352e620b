"""Chunks are found by all that their entries depend on, and by nothing less."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import replace
from itertools import count

import pytest
import torch

from kvbench.store.chunks import Chunk, ChunkStore, Owner, name_chunk

OWNER = Owner("model sha float32", "epic 1 {}", None)
NAME = name_chunk((1,), (2, 3))


def make(seed=0):
    """A chunk of two tokens in two layers."""
    torch.manual_seed(seed)
    return Chunk([torch.randn(1, 1, 2, 4) for _ in range(2)], [torch.randn(1, 1, 2, 4) for _ in range(2)],
                 {"mass": torch.randn(2)})


def require_equal(a, b):
    """All tensors are equal."""
    for x, y in ((a.keys, b.keys), (a.values, b.values), (list(a.notes.values()), list(b.notes.values()))):
        assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))


@pytest.mark.parametrize("field", ["model", "method", "template", "origin"])
def test_a_chunk_of_another_owner_is_a_miss_and_counted(field, tmp_path):
    """In memory and on disk."""
    for folder in (None, tmp_path):
        store = ChunkStore(folder)
        store.put(OWNER, NAME, make())
        assert store.get(replace(OWNER, **{field: "other"}), NAME) is None
        assert (store.hits, store.misses, store.mismatched) == (0, 1, 1)
        assert store.get(OWNER, name_chunk((), (2, 3))) is None, "other tokens before it"
        assert store.get(OWNER, name_chunk((1,), (2, 3), (1,))) is None, "depends on more"
        assert (store.misses, store.mismatched) == (3, 1)


def test_a_folder_gives_back_what_was_written(tmp_path):
    """In another process, in other words by another store."""
    ChunkStore(tmp_path).put(OWNER, NAME, make())
    store = ChunkStore(tmp_path)
    found = store.get(OWNER, NAME)
    require_equal(found, make())
    assert (store.hits, store.misses, store.loaded) == (1, 0, 1)
    assert ChunkStore(tmp_path, device="meta").get(OWNER, NAME).keys[0].device.type == "meta"


@pytest.mark.parametrize("fault", ["truncated", "one byte", "renamed", "empty"])
def test_a_damaged_file_is_a_miss_with_one_line(fault, tmp_path, capsys):
    """Truncated, changed, of other tokens, or empty: nothing of it is used, and it is written again."""
    ChunkStore(tmp_path).put(OWNER, NAME, make())
    path = next(tmp_path.glob("*/*.safetensors"))
    content = path.read_bytes()
    name = NAME
    if fault == "renamed":
        name = name_chunk((1,), (9, 9))
        path.rename(path.with_name(f"{name}.safetensors"))
    else:
        path.write_bytes({"truncated": content[:-9], "one byte": content[:-1] + bytes([content[-1] ^ 1]),
                          "empty": b""}[fault])
    store = ChunkStore(tmp_path)
    assert store.get(OWNER, name) is None
    assert (store.misses, store.mismatched, store.loaded) == (1, 1, 0)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    store.put(OWNER, name, make(1))
    require_equal(ChunkStore(tmp_path).get(OWNER, name), make(1))


def test_a_file_of_a_killed_process_is_no_chunk(tmp_path):
    """A process that dies while it writes leaves a part, which is never read."""
    ChunkStore(tmp_path).put(OWNER, NAME, make())
    path = next(tmp_path.glob("*/*.safetensors"))
    path.rename(path.with_suffix(".part"))
    store = ChunkStore(tmp_path)
    assert store.get(OWNER, NAME) is None
    assert store.mismatched == 0


def test_a_process_that_is_killed_while_it_writes_leaves_whole_chunks_or_none(tmp_path):
    """Nothing that it left is damaged, and nothing is given under another name."""
    for start in (0, 1000, 2000):
        child = os.fork()
        if not child:
            for i in count(start):
                ChunkStore(tmp_path).put(OWNER, name_chunk((), (i,)), make(i))
        while not list(tmp_path.glob(f"*/{name_chunk((), (start + 3,))}.safetensors")):
            time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store, written = ChunkStore(tmp_path), len(list(tmp_path.glob("*/*.safetensors")))
    for i in range(3000):
        if (found := store.get(OWNER, name_chunk((), (i,)))) is not None:
            require_equal(found, make(i))
    assert store.loaded == written >= 12
    assert store.mismatched == 0


def test_a_disk_that_is_full_in_the_middle_of_a_chunk_keeps_the_others(tmp_path, capsys):
    """The limit of a file's size stands for the disk: the chunk is refused, and the next small one is kept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = ChunkStore(tmp_path)
    large = Chunk([torch.zeros(1, 1, 4096, 4)], [torch.zeros(1, 1, 4096, 4)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        store.put(OWNER, "large", large)
        store.put(OWNER, NAME, make())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.refused == 1
    assert [x.name for x in tmp_path.glob("*/*")] == [f"{NAME}.safetensors"]
    assert capsys.readouterr().err.count("could not be written") == 1
    require_equal(ChunkStore(tmp_path).get(OWNER, NAME), make())


def test_a_folder_that_cannot_be_written_says_so_once(tmp_path, capsys):
    """The chunks stay in memory."""
    (tmp_path / "file").write_text("")
    store = ChunkStore(tmp_path / "file")
    for token in range(3):
        store.put(OWNER, name_chunk((), (token,)), make(token))
    assert store.get(OWNER, name_chunk((), (1,))) is not None
    assert store.refused == 3
    assert capsys.readouterr().err.count("Later samples and runs compute them again") == 1
