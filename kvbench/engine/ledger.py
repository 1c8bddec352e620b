"""The byte counts and effect counters of one session, read from its stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from kvbench.budget import Shape
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes, Effect
from kvbench.store import LayerKV, storage_bytes
from kvbench.store.facts import add_facts


class Ledger:
    """Reads the stores of one session. Methods do not write to it."""

    def __init__(self, layers: list[LayerKV], around: Ledger | None = None) -> None:
        """around: the ledger of a session that waits while this one runs, for instance on a draft of its cache."""
        self._layers, self._around = layers, around
        self._stored = [0] * len(layers)
        self._peak = 0
        self._shape: Shape | None = None  # of the context
        self._batch = 1
        self._context: tuple[int, int, int] | None = None  # stored, spare and host bytes right after compression
        self._effect: Effect | None = None

    def note_layer(self, index: int) -> None:
        """Read the bytes of one layer, between two operations."""
        self._stored[index] = self._layers[index].nbytes()
        self._peak = max(self._peak, sum(self._stored))

    def note_layers(self) -> None:
        """Read the bytes of every layer, and with them those of the sessions that wait for this one."""
        for index in range(len(self._layers)):
            self.note_layer(index)
        if self._around is not None:
            self._around.note_inner([store.tensors() for store in self._layers])

    def note_inner(self, tensors: Sequence[list[Tensor]]) -> None:
        """Read the bytes of the layers together with those of sessions that this one waits for, by layer."""
        alive = [store.tensors() + inner for store, inner in zip(self._layers, tensors, strict=True)]
        self._peak = max(self._peak, sum(storage_bytes(x) for x in alive))
        if self._around is not None:
            self._around.note_inner(alive)

    def note_context(self, method: Method, shape: Shape, batch: int, *, exact: bool = True) -> None:
        """Record bytes and entries right after compression.

        shape: of the context. exact: whether entries were those of the whole context's prefill before.
        """
        self.note_layers()
        spare = sum(store.spare_bytes() for store in self._layers)
        self._shape, self._batch, self._context = shape, batch, (sum(self._stored) - spare, spare, self._host_bytes())
        kept = tuple(sum(x) / len(x) for x in (store.entries_kept() for store in self._layers))
        self._effect = Effect(
            acted=False, identity=exact and method.identity(shape), facts={}, maxima=(),
            entries_seen=max(shape.entries(x) for x in shape.layers), entries_kept=kept,
        )

    def memory(self) -> CacheBytes:
        """Bytes of the cache right after compression and now."""
        assert self._context is not None and self._shape is not None, "prefill first"
        self.note_layers()
        stored, spare, host = self._context
        from_host, from_file = (sum(x) for x in zip(*(store.tier_read_bytes() for store in self._layers), strict=True))
        return CacheBytes(
            full_bytes=self._shape.full_bytes * self._batch, stored_bytes=stored, spare_bytes=spare,
            end_bytes=sum(self._stored), peak_bytes=self._peak,
            host_bytes=host,
            file_bytes=sum(store.file_bytes() for store in self._layers),
            read_bytes_per_step=sum(store.read_bytes() for store in self._layers),
            end_stored_bytes=sum(self._stored) - sum(x.spare_bytes() for x in self._layers) + self._host_bytes() - host,
            end_full_bytes=self._full_bytes([store.seen for store in self._layers]),
            distinct_read_bytes_per_step=sum(store.distinct_read_bytes() for store in self._layers),
            host_read_bytes_per_step=from_host, file_read_bytes_per_step=from_file,
            full_read_bytes_per_step=self._full_bytes([store.full_read_tokens() for store in self._layers]),
        )

    def _host_bytes(self) -> int:
        return sum(storage_bytes(store.host_tensors()) - store.host_spare_bytes() for store in self._layers)

    def _full_bytes(self, tokens: Sequence[float]) -> int:
        """Bytes of the full cache after this many tokens by layer, those of the conversation outside any window."""
        shape = self._shape
        assert shape is not None
        total = 0.0
        for layer, count in zip(shape.layers, tokens, strict=True):
            entries = shape.entries(layer) + count - shape.length if count else 0
            total += shape.layer_bytes(layer) / shape.entries(layer) * entries
        return round(total * self._batch)

    def effect(self) -> Effect:
        """The stores' counters of changes to KV entries."""
        assert self._effect is not None, "prefill first"
        facts = reduce(add_facts, (store.facts() for store in self._layers))
        return self._effect.model_copy(update={
            "acted": any(x.changed and x.value for x in facts.values()),
            "facts": {name: x.value for name, x in facts.items()},
            "maxima": tuple(name for name, x in facts.items() if x.maximum),
            "restarts": tuple(name for name, x in facts.items() if x.restarts),
        })

    def to_json(self) -> dict[str, Any]:
        """The counts, for a file."""
        effect = None if self._effect is None else self._effect.model_dump()
        return {"stored": self._stored, "peak": self._peak, "context": self._context, "effect": effect}

    def load_json(self, saved: dict[str, Any], shape: Shape, batch: int) -> None:
        """Take the counts of a file. shape: of the context.

        Raises:
            ValueError: they contradict each other or the shape.
        """
        self._stored, self._peak, self._shape, self._batch = saved["stored"], saved["peak"], shape, batch
        stored, spare, host = saved["context"]
        self._context, self._effect = (stored, spare, host), Effect.model_validate(saved["effect"])
        if min(stored, spare, host, *self._stored) < 0 or self._peak < max(stored + spare, sum(self._stored)):
            raise ValueError(f"its peak is {self._peak} bytes, with {stored} of the context")
        seen, kept = self._effect.entries_seen, self._effect.entries_kept
        held = [shape.entries(x) for x in shape.layers]
        if seen != max(held) or any(not 0 <= x <= most for x, most in zip(kept, held, strict=True)):
            raise ValueError(f"its layers keep {kept} entries of {seen}")

    def fork(self, layers: list[LayerKV]) -> Ledger:
        """A copy of the counts that continues over forks of the stores."""
        other = Ledger(layers, self._around)
        other._stored, other._peak = list(self._stored), self._peak
        other._shape, other._batch = self._shape, self._batch
        other._context, other._effect = self._context, self._effect
        return other

    def credit(self, branch: Ledger) -> None:
        """Add a fork's read counters, and take the larger peak of the two."""
        self._peak = max(self._peak, branch._peak)
        for store, fork in zip(self._layers, branch._layers, strict=True):
            store.credit(fork)
