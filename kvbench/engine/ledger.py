"""What a session's stores hold and what they say happened: bytes, and the certificate that the method acted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvbench.budget import Shape
from kvbench.method import Method
from kvbench.runs.journal import add_facts
from kvbench.store import LayerKV, storage_bytes

CHANGED = ("rows_dropped", "rows_quantized", "pages_skipped", "rows_factored")
"""Facts that prove that a method acted: rows evicted, rows stored otherwise, pages that attention did not read."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the cache, counted from storages."""

    dense_bytes: int
    """A native GQA cache of the same context."""
    cache_bytes: int
    """What held the context right after compression, room for later tokens excluded."""
    tail_bytes: int
    """Room for later tokens at that moment."""
    end_bytes: int
    """All of it now, the host's apart."""
    peak_bytes: int
    """The most held at once, between operations, the host's apart."""
    host_bytes: int = 0
    """Bytes in host memory now; on a CPU a tier that the store declares."""
    read_bytes_per_step: int = 0
    """Bytes of rows that one decode step reads; 0 where a method that reads a part has made none."""


@dataclass(frozen=True)
class Certificate:
    """Proof, written by the stores, of what happened to the rows of one conversation."""

    kind: str
    acted: bool
    identity: bool
    """The settings are the method's declared identity: nothing needs to happen."""
    rows_seen: int
    """Rows per KV head that a dense cache of the context holds, on the layer with the most."""
    rows_kept: tuple[float, ...]
    """Mean rows per KV head after compression, by layer."""
    facts: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Counts the stores of one session; a method writes nothing in it."""

    def __init__(self, layers: list[LayerKV]) -> None:
        self._layers = layers
        self._held = [0] * len(layers)
        self._peak = 0
        self._context: tuple[int, int, int] | None = None  # dense, cache and tail bytes right after compression
        self._certificate: Certificate | None = None

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
        self._context = (shape.dense_bytes * batch, total - spare, spare)
        kept = tuple(sum(rows) / len(rows) for rows in (store.rows_kept() for store in self._layers))
        self._certificate = Certificate(
            kind=method.card.budget.value, acted=False, identity=method.identity(shape),
            rows_seen=max(shape.rows(x) for x in shape.layers), rows_kept=kept,
        )

    def memory(self) -> Memory:
        """Bytes after the context and now."""
        assert self._context is not None, "prefill first"
        self.note_layers()
        dense, cache, tail = self._context
        return Memory(
            dense_bytes=dense, cache_bytes=cache, tail_bytes=tail, end_bytes=sum(self._held), peak_bytes=self._peak,
            host_bytes=sum(storage_bytes(store.host_tensors()) for store in self._layers),
            read_bytes_per_step=sum(store.read_bytes() for store in self._layers),
        )

    def certificate(self) -> Certificate:
        """What the stores say happened."""
        assert self._certificate is not None, "prefill first"
        facts: dict[str, int] = {}
        for store in self._layers:
            add_facts(facts, store.facts())
        return replace(self._certificate, acted=any(facts.get(name) for name in CHANGED), facts=facts)

    def fork(self, layers: list[LayerKV]) -> Ledger:
        """The same account, going on by itself over forks of the stores."""
        other = Ledger(layers)
        other._held, other._peak = list(self._held), self._peak
        other._context, other._certificate = self._context, self._certificate
        return other

    def credit(self, branch: Ledger) -> None:
        """Count as its own what a fork read, and the most that it held."""
        self._peak = max(self._peak, branch._peak)
        for store, twin in zip(self._layers, branch._layers, strict=True):
            store.credit(twin)
