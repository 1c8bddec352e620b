"""The part `coders` of scripts/bench.py: how fast methods encode and decode keys and values, over a memory copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvbench.kernels.pack import dequantize, quantize
from kvbench.methods.quantization.cachegen import CodedChunk
from kvbench.methods.quantization.fp8 import Fp8
from kvbench.methods.quantization.kvquant import KeyCoder, KVQuant
from kvbench.methods.quantization.nvfp4 import Nvfp4
from kvbench.methods.quantization.polarquant import PolarQuant
from kvbench.methods.quantization.qjl import QJL
from kvbench.methods.quantization.quarot_kv import QuaRotKV
from kvbench.methods.quantization.turboquant import TurboQuant
from kvbench.store.coders import Coder
from kvbench.techniques.codebooks import fit_levels

TOKENS, HEADS, WIDTH = 2048, 8, 128
ROUNDS, COPIES = 5, 8
Pair = tuple[Callable[[], object], Callable[[], object]]


def bench_coders() -> dict[str, Any]:
    """Throughput of encoding and of decoding 2,048 tokens of 8 KV heads of 128 channels in bfloat16, over a copy's.

    Normal numbers, keys and values in one call, timed in turn with the copy after one warm-up, in CPU seconds. Decoded
    entries stay in the coder's own coordinates, as attention takes them.
    """
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, HEADS, TOKENS, WIDTH, generator=generator).bfloat16()
    found = {}
    with torch.no_grad():
        for name, (encode, decode) in list_coders(keys, values):
            ratios: list[tuple[float, float]] = []
            for _ in range(ROUNDS + 1):
                copied = spend(lambda: [(keys.clone(), values.clone()) for _ in range(COPIES)]) / COPIES
                ratios.append((copied / spend(encode), copied / spend(decode)))
            found[name] = {
                kind: {"median": statistics.median(x), "min": min(x), "max": max(x), "rounds": ROUNDS}
                for kind, x in zip(("encode", "decode"), zip(*ratios[1:], strict=True), strict=True)
            }
    return {"tokens": TOKENS, "kv_heads": HEADS, "head_dim": WIDTH, "bytes": 2 * keys.nbytes, "over_a_copy": found}


def spend(call: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def list_coders(keys: Tensor, values: Tensor) -> Iterator[tuple[str, Pair]]:
    """The encoder and the decoder of both, by method, with default settings."""
    qjl = replace(QJL(first_layers=0), layers=1)
    for method in (TurboQuant(), TurboQuant(variant="prod"), PolarQuant(), qjl, Fp8(), Nvfp4(), QuaRotKV()):
        variant = " (prod)" if getattr(method, "variant", "mse") == "prod" else ""
        yield method.card.name + variant, pair(*method.coders(0), keys, values)
    key_coder, value_coder = KVQuant().coders(0)
    ranges = torch.zeros(HEADS * WIDTH), torch.full((HEADS * WIDTH,), 2.5)
    levels = fit_levels(torch.linspace(-1, 1, 512), torch.ones(512), 16).float()
    assert isinstance(key_coder, KeyCoder)
    made = replace(key_coder, levels=levels, middle=ranges[0], reach=ranges[1])
    yield "kvquant", pair(made, replace(value_coder, levels=levels), keys, values)
    codes = [quantize(keys, 2, tokens=32), quantize(values, 2, channels=32)]
    yield "kivi", (
        lambda: (quantize(keys, 2, tokens=32), quantize(values, 2, channels=32)), lambda: [dequantize(x) for x in codes]
    )
    chunks = [CodedChunk.encode(x, 16) for x in (keys, values)]
    yield "cachegen", (lambda: [CodedChunk.encode(x, 16) for x in (keys, values)], lambda: [x.decode() for x in chunks])


def pair(key_coder: Coder, value_coder: Coder, keys: Tensor, values: Tensor) -> Pair:
    """A coder of keys and one of values as two calls."""
    coders = [(coder.fit(x), x) for coder, x in ((key_coder, keys), (value_coder, values))]
    parts = [coder.encode(x) for coder, x in coders]
    return (
        lambda: [coder.encode(x) for coder, x in coders],
        lambda: [coder.decode(part, WIDTH) for (coder, _), part in zip(coders, parts, strict=True)],
    )
