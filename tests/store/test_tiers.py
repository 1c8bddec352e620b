"""Entries on the host and in files: what comes back, what is counted, and a disk that is full or gone."""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kvbench import machine
from kvbench.check.trial import CONTEXT, open_at_budget
from kvbench.engine.session import Session
from kvbench.errors import FileTierError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.machine import find_file_system
from kvbench.method import Budget
from kvbench.methods.retrieval.pqcache import PQCache
from kvbench.registry import find_method
from kvbench.store.chosen import ChosenKV
from kvbench.store.facts import Fact
from kvbench.store.file import FileEntries
from kvbench.store.host import HostEntries, host_fact
from kvbench.store.lowrank import LowRankKV


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of this test's own for files of entries."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [HostEntries, FileEntries])
def test_entries_come_back_bit_by_bit(folder, kind, dtype):
    """Alone, as neighbors, the first and the last, none, and all."""
    entries = torch.randn(2, 3, 10, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    held = kind(entries)
    for places in ([], [0], [59], [3, 4, 5, 20, 21, 59], range(60)):
        wanted = entries.flatten(0, 2)[torch.tensor(list(places), dtype=torch.long)]
        assert held.take(torch.tensor(list(places), dtype=torch.long)).equal(wanted)


def test_neighbors_are_read_at_once(folder, monkeypatch):
    """Six entries in three runs are three reads, of exactly their bytes."""
    held = FileEntries(torch.randn(1, 1, 30, 8))
    read, sizes = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda file, data, offset: sizes.append(len(data[0])) or read(file, data, offset))
    held.take(torch.tensor([3, 4, 5, 20, 21, 29]))
    assert sizes == [3 * 32, 2 * 32, 32]


def test_no_file_is_left(folder):
    """The file has no name, so that even a killed process leaves nothing."""
    held = FileEntries(torch.randn(1, 1, 30, 8))
    assert held.nbytes == 30 * 32
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("tier", ["host", "file"])
def test_a_tier_changes_where_entries_are_and_nothing_else(folder, tier):
    """The same logits bit by bit; entries count in their tier, and every fetched byte as read from it."""
    model, logits, found = tiny_model(), {}, {}
    for place in ("device", tier):
        method = PQCache(tier=place).bind(model).fit(Budget("rows", 60), model.shape(140))
        with Session(model, method, capacity=200) as session:
            session.prefill(ids(140))
            with session.fork() as branch:
                logits[place] = branch.force(ids(8, 2))
                found[place] = branch.memory()
            assert session.force(ids(8, 2)).equal(logits[place])
    assert logits[tier].equal(logits["device"])
    ours, plain = found[tier], found["device"]
    entries = model.shape(140).full_bytes
    assert (plain.host_bytes, plain.file_bytes, plain.host_read_bytes_per_step) == (0, 0, 0)
    assert (ours.host_bytes, ours.file_bytes) == ((entries, 0) if tier == "host" else (0, entries))
    assert plain.stored_bytes - ours.stored_bytes == entries
    assert ours.read_bytes_per_step == plain.read_bytes_per_step
    fetched = ours.host_read_bytes_per_step if tier == "host" else ours.file_read_bytes_per_step
    assert 0 < fetched < ours.read_bytes_per_step
    assert fetched % model.shape(1).full_bytes != 0 or fetched > 0


class Waits(TorchFunctionMode):
    """Counts calls for which a GPU's host waits: numbers of a tensor, its places, and indices by a mask."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        index = args[1] if name in ("__getitem__", "__setitem__") else ()
        masks = [x for x in tree_leaves(index) if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        self.count += len(masks) + (name in ("tolist", "item", "__int__", "nonzero", "cpu"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "settings", "store", "read", "wanted"), [
    ("pqcache", {"tier": "device"}, ChosenKV, "read", {2}), ("pqcache", {"tier": "host"}, ChosenKV, "read", {5}),
    ("shadowkv", {}, LowRankKV, "_bring_back", {1, 3}),
])
def test_a_read_waits_once_for_all_its_numbers(monkeypatch, name, settings, store, read, wanted):
    """And once for the marked entries, for those in either tier, and for the places of what the host copies.

    shadowkv waits for its misses, and for the places of the chunks that it misses, which are noted twice.
    """
    original, waits = getattr(store, read), []

    def count(*args, **kwargs):
        with Waits() as mode:
            found = original(*args, **kwargs)
        waits.append(mode.count)
        return found

    monkeypatch.setattr(store, read, count)
    with open_at_budget(find_method(name)(**settings), tiny_model()) as session:
        session.prefill(CONTEXT)
        session.force(ids(2, 2))
    assert waits and set(waits) <= wanted


@pytest.mark.parametrize(("name", "settings", "numbers"), [
    ("pqcache", {"tier": "host"}, 2), ("shadowkv", {}, 1), ("epicache", {}, 2), ("snapkv+vericache", {}, 2),
])
def test_entries_on_the_host_are_counted(name, settings, numbers):
    """On a CPU as on a simulated host: as many as their bytes hold. numbers: keys and values, or values alone."""
    method = find_method(name)(**settings)
    with open_at_budget(method, tiny_model()) as session:
        session.prefill(CONTEXT)
        found = session.memory().host_bytes
        assert session.effect().facts["entries_on_simulated_host"] == found // (numbers * 16 * 4) > 0
    assert host_fact(3, torch.device("cuda")) == {"entries_on_host": Fact(3)}


def test_a_full_disk_is_one_line(folder, monkeypatch):
    """With the folder, the reason and the next step."""
    def full(_file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileTierError, match=r"could not be written to a file in .*: No space left on device\. Free"):
        FileEntries(torch.randn(1, 1, 3, 2))


def test_no_folder_is_one_line(folder, monkeypatch):
    """A disk that was unmounted before the context ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    with pytest.raises(FileTierError, match=r"could not be written to a file in .*gone: No such file or directory"):
        FileEntries(torch.randn(1, 1, 3, 2))


