"""Every kernel compiles for an H100 or H200 and is launched, also where there is none.

This file, as a program, compiles and launches: by Triton's own launcher, on a driver without a device.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

SHARED = 227 * 1024
"""Bytes of shared memory that one program may have."""


SPILLED = {"attend_tiles": 16}
"""Bytes of stack that a kernel may spill: triton 3.6 spills 16 in float32 with 64 queries, later versions none."""
KERNELS = {
    "rows": {"attend_tiles", "merge_parts", "merge_pairs", "score_pages", "attend_pages", "attend_blocks",
             "weigh_entries"},
    "codes": {"attend_codes", "attend_levels", "attend_bitmaps", "sieve_entries", "code_groups", "write_entries",
              "code_entries", "write_keys", "merge_run", "merge_parts"},
}
KERNELS["methods"] = KERNELS["rows"] | KERNELS["codes"]
"""By the calls that launch them: operations on tensors of several types and widths, and every method."""


def test_every_kernel_is_compiled():
    """No launch in the operations' files is missing in the lists of this file."""
    texts = [x.read_text() for x in Path(__file__).parents[2].glob("kernels/*/triton.py")]
    assert {x for text in texts for x in re.findall(r"^ +(\w+)\[.*\]\($", text, re.MULTILINE)} == KERNELS["methods"]


@pytest.mark.slow
@pytest.mark.parametrize("which", KERNELS)
def test_kernels_compile_for_hopper_and_are_launched(which, tmp_path):
    """In the blocks that the operations choose for them: types fit, shared memory suffices, no register spills.

    Triton's launcher takes their arguments, constants and tuples among them.
    """
    triton = pytest.importorskip("triton", reason="Triton is for Linux")
    build_driver(Path(triton.__file__).parent / "backends" / "nvidia", tmp_path)
    environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, __file__, which], text=True, capture_output=True, check=False,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1",
             "TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    *usage, launched = done.stdout.splitlines()
    lines = [re.fullmatch(r"(\w+) shared=(\d+) stack=(\d+)", x) for x in usage]
    assert {x[1] for x in lines} == KERNELS[which]
    assert [x[0] for x in lines if int(x[2]) > SHARED or int(x[3]) > SPILLED.get(x[1], 0)] == []
    assert int(launched.removeprefix("launched=")) >= len(lines)


def build_driver(backend, folder):
    """A CUDA driver without a device: every call succeeds, and launches are counted."""
    texts = "".join((backend / x).read_text() for x in ("driver.c", "driver.py"))
    calls = {f"{x}{version}" for x in re.findall(r"\bcu[A-Z]\w+", texts) for version in ("", "_v2", "_v3")}
    own = (
        f"int cuDeviceGetAttribute(int *value, int which, int device) {{ *value = {SHARED}; return 0; }}",
        "int cuFuncGetAttribute(int *value, int which, void *kernel) { *value = which ? 0 : 1024; return 0; }",
        "int launched; int cuLaunchKernelEx() { launched++; return 0; }",
    )
    named = re.findall(r"int (cu\w+)", "".join(own))
    source = folder / "driver.c"
    source.write_text("\n".join([*own, *(f"int {x}() {{ return 0; }}" for x in sorted(calls - {*named}))]))
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)


