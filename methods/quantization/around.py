"""Packing around a method that evicts or trims heads: what it keeps becomes codes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, cast

import torch

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
    """The method `inner+kivi`. card: kivi's own.

    Raises:
        UserError: what the other method keeps cannot be packed.
    """
    name = f"{inner.card.name}+{card.name}"
    if not issubclass(inner, (ScoredMethod, HeadMethod)) or issubclass(inner, (HeadAllocation, PackedMethod)):
        raise UserError(f"{name} makes no sense: {_reason(inner)}")
    limit = "A budget counts entries, before they are packed: the bytes held are fewer, as measured."
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
        return f"{name} has rounded the entries already."
    if issubclass(inner, HeadAllocation):
        return "heads that keep unequal numbers of entries have no whole blocks of keys in common. Leave +adakv out."
    if inner.card.budget is BudgetKind.NONE:
        return f"{name} keeps every entry, and so does kivi alone."
    return (
        f"kivi packs blocks of rows for good, and {name} drops, overwrites, merges or selects single rows. Use one "
        "that scores entries once (snapkv+kivi) or trims heads (razor-attention+kivi)."
    )


class Around(PackedMethod):
    """Packs what another method keeps, and leaves its budget alone: so many rows, whatever they take once packed."""

    inner: ClassVar[type[Method]]
    needed: ClassVar[str] = "keeps {} entries"
    """What a KV head must do to have entries packed, by the size of a block."""

    def plain(self) -> Any:
        """The other method by itself, with what `bind` and `fit` have found so far."""
        return self.inner(**{x.name: getattr(self, x.name) for x in fields(self.inner)})

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """The other method's.

        Raises:
            UserError: or nothing of what it keeps can be packed.
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
                f"head {self.needed.format(self.residual)}: this would be {plain} alone. Use --budget {least} or more, "
                f"or --method {plain}."
            ) from None

    def _packs(self, rows: int, shape: Shape) -> bool:
        """Whether something is packed at a budget of that many entries, or nothing need be."""
        try:
            self._fit(Budget("rows", rows), shape)
        except UserError:
            return False
        return True

    def _fit(self, budget: Budget | None, shape: Shape) -> Self:
        plain = self.plain().fit(budget, shape)
        fitted = replace(self, **{x.name: getattr(plain, x.name) for x in fields(self.inner)})
        if not plain.identity(shape) and max(fitted.packed_rows(shape), default=0) < self.residual:
            raise UserError(f"{self.card.name}: nothing to pack.")
        return fitted

    def packed_rows(self, shape: Shape) -> list[int]:
        """Entries of the KV heads that are packed, by layer that has some; the last of them stay exact."""
        budgets = [(shape.rows(x), self.entries_in(i, x.window)) for i, x in enumerate(shape.layers)]
        return [held if rows is None else min(held, rows) for held, rows in budgets]

    def entries_in(self, layer: int, window: int | None) -> int | None:
        """The other method's."""
        return cast("int | None", self.plain().entries_in(layer, window))

    def minimum_entries(self) -> int:
        """As many as a block that is packed."""
        return max(super().minimum_entries(), self.residual)

    def identity(self, shape: Shape) -> bool:
        """Only where the other method drops nothing and nothing is packed."""
        return super().identity(shape) and self.plain().identity(shape)


class AroundHeads(Around):
    """Around a method of which some heads keep every row: these rows are packed, and those of the others are not."""

    needed: ClassVar[str] = "keeps a whole context of {} entries or more"

    def packed_rows(self, shape: Shape) -> list[int]:
        """Entries of heads that keep every entry."""
        return [shape.rows(shape.layers[index]) for index in self.plain().whole_heads(shape)]

    def layer(self, index: int) -> LayerKV:
        """The other method's two stores, or one where every head keeps every entry."""
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
        """The other method's bytes, with packed entries in place of the exact ones of heads that keep every entry."""
        plain = self.plain()
        total: int = plain.declared_bytes(shape)
        for index, heads in plain.whole_heads(shape).items():
            layer = replace(shape.layers[index], kv_heads=heads)
            total += PackedKV(packing=self.packing()).bytes_for(layer, shape, shape.rows(layer))
            total -= shape.layer_bytes(layer)
        return total


@dataclass
class PackedGroupsKV(HeadGroupsKV):
    """Heads that keep every entry pack them; heads that stream overwrite theirs in place, exactly."""

    packing: Packing | None = None

    def _divide(self, kv_heads: int, device: torch.device) -> None:
        super()._divide(kv_heads, device)
        for i, (heads, store) in enumerate(self.groups):
            if type(store) is LayerKV:
                packed = PackedKV(packing=self.packing, track=store.track)
                packed.capacity = store.capacity
                self.groups[i] = heads, packed
