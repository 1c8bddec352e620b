"""KIVI around another method: the entries that an eviction or head method keeps are quantized."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, cast

from kvbench.budget import solve
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Shape
from kvbench.methods.allocation.adakv import HeadAllocation
from kvbench.methods.heads.groups import HeadMethod
from kvbench.methods.heads.store import HeadGroupsKV
from kvbench.methods.quantization.packed import PackedMethod
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV
from kvbench.store.packed import PackedKV, Packing


def go_around(inner: type[Method], card: Card) -> type[Method]:
    """Create the method `inner+kivi`. card: the card of kivi alone.

    Raises:
        UserError: the entries that the other method keeps cannot be packed.
    """
    name = f"{inner.card.name}+{card.name}"
    packable = issubclass(inner, (ScoredMethod, HeadMethod)) and inner.end_of_layer is Method.end_of_layer
    if not packable or issubclass(inner, (HeadAllocation, PackedMethod)):
        raise UserError(f"{name} makes no sense: {_reason(inner)}")
    limit = "A budget counts entries before they are packed: fewer bytes are stored, as measured."
    if issubclass(inner, HeadMethod):
        limit += " Entries of streaming heads are overwritten in place and stay exact."
    joined = inner.card.model_copy(update={
        "name": name, "family": card.family, "limits": (*inner.card.limits, *card.limits, limit),
        "deviations": (*inner.card.deviations, *card.deviations),
    })
    body = {"card": joined, "inner": inner, "__doc__": inner.__doc__, "__module__": inner.__module__}
    around = AroundHeads if issubclass(inner, HeadMethod) else Around
    return dataclass(frozen=True)(type(name, (around, inner), body))


def _reason(inner: type[Method]) -> str:
    """Why kivi cannot go around a method."""
    name = inner.card.name
    if issubclass(inner, PackedMethod) or inner.card.budget is BudgetKind.BITS:
        return f"{name} quantizes the entries itself. Use {name} alone."
    if issubclass(inner, HeadAllocation):
        return (
            f"kivi packs the same blocks in all heads, and {name} keeps unequal numbers of entries. Use a method that "
            "keeps as many in every head (snapkv+kivi)."
        )
    if inner.card.budget is BudgetKind.NONE:
        return f"{name} keeps every entry, as kivi alone does. Use kivi."
    if issubclass(inner, ScoredMethod) and inner.end_of_layer is not Method.end_of_layer:
        return (
            f"kivi packs a layer's entries when they are scored, and {name} decides later which of them it keeps. Use "
            "a method that decides at once (snapkv+kivi)."
        )
    return (
        f"a packed block of entries cannot change, and {name} drops, overwrites, merges or selects single entries. "
        "Use a method that scores entries once (snapkv+kivi) or trims heads (razor-attention+kivi)."
    )


class Around(PackedMethod):
    """Packs the entries that another method keeps; the budget still counts entries, not their packed bytes."""

    inner: ClassVar[type[Method]]
    needed: ClassVar[str] = "keeps {} entries"
    """The condition for a KV head to have entries packed, with the size of a block to fill in."""

    def plain(self) -> Any:
        """The other method alone, with the fields that `bind` and `fit` have resolved so far."""
        return self.inner(**{x.name: getattr(self, x.name) for x in fields(self.inner)})

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Fit the other method.

        Raises:
            UserError: the other method refuses the budget, or none of the entries that it keeps can be packed.
        """
        self.check_groups(shape)
        try:
            return self._fit(budget, shape)
        except UserError:
            if (budget is not None and budget.kind == "paper") or not self._packs(shape.length, shape):
                raise
            least = 1 + (solve(lambda x: self._packs(x, shape), False, range(1, shape.length)) or 0)
            plain = self.inner.card.name
            raise UserError(
                f"{self.card.name}: at this budget kivi has nothing to pack in {shape.length} tokens, because no KV "
                f"head {self.needed.format(self.residual)}. The result would be that of {plain} alone. "
                f"Use --budget {least} or more, or --method {plain}."
            ) from None

    def _packs(self, entries: int, shape: Shape) -> bool:
        """Whether a budget of this many entries can be fitted."""
        try:
            self._fit(Budget("rows", entries), shape)
        except UserError:
            return False
        return True

    def _fit(self, budget: Budget | None, shape: Shape) -> Self:
        plain = self.plain().fit(budget, shape)
        fitted = replace(self, **{x.name: getattr(plain, x.name) for x in fields(self.inner)})
        if not plain.identity(shape) and max(fitted.packed_entries(shape), default=0) < self.residual:
            raise UserError(f"{self.card.name}: nothing to pack.")
        return fitted

    def packed_entries(self, shape: Shape) -> list[int]:
        """Entries per KV head in each layer that packs, including the last ones, which stay exact."""
        budgets = [(shape.entries(x), self.entries_in(i, x.window)) for i, x in enumerate(shape.layers)]
        return [full if entries is None else min(full, entries) for full, entries in budgets]

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The budget of the other method."""
        return cast("int | None", self.plain().entries_in(layer, window))

    def minimum_entries(self) -> int:
        """At least one packed block."""
        return max(super().minimum_entries(), self.residual)

    def identity(self, shape: Shape) -> bool:
        """Whether the other method drops nothing and nothing is packed."""
        return super().identity(shape) and self.plain().identity(shape)


class AroundHeads(Around):
    """Packs the heads that keep every entry in a head method; the other heads stay exact."""

    needed: ClassVar[str] = "keeps a whole context of {} entries or more"

    def packed_entries(self, shape: Shape) -> list[int]:
        """Entries per KV head in each layer with heads that keep every entry."""
        return [shape.entries(shape.layers[index]) for index in self.plain().whole_heads(shape)]

    def layer(self, index: int) -> LayerKV:
        """Two stores as in the other method, or one if every head keeps every entry."""
        store = self.plain().layer(index)
        if not isinstance(store, HeadGroupsKV):
            return super().layer(index)
        return PackedGroupsKV(retrieval=store.retrieval, packing=self.packing())

    def packed_stores(self, kv: LayerKV) -> list[PackedKV]:
        """The store of heads that keep every entry."""
        if not isinstance(kv, PackedGroupsKV):
            return super().packed_stores(kv)
        return [store for _, store in kv.groups if isinstance(store, PackedKV)]

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the other method, with heads that keep every entry counted as packed."""
        plain = self.plain()
        total: int = plain.declared_bytes(shape)
        for index, heads in plain.whole_heads(shape).items():
            layer = replace(shape.layers[index], kv_heads=heads)
            total += PackedKV(packing=self.packing()).bytes_for(layer, shape, shape.entries(layer))
            total -= shape.layer_bytes(layer)
        return total


@dataclass
class PackedGroupsKV(HeadGroupsKV):
    """Heads that keep every entry pack them; streaming heads overwrite exact entries in place."""

    packing: Packing | None = None

    def make_whole(self) -> LayerKV:
        """Packed entries of the heads that keep every entry."""
        return PackedKV(packing=self.packing)
