"""Stores of KV entries: preallocated, append-only, shared by forks, and counting their own bytes.

This module exports the base store; other stores have modules of their own (`kvbench.store.int8`).
"""

from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV
from kvbench.store.rows import Buffer, FlatRows, storage_bytes

__all__ = ["Buffer", "Fact", "FlatRows", "LayerKV", "storage_bytes"]
