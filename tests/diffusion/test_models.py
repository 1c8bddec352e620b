"""LLaDA and Dream from their own files: the published layout loads without its code and computes what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, GPT2Config, GraniteConfig, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

from kvbench.diffusion.policy import denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.hf import load_model, predict_memory
from kvbench.hf.adapter import attached
from kvbench.hf.masked import Blocks, Masking
from kvbench.methods.diffusion.none import NoCache
from kvbench.store.positions import attend_rows
from kvbench.text.template import Frame

from .published import (
    BYTES,
    END,
    HEADS,
    LLADA,
    MASK,
    VOCABULARY,
    dream_by_hand,
    llada_by_hand,
    write_dream,
    write_llada,
)

IDS = torch.randint(256, (40,), generator=torch.Generator().manual_seed(1))


def logits(model, ids, positions=None, attend=attend_rows):
    """Of every row, block by block. [N, V]"""
    blocks = Blocks(model.module)
    positions = torch.arange(len(ids)) if positions is None else positions
    with attached(model.module), torch.no_grad():
        hidden = blocks.embed(ids[None])
        angles = blocks.angles(hidden, positions[None])
        for layer in range(len(blocks.layers)):
            hidden = hidden + blocks.attention(layer, hidden, positions[None], angles, attend)
            hidden = hidden + blocks.mlp(layer, hidden)
        return blocks.head(hidden)[0]


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llada"
    weights = write_llada(folder)
    return load_model(str(folder)), weights


@pytest.fixture(scope="module")
def dream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "dream"
    weights = write_dream(folder)
    return load_model(str(folder)), weights


def test_llada_is_the_dense_reference(llada):
    """From two shards in its own names, against plain torch: the gate is ff_proj, nothing is shifted."""
    model, weights = llada
    torch.testing.assert_close(logits(model, IDS), llada_by_hand(weights, IDS), atol=1e-4, rtol=1e-4)
    assert model.masking == Masking(MASK, shifted=False, tokens_per_step=1)
    assert (model.kind, model.max_length, model.stop_ids) == ("diffusion", 512, {END})
    assert model.params == sum(x.numel() for x in weights.values()) == predict_memory(model.id).params


def test_dream_is_the_dense_reference(dream):
    """Biases, two KV heads for four queries, its own theta; the head is shifted."""
    model, weights = dream
    torch.testing.assert_close(logits(model, IDS), dream_by_hand(weights, IDS), atol=1e-4, rtol=1e-4)
    assert model.masking == Masking(MASK, shifted=True, tokens_per_step=1)
    assert (model.kind, model.max_length, model.stop_ids) == ("diffusion", 1024, {END})


def test_dream_with_a_causal_mask_is_qwen2(dream):
    """The same weights in transformers' Qwen2ForCausalLM (card 1.2, oracle a)."""
    model, weights = dream
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=1024, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    causal = Qwen2ForCausalLM(config).eval()
    causal.load_state_dict(weights)

    def attend(step):
        return scaled_dot_product_attention(
            step.query, step.key, step.value, is_causal=True, scale=step.scale, enable_gqa=True
        )

    with torch.no_grad():
        wanted = causal(input_ids=IDS[None]).logits[0]
    torch.testing.assert_close(logits(model, IDS, attend=attend), wanted, atol=1e-4, rtol=1e-4)
    assert (logits(model, IDS) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_tokens_and_positions_may_be_permuted_together(kind, request):
    """Outputs permute with them: no row is before another (card 1.1, oracle a)."""
    model, _ = request.getfixturevalue(kind)
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(logits(model, IDS[order], order), logits(model, IDS)[order], atol=1e-4, rtol=1e-4)


class Touched(NoCache):
    """No cache, one hidden row changed after the last layer, and the confidences of the first step."""

    row: ClassVar[int | None] = None
    seen: ClassVar[torch.Tensor]

    def run(self, d, plan, rows):
        hidden = super().run(d, plan, rows)
        if self.row is not None:
            hidden[:, self.row] = hidden[:, self.row].flip(-1)
        return hidden

    def accept(self, d, confidence):
        if d.nfe == 1:
            type(self).seen = confidence[0]
        return super().accept(d, confidence)


@pytest.mark.parametrize(("kind", "touched", "decides"), [
    ("llada", 39, []), ("llada", 44, [44]), ("dream", 39, [40]), ("dream", 44, [45]),
])
def test_a_row_predicts_its_own_place_or_the_next(kind, touched, decides, request, monkeypatch):
    """Hidden row p - 1 decides on token p of Dream, also on the first one, and on no other (card 1.2, oracle b)."""
    model, _ = request.getfixturevalue(kind)
    seen = []
    for row in (None, touched):
        monkeypatch.setattr(Touched, "row", row)
        denoise(model, Touched(), IDS, 8, Sampling(steps=8, block=8))
        seen.append(Touched.seen)
    assert (seen[0] != seen[1]).nonzero().flatten().tolist() == decides


def test_lladas_template_is_cut_once(llada):
    """Its assistant header stands there whether asked for or not; a second question follows an end of turn."""
    frame = Frame.of(llada[0].tokenizer)
    assert frame.head == "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n"
    assert frame.tail == "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert frame.middle == "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    assert llada[0].tokenizer("<|mdm_mask|>", add_special_tokens=False).input_ids == [MASK]


def test_dreams_tokenizer_is_qwen2s(dream):
    """Its own class is published as code, over Qwen2's files: merges, added tokens and template hold."""
    tokenizer = dream[0].tokenizer
    assert tokenizer("abc<|mask|>", add_special_tokens=False).input_ids == [256, BYTES.index("c"), MASK]
    assert tokenizer.decode([256, END], skip_special_tokens=True) == "ab"
    assert Frame.of(tokenizer).tail == "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("changes", "kv_heads"), [
    ({"n_kv_heads": None}, HEADS), ({"n_kv_heads": None, "multi_query_attention": True}, 1), ({"n_kv_heads": 2}, 2),
])
def test_llada_says_its_kv_heads_in_three_ways(tmp_path, changes, kv_heads):
    """null: as many as query heads; multi_query_attention: one."""
    weights = write_llada(tmp_path / "model", kv_heads=kv_heads, **changes)
    model = load_model(str(tmp_path / "model"))
    assert [x.kv_heads for x in model.layers] == [kv_heads] * 2
    torch.testing.assert_close(logits(model, IDS), llada_by_hand(weights, IDS), atol=1e-4, rtol=1e-4)


