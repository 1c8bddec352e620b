"""Models by name: bundled, a local folder, a hub id, or an architecture with random weights."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.errors import UserError, unknown
from kvbench.hf.proof import prove, rope_types
from kvbench.hf.rope import Rope
from kvbench.hf.seam import Forward, run_model
from kvbench.method import LayerShape, Shape

BUNDLED = Path(__file__).parent.parent / "models"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANDOM = "random:"


@dataclass(frozen=True)
class Model:
    """A loaded model that passed the proof, and its tokenizer."""

    id: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: tuple[LayerShape, ...]
    ropes: tuple[Rope, ...]
    revision: str | None
    sha256: str
    tokenizer_sha256: str
    max_length: int

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        device: torch.device = self.module.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> str:
        """Element type of weights and cache, e.g. `bfloat16`."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def params(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(x.numel() for x in self.module.parameters())

    @property
    def random(self) -> bool:
        """Whether the weights are random: memory and speed only."""
        return self.id.startswith(RANDOM)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer: the tokenizer's and the generation config's."""
        configured = getattr(self.module.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(x) for x in [*ids, self.tokenizer.eos_token_id] if x is not None)

    def shape(self, length: int) -> Shape:
        """The dense cache of a context of this length."""
        return Shape(length=length, layers=self.layers, itemsize=self.module.dtype.itemsize)

    def run(self, ids: Tensor, forward: Forward, keep: int = 1) -> Tensor:
        """Logits of the last `keep` positions; kvbench's attention must be attached. [B, keep, V]"""
        return run_model(self.module, ids, forward, keep)


@dataclass(frozen=True)
class Prediction:
    """Bytes that a model will take, known before it is loaded."""

    params: int
    weight_bytes: int
    cache_bytes: int
    """Dense cache of one sequence."""


def list_bundled() -> list[str]:
    """Names of the models that come with kvbench."""
    return sorted(x.parent.name for x in BUNDLED.glob("*/config.json"))


def find_folder(name: str) -> Path | None:
    """The folder of a bundled or local model, None for a hub id.

    Raises:
        UserError: the name is none of them.
    """
    if (BUNDLED / name / "config.json").is_file():
        return BUNDLED / name
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"model folder '{name}' has no config.json: it is not a Hugging Face model folder.")
        return path
    hub_parts = 2
    if name.startswith(("/", ".", "~")) or len(name.split("/")) != hub_parts:
        raise unknown("model", name, list_bundled(), "Or give a local folder or a hub id such as org/name.")
    return None


def predict_memory(name: str, dtype: str | None, length: int) -> Prediction:
    """Bytes of weights and of a dense cache, from the configuration alone."""
    config = _read_config(name)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    size = (DTYPES[dtype] if dtype else config.dtype or torch.float32).itemsize
    params = sum(x.numel() for x in module.parameters())
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Prediction(params, params * size, 2 * text.num_hidden_layers * heads * width * size * length)


def load_model(name: str, device: str = "cpu", dtype: str | None = None) -> Model:
    """Load a model and prove that kvbench serves it exactly.

    Args:
        name: a bundled model, a local folder, a hub id, or `random:` before any of these.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: one of DTYPES; None: the checkpoint's own.

    Raises:
        UserError: nothing there, broken files, or an architecture that is not served.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    check_device(device)
    config = _read_config(name)
    kind = DTYPES[dtype] if dtype else config.dtype or torch.float32
    source = name.removeprefix(RANDOM)
    folder = find_folder(source)
    try:
        if name.startswith(RANDOM):
            torch.manual_seed(0)
            module = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=False)
        else:
            module = AutoModelForCausalLM.from_pretrained(
                folder or source, dtype=kind, trust_remote_code=False, use_safetensors=True
            )
        tokenizer = AutoTokenizer.from_pretrained(folder or source, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # transformers, safetensors and the hub raise many kinds; all mean the same here
        raise UserError(f"model '{name}' cannot be loaded: {_first_line(error)}") from error
    module = module.to(device).eval().requires_grad_(False)  # noqa: FBT003  # torch's signature
    layers, ropes = prove(module)
    text = config.get_text_config()
    original = getattr(text, "original_max_position_embeddings", None) if "longrope" in rope_types(text) else None
    return Model(
        id=name, module=module, tokenizer=tokenizer, layers=layers, ropes=ropes,
        revision=getattr(config, "_commit_hash", None),
        sha256=_hash_weights(module) if folder is None else hash_files(folder, ("config.json", "*.safetensors")),
        tokenizer_sha256=hash_text(tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(tokenizer)),
        max_length=int(original or getattr(text, "max_position_embeddings", 1 << 30)),
    )


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        UserError: unknown or absent device.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise unknown("device", device, ["cpu", "cuda"])
    if kind == "cuda" and (not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count()):
        raise UserError(f"device '{device}' is not on this machine ({torch.cuda.device_count()} GPUs seen). Use --device cpu.")


def hash_text(text: str) -> str:
    """sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def hash_files(folder: Path, patterns: tuple[str, ...]) -> str:
    """sha256 over the files' own hashes, in the order of their names; each file's is remembered by size and time."""
    known_path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvbench" / "hashes.json"
    known: dict[str, str] = {}
    try:
        known = json.loads(known_path.read_text())
    except (OSError, ValueError):
        known = {}
    total = hashlib.sha256()
    for path in sorted(x for pattern in patterns for x in folder.glob(pattern)):
        stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.name} {known[key]}\n".encode())
    try:
        known_path.parent.mkdir(parents=True, exist_ok=True)
        known_path.write_text(json.dumps(known))
    except OSError:
        pass  # only a memory of work done
    return total.hexdigest()


def _read_config(name: str) -> Any:
    source = name.removeprefix(RANDOM)
    folder = find_folder(source)
    try:
        return AutoConfig.from_pretrained(folder or source, trust_remote_code=False)
    except Exception as error:  # as in load_model
        raise UserError(f"model '{name}' has no readable configuration: {_first_line(error)}") from error


def _hash_weights(module: PreTrainedModel) -> str:
    total = hashlib.sha256()
    for name, x in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
