"""Conversations under methods that code, merge or factor entries: Triton's operations give torch's tokens."""

from __future__ import annotations

import copy

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.choice import using
from kvbench.method import Budget
from kvbench.registry import find_method

PROMPT = {"dense_attention", "dense_attention.prompt"}
TAIL = {"ragged_attention.dense_partial", "ragged_attention.merge_partials"}
CODES = {"pack.quantize", "packed_attention.packed_partial"}
LEVELS = {"level_attention.level_partial", "ragged_attention.merge_partials"}
FLAT = {"ragged_attention.ragged_partial"}
SLIDING = (4, 1, 20)
METHODS = {
    "kivi": ((4, 2, None), {"group": 4, "residual": 8}, None, TAIL | CODES | {"pack.dequantize"}),
    "mikv": ((4, 2, None), {}, None, TAIL | CODES | {"column_sums", "attention_mass"}),
    "mikv, high tier of 4 bits": (
        SLIDING, {"high_bits": 4}, None, TAIL | CODES | {"column_sums", "attention_mass", "pack.dequantize"},
    ),
    "zipcache": ((4, 2, None), {"gap": 5}, None, TAIL | CODES | {"attention_mass"}),
    "nvfp4": ((4, 2, None), {}, None, LEVELS),
    "turboquant": (SLIDING, {}, None, LEVELS),
    "full-int8": ((4, 2, None), {}, None, {"int8_attention", "int8_attention.quantize_rows"}),
    "shadowkv": (
        (4, 2, None), {"chunk": 2, "local_chunks": 1}, Budget("rows", 8), TAIL | FLAT | {"lowrank_keys.restore_keys"},
    ),
    "kvmerger": ((4, 2, None), {}, Budget("rows", 16), TAIL | FLAT | {"column_sums", "merge_sets"}),
}
"""Model, settings, budget, and the operations that must have run as Triton's."""
TORCH = {"pack", "attention_mass.joint_lse", "lowrank_keys.factor_keys"}
"""Operations that the Triton implementations leave to torch."""


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_triton_gives_the_tokens_of_torch(name, triton):
    """A context, a question of several tokens and an answer; every operation ran as it was asked to."""
    shape, settings, budget, wanted = METHODS[name]
    model, device = tiny_model(*shape), triton(torch.empty(0)).device
    if device.type != "cpu":
        model = Model.from_module(copy.deepcopy(model.module).to(device), id=model.id)
    method = find_method(name.partition(",")[0])(**settings).fit(budget, model.shape(20)).bind(model)
    answers, logits = {}, {}
    for kernels in ("torch", "triton"):
        with using(kernels) as ran, Session(model, method, capacity=30) as session:
            session.prefill(ids(20))
            logits[kernels] = session.force(ids(3, 2))[0]
            answers[kernels] = session.ask(ids(1, 3), 3, stop=frozenset()).ids
    assert answers["triton"] == answers["torch"]
    assert torch.allclose(logits["triton"], logits["torch"], atol=1e-3)
    assert {x for x, where in ran.items() if where == "torch"} <= TORCH
    assert PROMPT | wanted <= {x for x, where in ran.items() if where == "triton"}
