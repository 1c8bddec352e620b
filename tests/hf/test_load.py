"""Models by name: what loads, what is refused in one line that says what to do, and what is predicted and hashed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from kvbench.errors import UserError
from kvbench.hf import DTYPES, Model, find, list_bundled, load_model, predict_memory
from kvbench.session import Session, model_bytes

from .models import SERVED, build, save
from .test_seam import Dense, token_ids

FEW_SECONDS = 5.0
SEED = 1
"""Of the saved weights: not the one that `random:` uses."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes are remembered elsewhere than the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a tiny random Llama and Qwen with their tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save(build(*SERVED[name], SEED), folder / name) for name in ("llama", "qwen2", "mistral")}


@pytest.fixture
def llama(saved: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the Llama's folder that a test may break."""
    return Path(shutil.copytree(saved["llama"], tmp_path / "copy"))


def refusal(name: str | Path, **options: str) -> str:
    """The one line that loading ends with."""
    with pytest.raises(UserError) as caught:
        load_model(str(name), **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_local_folder(name: str, saved: dict[str, Path]) -> None:
    """A saved model loads with its weights, its tokenizer and its facts, and answers as it did in memory."""
    original = build(*SERVED[name], SEED)
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
    assert predict_memory(str(folder)).weight_bytes == model_bytes(load_model(str(folder)))


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


def test_bundled_name(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundled model loads by its bare name, from any working directory."""
    shutil.copytree(saved["llama"], tmp_path / "bundled" / "mini")
    monkeypatch.setattr(find, "BUNDLED", tmp_path / "bundled")
    monkeypatch.chdir("/")
    assert list_bundled() == ["mini"]
    assert load_model("mini").id == "mini"


def test_unknown_name(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name is answered with the nearest one, the list, and what else may stand there."""
    shutil.copytree(saved["llama"], tmp_path / "bundled" / "mini")
    monkeypatch.setattr(find, "BUNDLED", tmp_path / "bundled")
    text = refusal("minni")
    assert text.startswith("unknown model 'minni'. Did you mean 'mini'? Allowed: mini.")
    assert text.endswith("Or give a local folder, or a hub id such as org/name.")
    for name in ("", "random:", "./nowhere", "/no/where", "~/nowhere", "a/b/c"):
        assert refusal(name).startswith("unknown model")


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def name_unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llamba"}')


def name_architecture_of_another_kind(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shrink_weight(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({QUERY: torch.zeros(3, 3)}))


QUERY = "model.layers.0.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda x: (x / "config.json").unlink(), "has no config.json"),
    "config cut off": (break_config, "no readable config.json"),
    "unknown architecture": (name_unknown_architecture, "model type `llamba`"),
    "no causal model": (name_architecture_of_another_kind, "cannot be loaded"),
    "weights cut off": (truncate_weights, "cannot be loaded .*not fully covered"),
    "weights empty": (empty_weights, "cannot be loaded"),
    "no weights": (lambda x: (x / "model.safetensors").unlink(), "has no weights"),
    "one weight missing": (lambda x: rewrite(x, lambda w: w.pop(QUERY)), f"lacks 1 of its weights, .* {QUERY}"),
    "one weight too small": (shrink_weight, "cannot be loaded .*mismatched_sizes"),
    "no tokenizer": (lambda x: (x / "tokenizer.json").unlink(), "has no tokenizer"),
    "tokenizer cut off": (lambda x: (x / "tokenizer.json").write_text('{"version"'), "cannot be loaded"),
}


@pytest.mark.parametrize("kind", BROKEN)
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
    assert "loading a pickle runs whatever code is in it" in text and "safetensors" in text


def test_unserved_architecture(tmp_path: Path) -> None:
    """An architecture that the proof refuses is refused at loading and at prediction."""
    folder = save(build("bloom", {}), tmp_path / "bloom")
    assert "calls the attention function 0 times" in refusal(folder)
    with pytest.raises(UserError, match="calls the attention function 0 times"):
        predict_memory(str(folder))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:1", "mps", ""])
def test_unknown_device(device: str, saved: dict[str, Path]) -> None:
    """A device that does not exist anywhere is answered with those that do."""
    assert refusal(saved["llama"], device=device).startswith(f"unknown device '{device}'.")


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_absent_device(device: str, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that this machine lacks is refused with what was seen and what works."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = refusal(saved["llama"], device=device)
    assert text == f"device '{device}' is not on this machine (0 GPUs seen). Use --device cpu."


def test_unknown_precision(saved: dict[str, Path]) -> None:
    """A misspelt precision is answered with the nearest and all."""
    text = refusal(saved["llama"], dtype="bfloat61")
    assert text == "unknown dtype 'bfloat61'. Did you mean 'bfloat16'? Allowed: bfloat16, float16, float32."


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id that cannot be fetched ends within seconds, saying where it was looked for."""

    def offline(*_: object, **__: object) -> object:
        raise ConnectionError("no route")

    monkeypatch.setattr(find.HfApi, "model_info", offline)
    started = time.perf_counter()
    text = refusal("nobody-here/no-such-model")
    assert time.perf_counter() - started < FEW_SECONDS
    assert "the hub cannot be reached (no route)" in text and "local folder" in text


def test_hub_id_in_the_cache(saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network, a model that was fetched before loads with its revision."""
    cached = tmp_path / "hub" / "models--org--name"
    shutil.copytree(saved["llama"], cached / "snapshots" / "0123abcd")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")

    def offline(*_: object, **__: object) -> object:
        raise ConnectionError("no route")

    monkeypatch.setattr(find.HfApi, "model_info", offline)
    monkeypatch.setattr(
        find, "snapshot_download",
        lambda *x, **options: huggingface_hub.snapshot_download(*x, cache_dir=tmp_path / "hub", **options),
    )
    loaded = load_model("org/name")
    assert (loaded.id, loaded.revision) == ("org/name", "0123abcd")
    assert loaded.sha256 == load_model(str(saved["llama"])).sha256


@pytest.mark.parametrize(
    ("kind", "says"), [(RepositoryNotFoundError, "no such repository"), (GatedRepoError, "is gated")]
)
def test_hub_says_no(kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that is not there, or not for everyone, is refused with what to do."""

    def refuse(*_: object, **__: object) -> object:
        raise kind.__new__(kind)

    monkeypatch.setattr(find.HfApi, "model_info", refuse)
    text = refusal("org/name")
    assert says in text and "hf auth login" in text


def test_nothing_is_printed(saved: dict[str, Path], llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Loading, failing to load and predicting leave the screen to kvbench."""
    load_model(str(saved["llama"]))
    predict_memory(str(saved["llama"]))
    rewrite(llama, lambda weights: weights.pop(QUERY))
    refusal(llama)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_predicted_memory_is_what_is_taken(name: str, dtype: str, saved: dict[str, Path]) -> None:
    """Predicted bytes are the loaded weights' and a full session's, also where windows bound the cache."""
    ids = token_ids(1)
    prediction = predict_memory(str(saved[name]), dtype, ids.shape[1])
    loaded = load_model(str(saved[name]), dtype=dtype)
    assert prediction.params == loaded.params
    assert prediction.weight_bytes == model_bytes(loaded)
    with Session(loaded, Dense()) as session:
        session.prefill(ids)
        memory = session.memory()
    assert prediction.cache_bytes == memory.cache_bytes == memory.dense_bytes


@pytest.mark.parametrize("name", SERVED)
def test_every_served_architecture_is_predicted(name: str, tmp_path: Path) -> None:
    """The shapes found without weights are those of the loaded model."""
    module = build(*SERVED[name])
    module.config.save_pretrained(tmp_path)
    prediction = predict_memory(str(tmp_path), "float32", 100)
    assert prediction.params == sum(x.numel() for x in module.parameters())
    assert prediction.cache_bytes == Model.from_module(module).shape(100).dense_bytes


def test_hashes_stay_with_a_copy(saved: dict[str, Path], llama: Path) -> None:
    """The same files elsewhere, under other times, are the same model and tokenizer."""
    (llama / "config.json").touch()
    (llama / "README.md").write_text("a copy")
    one, other = load_model(str(saved["llama"])), load_model(str(llama))
    assert one.sha256 == other.sha256
    assert one.tokenizer_sha256 == other.tokenizer_sha256


def change_weights(folder: Path) -> None:
    rewrite(folder, lambda weights: weights[QUERY].add_(1e-3))


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def change_stop_token(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))


@pytest.mark.parametrize("change", [change_weights, change_config, change_stop_token])
def test_model_hash_follows_the_files(change: Callable[[Path], None], llama: Path) -> None:
    """Other weights, another configuration or another stop token are another model, with the same tokenizer."""
    before = load_model(str(llama))
    change(llama)
    after = load_model(str(llama))
    assert after.sha256 != before.sha256
    assert after.tokenizer_sha256 == before.tokenizer_sha256


def test_tokenizer_hash_follows_the_tokenizer(llama: Path) -> None:
    """Another vocabulary or another special token is another tokenizer, with the same model."""
    before = load_model(str(llama))
    text = (llama / "tokenizer.json").read_text()
    (llama / "tokenizer.json").write_text(text.replace('"w9"', '"nine"'))
    words = load_model(str(llama))
    (llama / "tokenizer.json").write_text(text)
    settings = json.loads((llama / "tokenizer_config.json").read_text())
    (llama / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "w7"}))
    special = load_model(str(llama))
    assert len({x.tokenizer_sha256 for x in (before, words, special)}) == 3
    assert len({x.sha256 for x in (before, words, special)}) == 1
    assert special.stop_ids == {2, 7}


@pytest.mark.parametrize("memory", ['{"half', "[]", None])
def test_hash_memory_may_be_broken(memory: str | None, saved: dict[str, Path], tmp_path: Path) -> None:
    """What remembers hashes between runs may be cut off, nonsense or unwritable, and is never needed."""
    expected = load_model(str(saved["llama"])).sha256
    shutil.rmtree(tmp_path / "cache")
    if memory is None:
        (tmp_path / "cache").write_text("no folder")
    else:
        (tmp_path / "cache" / "kvbench").mkdir(parents=True)
        (tmp_path / "cache" / "kvbench" / "hashes.json").write_text(memory)
    assert load_model(str(saved["llama"])).sha256 == expected


def test_module_in_memory() -> None:
    """A module without files is a model too; its hash is that of its parameters and configuration."""
    one, same, other = (Model.from_module(build("llama", {}, seed), id="mine") for seed in (0, 0, 1))
    assert one.sha256 == same.sha256 != other.sha256
    assert one.tokenizer.decode([7]) == "<7>"
    assert one.id == "mine"
