"""Small diffusion models with random weights in float32: one with a shifted head, one without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvbench.diffusion.policy import denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.hf import Model
from kvbench.hf.masked import Masking

MASK, WORDS = 63, 60
END = 0
"""Of the models in folders."""
TOYS = Path(__file__).parent / "toys.py"


def make_module(seed=0, kv_heads=2, layers=2):
    """Weights large enough for attention to choose."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=16, initializer_range=0.2, max_position_embeddings=256,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.fixture(scope="session", params=[False, True], ids=["llada", "dream"])
def model(request):
    """LLaDA's kind (a place predicts itself) and Dream's (the next one)."""
    return Model.from_module(make_module(), masking=Masking(MASK, request.param))


@pytest.fixture(scope="session")
def unshifted():
    """LLaDA's kind alone."""
    return Model.from_module(make_module(), masking=Masking(MASK, shifted=False))


@pytest.fixture(scope="session")
def shifted():
    """Dream's kind alone."""
    return Model.from_module(make_module(), masking=Masking(MASK, shifted=True))


@pytest.fixture
def prompts():
    """Two prompts of 20 tokens."""
    return torch.randint(WORDS, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def fill(prompts):
    """Answers of 16 tokens to the prompts: as many steps unless said otherwise."""

    def run(model, method, prompt=None, answer=16, seed=0, **how):
        sampling = Sampling(**{"steps": answer, "block": answer, **how})
        return denoise(model, method, prompts if prompt is None else prompt, answer, sampling, seed)

    return run


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory):
    """Two layers with random weights and a tokenizer of one token per byte: an autoregressive model."""
    folder = tmp_path_factory.mktemp("models") / "plain"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet, "<mask>"])}
    bytes_only = Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<end>", mask_token="<mask>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=256, eos_token_id=END, bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(plain_folder):
    """The same as a diffusion model."""
    made = plain_folder.parent / "diffusion"
    shutil.copytree(plain_folder, made)
    document = json.loads((made / "config.json").read_text())
    document["diffusion"] = {"mask_token_id": 257, "shifted_head": False}
    (made / "config.json").write_text(json.dumps(document))
    return made


@pytest.fixture
def arguments(folder, tmp_path):
    """A run of four samples that works, but for `--method`."""
    return [
        "run", "--task", f"{TOYS}:Letters", "--model", folder, "--samples", "4", "--device", "cpu", "--out",
        tmp_path / "runs", "--json",
    ]


def read_lines(out):
    """The journal of the one run there."""
    (path,) = out.glob("*/samples.jsonl")
    return [json.loads(x) for x in path.read_text().splitlines()]
