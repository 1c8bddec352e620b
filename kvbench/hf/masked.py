"""Masked diffusion language models, loaded as native models of transformers and run layer by layer.

LLaDA and Dream are published with their own code, which is never run: LLaDA is a Llama with other names, Dream is a
Qwen2, and both use bidirectional attention, which kvbench's attention function computes if a step is not causal.
Any other model is a diffusion model if its config.json has `"diffusion": {"mask_token_id": 1, "shifted_head": false}`,
with an optional `tokens_per_step`, and `attention`: `prefix` if prompts attend to themselves only.

Sources: GSAI-ML/LLaDA-8B (config.json, modeling_llada.py), Dream-org/Dream-v0-7B (modeling_dream.py); arXiv 2502.09992
and 2508.15487.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen2Tokenizer

from kvbench.errors import UserError
from kvbench.hf.adapter import Forward, attached, serving
from kvbench.step import Moment, Step

LLADA_ENDS = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
LLADA_BLOCK = {
    "attn_norm": "input_layernorm", "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj", "attn_out": "self_attn.o_proj", "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj", "ff_out": "mlp.down_proj",
}
"""LLaDA's names of weights, and transformers' names of Llama's. `ff_out` occurs twice; `ff_proj` is the gate."""
LLADA_NEEDS = (
    "d_model", "n_layers", "n_heads", "mlp_hidden_size", "vocab_size", "rms_norm_eps", "max_sequence_length",
    "rope_theta",
)
LLADA_ONLY: dict[str, Any] = {
    "activation_type": "silu", "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms",
    "bias_for_layer_norm": False, "rope": True, "alibi": False, "include_bias": False, "include_qkv_bias": False,
    "attention_layer_norm": False, "clip_qkv": None, "scale_logits": False, "input_emb_norm": False,
}
"""Values of LLaDA's configuration that make it a Llama; its code has branches for other values."""


@dataclass(frozen=True)
class Masking:
    """The properties of a masked diffusion model."""

    mask_id: int
    shifted: bool
    """Whether a position's output predicts the next token, as in the autoregressive model that Dream starts from."""
    tokens_per_step: int = 1
    """Default number of tokens committed per denoising step."""
    attention: Literal["full", "prefix"] = "full"
    """The tokens that a prompt attends to: all, or its own."""


def read_masking(document: Mapping[str, Any]) -> Masking | None:
    """Read the masking from config.json; None for an autoregressive model.

    Raises:
        UserError: a diffusion model has no valid mask token, head or number of tokens per step.
    """
    kind = document.get("model_type")
    own = document.get("diffusion")
    if kind not in ("llada", "Dream") and not isinstance(own, dict):
        return None
    place = own if isinstance(own, dict) else document
    mask_id, vocabulary = place.get("mask_token_id"), document.get("vocab_size")
    if type(mask_id) is not int or type(vocabulary) is not int or not 0 <= mask_id < vocabulary:
        raise UserError(
            f"config.json of a diffusion model has mask_token_id {mask_id!r} and vocab_size {vocabulary!r}: the mask "
            "must be a token of the vocabulary."
        )
    shifted = place.get("shifted_head", None if isinstance(own, dict) else kind == "Dream")
    if type(shifted) is not bool:
        raise UserError(f"config.json has shifted_head {shifted!r}: it must be true or false.")
    tokens_per_step = place.get("tokens_per_step", 1)
    if type(tokens_per_step) is not int or tokens_per_step < 1:
        raise UserError(f"config.json has tokens_per_step {tokens_per_step!r}: it must be a whole number, 1 or more.")
    attention = place.get("attention", "full")
    if attention not in ("full", "prefix"):
        raise UserError(f"config.json has attention {attention!r} of a diffusion model: it must be full or prefix.")
    return Masking(mask_id, shifted, tokens_per_step, attention)


def native_config(document: Mapping[str, Any]) -> Any:
    """The configuration of an equivalent native model, for models that transformers does not know; None: it does.

    Raises:
        UserError: a variant of LLaDA that is not equivalent to a Llama.
    """
    if document.get("model_type") == "Dream":
        kept = {x: document[x] for x in document if x not in ("model_type", "architectures", "auto_map")}
        return Qwen2Config(**kept)
    if document.get("model_type") != "llada":
        return None
    if absent := [x for x in LLADA_NEEDS if document.get(x) is None]:
        raise UserError(f"config.json of a LLaDA model lacks {', '.join(absent)}: it is not in the published layout.")
    for name, needed in LLADA_ONLY.items():
        if document.get(name, needed) not in (needed, None):
            raise UserError(f"config.json has {name} {document[name]!r}; kvbench needs {needed!r} for a LLaDA model.")
    heads = document["n_heads"]
    return LlamaConfig(
        hidden_size=document["d_model"], num_hidden_layers=document["n_layers"], num_attention_heads=heads,
        num_key_value_heads=1 if document.get("multi_query_attention") else document.get("n_kv_heads") or heads,
        intermediate_size=document["mlp_hidden_size"],
        vocab_size=document.get("embedding_size") or document["vocab_size"], rms_norm_eps=document["rms_norm_eps"],
        max_position_embeddings=document["max_sequence_length"],
        rope_parameters={"rope_type": "default", "rope_theta": float(document["rope_theta"])},
        tie_word_embeddings=bool(document.get("weight_tying")), eos_token_id=document.get("eos_token_id"),
        pad_token_id=document.get("pad_token_id"), dtype=document.get("torch_dtype") or document.get("dtype"),
    )


