"""Methods that encode every key and value by itself: the context at its end, later entries when they arrive."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import Method, Shape, Step
from kvbench.store import LayerKV
from kvbench.store.coded import CodedKV
from kvbench.store.coders import Coder


@dataclass(frozen=True)
class CodedMethod(Method):
    """Encodes the entries of the context at its end, after its attention, and later entries when they arrive."""

    recompressible: ClassVar[str | None] = "every entry is encoded once, and later entries as they are added."
    graphable: ClassVar[str | None] = "entries are decoded in blocks, and the store counts them on the host."

    @abstractmethod
    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """The coders of a layer's keys and of its values."""

    def tensor_bytes(self, shape: Shape) -> int:
        """Bytes of the coders' own tensors in all layers."""
        return sum(
            coder.fixed_bytes(width, x.kv_heads) for i, x in enumerate(shape.layers)
            for coder, width in zip(self.coders(i), (x.key_dim, x.value_dim), strict=True)
        )

    def running_bytes(self, shape: Shape) -> int:
        """Bytes next to keys and values while the context is run, the coders' own tensors included."""
        return super().running_bytes(shape) + self.tensor_bytes(shape)

    def layer(self, index: int) -> LayerKV:
        """A store of exact entries that is encoded at the end of the context."""
        keys, values = self.coders(index)
        return CodedKV(key_coder=keys, value_coder=values)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Encode the entries at the end of the context, and those that wait for a block when their turn ends."""
        assert isinstance(kv, CodedKV)
        if step.moment.compresses and not kv.coded:
            kv.encode()
        elif step.moment.is_last:
            kv.flush()
