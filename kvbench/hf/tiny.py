"""Tiny models with random weights for checking methods in about a second on a CPU, without files or network."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from kvbench.hf.load import Model
from kvbench.hf.masked import Masking

VOCABULARY = 64
STEEPNESS = 4.0
HEAD_DIM = 16


_place: ContextVar[tuple[str, torch.dtype]] = ContextVar("place", default=("cpu", torch.float32))


@contextmanager
def placed(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Make tiny models on a device and in an element type; elsewhere they are on the CPU, in float32."""
    token = _place.set((device, dtype))
    try:
        yield
    finally:
        _place.reset(token)


def tiny_model(
    query_heads: int = 4, kv_heads: int = 2, window: int | None = None, seed: int = 0, layers: int = 2
) -> Model:
    """A Llama or Mistral of few layers; its weights are large enough that attention is not uniform."""
    return _make(query_heads, kv_heads, window, seed, layers, *_place.get())


@functools.cache
def _make(
    query_heads: int, kv_heads: int, window: int | None, seed: int, layers: int, device: str, dtype: torch.dtype
) -> Model:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": query_heads * HEAD_DIM, "intermediate_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": query_heads, "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM, "initializer_range": 0.2, "max_position_embeddings": 4096,
    }
    config = LlamaConfig(**sizes) if window is None else MistralConfig(**sizes, sliding_window=window)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device, dtype)
    return Model.from_module(module, id=f"tiny-{query_heads}q{kv_heads}kv" + (f"-window{window}" if window else ""))


def tiny_diffusion(*, shifted: bool) -> Model:
    """A masked diffusion model of two layers whose mask is the last token.

    Its output weights are scaled up so that the confidence of predictions varies.
    """
    return _make_diffusion(shifted, *_place.get())


@functools.cache
def _make_diffusion(shifted: bool, device: str, dtype: torch.dtype) -> Model:  # noqa: FBT001  # cached by position
    with placed(device, dtype):
        module = copy.deepcopy(tiny_model().module)
    with torch.no_grad():
        module.lm_head.weight.mul_(STEEPNESS)
    kind = "shifted" if shifted else "unshifted"
    return Model.from_module(module, id=f"tiny-diffusion-{kind}", masking=Masking(VOCABULARY - 1, shifted))


def permute_heads(model: Model, order: list[int]) -> Model:
    """The same model with its KV heads, and the query heads of each, in another order."""
    shape = model.layers[0]
    group = shape.query_heads // shape.kv_heads
    kv_channels = _channels(order, shape.key_dim)
    query_channels = _channels([head * group + i for head in order for i in range(group)], shape.key_dim)
    module: PreTrainedModel = copy.deepcopy(model.module)
    for layer in module.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            attention.q_proj.weight.copy_(attention.q_proj.weight[query_channels])
            attention.k_proj.weight.copy_(attention.k_proj.weight[kv_channels])
            attention.v_proj.weight.copy_(attention.v_proj.weight[kv_channels])
            attention.o_proj.weight.copy_(attention.o_proj.weight[:, query_channels])
    return Model.from_module(module, id=f"{model.id}-permuted")


def _channels(heads: list[int], width: int) -> list[int]:
    return [head * width + i for head in heads for i in range(width)]
