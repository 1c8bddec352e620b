"""Base class of methods in which some KV heads keep every entry and the others the first and the last ones."""

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
"""A streaming head keeps at least the mean number of entries per head divided by this. In a short context it then gets
less than its usual window, and RazorAttention's 15 % of retrieval heads still fit a budget of 25 %."""
Head = tuple[int, int]
"""A layer, and a KV head in it."""


@dataclass(frozen=True)
class HeadMethod(Method):
    """Retrieval heads keep every entry; streaming heads keep the first and the last entries, also while decoding.

    A budget gives as many retrieval heads as possible while each streaming head has its `least_window`; the rest
    widens the windows. In sliding layers whose window is shorter than the context, streaming heads keep the same
    share of the window and no first entries, which are outside it.
    """

    sinks: Natural = 4
    """First entries that a streaming head keeps."""
    probe: Annotated[int, Ge(2)] | None = None
    """Random tokens per copy in the head profile; None: 2,500, or 64 on models with too few positions or tokens."""

    order: tuple[Head, ...] | None = resolved(by_bind=True)
    """Every head, in the order in which they become retrieval heads."""
    retrieval: int | None = resolved()
    """Number of heads that keep every entry; None: all."""
    streaming: int | None = resolved()
    """Entries per streaming head of a full-attention layer."""

    stepwise: ClassVar[bool] = True
    recompressible: ClassVar[str | None] = "streaming heads are already trimmed after every forward pass."
    compensate: ClassVar[bool] = False
    """Whether streaming heads keep the mean of their dropped entries."""

    @abstractmethod
    def rank(self, model: Model) -> tuple[Head, ...]:
        """Every head of the model, in the order in which they become retrieval heads."""

    @abstractmethod
    def most_retrieval(self, heads: int) -> int:
        """The largest number of retrieval heads among this many heads."""

    @abstractmethod
    def least_window(self, entries: int) -> int:
        """Fewest entries of a streaming head at a budget of this many entries per head."""

    @abstractmethod
    def paper(self, heads: int, length: int) -> tuple[int, int]:
        """The paper's number of retrieval heads, and of entries per streaming head."""

    def sinks_in(self, entries: int) -> int:
        """First entries that a streaming head of this many entries keeps; at least one entry is a recent one."""
        return min(self.sinks, entries - 1)

    def bind(self, model: Model) -> Self:
        """Rank the model's heads."""
        return replace(self, order=self.rank(model))

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the order of heads from a result (`UserError` unless it names every head once)."""
        order: Any = resolution.get("order")
        if order is None:
            return self
        if sorted(order) != [[layer, head] for layer, x in enumerate(shape.layers) for head in range(x.kv_heads)]:
            raise UserError(f"{self.card.name}: the order of heads does not name every KV head of the model once.")
        return replace(self, order=tuple((layer, head) for layer, head in order))

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Divide a budget between retrieval heads and windows (`UserError` if it is too small)."""
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

        count = solve(lambda x: needs(x, least), target, range(self.most_retrieval(heads) + 1))
        if count is None:
            reachable = math.ceil(needs(0, least) / shape.full_bytes * shape.length)
            raise too_small(self.card.name, budget or DEFAULT_BUDGET, fitted.rows, shape.length, reachable)
        window = solve(lambda x: needs(count, x), target, range(least, shape.length))
        return replace(fitted, retrieval=count, streaming=window)

    def identity(self, shape: Shape) -> bool:
        """Whether no head drops an entry of a context of this length."""
        all_heads = self.retrieval == sum(x.kv_heads for x in shape.layers)
        return all_heads or self.streaming is None or self.streaming >= shape.length

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the entries of both kinds of heads, and of the means."""
        if self.streaming is None:
            return shape.full_bytes
        total, whole = 0, self.whole_heads(shape)
        for index, layer in enumerate(shape.layers):
            full = shape.entries(layer)
            mean = self.compensate and self.sees_context(layer.window)
            total += HeadGroupsKV().bytes_for(
                layer, shape, min(full, self._trimmed(layer.window) or full), whole=whole[index], mean=mean
            )
        return total

    def running_bytes(self, shape: Shape) -> int:
        """None: heads are ranked before the run, so the stores keep nothing for scoring."""
        del shape
        return 0

    def whole_heads(self, shape: Shape) -> Counter[int]:
        """Number of KV heads of each layer that keep every entry, after `fit`."""
        order = self.order or _costliest(shape)
        return Counter(layer for layer, _ in (order if self.streaming is None else order[: self.retrieval]))

    def _trimmed(self, window: int | None) -> int | None:
        """Entries per streaming head of a layer with this window; None: all that the window covers."""
        if window is None or self.streaming is None or self.length is None:
            return self.streaming
        entries = math.ceil(self.streaming * min(1.0, window / self.length))
        return entries if entries < window else None

    def layer(self, index: int) -> LayerKV:
        """A store with two groups of heads, or a plain one if every head keeps every entry."""
        if self.streaming is None:
            return LayerKV()
        assert self.order is not None, "call bind first: heads are ranked on a model"
        kept = tuple(sorted(head for layer, head in self.order[: self.retrieval] if layer == index))
        return self.make_groups(kept)

    def make_groups(self, retrieval: tuple[int, ...]) -> HeadGroupsKV:
        """A store in which these KV heads keep every entry."""
        return HeadGroupsKV(retrieval=retrieval)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Trim streaming heads at the end of the context and after every later forward pass."""
        entries = self._trimmed(step.window)
        if entries is None or not step.moment.is_last:
            return
        assert isinstance(kv, HeadGroupsKV)
        full = self.sees_context(step.window)
        kv.trim(self.sinks_in(entries) if full else 0, entries, compensate=self.compensate and full)


def by_score(scores: Sequence[Sequence[float]]) -> tuple[Head, ...]:
    """Every head by descending score; equal scores by layer and head. scores: by layer and KV head."""
    heads = [(layer, head) for layer, by_head in enumerate(scores) for head in range(len(by_head))]
    return tuple(sorted(heads, key=lambda x: -scores[x[0]][x[1]]))


def _costliest(shape: Shape) -> tuple[Head, ...]:
    """Heads by descending bytes: without a model to rank them, the declared bytes are then an upper bound."""
    return by_score([
        [float(shape.entries(x) * (x.key_dim + x.value_dim))] * x.kv_heads for x in shape.layers
    ])