def test_the_folder_that_was_given_is_not_replaced(folder, monkeypatch):
    """Python takes another folder where TMPDIR is missing: entries must not move to another disk in silence."""
    monkeypatch.setenv("TMPDIR", str(folder / "gone"))
    with pytest.raises(FileTierError, match=r"a file in .*gone: it is no folder"):
        FileEntries(torch.randn(1, 1, 3, 2))
    monkeypatch.setenv("TMPDIR", str(folder))
    assert FileEntries(torch.randn(1, 1, 3, 2)).nbytes == 3 * 2 * 4


@pytest.mark.parametrize(("mounts", "found"), [
    ("/dev/vda / ext4 rw 0 0\ntmpfs {place} tmpfs rw 0 0\n", "tmpfs"), ("none {place} ramfs rw 0 0\n", "ramfs"),
    ("tmpfs / tmpfs rw 0 0\n/dev/vda {place} ext4 rw 0 0\n", None), ("tmpfs {part} tmpfs rw 0 0\n", None), (None, None),
])
def test_a_folder_in_memory_is_refused(folder, monkeypatch, mounts, found):
    """A file there would be memory. The longest mount point that holds the folder decides; without a list, none."""
    def read(path, **_):
        assert str(path) == "/proc/self/mounts"
        if mounts is None:
            raise FileNotFoundError
        return mounts.format(place=escaped, part=escaped[:-1])

    place = folder / "with space"
    place.mkdir()
    escaped = str(place).replace(" ", r"\040")
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(machine, "find_file_system", find_file_system)
    monkeypatch.setattr(Path, "read_text", read)
    if found is None:
        assert FileEntries(torch.randn(1, 1, 3, 2)).nbytes == 3 * 2 * 4
    else:
        with pytest.raises(FileTierError, match=rf"with space: it is on {found}, which is memory\. .*TMPDIR"):
            FileEntries(torch.randn(1, 1, 3, 2))
    assert list(place.iterdir()) == []


def test_a_vanished_disk_is_one_line(folder, monkeypatch):
    """An input/output error, and a file that lost its end: no entry is made up."""
    held = FileEntries(torch.randn(1, 1, 30, 8))
    os.ftruncate(held._file, 29 * 32)
    assert held.take(torch.tensor([28])).shape == (1, 8)
    with pytest.raises(FileTierError, match=r"could not be read from a file in .*: it is shorter than it was written"):
        held.take(torch.tensor([28, 29]))

    def gone(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", gone)
    with pytest.raises(FileTierError, match="Input/output error"):
        held.take(torch.tensor([0]))


def test_a_run_stops_and_resumes(kvbench, arguments, folder, monkeypatch, tmp_path):
    """The disk is full once a sample is saved: one line, exit code 1, no failed sample; later the run goes on."""
    made = FileEntries.__init__

    def fill(self, entries):
        if any(x.stat().st_size for x in tmp_path.rglob("samples.jsonl")):
            raise FileTierError("the disk is full.")
        made(self, entries)

    monkeypatch.setattr(FileEntries, "__init__", fill)
    first = kvbench(*arguments, "--method", "leoam")
    assert first.code == 1
    assert first.err.strip().splitlines()[-1].endswith("the disk is full.")
    monkeypatch.setattr(FileEntries, "__init__", made)
    second = kvbench(*arguments, "--method", "leoam")
    assert second.code == 0, second.err
    assert "resuming: 1 of 4 samples" in second.err
    assert second.json["n_failed"] == 0
    assert second.json["memory"]["file_bytes"] > 0


def test_identity_settings_move_nothing(folder):
    """At the full budget every entry stays on the device, and nothing is declared elsewhere."""
    model = tiny_model()
    method = PQCache(tier="file").bind(model).fit(Budget("fraction", 1.0), model.shape(140))
    assert method.declared_file_bytes(model.shape(140)) == 0
    assert replace(method, rows=60).declared_file_bytes(model.shape(140)) == model.shape(140).full_bytes
