"""Reading a model's configuration and element type before loading it, and silencing transformers' output."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers import logging as transformers_logging

from kvbench import machine
from kvbench.errors import UserError, first_line, unknown
from kvbench.hf.masked import native_config

AUTO = "auto"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_dtype(asked: str | None) -> None:
    """Refuse an unknown element type; None means `auto`.

    Raises:
        UserError: with the types.
    """
    if asked not in (None, AUTO, *DTYPES):
        raise unknown("dtype", str(asked), [AUTO, *DTYPES])


def choose_dtype(asked: str | None, config: Any, folder: Path, device: str) -> torch.dtype:
    """The element type to compute in: as asked, or for `auto` the model's own, except on a CPU that is slow in it.

    Raises:
        UserError: as `own_dtype` raises it.
    """
    if asked not in (None, AUTO):
        return DTYPES[asked]
    own = own_dtype(config, folder)
    return torch.float32 if own.itemsize < 4 and device == "cpu" and not machine.has_bfloat16_units() else own


def own_dtype(config: Any, folder: Path) -> torch.dtype:
    """The element type that the configuration names, or that of the weights.

    Raises:
        UserError: it is not one of DTYPES.
    """
    own = config.dtype or config.get_text_config().dtype
    if own is None:
        for path in sorted(folder.glob("*.safetensors"))[:1]:
            try:
                with safe_open(path, "pt") as file:
                    own = file.get_tensor(next(iter(file.keys()))).dtype
            except Exception as error:  # safetensors raises its own class
                raise UserError(f"{path} is broken: {first_line(error)}. Fetch it again.") from error
    own = own or torch.float32
    if own not in DTYPES.values():
        raise UserError(f"weights in {folder} have type {own}, which is not supported. Use --dtype {'|'.join(DTYPES)}.")
    return own


def read_document(name: str, folder: Path, file: str = "config.json") -> dict[str, Any]:
    """The content of a configuration file.

    Raises:
        UserError: the file cannot be read or holds no JSON object.
    """
    try:
        found = json.loads((folder / file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model '{name}' has no readable {file} in {folder}: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"model '{name}' has no readable {file} in {folder}: it is not a JSON object.")
    return found


def read_config(name: str, folder: Path) -> Any:
    """The configuration as an object of transformers.

    Raises:
        UserError: the configuration cannot be read, or its architecture is not supported.
    """
    document = read_document(name, folder)
    try:
        with quiet():
            native = native_config(document)
            return AutoConfig.from_pretrained(folder, trust_remote_code=False) if native is None else native
    except UserError:
        raise
    except Exception as error:  # as in load_model
        raise UserError(f"model '{name}' has no readable config.json in {folder}: {first_line(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the progress bars, reports and warnings of transformers; kvbench checks for itself what they report."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    spreading = logging.getLogger("accelerate")
    before = spreading.level
    spreading.setLevel(logging.CRITICAL)
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        transformers_logging.set_verbosity(level)
        spreading.setLevel(before)
        if bars:
            transformers_logging.enable_progress_bar()