def rows(*shape, dtype=torch.bfloat16):
    """A tensor without data: compiling needs shapes and types alone."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_operations():
    """Steps and questions, plain and with every option, in 16 and in 32 bits, of narrow and of wide heads."""
    from kvbench.kernels import (
        block_attention,
        column_sums,
        dense_attention,
        page_attention,
        page_select,
        ragged_attention,
    )
    from kvbench.kernels.attention_mass import attention_mass
    from kvbench.kernels.cast_attention import cast_partial
    from kvbench.kernels.window_scores import window_scores

    number, sinks = rows(dtype=torch.int64), rows(32)
    for dtype, width, queries in ((torch.bfloat16, 128, 1), (torch.bfloat16, 128, 64), (torch.bfloat16, 256, 1),
                                  (torch.float16, 64, 1), (torch.float32, 128, 1), (torch.float32, 128, 64)):
        query = rows(2, 32, queries, width, dtype=dtype)
        block, flat = rows(2, 8, 4096, width, dtype=dtype), rows(70_000, width, dtype=dtype)
        offsets = rows(17, dtype=torch.int32)
        plain = {"scale": 0.1, "seen": 5000}
        parts = [
            ragged_attention.ragged_partial(query, flat, flat, offsets, [0] * 16, **plain),
            ragged_attention.dense_partial(query, block, block, **plain),
        ]
        ragged_attention.merge_partials(parts, sinks)
        dense_attention.dense_attention(query, block, block, **plain, sinks=sinks)
        column_sums.column_sums(query, block, **plain, sinks=sinks)
        window_scores(query, block, **plain)
    query, block, offsets = rows(2, 32, 1, 128), rows(2, 8, 4096, 128), rows(17, dtype=torch.int32)
    every = {"scale": 0.1, "seen": number, "window": 100, "softcap": 30.0}
    flat, positions = rows(70_000, 128), rows(70_000, dtype=torch.int32)
    ragged_attention.ragged_partial(
        query, flat, flat, offsets, [0] * 16, **every, positions=positions, bias=rows(70_000, dtype=torch.float32)
    )
    ragged_attention.dense_partial(
        query, block, block, **every, positions=rows(2, 8, 4096, dtype=torch.int32), length=number
    )
    for dtype in (torch.bfloat16, torch.float32):
        query, block = rows(2, 32, 64, 128, dtype=dtype), rows(2, 8, 4096, 128, dtype=dtype)
        attention_mass(
            query, block, rows(64, dtype=torch.int64), scale=0.1, window=100, softcap=30.0,
            logical=rows(64, dtype=torch.int64), positions=rows(2, 8, 4096, dtype=torch.int32),
        )
        column_sums.column_maxima(query, block, scale=0.1, seen=5000, window=100, softcap=30.0)
    query, block = rows(2, 32, 1, 128), rows(2, 8, 4096, 128)
    pages = rows(2, 32, 1, 128, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        query, block = rows(2, 32, 1, 128, dtype=dtype), rows(2, 8, 4096, 128, dtype=dtype)
        page_select.page_scores(query, rows(2, 8, 256, 256, dtype=dtype))
        page_select.page_scores(rows(2, 32, 64, 128, dtype=dtype), rows(2, 8, 256, 256, dtype=dtype))
        page_attention.page_attention(query, block, block, pages, page=16, before=number, scale=0.1, window=100,
                                      softcap=30.0, sinks=sinks)
        casts = rows(2, 8, 4096, 128, dtype=torch.uint8)
        cast_partial(query, casts, casts, None, rows(8, dtype=torch.float32), scale=0.1, seen=5000, window=100)
    blocks, columns = rows(1, 32, 40, 40, dtype=torch.bool), rows(1, 32, 5000, dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float32):
        query, prompt = rows(1, 32, 5000, 128, dtype=dtype), rows(1, 8, 5000, 128, dtype=dtype)
        for cap, sink, single in ((None, None, None), (30.0, rows(32), columns)):
            block_attention.block_attention(
                query, prompt, prompt, blocks, single, block=128, scale=0.1, softcap=cap, sinks=sink
            )


def coded(bits, tokens, channels, width=128):
    """Codes without data."""
    from kvbench.kernels.pack import Codes, packed_width

    parameters = [rows(2, 8, 4096 // tokens, width // channels, dtype=torch.float16) for _ in range(2)]
    return Codes(rows(2, 8, 4096, packed_width(width, bits), dtype=torch.uint8), *parameters, bits, width)


def call_operations_on_codes():
    """Every width of codes with the groups that methods have, 8-bit, sparse, factored and merged entries."""
    from kvbench.kernels import bitmap_attention, int8_attention, lowrank_keys, pack
    from kvbench.kernels.level_attention import Levels, level_partial
    from kvbench.kernels.merge_sets.triton import merge_runs
    from kvbench.kernels.packed_attention import packed_partial

    number = rows(dtype=torch.int64)
    every = {"scale": 0.1, "window": 100, "softcap": 30.0}
    for bits in pack.BITS:
        for key, value in (((32, 1), 32), ((1, 64), 64), ((4096, 1), 128))[: 3 if bits == 2 else 1]:
            codes = coded(bits, *key), coded(bits, 1, value)
            packed_partial(rows(2, 32, 1, 128), *codes, scale=0.1, seen=5000)
        pack.quantize(rows(2, 8, 4096, 128), bits, tokens=32)
        pack.dequantize(pack.quantize(rows(2, 8, 4096, 128), bits, channels=32))
    for dtype, width, queries in ((torch.bfloat16, 128, 64), (torch.bfloat16, 256, 1), (torch.float16, 64, 64),
                                  (torch.bfloat16, 96, 1), (torch.float32, 128, 1)):
        query, held = rows(2, 32, queries, width, dtype=dtype), rows(2, 8, 4096, width, dtype=dtype)
        codes = coded(2, 32, 1, width), coded(2, 1, 32, width)
        pack.quantize(held, 2, tokens=4096)
        packed_partial(query, *codes, **every, seen=5000, positions=rows(2, 8, 4096, dtype=torch.int32))
        eight = int8_attention.quantize_rows(held, held)
        int8_attention.int8_attention(query, **eight, **every, sinks=rows(32), length=number)
        sparse = bitmap_attention.compress(held, width // 2)
        bitmap_attention.bitmap_partial(query, sparse, sparse, **every, seen=5000)

    def level(bits, width, factor):
        packed = rows(2, 8, 4096, pack.packed_width(width, bits), dtype=torch.uint8)
        return Levels(packed, factor, rows(2**bits, dtype=torch.float32), bits, width)

    blocks = level(4, 128, rows(2, 8, 4096, 8, dtype=torch.uint8))
    norms = rows(2, 8, 4096, 1, dtype=torch.float16)
    halves = level(4, 32, norms), level(3, 96, norms)
    for dtype, queries in ((torch.bfloat16, 1), (torch.bfloat16, 64), (torch.float32, 1), (torch.float32, 64)):
        for parts in ((blocks,), halves):
            query = rows(2, 32, queries, 128, dtype=dtype)
            level_partial(query, parts, parts, scale=0.1, seen=5000)
            level_partial(query, parts, parts, **every, seen=5000)
        level_partial(rows(2, 32, 1, 128, dtype=dtype), parts, parts, **every, seen=5000, length=number)

    class Turning:
        """A rotation of half of the channels, or of none."""

        def __init__(self, width):
            self.width = width

        def terms(self, positions):
            cos = rows(*positions.shape, self.width, dtype=torch.float32)
            return (cos, cos, rows(self.width, dtype=torch.int64)) if self.width else None

    for dtype in (torch.bfloat16, torch.float32):
        block, numbers = rows(2, 8, 4096, 128, dtype=dtype), rows(2, 8, 1000, dtype=torch.int64)
        for turning in (Turning(0), Turning(64)):
            lowrank_keys.restore_keys(
                block, numbers, rows(2, 30_000, 160, dtype=dtype), rows(2, 8, 160, 128, dtype=dtype), numbers, turning
            )
        sets = rows(5000, dtype=torch.int64)
        merge_runs(block, block, rows(2, 8, 4096, dtype=torch.float32), sets, sets, 5.0, 1)


def call_methods():
    """Every method, in the shapes of its own calls: a context, a question and two steps of heads of 128 channels.

    The torch implementation computes; the Triton implementation is given the same arguments, for its launches.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kvbench.bench.state import Setting, open_context
    from kvbench.engine.autoregressive import step_logits
    from kvbench.hf import Model
    from kvbench.kernels import choice
    from kvbench.method import Budget, BudgetKind
    from kvbench.registry import find_method, list_entries

    def find(package, implementation, name):
        launches, computes = (getattr(importlib.import_module(f"{package}.{x}"), name) for x in ("triton", "torch"))

        @functools.wraps(launches)
        def both(*args, **kwargs):
            launches(*args, **kwargs)
            return computes(*args, **kwargs)

        return both

    choice._find = find
    torch._assert_async = lambda *_: None  # tests what the launches would have written
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128,
    )
    with choice.using("torch"):
        model = Model.from_module(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    job = Setting(model)
    for name in (x.name for x in list_entries("method") if x.models == "autoregressive"):
        made = find_method(name)().bind(model)
        chosen = made.budget_kind in (BudgetKind.STORED, BudgetKind.READ)
        method = made.fit(Budget("rows", max(made.minimum_entries(), 128)) if chosen else None, model.shape(512))
        with open_context(job, method, 512, 2) as context:
            context.session.question(job.tokens(2, 5, seed=3), 5)
            for token in job.tokens(2, 2, seed=2).split(1, dim=1):
                step_logits(context.session, token)


def main():
    """Compile and launch every kernel that is called; print what it takes, and how many were launched."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime.jit import JITFunction

    from kvbench.kernels.choice import using

    class Hopper:
        """As much of a driver as a compiler and a launcher ask for."""

        utils = CudaUtils()
        launcher_cls = CudaLauncher
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    launch, known = JITFunction.run, set()

    def launch_and_report(self, *args, **kwargs):
        kernel = launch(self, *args, **kwargs)
        if kernel.hash in known:
            return
        known.add(kernel.hash)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            usage = subprocess.run([tool, "--dump-resource-usage", file.name], text=True, capture_output=True,
                                   check=True).stdout
        stack = re.search(r"STACK:(\d+)", usage)[1]
        sys.stdout.write(f"{self.__name__} shared={kernel.metadata.shared} stack={stack}\n")

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = launch_and_report
    with using("triton"):
        {"rows": call_operations, "codes": call_operations_on_codes, "methods": call_methods}[sys.argv[1]]()
    sys.stdout.write(f"launched={ctypes.c_int.in_dll(ctypes.CDLL('libcuda.so.1'), 'launched').value}\n")


if __name__ == "__main__":
    main()
