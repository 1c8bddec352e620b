"""The schema version of a run's files, and the upgrade of files with earlier names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

SCHEMA_VERSION: Literal[2] = 2
NAMES = {
    "dense_bytes": "full_bytes", "cache_bytes": "stored_bytes", "tail_bytes": "spare_bytes",
    "certificate": "effect", "evidence": "effect", "rows_seen": "entries_seen", "rows_kept": "entries_kept",
    "rows_kept_by_layer": "entries_kept_by_layer", "rows_dropped": "entries_dropped",
    "rows_quantised": "entries_quantized", "rows_factored": "entries_factored", "rows_merged": "entries_merged",
    "rows_on_host": "entries_on_host", "rows_on_simulated_host": "entries_on_simulated_host", "licence": "license",
    "rows_skipped": "tokens_skipped", "rows_unread": "entries_unread",
}
"""Current names by earlier ones, anywhere in a document but in settings."""
NAMES_WITHIN: dict[object, dict[str, str]] = {
    None: {"ruler": "copy_bandwidth"},
    "generation": {"limit": "max_new_tokens"},
    "latency": {"clock": "timing"}, "cells": {"clock": "timing"}, "command": {"clocks": "timings"},
    "predicted": {"largest_batch": "max_batch"},
    "diffusion": {
        "canvas": "response_length", "rows_per_step": "computed_tokens_per_step", "rows_share": "computed_share",
        "recomputed_rows": "recomputed_tokens",
    },
    "denoising": {
        "canvas": "response_length", "passes": "nfe", "rows": "computed_tokens", "total": "sequence_length",
        "committed": "committed_tokens", "same": "same_tokens",
    },
}
"""The same within the value of one name; None: at the top of a document."""
VALUES: dict[tuple[object, str], str] = {
    ("history", "golden"): "reference", ("kind", "held"): "stored", ("budget", "held"): "stored",
    ("family", "quantisation"): "quantization", ("timing", "user"): "end-to-end", ("timings", "user"): "end-to-end",
}
"""Current values by current name and earlier value."""


def upgrade(document: Any) -> Any:
    """A document in the current names.

    Version 2 was renamed in parts before its release, so documents of version 2 are translated like those of version 1.
    No earlier name has a new meaning, so current documents stay as they are.
    """
    known = isinstance(document, dict) and document.get("schema_version") in (1, SCHEMA_VERSION)
    return _derive(_translate(document, None, NAMES | NAMES_WITHIN[None])) if known else document


def _derive(document: dict[str, Any]) -> dict[str, Any]:
    """A document with the later fields of result.json that follow from its earlier ones."""
    memory, output, model = (document.get(x) for x in ("memory", "output", "model"))
    if not (isinstance(output, dict) and isinstance(model, dict)):
        return document
    found = dict(document)
    if isinstance(memory, dict) and isinstance(memory.get("full_bytes"), int) and isinstance(model.get("dtype"), str):
        found["memory"] = {"full_16bit_bytes": in_16_bits(memory["full_bytes"], model["dtype"]), **memory}
    reasons = output.get("stop_reasons")
    if isinstance(reasons, dict) and all(isinstance(x, int) for x in reasons.values()):
        found.setdefault("n_questions", sum(reasons.values()))
    return found


def in_16_bits(count: int, dtype: str) -> int:
    """Bytes in 16 bits per element of a full cache that has this many in `dtype`."""
    return count // 2 if dtype == "float32" else count


def _translate(found: Any, name: object, names: Mapping[str, str]) -> Any:
    """Translate the value of a name."""
    if name == "settings":  # their names are those of a method or task, which may be a user's own
        return found
    if isinstance(found, dict):
        names = {**names, **NAMES_WITHIN[name]} if name is not None and name in NAMES_WITHIN else names
        inner = NAMES if name is None else names
        return {names.get(key, key): _translate(value, names.get(key, key), inner) for key, value in found.items()}
    if isinstance(found, list):
        return [_translate(x, name, names) for x in found]
    if name == "schema_version":
        return SCHEMA_VERSION
    return VALUES.get((name, found), found) if isinstance(found, str) else found


def exceeds(text: str, most: int) -> bool:
    """Whether an integer's absolute value is above `most`; a text with too many digits is not converted."""
    return len(text) > len(str(most)) + 1 or abs(int(text)) > most
