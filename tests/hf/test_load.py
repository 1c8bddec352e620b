"""Models by name: what loads, what is refused in one line that says what to do, and what is predicted and hashed."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model, load_model, load_tokenizer, predict_memory
from kvbench.hf.config import DTYPES
from kvbench.store import storage_bytes

from .models import ARCHITECTURES, QUERY, SAVED_SEED, SERVED, build, refusal, rewrite, save
from .test_adapter import Dense, token_ids


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_local_folder(name: str, saved: dict[str, Path]) -> None:
    """A saved model loads with its weights, its tokenizer and its facts, and answers as it did in memory."""
    original = build(*SERVED[name], SAVED_SEED)
    loaded = load_model(str(saved[name]))
    for key, weight in original.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[key], weight), key
    assert loaded.id == str(saved[name])
    assert loaded.tokenizer.encode("w7 w9", add_special_tokens=False) == [7, 9]
    assert (loaded.dtype, loaded.device) == ("float32", torch.device("cpu"))
    assert (loaded.random, loaded.revision) == (False, None)
    assert loaded.params == sum(x.numel() for x in original.parameters())
    assert loaded.max_length == 512
    assert loaded.stop_ids == {2}
    with Session(loaded, Dense()) as session, torch.no_grad():
        answer = session.prefill(token_ids(1))
        assert (answer - original(token_ids(1)).logits[:, -1]).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision(dtype: str, saved: dict[str, Path]) -> None:
    """Weights come in the precision that was asked for."""
    loaded = load_model(str(saved["llama"]), dtype=dtype)
    assert loaded.dtype == dtype
    assert {x.dtype for x in loaded.module.parameters()} == {DTYPES[dtype]}


@pytest.mark.parametrize("declared", [True, False])
def test_own_precision(declared: bool, tmp_path: Path) -> None:  # noqa: FBT001
    """Without a wish it is the checkpoint's own, also where the configuration does not say."""
    folder = save(build("llama", {}).bfloat16(), tmp_path / "half")
    if not declared:
        config = json.loads((folder / "config.json").read_text())
        del config["dtype"]
        (folder / "config.json").write_text(json.dumps(config))
    assert load_model(str(folder)).dtype == "bfloat16"
    assert predict_memory(str(folder)).weight_bytes == storage_bytes(load_model(str(folder)).module.parameters())


