"""Tiny random models of many architectures, and a tiny tokenizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from kvbench.errors import UserError
from kvbench.hf import Model, load_model

VOCABULARY = 64
QUERY = "model.layers.0.self_attn.q_proj.weight"
"""One of a Llama's weights."""
SAVED_SEED = 1
"""Of the saved weights: not the one that `random:` uses."""
WINDOW = 9
"""Shorter than every probe, so that it bites."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 8.0, "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "ministral": ("ministral", {**MIXED, "head_dim": 8}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "head_dim": 8, "attn_logit_softcapping": 0.5}),
    "gemma3_text": ("gemma3_text", {**MIXED, "head_dim": 8}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", MIXED),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", MIXED),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {"sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", {**MIXED, "head_dim": 8, "num_local_experts": 4}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "exaone4": ("exaone4", MIXED),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "arcee": ("arcee", {}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "apertus": ("apertus", {}),
    "helium": ("helium", {"head_dim": 8}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 8}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "persimmon": ("persimmon", {}),
    "phimoe": ("phimoe", {}),
    "granitemoe": ("granitemoe", {}),
    "olmoe": ("olmoe", {}),
    "biogpt": ("biogpt", {}),
    "vaultgemma": ("vaultgemma", {**MIXED,"head_dim":8}),
    "bitnet": ("bitnet", {}),
    "jais2": ("jais2", {}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama4_text": ("llama4_text", {}, "layers of type chunked_attention"),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "qwen3_next": ("qwen3_next", {}, "layers of type linear_attention"),
    "jamba": ("jamba", {}, "layers of type linear_attention"),
    "falcon_h1": ("falcon_h1", {}, "layers of type hybrid"),
    "mamba": ("mamba", {}, "layers of type linear_attention|calls the attention function 0 times"),
    "rwkv": ("rwkv", {}, "calls the attention function 0 times for 2 layers"),
    "bloom": ("bloom", {}, "calls the attention function 0 times for 2 layers"),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}, "calls the attention function 0 times for 2 layers"),
    "diffllama": ("diffllama", {}, "calls the attention function 4 times for 2 layers"),
    "doge": ("doge", {}, "given an attention mask"),
    "deepseek_v3": ("deepseek_v3", {**MLA, **MOE, "n_routed_experts": 4, "first_k_dense_replace": 2}, "caches latents"),
    "gemma4_text": (
        "gemma4_text", {"head_dim": 8, "num_kv_shared_layers": 1, "num_hidden_layers": 3, "sliding_window": WINDOW,
        "layer_types": ["full_attention"] * 3, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
        "1 layers that read the KV entries of other layers",
    ),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}, "'dynamic' rotary embeddings"),
}
"""By name: model type, options, and what the refusal says."""
COMMON = {"llama", "gemma2", "mixtral", "gpt_oss"}
"""Between them: windows, soft caps, sinks and experts."""
ARCHITECTURES = [x if x in COMMON else pytest.param(x, marks=pytest.mark.slow) for x in SERVED]
"""Every name of SERVED; `make test` runs the common ones."""


@cache
def model(name: str) -> Model:
    """One architecture by its name in SERVED, proven, every parameter random, in float32."""
    kind, options = SERVED[name]
    return Model.from_module(build(kind, options), tokenizer(), name)


def build(kind: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model of this type, with sizes of SIZES where options do not say otherwise, every parameter random."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **copy.deepcopy({**SIZES, **options}))  # it writes into rope_parameters
    with warnings.catch_warnings(action="ignore"):  # some files are older than what they import
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for x in module.parameters():
        if x.dim() == 1:  # biases, norms, sinks: at their start they are zeros and ones, which hide mistakes
            x.add_(torch.randn_like(x) * 0.1)
    return module


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words `w3`, one id each."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save(module: PreTrainedModel, folder: Path) -> Path:
    """A Hugging Face folder of a model and the tokenizer."""
    module.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def refusal(name: str | Path, **options: str) -> str:
    """The one line that loading ends with."""
    with pytest.raises(UserError) as caught:
        load_model(str(name), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the saved weights."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
