"""Loading models by name: bundled, a local folder, a hub id, or an architecture with random weights."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError, first_line
from kvbench.hf.adapter import Forward, embedding_device, is_attached, list_attentions, run_model
from kvbench.hf.config import (
    AUTO,
    check_dtype,
    choose_dtype,
    own_dtype,
    quiet,
    read_config,
    read_document,
)
from kvbench.hf.find import (
    check_device,
    check_files,
    find_folder,
    find_revision,
    hash_model,
    hash_text,
    hash_tokenizer,
    is_architecture,
)
from kvbench.hf.masked import Masking, native_tokenizer, read_masking, weight_names
from kvbench.hf.proof import prove, prove_bidirectional, refuse_config
from kvbench.hf.rope import Rope, max_length
from kvbench.log import say
from kvbench.method import ModelKind
from kvbench.models.sources import RANDOM, is_random, result_id


@dataclass(frozen=True)
class Model:
    """A loaded model that passed the load check, and its tokenizer."""

    id: str
    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: tuple[LayerShape, ...]
    ropes: tuple[Rope, ...]
    revision: str | None
    sha256: str
    """Hash of configuration and weights."""
    tokenizer_sha256: str
    max_length: int
    """Positions that the model supports."""
    masking: Masking | None = None
    """How a diffusion model masks; None: an autoregressive model."""

    @classmethod
    def from_module(
        cls, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, id: str = "module", *,
        sha256: str | None = None, revision: str | None = None, masking: Masking | None = None,
    ) -> Model:
        """Create a model from a loaded module, after the load check.

        Args:
            module: any causal model of transformers; gradients of its parameters are turned off.
            tokenizer: None: a tokenizer whose tokens are their ids in angle brackets, for models without text.
            id: name in results.
            sha256: hash of the model's files; None: hash of the parameters in memory.
            revision: commit of the hub repository.
            masking: how a diffusion model masks.

        Raises:
            UserError: the architecture is not supported.
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
        """Whether the model is autoregressive or a diffusion model."""
        return "autoregressive" if self.masking is None else "diffusion"

    @property
    def device(self) -> torch.device:
        """The device for the model's inputs."""
        return embedding_device(self.module)

    @property
    def device_map(self) -> dict[str, str] | None:
        """The device of each part of a model that is spread over several devices; None: it is on one."""
        places = getattr(self.module, "hf_device_map", None)
        return places and {name: f"cuda:{x}" if isinstance(x, int) else str(x) for name, x in places.items()}

    @property
    def dtype(self) -> str:
        """Element type of weights and KV cache, e.g. `bfloat16`."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def entries_move(self) -> bool:
        """Whether KV entries can be moved to other positions: the rotation of every layer is understood."""
        return all(x.trusted and x.movable for x in self.ropes)

    @property
    def width(self) -> int:
        """Channels of the hidden states."""
        width: int = self.module.config.get_text_config().hidden_size
        return width

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can read, which may exceed the tokenizer's."""
        return len(cast("nn.Embedding", self.module.get_input_embeddings()).weight)

    @property
    def params(self) -> int:
        """Number of parameters; tied parameters count once, also if offloading to disk has separated them."""
        tied: dict[str, str] = getattr(self.module, "all_tied_weights_keys", {})
        sizes = {tied.get(name, name): x.numel() for name, x in self.module.named_parameters(remove_duplicate=False)}
        return sum(sizes.values())

    @property
    def random(self) -> bool:
        """Whether the weights are random, so that only memory and speed are meaningful."""
        return is_random(self.id)

    @cached_property
    def attentions(self) -> tuple[nn.Module, ...]:
        """The attention module of every layer."""
        return tuple(list_attentions(self.module))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer, from the tokenizer and the generation configuration."""
        configured = getattr(self.module.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(x) for x in [*ids, self.tokenizer.eos_token_id] if x is not None)

    def shape(self, length: int) -> Shape:
        """The shape of the full cache of a context of this length."""
        return Shape(length=length, layers=self.layers, itemsize=self.module.dtype.itemsize)

    def run(self, ids: Tensor, forward: Forward, keep: int | Tensor = 1) -> Tensor:
        """Logits of the last `keep` positions, or of the positions in `keep` [K]; requires `attached`.

        ids: [B, T]. Returns [B, K, V].
        """
        if not is_attached(self.module):
            raise RuntimeError("kvbench's attention is not switched on: the session is closed, or was never opened")
        return run_model(self.module, ids, forward, keep)


def load_model(
    name: str, device: str = "cpu", dtype: str | None = None, device_map: str | dict[str, str | int] | None = None
) -> Model:
    """Load a model and check that kvbench computes its logits exactly.

    Args:
        name: a bundled model, a local folder or a hub id; or `random:` before one of these or an architecture's name.
        device: `cpu`, `cuda` or `cuda:N`.
        dtype: one of DTYPES; None or `auto`: the model's own, but float32 on a CPU without bfloat16 units.
        device_map: replaces `device`; how transformers distributes the model over devices, host memory and disk.

    Raises:
        UserError: the model does not exist, its files are broken, or its architecture is not supported.
    """
    check_dtype(dtype)
    check_device(device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # for Triton, CUDA graphs and memory queries, which use the current device
    folder = find_folder(name)
    config = read_config(name, folder)
    check_files(name, folder)
    refuse_config(config.get_text_config())
    document = read_document(name, folder)
    if (folder / "generation_config.json").exists():  # transformers ignores a broken one, and its stop tokens
        read_document(name, folder, "generation_config.json")
    masking = read_masking(document)
    if masking is not None and device_map is not None:
        raise UserError(f"{name} is a diffusion model, which no device map supports: leave --device-map out.")
    place = "cuda" if device_map is not None and torch.cuda.is_available() else device
    kind = choose_dtype(dtype, config, folder, place)
    if dtype in (None, AUTO) and kind != (own := own_dtype(config, folder)):
        say(
            f"{name}: computing in float32, because this CPU has no bfloat16 units; the model's own type is --dtype "
            f"{str(own).removeprefix('torch.')}."
        )
    try:
        with quiet():
            tokenizer = None if is_architecture(name) else _tokenizer(folder, document)
            module = (
                _random(config, kind, device) if is_random(name)
                else _trained(name, folder, config, kind, device_map, weight_names(document))
            )
    except UserError:
        raise
    except Exception as error:  # transformers and safetensors raise many classes; all mean the same here
        if "offload_folder" in str(error):
            raise UserError(
                f"model '{name}' cannot be kept on disk: transformers changes the form of its weights when it loads "
                "them. Use a device map without disk."
            ) from error
        raise UserError(f"model '{name}' cannot be loaded from {folder}: {first_line(error)}") from error
    if device_map is None:
        nn.Module.to(module, torch.device(device))  # transformers' own `to` has no types
    return Model.from_module(
        module, tokenizer, result_id(name), sha256=hash_model(name, folder),
        revision=find_revision(folder), masking=masking,
    )


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model without its weights.

    Raises:
        UserError: the model does not exist, or transformers cannot read its tokenizer.
    """
    folder = find_folder(name, weights=False)
    check_files(f"{RANDOM}{name}", folder)  # with the prefix, the check does not require weights
    document = read_document(name, folder)
    try:
        with quiet():
            return _tokenizer(folder, document)
    except Exception as error:  # as in load_model
        raise UserError(f"tokenizer of '{name}' cannot be loaded from {folder}: {first_line(error)}") from error


