"""Stores of KV entries: preallocated, append-only, shared by forks, and counting their own bytes.

This module exports the base store; other stores have modules of their own (`kvbench.store.int8`).
"""

from kvbench.store.entries import Buffer, FlatEntries, storage_bytes
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

__all__ = ["Buffer", "Fact", "FlatEntries", "LayerKV", "storage_bytes"]
