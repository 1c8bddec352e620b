"""KIVI: keys are rounded per channel, where their outliers are, and values per token."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from kvbench.errors import UserError
from kvbench.kernels.pack import BITS, packed_width
from kvbench.method import POSITION_BYTES, Budget, BudgetKind, Card, LayerShape, Method, Shape, Step, Upstream
from kvbench.methods.allocation.adakv import HeadAllocation
from kvbench.methods.heads.groups import HeadMethod
from kvbench.methods.heads.store import HeadGroupsKV
from kvbench.selection import ScoredMethod
from kvbench.store import LayerKV
from kvbench.store.packed import PackedKV, Packing

GROUP = 32
GROUP_BYTES = 4
"""A scale and a minimum in float16."""
TOLERANCE = 0.005
"""A budget this near to what is reached is taken for it: people write rounded percentages."""


@dataclass
class PackedGroupsKV(HeadGroupsKV):
    """Heads that keep every row pack them; heads that stream overwrite theirs in place, exactly."""

    packing: Packing | None = None

    def _divide(self, kv_heads: int, device: torch.device) -> None:
        super()._divide(kv_heads, device)
        for i, (heads, store) in enumerate(self.groups):
            if type(store) is LayerKV:
                packed = PackedKV(packing=self.packing, track=store.track)
                packed.capacity = store.capacity
                self.groups[i] = heads, packed

    def packed_stores(self) -> list[PackedKV]:
        """The stores of heads that keep every row."""
        return [x for _, x in self.groups if isinstance(x, PackedKV)]


@dataclass(frozen=True)
class PackedMethod(Method):
    """Packs what another method, or none, has left of the context."""

    key_bits: int = 2
    value_bits: int = 2
    group: int | None = None
    """Tokens that share a key channel's scale, and channels that share a value's; None: 32, or the whole of a value
    that is narrower."""
    residual: int = 32
    """Keys are packed in blocks of so many tokens, and so many last values stay exact."""
    scbench_compat: bool = False
    """Pack the context only, as SCBench's port does: later rows stay exact."""

    graphable: ClassVar[str | None] = "rows are packed in blocks, and the store counts them on the host."

    def __post_init__(self) -> None:
        """Refuse settings without a meaning."""
        super().__post_init__()
        name = self.card.name
        for setting in ("key_bits", "value_bits"):
            if getattr(self, setting) not in BITS:
                raise UserError(
                    f"{name}: {setting} must be one of {', '.join(map(str, BITS))}, got {getattr(self, setting)}. "
                    "Rows that are not packed are `full`."
                )
        if self.group is not None and self.group < 1:
            raise UserError(f"{name}: group must be 1 or more, got {self.group}; the paper's is {GROUP}.")
        if self.residual < 1 or self.residual % self._tokens:
            raise UserError(
                f"{name}: residual must be a multiple of the group of {self._tokens} tokens, got {self.residual}: keys "
                f"are packed in whole groups. Use {max(1, self.residual // self._tokens) * self._tokens}, or another "
                "group."
            )

    @property
    def _tokens(self) -> int:
        return GROUP if self.group is None else self.group

    def _channels(self, width: int) -> int:
        return min(GROUP, width) if self.group is None else self.group

    def packing(self) -> Packing:
        """How the stores pack."""
        return Packing(self.key_bits, self.value_bits, self._tokens, self.residual, later=not self.scbench_compat)

    def check_groups(self, shape: Shape) -> None:
        """Refuse groups that do not divide a value (`UserError`)."""
        for width in sorted({x.value_dim for x in shape.layers}):
            if width % self._channels(width):
                allowed = [x for x in range(1, width + 1) if not width % x and not self.residual % x]
                raise UserError(
                    f"{self.card.name}: groups of {self._channels(width)} do not divide values of {width} channels. "
                    f"With residual={self.residual} group may be {', '.join(map(str, allowed))}."
                )

    def head_bytes(self, rows: int, layer: LayerShape, shape: Shape) -> int:
        """Declared bytes of the rows of one KV head."""
        packing = self.packing()
        keys, values = packing.packed_keys(rows), packing.packed_values(rows)
        groups = keys // self._tokens * layer.key_dim + values * (layer.value_dim // self._channels(layer.value_dim))
        codes = keys * packed_width(layer.key_dim, self.key_bits)
        codes += values * packed_width(layer.value_dim, self.value_bits)
        exact = (rows - keys) * layer.key_dim + (rows - values) * layer.value_dim
        return codes + groups * GROUP_BYTES + exact * shape.itemsize

    def loses_nothing(self, shape: Shape) -> bool:
        """Whether the context is too short for a packed row."""
        return max(shape.rows(x) for x in shape.layers) < self.residual

    def layer(self, index: int) -> LayerKV:
        """The other method's store, packed at the end of the context."""
        store = super().layer(index)
        if isinstance(store, HeadGroupsKV):
            return PackedGroupsKV(retrieval=store.retrieval, packing=self.packing())
        assert type(store) is LayerKV and not store.bounded, "`over` lets no other store through"
        return PackedKV(
            queries=store.queries, column_sums=store.column_sums, track=store.track, packing=self.packing()
        )

    def evict(self, kv: LayerKV, step: Step) -> None:
        """What the other method left becomes codes at the end of the context; later rows when their turn ends."""
        super().evict(kv, step)
        if not step.last:
            return
        for store in kv.packed_stores() if isinstance(kv, PackedGroupsKV) else [kv]:
            assert isinstance(store, PackedKV)
            if store.packed is not None:
                store.flush()
            elif step.compress:
                store.pack()


