"""Published architectures that `random:` builds: the right sizes, served exactly, and without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kvbench import registry
from kvbench.errors import UserError
from kvbench.hf import load, load_model, predict_memory
from kvbench.runs.request import check_model

PUBLISHED = {
    "llada-8b": (8_015_581_184, 2 * 32 * 32 * 128 * 2),
    "llama-2-7b": (6_738_415_616, 2 * 32 * 32 * 128 * 2),
    "llama-3.1-8b": (8_030_261_248, 2 * 32 * 8 * 128 * 2),
    "qwen2.5-7b": (7_615_616_512, 2 * 28 * 4 * 128 * 2),
    "qwen3-8b": (8_190_735_360, 2 * 36 * 8 * 128 * 2),
}
"""Parameters that the checkpoints have, and bytes of a token's keys and values in 16 bits."""
SMALLER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2,
    "d_model": 64, "mlp_hidden_size": 96, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "embedding_size": 128,
    "mask_token_id": 127, "pad_token_id": 0,
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same architectures, small enough for this machine; the group of heads that share rows stays."""
    for name in registry.list_architectures():
        config = json.loads((registry.ARCHITECTURES / name / "config.json").read_text())
        group = config["num_attention_heads"] // config["num_key_value_heads"] if name != "llada-8b" else 1
        smaller = {key: SMALLER.get(key, value) for key, value in config.items()}
        if name != "llada-8b":
            smaller["num_attention_heads"], smaller["num_key_value_heads"] = 2 * group, 2
            smaller["hidden_size"] = 2 * group * 16
        folder = tmp_path / "random" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(smaller))
    monkeypatch.setattr(registry, "ARCHITECTURES", tmp_path / "random")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    """Built without memory, a shape has its checkpoint's number of parameters and its cache's bytes per token."""
    found = predict_memory(f"random:{name}", "bfloat16", length=100)
    assert (found.params, found.stored_bytes // 100) == PUBLISHED[name]


def test_a_step_reads_no_embedding_table() -> None:
    """All parameters but the table that tokens are looked up in, unless it is the output's too."""
    llama, mini = predict_memory("random:llama-3.1-8b"), predict_memory("mini")
    assert llama.step_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert mini.step_bytes == mini.weight_bytes


@pytest.mark.parametrize("name", registry.list_architectures())
def test_every_shape_is_served(name: str, small: None) -> None:
    """With fewer and narrower layers, it loads in its own precision and passes the proof; a token is its own text."""
    model = load_model(f"random:{name}")
    assert model.dtype == ("float16" if name == "llama-2-7b" else "bfloat16")
    assert model.random and model.kind == ("diffusion" if name == "llada-8b" else "autoregressive")
    assert model.tokenizer.decode([3]) == "<3>"


def test_weights_are_made_where_they_will_be() -> None:
    """No copy of eight billion numbers passes through the host's memory; without memory they are made at full size."""
    config = AutoConfig.from_pretrained(registry.ARCHITECTURES / "llama-3.1-8b")
    module = load._random(config, torch.bfloat16, "meta")
    assert {x.device.type for x in module.parameters()} == {"meta"}
    assert sum(x.numel() for x in module.parameters()) == PUBLISHED["llama-3.1-8b"][0]


def test_a_task_is_refused() -> None:
    """Nobody is told a score of text that was cut into no tokens."""
    with pytest.raises(UserError, match=r"random:llama-3\.1-8b.*tokenizer"):
        check_model("random:llama-3.1-8b")
    with pytest.raises(UserError, match="unknown model"):
        check_model("llama-3.1-8b")


def test_a_misspelt_shape_is_answered_with_the_nearest() -> None:
    """Next to the bundled models, those after `random:` are named."""
    with pytest.raises(UserError, match=r"random:llama-3\.1-8b"):
        predict_memory("random:lama-3.1-8b")
