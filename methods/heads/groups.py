"""What methods share that let some KV heads keep every entry and trim the others to the first and the last entries."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from kvbench.budget import DEFAULT_BUDGET, solve, too_small
from kvbench.constraints import Ge, Natural
from kvbench.errors import UserError
from kvbench.method import Budget, Method, Shape, Step, resolved
from kvbench.methods.heads.store import HeadGroupsKV
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.hf import Model

LEAST_SHARE = 5
"""Of a budget, a streaming head has at least the mean rows per head divided by this: heads do not take the whole window
of a short context, and RazorAttention's 15 % of the heads still fit a quarter of the full cache's bytes."""
Head = tuple[int, int]
"""Layer, and KV head in it."""


@dataclass(frozen=True)
class HeadMethod(Method):
    """Retrieval heads keep every entry; streaming heads the first and the last, while decoding too.

    A budget is spent on as many retrieval heads as leave each streaming head its `least_window`; what is left over
    widens the windows. Sliding layers whose window is shorter than the context stream the same share of it, without
    first entries, which it hides.
    """

    sinks: Natural = 4
    """First entries that a streaming head keeps."""
    probe: Annotated[int, Ge(2)] | None = None
    """Random tokens of one of the head profile's copies; None: 2,500, or 64 on models that do not take so many."""

    order: tuple[Head, ...] | None = resolved()
    """Every head, the one that most needs all its entries first."""
    retrieval: int | None = resolved()
    """Heads that keep every entry; None: all."""
    streaming: int | None = resolved()
    """Entries that every other head of a full-attention layer holds."""

    graphable: ClassVar[str | None] = "streaming heads overwrite a row in every step, at places that the host counts."

    @abstractmethod
    def rank(self, model: Model) -> tuple[Head, ...]:
        """Every head of the model, the one that most needs all its entries first."""

    @abstractmethod
    def most_retrieval(self, heads: int) -> int:
        """Most of so many heads that a budget is spent on."""

    @abstractmethod
    def least_window(self, rows: int) -> int:
        """Fewest entries of a streaming head where the budget amounts to that many entries per head."""

    @abstractmethod
    def paper(self, heads: int, length: int) -> tuple[int, int]:
        """The paper's own number of retrieval heads, and its entries of a streaming head."""

    def sinks_in(self, rows: int) -> int:
        """First entries among so many of a streaming head: one entry is always a recent one."""
        return min(self.sinks, rows - 1)

    recompressible: ClassVar[str | None] = "streaming heads are trimmed after every forward as it is."
    compensate: ClassVar[bool] = False
    """Whether the mean of the dropped entries stays."""

    def bind(self, model: Model) -> Self:
        """Rank the model's heads."""
        return replace(self, order=self.rank(model))

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """With the order of heads that a result has, if it is one of all heads."""
        order: Any = resolution.get("order")
        if order is None:
            return self
        if sorted(order) != [[layer, head] for layer, x in enumerate(shape.layers) for head in range(x.kv_heads)]:
            raise UserError(f"{self.card.name}: the order of heads does not name every KV head of the model once.")
        return replace(self, order=tuple((layer, head) for layer, head in order))

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Divide a budget between retrieval heads and windows."""
        heads = sum(x.kv_heads for x in shape.layers)
        if budget is not None and budget.kind == "paper":
            retrieval, streaming = self.paper(heads, shape.length)
            return replace(self, rows=None, length=shape.length, retrieval=retrieval, streaming=streaming)
        fitted = super().fit(budget, shape)
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, retrieval=None, streaming=None)
        target = shape.full_bytes * fitted.rows / shape.length
        least = self.least_window(fitted.rows)

        def needs(retrieval: int, streaming: int) -> int:
            return replace(fitted, retrieval=retrieval, streaming=streaming).declared_bytes(shape)

        whole = solve(lambda x: needs(x, least), target, range(self.most_retrieval(heads) + 1))
        if whole is None:
            reachable = math.ceil(needs(0, least) / shape.full_bytes * shape.length)
            raise too_small(self.card.name, budget or DEFAULT_BUDGET, fitted.rows, shape.length, reachable)
        window = solve(lambda x: needs(whole, x), target, range(least, shape.length))
        return replace(fitted, retrieval=whole, streaming=window)

    def identity(self, shape: Shape) -> bool:
        """Whether no head drops an entry of a context of this length."""
        whole = self.retrieval == sum(x.kv_heads for x in shape.layers)
        return whole or self.streaming is None or self.streaming >= shape.length

    def declared_bytes(self, shape: Shape) -> int:
        """Entries of both kinds of heads, and what streaming heads hold next to theirs."""
        if self.streaming is None:
            return shape.full_bytes
        total, whole = 0, self.whole_heads(shape)
        for index, layer in enumerate(shape.layers):
            held = shape.rows(layer)
            mean = self.compensate and self.sees_context(layer.window)
            total += HeadGroupsKV().bytes_for(
                layer, shape, min(held, self._trimmed(layer.window) or held), whole=whole[index], mean=mean
            )
        return total

    def whole_heads(self, shape: Shape) -> Counter[int]:
        """How many KV heads of each layer keep every entry, once the budget is fitted."""
        order = self.order or _costliest(shape)
        return Counter(layer for layer, _ in (order if self.streaming is None else order[: self.retrieval]))

    def _trimmed(self, window: int | None) -> int | None:
        """Entries of a streaming head of a layer; None: all that its window shows."""
        if window is None or self.streaming is None or self.length is None:
            return self.streaming
        rows = math.ceil(self.streaming * min(1.0, window / self.length))
        return rows if rows < window else None

    def layer(self, index: int) -> LayerKV:
        """Two stores, unless every head keeps every entry."""
        if self.streaming is None:
            return LayerKV()
        assert self.order is not None, "bind the method to a model first"
        kept = tuple(sorted(head for layer, head in self.order[: self.retrieval] if layer == index))
        return HeadGroupsKV(retrieval=kept)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """The middle of streaming heads: at the end of the context, and after every later forward."""
        rows = self._trimmed(step.window)
        if rows is None or not step.moment.is_last:
            return
        assert isinstance(kv, HeadGroupsKV)
        full = self.sees_context(step.window)
        kv.trim(self.sinks_in(rows) if full else 0, rows, compensate=self.compensate and full)


def by_score(scores: Sequence[Sequence[float]]) -> tuple[Head, ...]:
    """Every head by its score, the greatest first, of equal ones the first. scores: by layer and KV head."""
    heads = [(layer, head) for layer, row in enumerate(scores) for head in range(len(row))]
    return tuple(sorted(heads, key=lambda x: -scores[x[0]][x[1]]))


def _costliest(shape: Shape) -> tuple[Head, ...]:
    """Heads in the order of what their rows take: before the model is known, a budget is divided on the safe side."""
    return by_score([
        [float(shape.rows(x) * (x.key_dim + x.value_dim))] * x.kv_heads for x in shape.layers
    ])


