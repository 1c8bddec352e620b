"""Writes tiny GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
TOKENS = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]


def build_llama() -> LlamaForCausalLM:
    """Two layers with random weights and a vocabulary of bytes and one merge of two digits."""
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path, kind: str = "F32", split: str = "smollm", architecture: str = "llama", leave_out: str | None = None
) -> LlamaForCausalLM:
    """Write the model of `build_llama` with matrices of a type, rotary pairs interleaved as the format has them."""
    model, writer = build_llama(), gguf.GGUFWriter(path, architecture)
    config: Any = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["1 2"])
    writer.add_eos_token_id(0)
    for key, value in model.state_dict().items():
        weight = value
        name = _rename(key)
        if name == leave_out:
            continue
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            heads = weight.shape[0] // config.head_dim
            weight = weight.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
        data = weight.contiguous().numpy()
        if data.ndim == 1 or kind == "F32":
            writer.add_tensor(name, data)
        elif kind == "I8":
            writer.add_tensor(name, data.astype("int8"))
        else:
            quantized = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(data, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _rename(key: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not key.startswith("model.layers."):
        return outer.get(key, "output.weight")
    _, _, layer, inner = key.split(".", 3)
    return f"blk.{layer}.{NAMES[inner.removesuffix('.weight')]}.weight"
