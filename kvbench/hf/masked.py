"""Masked diffusion language models: read as modules of transformers, and run block by block.

LLaDA and Dream are published with code of their own, which is never run: LLaDA is a Llama under other names, Dream a
Qwen2, and both look at all tokens from every token, which our attention function does where a step is not causal.
Another model says in its config.json what it is: `"diffusion": {"mask_token_id": 1, "shifted_head": false}`, with
`tokens_per_step` where that is not 1.

Sources: GSAI-ML/LLaDA-8B (config.json, modeling_llada.py), Dream-org/Dream-v0-7B (modeling_dream.py); arXiv 2502.09992
and 2508.15487.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
"""LLaDA's weights by transformers' names for Llama's; two of them are called `ff_out`, and `ff_proj` is the gate."""
LLADA_NEEDS = (
    "d_model", "n_layers", "n_heads", "mlp_hidden_size", "vocab_size", "rms_norm_eps", "max_sequence_length",
    "rope_theta",
)
LLADA_ONLY: dict[str, Any] = {
    "activation_type": "silu", "block_type": "llama", "block_group_size": 1, "layer_norm_type": "rms",
    "bias_for_layer_norm": False, "rope": True, "alibi": False, "include_bias": False, "include_qkv_bias": False,
    "attention_layer_norm": False, "clip_qkv": None, "scale_logits": False, "input_emb_norm": False,
}
"""What a Llama can be said to be; its code has branches for others."""


@dataclass(frozen=True)
class Masking:
    """What makes a model a diffusion model."""

    mask_id: int
    shifted: bool
    """Whether a position's output predicts the next token, as in the autoregressive model that Dream was made from."""
    tokens_per_step: int = 1
    """Tokens of an answer for each pass, where the user does not say."""


def read_masking(document: Mapping[str, Any]) -> Masking | None:
    """What config.json says; None: an autoregressive model.

    Raises:
        UserError: a diffusion model without a mask token.
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
            "must be one of the tokens, because generation starts from it."
        )
    shifted = place.get("shifted_head", kind == "Dream")
    if type(shifted) is not bool:
        raise UserError(f"config.json has shifted_head {shifted!r}: it must be true or false.")
    tokens_per_step = place.get("tokens_per_step", 1)
    if type(tokens_per_step) is not int or tokens_per_step < 1:
        raise UserError(f"config.json has tokens_per_step {tokens_per_step!r}: it must be a whole number, 1 or more.")
    return Masking(mask_id, shifted, tokens_per_step)


def native_config(document: Mapping[str, Any]) -> Any:
    """transformers' configuration of a model that it does not know by name; None: it does.

    Raises:
        UserError: a variant of LLaDA that is no Llama.
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
            raise UserError(f"config.json has {name} {document[name]!r}; kvbench serves LLaDA models with {needed!r}.")
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
    """The class that reads a tokenizer without tokenizer.json; Dream's own, which is published as code, is Qwen2's."""
    return Qwen2Tokenizer if document.get("model_type") == "Dream" else AutoTokenizer


def weight_names(document: Mapping[str, Any]) -> dict[str, str] | None:
    """Patterns of weight names and what they are called in the native module; None: the same."""
    if document.get("model_type") != "llada":
        return None
    ends = {rf"^model\.transformer\.{old}\.": f"{new}." for old, new in LLADA_ENDS.items()}
    blocks = {
        rf"^model\.transformer\.blocks\.(\d+)\.{old}\.": rf"model.layers.\1.{new}." for old, new in LLADA_BLOCK.items()
    }
    return ends | blocks


class Blocks:
    """A model's layers one by one, for rows at any positions: what a denoising step runs in place of `forward`."""

    def __init__(self, module: PreTrainedModel) -> None:
        self.module: Any = module
        self.layers = list(self.module.model.layers)
        self.rows = 0
        """Rows that feed-forward parts ran so far: what the passes cost, counted where no policy can forget to."""

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, m] -> [B, m, D]"""
        found: Tensor = self.module.model.embed_tokens(ids)
        return found

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rows at these positions. [B, m, d] each"""
        found: tuple[Tensor, Tensor] = self.module.model.rotary_emb(hidden, positions)
        return found

    def run(self, hidden: Tensor, positions: Tensor, attend: Callable[[Step], Tensor]) -> Tensor:
        """Rows through all layers. hidden: [B, m, D]. positions: [B, m]"""
        angles = self.angles(hidden, positions)
        for layer in range(len(self.layers)):
            hidden = hidden + self.attention(layer, hidden, positions, angles, attend)
            hidden = hidden + self.mlp(layer, hidden)
        return hidden

    def attention(
        self, layer: int, hidden: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor],
        attend: Callable[[Step], Tensor],
    ) -> Tensor:
        """What attention adds to the rows: norm, projections, `attend`, output projection. [B, m, D]"""
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
        """What the feed-forward part adds to the rows, its norm included. [B, m, D]"""
        block = self.layers[layer]
        self.rows += hidden.shape[0] * hidden.shape[1]
        with torch.no_grad():
            found: Tensor = block.mlp(block.post_attention_layernorm(hidden))
        return found

    def values(self, layer: int, hidden: Tensor) -> Tensor:
        """What the rows are worth to attention, without the rest of it. [B, m, D] -> [B, H_kv, m, D_v]"""
        block = self.layers[layer]
        with torch.no_grad():
            flat: Tensor = block.self_attn.v_proj(block.input_layernorm(hidden))
        width = int(block.self_attn.head_dim)
        return flat.view(*flat.shape[:2], -1, width).transpose(1, 2)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits of rows after the last layer, the final norm included. [..., D] -> [..., V]"""
        with torch.no_grad():
            logits: Tensor = self.module.lm_head(self.module.model.norm(hidden))
        return logits


def prove_blocks(module: PreTrainedModel, ids: Tensor, dense: Callable[[Step], Tensor]) -> tuple[float, float]:
    """The worst difference of logits between `Blocks` and the model's own attention without a mask, and the largest.

    ids: [1, N]. dense: attention of a step over its own rows.

    Raises:
        UserError: the layers are not those of a Llama.
    """
    stack = getattr(module, "model", None)
    parts = ("embed_tokens", "layers", "rotary_emb", "norm")
    if stack is None or not all(hasattr(stack, x) for x in parts) or not hasattr(module, "lm_head"):
        raise UserError(f"{module.config.model_type} is not built as a Llama is: its blocks cannot be run one by one.")
    blocks = Blocks(module)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with attached(module), torch.no_grad():
        ours = blocks.head(blocks.run(blocks.embed(ids), positions, dense)).float()
    everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=module.dtype, device=ids.device)
    with attached(module, "eager"), torch.no_grad():
        stock = module(input_ids=ids, attention_mask=everything, use_cache=False).logits.float()
    return (ours - stock).abs().max().item(), stock.abs().max().item()