def test_random_weights(saved: dict[str, Path]) -> None:
    """`random:` takes the architecture and leaves the weights, is the same every time and says that it is random."""
    first, second, trained = (load_model(x + str(saved["llama"])) for x in ("random:", "random:", ""))
    assert first.random and not trained.random
    assert first.sha256 == second.sha256 != trained.sha256
    weights = [x.module.model.layers[0].self_attn.q_proj.weight for x in (first, second, trained)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_random_weights_leave_the_generator_alone(saved: dict[str, Path]) -> None:
    """Making weights up does not change what the caller draws next."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    load_model(f"random:{saved['llama']}")
    assert torch.equal(torch.rand(1), expected)


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def break_generation(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ')


def name_unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llamba"}')


def name_architecture_of_another_kind(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def shrink_weight(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({QUERY: torch.zeros(3, 3)}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda x: (x / "config.json").unlink(), "has no config.json"),
    "config cut off": (break_config, "no readable config.json"),
    "generation config cut off": (break_generation, "no readable generation_config.json"),
    "unknown architecture": (name_unknown_architecture, "model type `llamba`"),
    "no causal model": (name_architecture_of_another_kind, "cannot be loaded"),
    "weights cut off": (truncate_weights, "cannot be loaded .*not fully covered"),
    "weights empty": (empty_weights, "cannot be loaded"),
    "no weights": (lambda x: (x / "model.safetensors").unlink(), "has no weights"),
    "one weight missing": (lambda x: rewrite(x, lambda w: w.pop(QUERY)), f"lacks 1 of its weights, .* {QUERY}"),
    "one weight too small": (
        shrink_weight, rf"lacks 1 of its weights, .* {QUERY} of the shape \[3, 3\] instead of \[\d+, \d+\]"
    ),
    "no tokenizer": (lambda x: (x / "tokenizer.json").unlink(), "has no tokenizer"),
    "tokenizer cut off": (lambda x: (x / "tokenizer.json").write_text('{"version"'), "cannot be loaded"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow) if x == "no causal model" else x for x in BROKEN]
)
def test_broken_folder(kind: str, llama: Path) -> None:
    """A folder with something missing or broken is refused in one line that names the folder and the fault."""
    damage, reason = BROKEN[kind]
    damage(llama)
    with pytest.raises(UserError, match=reason) as caught:
        load_model(str(llama))
    assert "\n" not in str(caught.value)
    assert str(llama) in str(caught.value)


def test_pickled_weights(llama: Path) -> None:
    """Pickles are not loaded, and the refusal says why and what to do."""
    (llama / "model.safetensors").unlink()
    torch.save(build("llama", {}).state_dict(), llama / "pytorch_model.bin")
    text = refusal(llama)
    assert "a pickle can run any code" in text and "safetensors" in text


def test_unserved_architecture(tmp_path: Path) -> None:
    """An architecture that the proof refuses is refused at loading and at prediction."""
    folder = save(build("bloom", {}), tmp_path / "bloom")
    assert "calls the attention function 0 times" in refusal(folder)
    with pytest.raises(UserError, match="calls the attention function 0 times"):
        predict_memory(str(folder))


def test_unknown_precision(saved: dict[str, Path]) -> None:
    """A misspelt precision is answered with the nearest and all."""
    text = refusal(saved["llama"], dtype="bfloat61")
    assert text == "unknown dtype 'bfloat61'. Did you mean 'bfloat16'? Allowed: auto, bfloat16, float16, float32."


def test_nothing_is_printed(saved: dict[str, Path], llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Loading, failing to load and predicting leave the screen to kvbench."""
    load_model(str(saved["llama"]))
    predict_memory(str(saved["llama"]))
    rewrite(llama, lambda weights: weights.pop(QUERY))
    refusal(llama)
    assert capfd.readouterr() == ("", "")


def test_a_text_beyond_the_tokenizers_limit_is_encoded_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus is longer than any prompt; transformers would announce indexing errors."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(load_tokenizer("mini")("word " * 10_000).input_ids) > 8192
    assert caplog.messages == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_predicted_memory_is_what_is_taken(name: str, dtype: str, saved: dict[str, Path]) -> None:
    """Predicted bytes are the loaded weights' and a full session's, also where windows bound the cache."""
    ids = token_ids(1)
    prediction = predict_memory(str(saved[name]), dtype, ids.shape[1])
    loaded = load_model(str(saved[name]), dtype=dtype)
    assert prediction.params == loaded.params
    assert prediction.weight_bytes == storage_bytes(loaded.module.parameters())
    with Session(loaded, Dense()) as session:
        session.prefill(ids)
        memory = session.memory()
    assert prediction.stored_bytes == memory.stored_bytes == memory.full_bytes


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_served_architecture_is_predicted(name: str, tmp_path: Path) -> None:
    """The shapes found without weights are those of the loaded model."""
    module = build(*SERVED[name])
    module.config.save_pretrained(tmp_path)
    prediction = predict_memory(str(tmp_path), "float32", 100)
    assert prediction.params == sum(x.numel() for x in module.parameters())
    assert prediction.stored_bytes == Model.from_module(module).shape(100).full_bytes


def test_a_second_gpu_becomes_the_current_device(monkeypatch):
    """Triton, CUDA graphs and memory queries use the current device, not the model's."""
    chosen = []
    monkeypatch.setattr("kvbench.hf.load.check_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("kvbench.hf.load.find_folder", lambda name: (_ for _ in ()).throw(KeyError(name)))
    for device in ("cpu", "cuda", "cuda:1"):
        with pytest.raises(KeyError):
            load_model("mini", device)
    assert chosen == ["cuda:1"]
