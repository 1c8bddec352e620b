"""Reads `--gen key=value` options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvbench.errors import MOST, UserError, is_whole, unknown
from kvbench.runs.spec import DenoisingSpec, GenerationSpec


def read_generation(given: dict[str, str]) -> GenerationSpec:
    """Read `--gen key=value` options.

    Raises:
        UserError: an unknown key or an invalid value.
    """
    for key in given:
        if key not in GENERATION:
            raise unknown("generation setting", key, GENERATION, "Autoregressive decoding is greedy.")
    read = {key: GENERATION[key](key, text) for key, text in given.items()}
    most = read.pop("max_new_tokens", None)
    return GenerationSpec(max_new_tokens=most, denoising=DenoisingSpec(**read) if read else None)


def _whole(key: str, text: str) -> int:
    if not is_whole(text) or not int(text):
        raise UserError(f"--gen {key}={text[:80]} must be a whole number, 1 or more, at most {MOST:,}.")
    return int(text)


def _number(key: str, text: str) -> float:
    top = 1.0 if key == "threshold" else math.inf
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= top or math.isinf(value):
        raise UserError(f"--gen {key}={text} must be a number from 0{' to 1' if key == 'threshold' else ' on'}.")
    return value


def _remasking(key: str, text: str) -> str:
    if text not in ("low-confidence", "random"):
        raise unknown(key, text, ["low-confidence", "random"])
    return text


GENERATION: dict[str, Callable[[str, str], Any]] = {
    "max_new_tokens": _whole, "steps": _whole, "block": _whole, "remasking": _remasking, "temperature": _number,
    "threshold": _number, "response_length": _whole,
}
"""Readers of `--gen` settings; all but max_new_tokens are for diffusion models."""
