"""Entries in a file."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from kvbench import machine
from kvbench.errors import FileTierError

IN_MEMORY = {"tmpfs", "ramfs"}
"""File systems without a disk: a file there would be another tier than its name says."""


class FileEntries:
    """Entries that were moved to a file without a name, which is gone when the last store that reads it is closed.

    Every read goes to the disk: the operating system is told to drop the file's pages from memory after it.
    """

    def __init__(self, entries: Tensor) -> None:
        """Write the entries. [B, H_kv, n, W]

        Raises:
            FileTierError: the disk is full, or there is none, or TMPDIR is no folder that can be written to, or in
                memory.
        """
        self._device, self._dtype = entries.device, entries.dtype
        self.entry_bytes = entries.shape[3] * entries.itemsize
        self.nbytes = entries.numel() * entries.itemsize
        data = entries.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")
        given = os.environ.get("TMPDIR")
        if given and not os.access(given, os.W_OK | os.X_OK):  # tempfile would take another folder without a word
            raise _describe("written to", "it is no folder that can be written to", given)
        try:
            self._file, name = tempfile.mkstemp(prefix="kvbench-")
            weakref.finalize(self, os.close, self._file)
            Path(name).unlink()
            kind = machine.find_file_system(Path(name).parent)
            if kind in IN_MEMORY:
                raise _describe("written to", f"it is on {kind}, which is memory")
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise _describe("written to", error.strerror) from error
        self._forget()

    def take(self, places: Tensor) -> Tensor:
        """Entries by their place in [B * H_kv * n], ascending; neighbors in one read. [R] -> [R, W]

        Raises:
            FileTierError: the file cannot be read, or has lost its end.
        """
        found = torch.empty((len(places), self.entry_bytes), dtype=torch.uint8)
        places = places.cpu()
        starts = [0, *((places.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(places)]
        first = places[[x for x in starts[:-1] if x < len(places)]].tolist()
        for start, stop, place in zip(starts, starts[1:], first, strict=False):
            self._read(found[start:stop], place * self.entry_bytes)
        self._forget()
        return found.view(self._dtype).to(self._device)

    def _read(self, rows: Tensor, offset: int) -> None:
        data = rows.numpy().data.cast("B")
        while data:
            try:
                count = os.preadv(self._file, [data], offset)
            except OSError as error:
                raise _describe("read from", error.strerror) from error
            if not count:
                raise _describe("read from", "it is shorter than it was written")
            data, offset = data[count:], offset + count

    def _forget(self) -> None:
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def _describe(action: str, reason: str | None, folder: str | None = None) -> FileTierError:
    return FileTierError(
        f"KV entries could not be {action} a file in {folder or tempfile.gettempdir()}: {reason}. Free or mount the "
        "disk, or set TMPDIR to another folder, then run the same command to resume."
    )
