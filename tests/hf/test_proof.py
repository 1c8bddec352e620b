"""The proof at load catches faults in what kvbench computes, and refuses what it cannot serve with the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvbench.kernels.dense_attention.torch as dense
from kvbench.errors import UserError
from kvbench.hf import proof
from kvbench.hf.adapter import Forward
from kvbench.hf.proof import TOLERANCE, compare, prove
from kvbench.store import layer

from .models import ARCHITECTURES, COMMON, REFUSED, SERVED, VOCABULARY, WINDOW, build, model

MARGIN = 20
"""Faults stand this far above what is tolerated, and honest differences this far below it."""


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    honest = proof.run_model

    def run(module: Any, ids: Any, forward: Forward, keep: int = 1) -> Any:
        later = int(forward.positions.min()) > 0 and forward.seen > 1
        return honest(module, ids, replace(forward, positions=forward.positions + 1) if later else forward, keep)

    patch.setattr(proof, "run_model", run)


def mask_one_ahead(patch: pytest.MonkeyPatch) -> None:
    honest = dense.visible_entries
    patch.setattr(dense, "visible_entries", lambda before, *others: honest(before + 1, *others))


def without(option: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        honest = layer.dense_attention
        patch.setattr(layer, "dense_attention", lambda *x, **options: honest(*x, **{**options, option: None}))

    plant.__name__ = f"{option}_ignored"
    return plant


def window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    honest = layer.dense_attention

    def attend(*x: Any, **options: Any) -> Any:
        return honest(*x, **{**options, "window": options["window"] and options["window"] + 1})

    patch.setattr(layer, "dense_attention", attend)


def faults() -> list[Any]:
    planted = [(name, fault) for name in SERVED for fault in (position_off_by_one, mask_one_ahead)]
    windowed = [name for name, (_, options) in SERVED.items() if options.get("sliding_window") == WINDOW]
    planted += [(name, fault) for name in windowed for fault in (without("window"), window_one_too_wide)]
    planted += [("gpt_oss", without("sinks")), ("gemma2", without("softcap"))]
    return [
        pytest.param(name, fault, id=f"{name}-{fault.__name__}", marks=() if name in COMMON else pytest.mark.slow)
        for name, fault in planted
    ]


@pytest.mark.parametrize(("name", "plant"), faults())
def test_planted_fault_is_refused(name: str, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in positions, masks, windows, sinks or caps makes the proof refuse the model and name the difference."""
    module = model(name).module
    plant(monkeypatch)
    with pytest.raises(UserError, match=r"does not compute the same .* logits differ by \d.* probe of \d+ tokens"):
        prove(module)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tolerance_has_margins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Honest differences stay a factor of 20 below the bound; a wrong mask goes as far above it."""
    module = model(name).module
    ids = proof._probe_ids(module, WINDOW + proof.PROBE)
    worst, bound = compare(module, ids)
    assert worst * MARGIN <= bound, f"{worst:.1e} of {bound:.1e}"
    mask_one_ahead(monkeypatch)
    worst, bound = compare(module, ids)
    assert worst >= bound * MARGIN, f"{worst:.1e} of {bound:.1e}"


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    """An architecture that is not served is refused with one line that names it and says why."""
    kind, options, reason = REFUSED[name]
    with pytest.raises(UserError, match=reason) as caught:
        prove(build(kind, options))
    assert str(caught.value).startswith(kind)
    assert "\n" not in str(caught.value)


def test_window_that_never_reaches_attention_is_found() -> None:
    """A window that only the configuration knows makes the probe long enough to see that it is not applied."""
    kind, options = SERVED["gemma2"]
    module = build(kind, {**options, "sliding_window": 2 * proof.PROBE})
    prove(module)
    for block in module.model.layers:
        block.self_attn.sliding_window = None  # stock attention goes by the mask
    with pytest.raises(UserError, match="does not compute the same"):
        prove(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt_oss"])
def test_half_precision_is_proven_as_strictly(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model in half precision passes, is left as it was, and a position off by one is still found in it."""
    module = build(*SERVED[name]).to(dtype)
    prove(module)
    assert {x.dtype for x in module.parameters()} == {dtype}
    position_off_by_one(monkeypatch)
    with pytest.raises(UserError, match="does not compute the same"):
        prove(module)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "mixtral", "gpt_oss"])