def test_the_mask_is_read_from_the_configuration(tmp_path):
    """iLLaDA has LLaDA's code and 5 for its mask."""
    write_llada(tmp_path / "model", mask_token_id=5)
    model = load_model(str(tmp_path / "model"))
    assert model.masking == Masking(5, shifted=False)
    assert 5 not in denoise(model, NoCache(), IDS, 8, Sampling(steps=8, block=8)).ids[0]


@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_half_precision_and_random_weights(tmp_path, write):
    """bfloat16, asked for or written; `random:` needs no weights and is the same kind of model."""
    write(tmp_path / "model", torch_dtype="bfloat16")
    assert load_model(str(tmp_path / "model")).dtype == "bfloat16"
    assert load_model(str(tmp_path / "model"), dtype="float16").dtype == "float16"
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    model = load_model(f"random:{tmp_path / 'model'}", dtype="bfloat16")
    assert (model.random, model.kind, model.dtype) == (True, "diffusion", "bfloat16")
    assert len(denoise(model, NoCache(), IDS, 8, Sampling(steps=4, block=8)).ids[0]) == 8


def refuse(folder: Path, **options: Any) -> str:
    """The one line that loading ends with."""
    with pytest.raises(UserError) as caught:
        load_model(str(folder), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("write", [write_llada, write_dream])
@pytest.mark.parametrize(("changes", "message"), [
    ({"mask_token_id": None}, "mask_token_id None and vocab_size 272: the mask must be a token of the vocabulary"),
    ({"mask_token_id": VOCABULARY}, "mask_token_id 272 and vocab_size 272"),
    ({"mask_token_id": -1}, "mask_token_id -1"),
    ({"mask_token_id": "<|mask|>"}, "mask_token_id '<|mask|>'"),
    ({"mask_token_id": True}, "mask_token_id True"),
    ({"tokens_per_step": 0}, "tokens_per_step 0: it must be a whole number"),
    ({"shifted_head": "yes"}, "shifted_head 'yes': it must be true or false"),
])
def test_a_configuration_without_a_mask_is_refused(tmp_path, write, changes, message):
    """Generation starts from it."""
    write(tmp_path / "model", **changes)
    assert message in refuse(tmp_path / "model")


@pytest.mark.parametrize(("name", "value"), [
    ("attention_layer_norm", True), ("include_qkv_bias", True), ("block_type", "sequential"), ("alibi", True),
    ("activation_type", "swiglu"), ("block_group_size", 2), ("clip_qkv", 8.0), ("bias_for_layer_norm", True),
])
def test_a_llada_that_is_no_llama_is_refused(tmp_path, name, value):
    """Its code has branches that no released model takes."""
    write_llada(tmp_path / "model", **{name: value})
    text = f"config.json has {name} {value!r}; kvbench needs {LLADA[name]!r} for a LLaDA model"
    assert text in refuse(tmp_path / "model")


def test_a_configuration_without_its_keys_is_refused(tmp_path):
    """Also LLaDA-MoE's, which calls itself llada and has other names."""
    write_llada(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    document = json.loads(path.read_text())
    del document["d_model"], document["rope_theta"]
    path.write_text(json.dumps(document))
    assert "config.json of a LLaDA model lacks d_model, rope_theta" in refuse(tmp_path / "model")
    with pytest.raises(UserError, match="lacks d_model, rope_theta"):
        predict_memory(str(tmp_path / "model"))


@pytest.mark.parametrize("write", [write_llada, write_dream])
def test_files_that_do_not_fit_are_refused(tmp_path, write):
    """A weight missing, a device map, pickles."""
    weights = write(tmp_path / "model")
    assert "which no device map supports" in refuse(tmp_path / "model", device_map="auto")
    for path in (tmp_path / "model").glob("*.safetensors*"):
        path.unlink()
    torch.save(weights, tmp_path / "model" / "pytorch_model.bin")
    assert "a pickle can run any code" in refuse(tmp_path / "model")


def test_a_missing_weight_is_refused(tmp_path):
    """By its name in the native module."""
    write_dream(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.self_attn.q_proj.bias"]
    save_file(weights, path, metadata={"format": "pt"})
    assert "lacks 1 of its weights, for example model.layers.1.self_attn.q_proj.bias" in refuse(tmp_path / "model")


SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
LLAMA_SIZES = {
    **SIZES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}


@pytest.mark.parametrize(("config", "message"), [
    (GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **SIZES), "gpt2 does not have a Llama's structure"),
    (GraniteConfig(**LLAMA_SIZES, residual_multiplier=0.5), "granite does not compute the same layer by layer"),
])
def test_layers_that_are_no_llamas_are_refused(llada, tmp_path, config, message):
    """Under every setting of diffusion in config.json: blocks run one by one must give the model's own logits."""
    assert message in refuse(write_native(tmp_path / "model", config, llada[0].tokenizer))


def write_native(folder: Path, config: Any, tokenizer: Any) -> Path:
    """A model of transformers' own that says in config.json that it is a diffusion model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    path = folder / "config.json"
    document = json.loads(path.read_text())
    document["diffusion"] = {"mask_token_id": 63, "shifted_head": True, "tokens_per_step": 2}
    path.write_text(json.dumps(document))
    tokenizer.save_pretrained(folder)
    return folder


def test_any_llama_may_say_that_it_is_a_diffusion_model(llada, tmp_path):
    """As mini-diffusion does: mask, head and default schedule stand under `diffusion`."""
    model = load_model(str(write_native(tmp_path / "model", LlamaConfig(**LLAMA_SIZES), llada[0].tokenizer)))
    assert model.masking == Masking(63, shifted=True, tokens_per_step=2)