@dataclass(frozen=True)
class Kivi(PackedMethod):
    """Keeps every row in 2 to 8 bits, but for the last ones: keys in groups of tokens, values in groups of channels."""

    card: ClassVar[Card] = Card(
        name="kivi",
        title="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        idea="Keys have a few channels of large values, values have none. So keys share scales per channel over groups "
        "of tokens, values per token over groups of channels, and the last rows stay exact.",
        arxiv="2402.02750",
        year=2024,
        family="quantisation",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="jy-yuan/KIVI", commit=None, licence="MIT"),
        deviations=(
            ("Minima are rounded down and scales up to float16, so that codes cover their range and every element is "
            "within half a scale; the authors' code rounds both to nearest."),
            "Codes are packed along the channels, for keys too; the authors' code packs keys along the tokens.",
            ("A later turn attends to its own rows exactly and packs them at its end, so that chunks do not matter. "
            "SCBench's port never packs them: scbench_compat."),
            "A group of one value has scale 0 and comes back exactly; the authors' code divides by zero.",
            ("Left out, group is the paper's 32, or the whole of a value that is narrower; its models have no "
            "such."),
        ),
        limits=(
            "The last 32 values and up to 31 keys stay exact: short contexts come to more than 18.8 %.",
            "In plain PyTorch on a CPU unpacking costs more than reading exact rows: a step is slower than full's.",
        ),
    )

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """What the settings come to is the only budget."""
        self.check_groups(shape)
        if budget is None:
            return self
        if budget.kind == "fraction" and self._reaches(budget.value, shape):
            return self
        alike = {x: replace(self, key_bits=x, value_bits=x) for x in BITS}
        reached = ", ".join(f"{y.ratio(shape):.1%} ({x} bits)" for x, y in alike.items())
        raise UserError(
            f"kivi cannot reach a budget of {budget}: its settings come to {self.ratio(shape):.1%} of the dense bytes. "
            f"With key_bits and value_bits alike it reaches {reached}. Leave --budget out, or change these settings "
            "with --set."
        )

    def ratio(self, shape: Shape) -> float:
        """Declared bytes as a share of the dense ones."""
        return self.declared_bytes(shape) / shape.dense_bytes

    def _reaches(self, share: float, shape: Shape) -> bool:
        """Whether a share is reached at this length, or by as many whole blocks of keys: samples differ in length."""
        whole = max(1, shape.length - shape.length % self.residual)
        ratios = [self.ratio(replace(shape, length=x)) for x in (whole, shape.length, whole + self.residual - 1)]
        return min(ratios) - TOLERANCE <= share <= max(ratios) + TOLERANCE

    def identity(self, shape: Shape) -> bool:
        """Only where nothing is packed."""
        return self.loses_nothing(shape)

    def declared_bytes(self, shape: Shape) -> int:
        """Codes, scales and minima, and the residual."""
        return sum(x.kv_heads * self.head_bytes(shape.rows(x), x, shape) for x in shape.layers)

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Around a method that evicts or trims heads: what it keeps is packed."""
        name = f"{inner.card.name}+kivi"
        kinds = [x for x in (ScoredMethod, HeadMethod) if issubclass(inner, x)]
        if not kinds or issubclass(inner, (HeadAllocation, PackedMethod)):
            raise UserError(f"{name} makes no sense: {_reason(inner)}")
        limit = "A budget counts rows, before they are packed: the bytes held are fewer, as measured."
        if issubclass(inner, HeadMethod):
            limit += " Rows of streaming heads are overwritten in place and stay exact."
        card = inner.card.model_copy(update={
            "name": name, "family": "quantisation", "limits": (*inner.card.limits, *cls.card.limits, limit),
            "deviations": (*inner.card.deviations, *cls.card.deviations),
        })
        body = {"card": card, "inner": inner, "__doc__": inner.__doc__, "__module__": inner.__module__}
        around = AroundHeads if issubclass(inner, HeadMethod) else AroundScores
        return dataclass(frozen=True)(type(name, (around, inner), body))


def _reason(inner: type[Method]) -> str:
    """Why kivi cannot go around a method."""
    name = inner.card.name
    if issubclass(inner, PackedMethod) or inner.card.budget is BudgetKind.BITS:
        return f"{name} has rounded the rows already."
    if issubclass(inner, HeadAllocation):
        return "heads that keep unequal numbers of rows have no whole blocks of keys in common. Leave +adakv out."
    if inner.card.budget is BudgetKind.NONE:
        return f"{name} keeps every row, and so does kivi alone."
    return (
        f"kivi packs blocks of rows for good, and {name} drops, overwrites, merges or selects single rows. Use one "
        "that scores rows once (snapkv+kivi) or trims heads (razor-attention+kivi)."
    )


class Around(PackedMethod):
    """KIVI around another method, whose budget it leaves alone."""

    inner: ClassVar[type[Method]]

    def _plain(self) -> Any:
        """The other method by itself, with what `bind` and `fit` have found so far."""
        return self.inner(**{x.name: getattr(self, x.name) for x in fields(self.inner)})

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """The other method's budget: rows, whatever they take once packed."""
        self.check_groups(shape)
        fitted = self._plain().fit(budget, shape)
        return replace(self, **{x.name: getattr(fitted, x.name) for x in fields(self.inner)})

    def identity(self, shape: Shape) -> bool:
        """Only where the other method drops nothing and nothing is packed."""
        return self.loses_nothing(shape) and self._plain().identity(shape)


class AroundScores(Around):
    """KIVI around a method that keeps equally many rows of every head."""

    def declared_bytes(self, shape: Shape) -> int:
        """The rows that the other method keeps, packed."""
        total = 0
        for index, layer in enumerate(shape.layers):
            held = shape.rows(layer)
            budget = self.rows_in(index, layer.window)
            rows = held if budget is None else min(held, budget)
            positions = rows * POSITION_BYTES if rows < held and layer.window is not None else 0
            total += layer.kv_heads * (self.head_bytes(rows, layer, shape) + positions)
        return total


class AroundHeads(Around):
    """KIVI around a method of which some heads keep every row: these rows are packed."""

    def declared_bytes(self, shape: Shape) -> int:
        """The other method's bytes, with packed rows in place of the exact ones of heads that keep every row."""
        plain = self._plain()
        total: int = plain.declared_bytes(shape)
        for index, heads in plain.whole_heads(shape).items():
            layer = shape.layers[index]
            rows = shape.rows(layer)
            exact = rows * plain.row_bytes(layer, shape, holes=False)
            total += heads * (self.head_bytes(rows, layer, shape) - exact)
        return total