def _random(config: Any, dtype: torch.dtype, device: str) -> PreTrainedModel:
    with torch.random.fork_rng(), torch.device(device):  # drawing eight billion numbers on a CPU takes minutes
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return module


def _trained(
    name: str, folder: Path, config: Any, dtype: torch.dtype, device_map: str | dict[str, str | int] | None,
    names: dict[str, str] | None,
) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
        device_map=device_map, key_mapping=names, ignore_mismatched_sizes=True,  # refused below, by name
    )
    module: PreTrainedModel
    module, info = loaded
    wrong = (
        f"{key} of the shape {list(found)} instead of {list(wanted)}" for key, found, wanted in info["mismatched_keys"]
    )
    absent = sorted({*info["missing_keys"], *wrong})
    if absent:
        raise UserError(
            f"model '{name}' lacks {len(absent)} of its weights, for example {absent[0]}; transformers would set them "
            f"at random. Its files in {folder} do not match its config.json: fetch them again."
        )
    return module


def _tokenizer(folder: Path, document: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Load tokenizer.json as it is; AutoTokenizer would replace parts of it, for example for any Qwen2."""
    plain = (folder / "tokenizer.json").is_file()
    kind: Any = PreTrainedTokenizerFast if plain else native_tokenizer(document)
    # kvbench checks lengths itself; a tokenizer's own limit would warn of every corpus, which is cut after encoding
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
        folder, trust_remote_code=False, model_max_length=sys.maxsize
    )
    return tokenizer


def _plain_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    words = WordLevel({f"<{i}>": i for i in range(vocabulary)}, unk_token="<0>")  # noqa: S106  # text is one token
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def _hash_module(module: PreTrainedModel) -> str:
    parts = [module.config.to_json_string(use_diff=False)]
    for name, x in sorted(module.state_dict().items()):
        parts += [name, hash_text(str(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()))]
    return hash_text("\n".join(parts))
