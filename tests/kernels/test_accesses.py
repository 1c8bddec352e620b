"""The check of interpreted kernels' accesses finds the faults that it is for."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is for Linux")
tl = triton.language
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")


@triton.jit
def copy(x, out, n, block: tl.constexpr):
    """Copy n elements."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def shift(x, fence: tl.constexpr):
    """Write four elements, then read them in another order."""
    at = tl.arange(0, 4)
    tl.store(x + at, at.to(tl.float32))
    if fence:
        tl.debug_barrier()
    tl.store(x + 4 + at, tl.load(x + 3 - at))


@pytest.fixture
def buffer():
    """Sixteen elements of which a test passes a part: an access beyond that part is inside the storage."""
    return torch.zeros(16)


@interpreted
@pytest.mark.parametrize(("n", "fault"), [(9, "copy reads 1 elements outside"), (8, None)])
def test_a_read_past_the_end(n, fault, buffer):
    """One element more than the tensor has, of a buffer that has it."""
    run(lambda: copy[(3,)](buffer[:8], torch.zeros(16), n, 4), fault)


@interpreted
@pytest.mark.parametrize(("n", "fault"), [(9, "copy writes 1 elements outside"), (8, None)])
def test_a_write_past_the_end(n, fault, buffer):
    """One element more than the tensor has, of a buffer that has it."""
    run(lambda: copy[(3,)](torch.zeros(16), buffer[:8], n, 4), fault)


@interpreted
def test_programs_that_access_one_element(buffer):
    """One reads what another writes, after it and before it; two write one element."""
    run(lambda: copy[(2,)](buffer[:8], buffer[4:12], 8, 4), "copy reads what another program writes")
    run(lambda: copy[(2,)](buffer[4:12], buffer[:8], 8, 4), "copy writes what another program reads")
    run(lambda: shift[(2,)](buffer, fence=True), "shift writes what another program writes")


@interpreted
def test_a_program_that_reads_what_it_wrote(buffer):
    """Other threads wrote it: without a barrier they may be late."""
    run(lambda: shift[(1,)](buffer, fence=False), "shift reads what it wrote, without a barrier")
    run(lambda: shift[(1,)](buffer, fence=True), None)


def run(call, fault):
    """Launch a kernel, which must have this fault."""
    if fault is None:
        return call()
    with pytest.raises(triton.runtime.errors.InterpreterError, match=fault):
        call()
    return None
