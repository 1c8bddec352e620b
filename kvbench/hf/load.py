"""Models by name: bundled, a local folder, a hub id, or an architecture with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError, unknown
from kvbench.hf.adapter import Forward, embedding_device, is_attached, run_model
from kvbench.hf.config import DTYPES, first_line, quiet, read_config, read_document, resolve_dtype
from kvbench.hf.find import (
    RANDOM,
    check_device,
    check_files,
    find_folder,
    hash_model,
    hash_text,
    hash_tokenizer,
    is_architecture,
)
from kvbench.hf.masked import Masking, native_tokenizer, read_masking, weight_names
from kvbench.hf.proof import prove, prove_bidirectional, refuse_config
from kvbench.hf.rope import Rope, max_length
from kvbench.method import ModelKind

HUB_SNAPSHOTS = "snapshots"
"""Folder of the hub's cache whose folders are named after revisions."""


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
    """Of configuration and weights."""
    tokenizer_sha256: str
    max_length: int
    """Positions that the model was made for."""
    masking: Masking | None = None
    """Of a diffusion model."""

    @classmethod
    def from_module(
        cls, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, id: str = "module", *,
        sha256: str | None = None, revision: str | None = None, masking: Masking | None = None,
    ) -> Model:
        """A model from a loaded module, after the proof.

        Args:
            module: any causal model of transformers; its parameters stop asking for gradients.
            tokenizer: None: a token is its id in angle brackets, for models that nobody talks to.
            id: its name in results.
            sha256: hash of its files; None: of its parameters in memory.
            revision: of the hub repository that it is from.
            masking: of a diffusion model.

        Raises:
            UserError: an architecture that is not served.
        """
        module = module.eval().requires_grad_(False)
        config = module.config.get_text_config()
        tokenizer = tokenizer or _plain_tokenizer(config.vocab_size)
        with quiet():
            layers, ropes = prove(module) if masking is None else (prove_bidirectional(module), ())
        return cls(
            id=id, module=module, tokenizer=tokenizer, layers=layers, ropes=ropes, revision=revision,
            sha256=sha256 or _hash_module(module), tokenizer_sha256=hash_tokenizer(tokenizer),
            max_length=max_length(config), masking=masking,
        )

    @property
    def kind(self) -> ModelKind:
        """How it makes text."""
        return "autoregressive" if self.masking is None else "diffusion"

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return embedding_device(self.module)

    @property
    def device_map(self) -> dict[str, str] | None:
        """Where each part of a model is that is spread over several places."""
        places = getattr(self.module, "hf_device_map", None)
        return places and {name: f"cuda:{x}" if isinstance(x, int) else str(x) for name, x in places.items()}

    @property
    def dtype(self) -> str:
        """Element type of weights and cache, e.g. `bfloat16`."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def params(self) -> int:
        """Number of parameters, tied ones once; where they are kept on disk, they are two in memory."""
        tied: dict[str, str] = getattr(self.module, "all_tied_weights_keys", {})
        sizes = {tied.get(name, name): x.numel() for name, x in self.module.named_parameters(remove_duplicate=False)}
        return sum(sizes.values())

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
        if not is_attached(self.module):
            raise RuntimeError("kvbench's attention is not switched on: the session is closed, or was never opened")
        return run_model(self.module, ids, forward, keep)


def load_model(
    name: str, device: str = "cpu", dtype: str | None = None, device_map: str | dict[str, str | int] | None = None
) -> Model:
    """Load a model and prove that kvbench serves it exactly.

    Args:
        name: a bundled model, a local folder, a hub id, or `random:` before any of these or an architecture's name.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: one of DTYPES; None: the checkpoint's own.
        device_map: in the place of `device`, how transformers spreads the model over several, and over host and disk.

    Raises:
        UserError: nothing there, broken files, or an architecture that is not served.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    check_device(device)
    folder = find_folder(name)
    config = read_config(name, folder)
    check_files(name, folder)
    refuse_config(config.get_text_config())
    document = read_document(name, folder)
    masking = read_masking(document)
    if masking is not None and device_map is not None:
        raise UserError(f"{name} is a diffusion model, which no device map can spread: leave --device-map out.")
    kind = resolve_dtype(dtype, config, folder)
    try:
        with quiet():
            tokenizer = None if is_architecture(name) else _tokenizer(folder, document)
            module = (
                _random(config, kind, device) if name.startswith(RANDOM)
                else _trained(name, folder, config, kind, device_map, weight_names(document))
            )
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds; all mean the same here
        if "offload_folder" in str(error):
            raise UserError(
                f"model '{name}' cannot be kept on disk: transformers changes the form of its weights when it loads "
                "them. Use a device map without disk."
            ) from error
        raise UserError(f"model '{name}' cannot be loaded from {folder}: {first_line(error)}") from error
    if device_map is None:
        nn.Module.to(module, torch.device(device))  # transformers hides the types of its own
    return Model.from_module(
        module, tokenizer, name, sha256=hash_model(name, folder),
        revision=folder.name if folder.parent.name == HUB_SNAPSHOTS else None, masking=masking,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights.

    Raises:
        UserError: nothing there, or nothing that transformers can read.
    """
    folder = find_folder(name, weights=False)
    check_files(f"{RANDOM}{name}", folder)  # as a model of random weights, which needs no file of them
    document = read_document(name, folder)
    try:
        with quiet():
            return _tokenizer(folder, document)
    except Exception as error:  # as in load_model
        raise UserError(f"tokenizer of '{name}' cannot be loaded from {folder}: {first_line(error)}") from error


def _random(config: Any, dtype: torch.dtype, device: str) -> PreTrainedModel:
    with torch.random.fork_rng(), torch.device(device):  # eight billion numbers take a CPU minutes to draw
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return module


def _trained(
    name: str, folder: Path, config: Any, dtype: torch.dtype, device_map: str | dict[str, str | int] | None,
    names: dict[str, str] | None,
) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
        device_map=device_map, key_mapping=names,
    )
    module: PreTrainedModel
    module, info = loaded
    absent = sorted({*info["missing_keys"], *(str(x) for x in info["mismatched_keys"])})
    if absent:
        raise UserError(
            f"model '{name}' lacks {len(absent)} of its weights, for example {absent[0]}; transformers would make them "
            f"up at random. Its files in {folder} do not fit its config.json: fetch them again."
        )
    return module


def _tokenizer(folder: Path, document: dict[str, Any]) -> PreTrainedTokenizerBase:
    """What tokenizer.json says; AutoTokenizer puts its own in the place of, for example, any Qwen2's."""
    plain = (folder / "tokenizer.json").is_file()
    kind: Any = PreTrainedTokenizerFast if plain else native_tokenizer(document)
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(folder, trust_remote_code=False)
    return tokenizer


def _plain_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    words = WordLevel({f"<{i}>": i for i in range(vocabulary)}, unk_token="<0>")  # noqa: S106  # text is one token
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def _hash_module(module: PreTrainedModel) -> str:
    parts = [module.config.to_json_string(use_diff=False)]
    for name, x in sorted(module.state_dict().items()):
        parts += [name, hash_text(str(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()))]
    return hash_text("\n".join(parts))
