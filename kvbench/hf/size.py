"""Sizes of a model and its full cache, computed from the configuration without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.budget import LayerShape, Shape
from kvbench.errors import UserError, first_line
from kvbench.hf.config import check_dtype, choose_dtype, quiet, read_config, read_document
from kvbench.hf.find import find_folder
from kvbench.hf.masked import read_masking
from kvbench.hf.proof import layer_shapes, refuse_config
from kvbench.hf.rope import max_length
from kvbench.method import ModelKind


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that is not loaded."""

    params: int
    weight_bytes: int
    shape: Shape
    step_bytes: int
    """Bytes of the weights that one decode step reads."""
    hidden: int
    """Hidden size: channels between layers."""
    inner: int
    """Intermediate size: channels within a feed-forward block."""
    vocabulary: int
    max_length: int
    """Positions that the model supports."""
    kind: ModelKind

    @property
    def stored_bytes(self) -> int:
        """Bytes of the full cache of one sequence."""
        return self.shape.full_bytes


def predict_memory(name: str, dtype: str | None = None, length: int = 1024, device: str = "cuda") -> ModelSize:
    """Predict the bytes of the weights and of the full cache of a context of `length` tokens.

    Raises:
        UserError: the model does not exist, or its architecture is not supported.
    """
    check_dtype(dtype)
    folder = find_folder(name, weights=False)
    config = read_config(name, folder)
    text = config.get_text_config()
    refuse_config(text)
    size = choose_dtype(dtype, config, folder, device).itemsize
    text.pad_token_id = None  # some models would search for it in the ids, which have no values on the meta device
    try:
        params, step_params, layers = _outline(config)
    except UserError:
        raise
    except Exception as error:  # as in load_model
        raise UserError(f"model '{name}' cannot be built from {folder}: {first_line(error)}") from error
    return ModelSize(
        params=params, weight_bytes=params * size, shape=Shape(length=length, layers=layers, itemsize=size),
        step_bytes=step_params * size, hidden=text.hidden_size,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size, vocabulary=text.vocab_size,
        max_length=max_length(text),
        kind="autoregressive" if read_masking(read_document(name, folder)) is None else "diffusion",
    )


def _outline(config: Any) -> tuple[int, int, tuple[LayerShape, ...]]:
    """Parameters, those of a decode step, and shapes of the layers; built once per configuration, without weights.

    A sweep asks for the same model in every cell.
    """
    key = config.to_json_string(use_diff=False)
    if key not in _outlines:
        with torch.device("meta"), quiet():  # in bfloat16, the only type with grouped products on the meta device
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
            layers = layer_shapes(module)
        params = sum(x.numel() for x in module.parameters())
        _outlines[key] = params, count_step_params(module), layers
    return _outlines[key]


_outlines: dict[str, tuple[int, int, tuple[LayerShape, ...]]] = {}


def count_step_params(module: PreTrainedModel) -> int:
    """Parameters that a decode step reads: all but an input embedding that is not tied to the output embedding.

    All experts of a mixture of experts are counted, although a small batch reads only some of them.
    """
    first: Any = module.get_input_embeddings()
    last: Any = module.get_output_embeddings()
    apart = 0 if first.weight is last.weight else first.weight.numel()
    return sum(x.numel() for x in module.parameters()) - int(apart)
