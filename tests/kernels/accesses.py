"""Checks every access of an interpreted Triton kernel for faults that the interpreter lets pass and a GPU does not."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
import torch

MANY = -1
"""Instead of an epoch: several programs."""


class AccessError(Exception):
    """An access outside the kernel's tensors, or one whose result depends on the order of programs or threads."""


class Launch:
    """The memory of one launch: which programs wrote and read each address.

    Programs are told apart by epochs, one per program and a further one after each of its barriers. Accesses of one
    tensor have one element size. Atomic operations are not checked; no kernel here has one.
    """

    def __init__(self, name, tensors):
        """The addresses that views reach, without the rest of their storages."""
        self.name = name
        ranges = sorted({_reach(x) for x in tensors if x.numel()})
        self.low, self.high = (np.array(x, dtype=np.uint64) for x in zip(*ranges, strict=True))
        self.high = np.maximum.accumulate(self.high)  # views may overlap
        self.start = np.concatenate([[0], np.cumsum(self.high - self.low)[:-1]]).astype(np.int64)
        size = int((self.high - self.low).sum())
        self.wrote, self.read = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self.epoch = self.program = 0

    def begin(self):
        """The next program starts."""
        self.epoch += 1
        self.program = self.epoch

    def fence(self):
        """The program's threads have waited for each other."""
        self.epoch += 1

    def find(self, pointers, mask, size, kind):
        """Where the accessed addresses are in `wrote` and `read`."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        at = pointers[mask.astype(bool)].astype(np.uint64)
        place = np.searchsorted(self.low, at, side="right") - 1
        inside = (place >= 0) & (at + np.uint64(size) <= self.high[place])
        if not inside.all():
            self.fail(f"{kind} {np.count_nonzero(~inside)} elements outside its tensors")
        return self.start[place] + (at - self.low[place]).astype(np.int64)

    def load(self, pointers, mask, size):
        """The program reads."""
        at = self.find(pointers, mask, size, "reads")
        wrote, read = self.wrote[at], self.read[at]
        if self.is_others(wrote).any():
            self.fail("reads what another program writes")
        if (wrote == self.epoch).any():
            self.fail("reads what it wrote, without a barrier in between")
        self.read[at] = np.where(self.is_others(read), MANY, self.epoch)

    def store(self, pointers, mask, size):
        """The program writes."""
        at = self.find(pointers, mask, size, "writes")
        if self.is_others(self.wrote[at]).any():
            self.fail("writes what another program writes")
        if self.is_others(self.read[at]).any():
            self.fail("writes what another program reads")
        self.wrote[at] = self.epoch

    def is_others(self, epochs):
        """Whether another program made these accesses."""
        return (epochs != 0) & (epochs < self.program)

    def fail(self, fault):
        """Name the kernel; the traceback has the line."""
        raise AccessError(f"{self.name} {fault}")


def _reach(x):
    """The first byte of a view, and the one after its last."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize


@contextmanager
def checked():
    """Kernels that Triton interprets within raise at an `AccessError`, in the interpreter's own error."""
    from triton.runtime import interpreter  # here, because Triton is for Linux

    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    launch = None

    def start(self, args, kwargs):
        nonlocal launch
        held = prepare(self, args, kwargs)
        flat = [y for x in (*held[0], *held[1].values()) for y in (x if isinstance(x, tuple) else (x,))]
        launch = Launch(self.fn.__name__, [x for x in flat if isinstance(x, torch.Tensor)])
        return held

    def place(self, *index):
        launch.begin()
        return set_place(self, *index)

    def wait(self, *args):
        launch.fence()
        return barrier(self, *args)

    def read(self, pointers, mask, *args):
        launch.load(pointers.data, mask.data, np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)
        return load(self, pointers, mask, *args)

    def write(self, pointers, value, mask, *args):
        launch.store(pointers.data, mask.data, value.data.itemsize)
        return store(self, pointers, value, mask, *args)

    prepare, set_place = grid._init_args_hst, builder.set_grid_idx
    barrier, load, store = builder.create_barrier, builder.create_masked_load, builder.create_masked_store
    with ExitStack() as stack:
        for owner, name, ours in (
            (grid, "_init_args_hst", start), (builder, "set_grid_idx", place), (builder, "create_barrier", wait),
            (builder, "create_masked_load", read), (builder, "create_masked_store", write),
        ):
            stack.enter_context(mock.patch.object(owner, name, ours))
        yield
