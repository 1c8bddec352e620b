"""Tiny models with random weights for checking methods in about a second on a CPU, without files or network."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel

from kvbench.hf.load import Model
from kvbench.hf.masked import Masking

VOCABULARY = 64
STEEPNESS = 4.0
HEAD_DIM = 16


@functools.cache
def tiny_model(query_heads: int = 4, kv_heads: int = 2, window: int | None = None, seed: int = 0) -> Model:
    """A Llama or Mistral of two layers in float32; its weights are large enough that attention is not uniform."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": query_heads * HEAD_DIM, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": query_heads, "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM, "initializer_range": 0.2, "max_position_embeddings": 4096,
    }
    config = LlamaConfig(**sizes) if window is None else MistralConfig(**sizes, sliding_window=window)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Model.from_module(module, id=f"tiny-{query_heads}q{kv_heads}kv" + (f"-window{window}" if window else ""))


@functools.cache
def tiny_diffusion(*, shifted: bool) -> Model:
    """A masked diffusion model of two layers whose mask is the last token.

    Its output weights are scaled up so that the confidence of predictions varies.
    """
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
    module: PreTrainedModel = AutoModelForCausalLM.from_config(model.module.config, dtype=torch.float32)
    module.load_state_dict(model.module.state_dict())
    for layer in module.model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            _set(attention.q_proj, attention.q_proj.weight[query_channels])
            _set(attention.k_proj, attention.k_proj.weight[kv_channels])
            _set(attention.v_proj, attention.v_proj.weight[kv_channels])
            _set(attention.o_proj, attention.o_proj.weight[:, query_channels])
    return Model.from_module(module, id=f"{model.id}-permuted")


def _channels(heads: list[int], width: int) -> list[int]:
    return [head * width + i for head in heads for i in range(width)]


def _set(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight.copy_(weight.clone())
