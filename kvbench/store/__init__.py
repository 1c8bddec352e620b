"""What holds rows: preallocated, append-only, shared by forks, and counting its own bytes.

Here is what every method builds on; stores that few methods need are rooms of their own (`kvbench.store.int8`).
"""

from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV
from kvbench.store.rows import Buffer, FlatRows, storage_bytes

__all__ = ["Buffer", "Fact", "FlatRows", "LayerKV", "storage_bytes"]
