"""Base of stores that hold all entries and read a part: they count the entries that their attention reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

COUNTS = ("bytes", "host_bytes", "file_bytes", "seen")
"""Counters that results have fields for."""


@dataclass
class SelectiveKV(LayerKV):
    """A layer of which every query reads a part, and the account of what was read."""

    proof: ClassVar[str | None] = None
    """The counter of `reads` that proves that a part was read; None: the stored entries prove it."""
    selective: bool = field(default=False, init=False)
    """Whether a part is read; before that, everything."""
    reads: Counter[str] = field(default_factory=Counter, init=False)
    """`bytes` that `queries` tokens read, each as a step of its own, of them `host_bytes` and `file_bytes` from other
    tiers, the tokens `seen` by them, and counters."""

    @property
    def entry_bytes(self) -> int:
        """Bytes of one key and one value."""
        return self.keys.shape[3] * self.keys.itemsize + self.values.shape[3] * self.values.itemsize

    def read_bytes(self) -> int:
        """Bytes that a step read on average; 0 before the first."""
        if not self.selective:
            return super().read_bytes()
        return self.reads["bytes"] // max(1, self.reads["queries"])

    def tier_read_bytes(self) -> tuple[int, int]:
        """Bytes that a step read from the host and from a file on average; 0 before the first."""
        queries = max(1, self.reads["queries"])
        return self.reads["host_bytes"] // queries, self.reads["file_bytes"] // queries

    def full_read_tokens(self) -> float:
        """Mean over the same steps; 0 before the first."""
        return self.reads["seen"] / max(1, self.reads["queries"]) if self.selective else super().full_read_tokens()

    def fork(self) -> LayerKV:
        """A copy that counts for itself."""
        other = super().fork()
        assert isinstance(other, SelectiveKV)
        other.reads = Counter()
        return other

    def credit(self, branch: LayerKV) -> None:
        """Add a fork's read counters to this store."""
        assert isinstance(branch, SelectiveKV)
        self.reads.update(branch.reads)

    def facts(self) -> dict[str, Fact]:
        """Counters of the reads and of the changes."""
        counted = {
            name: Fact(x, changed=name == self.proof, restarts=True)
            for name, x in self.reads.items() if name not in COUNTS
        }
        return {**super().facts(), **counted}
