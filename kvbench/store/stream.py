"""A context that is stored as a stream of bytes, and decoded as a whole when a conversation goes on from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.step import Step
from kvbench.store.entries import storage_bytes
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV


class Stream(ABC):
    """An encoded context."""

    @abstractmethod
    def decode(self) -> dict[str, Tensor]:
        """Keys and values. [B, H_kv, n, D] and [B, H_kv, n, D_v]"""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Everything that is stored."""


@dataclass
class StreamKV(LayerKV):
    """Exact entries until `store` ends the context; a stream until a question or an answer; decoded entries from then.

    A fork decodes for itself, as a request does that takes a stored cache.
    """

    stream: Stream | None = field(default=None, init=False)
    stored: int = field(default=0, init=False)
    """Entries per KV head that were encoded."""
    _heads: int = field(default=0, init=False)
    _reserved: int = field(default=0, init=False)
    """Tokens that decoded entries get room for."""

    def store(self, stream: Stream) -> None:
        """Hold this stream in place of the entries."""
        self.stream, self.stored, self._heads = stream, self.n, self.keys.shape[:2].numel()
        self._free_block()

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens; while there is a stream, when it is decoded."""
        if self.stream is None:
            super().reserve(tokens, forward)
        else:
            self._reserved = max(self._reserved, tokens)

    def resume(self) -> None:
        """Decode the stream, if it has not been."""
        if self.stream is None:
            return
        decoded = self.stream.decode()
        if self.track:
            positions = torch.arange(self.seen - self.stored, self.seen, device=decoded["key"].device)
            decoded["position"] = positions.to(torch.int32).expand(*decoded["key"].shape[:2], -1)
        self._replace(decoded, self.stored + max(self._reserved, self.remaining))
        self.stream = None

    def append(self, step: Step) -> None:
        """Add a forward's entries; after the context, to the decoded ones."""
        self.resume()
        super().append(step)

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive."""
        return super().tensors() + ([] if self.stream is None else self.stream.tensors())

    def close(self) -> None:
        """Free entries and stream."""
        super().close()
        self.stream = None

    def entries_kept(self) -> list[int]:
        """Entries of each (batch, KV head), in whatever form."""
        return super().entries_kept() if self.stream is None else [self.stored] * self._heads

    def facts(self) -> dict[str, Fact]:
        """Entries that were encoded, and the bytes of their stream while it is held."""
        size = 0 if self.stream is None else storage_bytes(self.stream.tensors())
        return {
            **super().facts(), "entries_quantized": Fact(self.stored * self._heads, changed=True),
            "stream_bytes": Fact(size),
        }
