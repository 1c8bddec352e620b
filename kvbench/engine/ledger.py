"""What a session's stores hold and what they say happened: bytes, and the effect that the method acted."""

from __future__ import annotations

from functools import reduce

from kvbench.budget import Shape
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes, Effect
from kvbench.store import LayerKV, storage_bytes
from kvbench.store.facts import add_facts


class Ledger:
    """Counts the stores of one session; a method writes nothing in it."""

    def __init__(self, layers: list[LayerKV]) -> None:
        self._layers = layers
        self._held = [0] * len(layers)
        self._peak = 0
        self._context: tuple[int, int, int] | None = None  # dense, cache and tail bytes right after compression
        self._effect: Effect | None = None

    def note_layer(self, index: int) -> None:
        """Count a layer between two operations."""
        self._held[index] = self._layers[index].nbytes()
        self._peak = max(self._peak, sum(self._held))

    def note_layers(self) -> None:
        """Count every layer."""
        for index in range(len(self._layers)):
            self.note_layer(index)

    def note_context(self, method: Method, shape: Shape, batch: int) -> None:
        """Count what a context has come to, right after its compression. shape: of the context."""
        self.note_layers()
        total = sum(store.nbytes() for store in self._layers)
        spare = sum(store.spare_bytes() for store in self._layers)
        self._context = (shape.full_bytes * batch, total - spare, spare)
        kept = tuple(sum(rows) / len(rows) for rows in (store.entries_kept() for store in self._layers))
        self._effect = Effect(
            acted=False, identity=method.identity(shape), facts={}, maxima=(),
            entries_seen=max(shape.rows(x) for x in shape.layers), entries_kept=kept,
        )

    def memory(self) -> CacheBytes:
        """Bytes after the context and now."""
        assert self._context is not None, "prefill first"
        self.note_layers()
        dense, cache, tail = self._context
        return CacheBytes(
            full_bytes=dense, stored_bytes=cache, spare_bytes=tail, end_bytes=sum(self._held), peak_bytes=self._peak,
            host_bytes=sum(storage_bytes(store.host_tensors()) for store in self._layers),
            read_bytes_per_step=sum(store.read_bytes() for store in self._layers),
        )

    def effect(self) -> Effect:
        """What the stores say happened."""
        assert self._effect is not None, "prefill first"
        facts = reduce(add_facts, (store.facts() for store in self._layers))
        return self._effect.model_copy(update={
            "acted": any(x.changed and x.value for x in facts.values()),
            "facts": {name: x.value for name, x in facts.items()},
            "maxima": tuple(name for name, x in facts.items() if x.maximum),
        })

    def fork(self, layers: list[LayerKV]) -> Ledger:
        """The same account, going on by itself over forks of the stores."""
        other = Ledger(layers)
        other._held, other._peak = list(self._held), self._peak
        other._context, other._effect = self._context, self._effect
        return other

    def credit(self, branch: Ledger) -> None:
        """Count as its own what a fork read, and the most that it held."""
        self._peak = max(self._peak, branch._peak)
        for store, twin in zip(self._layers, branch._layers, strict=True):
            store.credit(twin)
