"""Methods that store a context as a stream of bytes, whose length depends on the text."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from kvbench.errors import UndeclaredError, UserError
from kvbench.method import Budget, Method, Shape, Step
from kvbench.store import LayerKV
from kvbench.store.stream import Stream, StreamKV


@dataclass(frozen=True)
class StreamMethod(Method):
    """Encodes the context at its end; the next token finds it decoded, and later entries stay exact."""

    recompressible: ClassVar[str | None] = "the context is encoded once, and later entries stay exact."
    graphable: ClassVar[str | None] = "the context is decoded on the host before the next token."

    @abstractmethod
    def encode(self, kv: StreamKV, step: Step) -> Stream:
        """Encode the entries of a layer."""

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse a budget (`UserError`): the text decides the length of a stream."""
        if budget is not None:
            raise UserError(
                f"{self.card.name} takes no budget: the length of a stream depends on the text. Leave --budget out, "
                "and change its settings with --set."
            )
        return replace(self, length=shape.length)

    def layer(self, index: int) -> LayerKV:
        """A store of exact entries that becomes a stream at the end of the context."""
        del index
        return StreamKV()

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Encode the context at its end."""
        assert isinstance(kv, StreamKV)
        if step.moment.in_context and step.moment.compresses:
            kv.store(self.encode(kv, step))

    def declared_bytes(self, shape: Shape) -> int:
        """Not known beforehand (`UndeclaredError`)."""
        del shape
        raise UndeclaredError(
            f"{self.card.name} cannot declare its bytes: the length of its streams depends on the text."
        )

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes of the decoded context."""
        return shape.full_bytes

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Bytes of exact later entries."""
        return -(-tokens * shape.full_bytes // shape.length)
