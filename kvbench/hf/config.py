"""What a model's files say of it before it is loaded, and how transformers is kept quiet meanwhile."""

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

from kvbench.errors import UserError
from kvbench.hf.masked import native_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(asked: str | None, config: Any, folder: Path) -> torch.dtype:
    """What was asked for, what the configuration says, or what the weights are.

    Raises:
        UserError: weights of another type than DTYPES has.
    """
    if asked:
        return DTYPES[asked]
    own = config.dtype or config.get_text_config().dtype
    if own is None:
        for path in sorted(folder.glob("*.safetensors"))[:1]:
            with _broken(path), safe_open(path, "pt") as file:
                own = file.get_tensor(next(iter(file.keys()))).dtype
    own = own or torch.float32
    if own not in DTYPES.values():
        raise UserError(f"weights in {folder} are of type {own}: choose one with --dtype: {', '.join(DTYPES)}.")
    return own


@contextmanager
def _broken(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors has its own kind
        raise UserError(f"{path} is broken: {first_line(error)}. Fetch it again.") from error


def read_document(name: str, folder: Path) -> dict[str, Any]:
    """What config.json says, as it stands there.

    Raises:
        UserError: it cannot be read.
    """
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model '{name}' has no readable config.json in {folder}: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"model '{name}' has no readable config.json in {folder}: it is no object.")
    return found


def read_config(name: str, folder: Path) -> Any:
    """transformers' configuration.

    Raises:
        UserError: it cannot be read, or is of a model that is not served.
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
    """Keep transformers' progress bars, reports and warnings off the screen; what matters in them is checked here."""
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


def first_line(error: Exception) -> str:
    """What an exception says first, to stand within a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
