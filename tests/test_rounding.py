"""Tests in half precision pass however the CPU multiplies: with units of its own for bfloat16, and emulated."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

HALF = "float16 or half or near_a_tie or test_mini or golden"
"""By name, of `make test`: tests in half precision (`float16` is part of `bfloat16`), of the bundled model,
whose weights are bfloat16, and of recorded outputs."""
EMULATED = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "without vectors": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "default"},
}
"""Settings that make a CPU with bfloat16 units round as one without: oneDNN's products, the width of PyTorch's sums."""
RUN = """
import sys, pytest, torch
assert not torch.ops.mkldnn._is_mkldnn_bf16_supported(), "products are not emulated"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the variables are for x86")
@pytest.mark.parametrize("cpu", EMULATED)
def test_half_precision_holds_where_products_are_emulated(cpu):
    """PyTorch adds in another order where the CPU has no bfloat16 units, so that the last bits differ.

    A test that passes only with the rounding of the machine on which it was written fails here. The variables are read
    when torch is loaded: hence a process of its own.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", RUN, "-q", "-rf", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not slow",
         "-k", HALF],
        env=plain | EMULATED[cpu], capture_output=True, text=True, check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