def native_tokenizer(document: Mapping[str, Any]) -> Any:
    """The class that reads a tokenizer without tokenizer.json; Dream's tokenizer, published as code, is Qwen2's."""
    return Qwen2Tokenizer if document.get("model_type") == "Dream" else AutoTokenizer


def weight_names(document: Mapping[str, Any]) -> dict[str, str] | None:
    """Regular expressions for weight names, with the names in the native model; None: the names are the same."""
    if document.get("model_type") != "llada":
        return None
    ends = {rf"^model\.transformer\.{old}\.": f"{new}." for old, new in LLADA_ENDS.items()}
    blocks = {
        rf"^model\.transformer\.blocks\.(\d+)\.{old}\.": rf"model.layers.\1.{new}." for old, new in LLADA_BLOCK.items()
    }
    return ends | blocks


class Blocks:
    """Runs a model layer by layer for tokens at any positions; denoising steps use it instead of `forward`.

    Gradients are off where it is used.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module: Any = module
        self.layers = list(self.module.model.layers)
        self.computed = 0
        """Tokens that feed-forward blocks have computed, over all layers: the cost of the denoising steps so far."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings. [B, m] -> [B, m, D]"""
        found: Tensor = self.module.model.embed_tokens(ids)
        return found

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding at these positions. [B, m, d] each"""
        found: tuple[Tensor, Tensor] = self.module.model.rotary_emb(hidden, positions)
        return found

    def run(self, hidden: Tensor, positions: Tensor, attend: Callable[[Step], Tensor]) -> Tensor:
        """Run hidden states through all layers. hidden: [B, m, D]. positions: [B, m]. Returns [B, m, D]"""
        angles = self.angles(hidden, positions)
        for layer in range(len(self.layers)):
            hidden = hidden + self.attention(layer, hidden, positions, angles, attend)
            hidden = hidden + self.mlp(layer, hidden)
        return hidden

    def attention(
        self, layer: int, hidden: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor],
        attend: Callable[[Step], Tensor],
    ) -> Tensor:
        """The attention block's residual update: norm, projections, `attend`, output projection. [B, m, D]"""
        block = self.layers[layer]
        forward = Forward(
            moment=Moment.DENOISE, positions=positions, seen=positions.shape[1], attend=attend, causal=False
        )
        with serving(forward):
            found: Tensor = block.self_attn(
                hidden_states=block.input_layernorm(hidden), position_embeddings=angles, attention_mask=None
            )[0]
        return found

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """The feed-forward block's residual update, its norm included. [B, m, D]"""
        block = self.layers[layer]
        self.computed += hidden.shape[0] * hidden.shape[1]
        found: Tensor = block.mlp(block.post_attention_layernorm(hidden))
        return found

    def values(self, layer: int, hidden: Tensor) -> Tensor:
        """The attention values of hidden states, its norm included. [B, m, D] -> [B, H_kv, m, D_v]"""
        block = self.layers[layer]
        flat: Tensor = block.self_attn.v_proj(block.input_layernorm(hidden))
        width = int(block.self_attn.head_dim)
        return flat.view(*flat.shape[:2], -1, width).transpose(1, 2)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states after the last layer, the final norm included. [..., D] -> [..., V]"""
        logits: Tensor = self.module.lm_head(self.module.model.norm(hidden))
        return logits


def prove_blocks(module: PreTrainedModel, ids: Tensor, attend: Callable[[Step], Tensor]) -> tuple[float, float]:
    """The largest difference between the logits of `Blocks` and of the model's own attention, and the largest logit.

    ids: [1, N]. attend: attention of a step over its own tokens, without a mask.

    Raises:
        UserError: the layers do not have the structure of a Llama's.
    """
    stack = getattr(module, "model", None)
    parts = ("embed_tokens", "layers", "rotary_emb", "norm")
    if stack is None or not all(hasattr(stack, x) for x in parts) or not hasattr(module, "lm_head"):
        raise UserError(
            f"{module.config.model_type} does not have a Llama's structure, so its layers cannot be run one by one."
        )
    blocks = Blocks(module)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with attached(module), torch.no_grad():
        ours = blocks.head(blocks.run(blocks.embed(ids), positions, attend)).float()
    everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=module.dtype, device=ids.device)
    with attached(module, "eager"), torch.no_grad():
        stock = module(input_ids=ids, attention_mask=everything, use_cache=False).logits.float()
    return (ours - stock).abs().max().item(), stock.abs().max().item()
