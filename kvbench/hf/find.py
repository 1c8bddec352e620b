"""Locating a model's files (bundled, in a local folder, or a snapshot of a hub repository) and hashing them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import PreTrainedTokenizerBase

from kvbench import registry
from kvbench.errors import UserError, first_line, unknown
from kvbench.log import say
from kvbench.machine import cache_folder
from kvbench.models.sources import RANDOM, find_added, is_random, list_added, refuse_missing
from kvbench.registry import list_architectures, list_models

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json", "spiece.model",
)
"""A folder without any of these files has no tokenizer; for some models transformers would create an empty one."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
GGUF = ".gguf"
COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_SNAPSHOTS = "snapshots"
"""Folder of the hub's cache that has one subfolder per revision, named after it."""


def find_folder(name: str, *, weights: bool = True) -> Path:
    """The folder of a model's files, fetched from the hub if the name is a hub id.

    Args:
        name: a bundled model, a local folder or a hub id; after the prefix `random:`, also a published architecture.
        weights: whether to fetch the weights too.

    Raises:
        UserError: the name is unknown, or the hub cannot provide the files.
    """
    if (own := _find_own(name)) is not None:
        return own
    source = name.removeprefix(RANDOM)
    path = Path(source).expanduser()
    if path.suffix == GGUF:
        from kvbench.models.add import convert_file  # it loads models, which imports this module

        return convert_file(path)
    if source and path.is_dir():
        if (path / "spec.json").is_file():
            raise UserError(
                f"'{source}' is the folder of a run, not of a model. Give a model; `kvbench show {source}` names the "
                "run's own."
            )
        if not (path / "config.json").is_file():
            raise UserError(f"model folder '{source}' has no config.json: give a folder in Hugging Face format.")
        return path
    refuse_missing(source)
    if not HUB_ID.fullmatch(source):
        if "/" in source:
            raise UserError(
                f"unknown model '{source}': no such folder. Give a local folder, or a hub id such as org/name."
            )
        allowed = [
            *list_models(), *list_added(),
            *(f"{RANDOM}{x}" for x in list_architectures() if is_random(name)),
        ]
        raise unknown("model", source, allowed, "Or give a local folder, or a hub id such as org/name.")
    return _fetch(source, weights=weights and not is_random(name))


def find_copy(name: str, revision: str | None) -> Path | None:
    """The folder of a model that is bundled, or in the hub's local cache at this commit; None: neither.

    Safe for untrusted names: nothing is fetched, and paths are not accepted.
    """
    if (own := _find_own(name)) is not None:
        return own
    source = name.removeprefix(RANDOM)
    if revision is None or not (HUB_ID.fullmatch(source) and COMMIT.fullmatch(revision)):
        return None
    try:
        return _take_snapshot(source, revision=revision, local_files_only=True)
    except Exception:  # noqa: BLE001  # as in _fetch
        return None


def find_revision(folder: Path) -> str | None:
    """The commit of a model's folder in the hub's local cache; None: the folder is elsewhere."""
    return folder.name if folder.parent.name == HUB_SNAPSHOTS else None


def _find_own(name: str) -> Path | None:
    """The folder of a bundled model or a published architecture."""
    source = name.removeprefix(RANDOM)
    if source in list_models():
        return registry.MODELS / source
    return registry.ARCHITECTURES / source if is_architecture(name) else find_added(source)


def is_architecture(name: str) -> bool:
    """Whether the name is `random:` and a published architecture, of which only the configuration is bundled."""
    return is_random(name) and name.removeprefix(RANDOM) in list_architectures()


