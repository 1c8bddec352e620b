"""The schema version of a run's files, and how files of version 1 are read."""

from __future__ import annotations

from typing import Any, Literal

SCHEMA_VERSION: Literal[2] = 2
NAMES = {
    "dense_bytes": "full_bytes", "cache_bytes": "stored_bytes", "tail_bytes": "spare_bytes",
    "certificate": "effect", "evidence": "effect", "rows_seen": "entries_seen", "rows_kept": "entries_kept",
    "rows_kept_by_layer": "entries_kept_by_layer", "rows_dropped": "entries_dropped",
    "rows_quantised": "entries_quantized", "rows_factored": "entries_factored", "rows_merged": "entries_merged",
    "rows_on_host": "entries_on_host", "rows_on_simulated_host": "entries_on_simulated_host", "licence": "license",
}
"""Names of version 1, by their names in version 2."""
VALUES: dict[tuple[object, str], str] = {
    ("history", "golden"): "reference", ("kind", "held"): "stored", ("budget", "held"): "stored",
    ("family", "quantisation"): "quantization",
}
"""Values of version 1 under a name, by their values in version 2."""


def upgrade(document: Any) -> Any:
    """A document of version 1 in the terms of version 2; any other document as it is."""
    old = isinstance(document, dict) and document.get("schema_version") == 1
    return _translate(document) if old else document


def _translate(found: Any, name: object = None) -> Any:
    """A value that stands under a name, in the terms of version 2."""
    if isinstance(found, dict):
        return {NAMES.get(key, key): _translate(value, NAMES.get(key, key)) for key, value in found.items()}
    if isinstance(found, list):
        return [_translate(x) for x in found]
    if name == "schema_version":
        return SCHEMA_VERSION
    return VALUES.get((name, found), found) if isinstance(found, str) else found