def test_half_precision_without_a_copy(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model too large to be copied passes in its own precision, and a window ignored is still found in it."""
    monkeypatch.setattr(proof, "COPIED", 0)
    module = build(*SERVED[name]).to(dtype)
    prove(module)
    if "sliding_window" in SERVED[name][1]:
        without("window")(monkeypatch)
        with pytest.raises(UserError, match="does not compute the same"):
            prove(module)


def near_a_tie(dtype: torch.dtype) -> PreTrainedModel:
    """A mixture of two experts, each the other's negative, whose router is one rounding step away from a tie.

    Every token has the same embedding and attention adds nothing to it. The router compares two channels, whose
    values are neighbors in this precision: products with 0 and 1 are exact, so every machine takes the same expert.
    """
    module = build("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}).to(dtype)
    block = module.model.layers[0]
    embeddings, gate = module.model.embed_tokens.weight, block.mlp.gate.weight
    embeddings.copy_(embeddings[VOCABULARY - 1].expand_as(embeddings))
    embeddings[:, 0], embeddings[:, 1] = 1, 1 + torch.finfo(dtype).eps
    block.self_attn.o_proj.weight.zero_()
    block.post_attention_layernorm.weight[:2] = 1
    gate.zero_()
    gate[0, 0] = gate[1, 1] = 1
    block.mlp.experts.gate_up_proj[1] = block.mlp.experts.gate_up_proj[0]
    block.mlp.experts.down_proj.mul_(100)
    block.mlp.experts.down_proj[1] = -block.mlp.experts.down_proj[0]
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_near_a_tie_are_no_fault(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision another rounding sends tokens to other experts: what that changes is measured, and allowed.

    How a machine rounds is not asked: the served path gets its other rounding here, one step of two channels.
    """
    monkeypatch.setattr(proof, "COPIED", 0)
    module, honest = near_a_tie(dtype), proof._served
    step = torch.ones(module.config.hidden_size)
    step[0], step[1] = 1 + torch.finfo(dtype).eps, 1 - torch.finfo(dtype).eps

    def rounded_otherwise(*arguments: Any) -> Tensor:
        hook = module.get_input_embeddings().register_forward_hook(lambda *x: (x[-1].float() * step).to(dtype))
        logits = honest(*arguments)
        hook.remove()
        return logits

    ids = proof._probe_ids(module, proof.PROBE)
    assert compare(module, ids)[0] < TOLERANCE[dtype], "both paths take the same expert"
    monkeypatch.setattr(proof, "_served", rounded_otherwise)
    worst, bound = compare(module, ids)
    assert worst <= bound
    monkeypatch.setattr(proof, "NOISE", 0.0)
    assert compare(module, ids)[1] * MARGIN < worst, "nothing but the measured difference allows it"


def test_other_precisions_are_refused() -> None:
    """Weights in float64 are refused with what is served."""
    with pytest.raises(UserError, match=re.escape("torch.float64: kvbench supports float32, bfloat16 and float16")):
        prove(build("llama", {}).double())


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_long_windows_are_proven_in_little_memory(name: str) -> None:
    """A long window costs logits of a few positions, which would else not fit where the vocabulary is large."""
    kind, options = SERVED[name]
    module = build(kind, {**options, "sliding_window": proof.STOCK_CHUNK + 100, "max_position_embeddings": 4096})
    kept: list[int] = []
    module.lm_head.register_forward_hook(lambda _module, _args, output: kept.append(output.shape[1]))
    prove(module)
    assert proof.PROBE <= max(kept) <= 2 * proof.PROBE


def test_tolerance_is_known_for_every_precision_served() -> None:
    """Float32 is judged at least a hundred times more strictly than half precision."""
    assert TOLERANCE[torch.float32] * 100 <= min(TOLERANCE[torch.float16], TOLERANCE[torch.bfloat16])
