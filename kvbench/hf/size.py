"""What a model takes, known from its configuration before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.budget import Shape
from kvbench.errors import UserError, unknown
from kvbench.hf.config import DTYPES, first_line, quiet, read_config, read_document, resolve_dtype
from kvbench.hf.find import find_folder
from kvbench.hf.masked import read_masking
from kvbench.hf.proof import layer_shapes, refuse_config
from kvbench.hf.rope import max_length
from kvbench.method import ModelKind


@dataclass(frozen=True)
class Prediction:
    """Bytes that a model will take, known before it is loaded."""

    params: int
    weight_bytes: int
    shape: Shape
    step_bytes: int
    """Weights that one decode step reads."""
    hidden: int
    """Channels between layers."""
    inner: int
    """Channels within a feed-forward part."""
    vocabulary: int
    max_length: int
    """Positions that the model was made for."""
    kind: ModelKind

    @property
    def stored_bytes(self) -> int:
        """Dense cache of one sequence."""
        return self.shape.full_bytes


def predict_memory(name: str, dtype: str | None = None, length: int = 1024) -> Prediction:
    """Bytes of weights and of a dense cache, from the configuration alone.

    Raises:
        UserError: nothing there, or an architecture that is not served.
    """
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    folder = find_folder(name, weights=False)
    config = read_config(name, folder)
    text = config.get_text_config()
    refuse_config(text)
    size = resolve_dtype(dtype, config, folder).itemsize
    text.pad_token_id = None  # else some models look for it in the ids, and there are none on the meta device
    try:
        with torch.device("meta"), quiet():  # in bfloat16, the only type that grouped products take there
            module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).eval()
            layers = layer_shapes(module)
    except UserError:
        raise
    except Exception as error:  # as in load_model
        raise UserError(f"model '{name}' cannot be built from {folder}: {first_line(error)}") from error
    params = sum(x.numel() for x in module.parameters())
    return Prediction(
        params=params, weight_bytes=params * size, shape=Shape(length=length, layers=layers, itemsize=size),
        step_bytes=count_step_params(module) * size, hidden=text.hidden_size,
        inner=getattr(text, "intermediate_size", None) or 4 * text.hidden_size, vocabulary=text.vocab_size,
        max_length=max_length(text),
        kind="autoregressive" if read_masking(read_document(name, folder)) is None else "diffusion",
    )


def count_step_params(module: PreTrainedModel) -> int:
    """Parameters that a decode step reads: of an input embedding that is no output embedding too, it reads a row.

    Of a mixture of experts all are counted, though a small batch reads few.
    """
    first: Any = module.get_input_embeddings()
    last: Any = module.get_output_embeddings()
    apart = 0 if first.weight is last.weight else first.weight.numel()
    return sum(x.numel() for x in module.parameters()) - int(apart)
