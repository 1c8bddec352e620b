"""Chunks are found by all that their entries depend on, and by nothing less."""

from __future__ import annotations

from dataclasses import replace

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


@pytest.mark.parametrize("field", ["model", "method", "template"])
def test_a_chunk_of_another_owner_is_a_miss_and_counted(field, tmp_path):
    """In memory and on disk."""
    for folder in (None, tmp_path):
        store = ChunkStore(folder)
        store.put(OWNER, NAME, make())
        assert store.get(replace(OWNER, **{field: "other"}), NAME) is None
        assert (store.hits, store.misses, store.mismatched) == (0, 1, 1)
        assert store.get(OWNER, name_chunk((), (2, 3))) is None, "other tokens before it"
        assert (store.misses, store.mismatched) == (2, 1)


def test_a_folder_gives_back_what_was_written(tmp_path):
    """In another process, in other words by another store."""
    ChunkStore(tmp_path).put(OWNER, NAME, make())
    store = ChunkStore(tmp_path)
    found = store.get(OWNER, NAME)
    require_equal(found, make())
    assert (store.hits, store.misses) == (1, 0)


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
    assert (store.misses, store.mismatched) == (1, 1)
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


def test_a_full_store_says_so_once_and_keeps_what_it_has(capsys):
    """Chunks beyond the limit are counted, and later chunks that fit are kept."""
    store = ChunkStore(limit=make().nbytes)
    for token in range(3):
        store.put(OWNER, name_chunk((), (token,)), make())
    assert store.refused == 2
    assert store.get(OWNER, name_chunk((), (0,))) is not None
    assert store.get(OWNER, name_chunk((), (1,))) is None
    assert capsys.readouterr().err.count("full") == 1


def test_a_folder_that_cannot_be_written_says_so_once(tmp_path, capsys):
    """The chunk stays in memory."""
    (tmp_path / "file").write_text("")
    store = ChunkStore(tmp_path / "file")
    store.put(OWNER, NAME, make())
    assert store.get(OWNER, NAME) is not None
    assert store.refused == 1
    assert "could not be written" in capsys.readouterr().err