def _fetch(source: str, *, weights: bool) -> Path:
    """A local snapshot of the hub's newest revision; if the hub cannot be reached, of the revision fetched last."""
    try:
        # One request first, with a timeout: transformers' own requests retry for 20 seconds without a network.
        HfApi().model_info(source, timeout=10)
        return _take_snapshot(source, weights=weights)
    except GatedRepoError as error:  # a subclass of the next one
        raise UserError(f"model '{source}' is gated: accept its terms on the hub, then run 'hf auth login'.") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"unknown model '{source}': the hub has no such repository, or it is private. Check the name, or log in "
            "with 'hf auth login'."
        ) from error
    except Exception as error:  # noqa: BLE001  # offline: the hub's clients raise many classes
        reason = first_line(error)
    try:
        folder = _take_snapshot(source, weights=weights, local_files_only=True)
    except Exception as error:  # as above
        raise UserError(
            f"model '{source}' is neither a bundled model nor a local folder, the hub's local cache has no copy of it, "
            f"and the hub cannot be reached ({reason}). Give a local folder, or one of: {', '.join(list_models())}."
        ) from error
    say(f"the hub cannot be reached ({reason}): using {source} as it was fetched last, revision {folder.name}.")
    return folder


def _take_snapshot(source: str, *, weights: bool = False, **options: Any) -> Path:
    """Fetch the files that kvbench reads, or find them in the local cache: the hub refuses a copy that lacks others."""
    patterns = SMALL_FILES + (["*.safetensors"] if weights else [])
    return Path(snapshot_download(source, allow_patterns=patterns, ignore_patterns="*/*", **options))


def check_device(device: str, one: str = "one GPU of several: cuda:1") -> None:
    """Check that this machine has the device. one: how to choose one GPU of several, for the message.

    Raises:
        UserError: the device is unknown or absent.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        if device.startswith("gpu"):  # the nearest allowed name would be cpu
            raise UserError(f"unknown device '{device}'. Use --device cuda; {one}.")
        raise unknown("device", device, ["cpu", "cuda"], f"{one[0].upper()}{one[1:]}.")
    if device != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(device.partition(":")[2] or 0) >= count:
            raise UserError(f"device '{device}' is not on this machine ({count} GPUs seen). Use --device cpu.")


def check_files(name: str, folder: Path) -> None:
    """Check that a model's folder has a tokenizer and weights in safetensors format.

    Raises:
        UserError: something is missing; the message names it.
    """
    if is_architecture(name):
        return
    if not any(any(folder.glob(x)) for x in TOKENIZERS):
        raise UserError(
            f"model '{name}' has no tokenizer: none of {', '.join(TOKENIZERS)} is in {folder}. "
            "Save it there with tokenizer.save_pretrained."
        )
    if is_random(name) or any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UserError(
            f"model '{name}' has only pickled weights, which are not loaded because a pickle can run any code. If you "
            "trust them, convert them to safetensors with model.save_pretrained."
        )
    raise UserError(f"model '{name}' has no weights: no *.safetensors file is in {folder}.")


def hash_text(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of everything that decides how text becomes token ids; the chat template is not part of it."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    inner = json.dumps(tokenizer.get_vocab(), sort_keys=True) if fast is None else fast.to_str()
    return hash_text(f"{inner}\n{json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)}")


def hash_model(name: str, folder: Path) -> str:
    """SHA-256 of configuration and weights; for random weights, of the configuration, which determines them."""
    if is_random(name):
        return hash_text(RANDOM + hash_files([folder / "config.json"]))
    return hash_files([folder / "config.json", *folder.glob("generation_config.json"), *folder.glob("*.safetensors")])


def hash_files(paths: list[Path]) -> str:
    """SHA-256 of the files' names and hashes; the hash of each file is cached by path, size and modification time."""
    memory = cache_folder() / "hashes.json"
    known = _read_memory(memory)
    before = len(known)
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda x: x.name):
        stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {known[key]}\n".encode())
    if len(known) > before:
        _write_memory(memory, known)
    return total.hexdigest()


def _read_memory(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_memory(path: Path, known: dict[str, str]) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known))
        part.replace(path)
    except OSError:  # the cache only saves time
        with contextlib.suppress(OSError):
            part.unlink()
