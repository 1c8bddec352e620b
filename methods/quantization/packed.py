"""Quantization to packed codes as in KIVI: groups, exact last entries, and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import Method, Shape, Step
from kvbench.store import LayerKV
from kvbench.store.packed import PackedKV, Packing

GROUP = 32


@dataclass(frozen=True)
class PackedMethod(Method):
    """Packs the entries of the context: all of them, or those that another method keeps."""

    key_bits: Literal[2, 3, 4, 8] = 2
    value_bits: Literal[2, 3, 4, 8] = 2
    group: Positive | None = None
    """Tokens that share a key channel's scale, and channels that share a value's scale; None: 32, or the whole
    value if it is narrower."""
    residual: Positive = 32
    """Tokens per packed block of keys; also the number of last values that stay exact."""
    scbench_compat: bool = False
    """Pack only the context, as SCBench's port does; later entries stay exact."""

    recompressible: ClassVar[str | None] = "entries are packed once, later ones when their turn ends."
    graphable: ClassVar[str | None] = "entries are packed in blocks, and the store counts them on the host."

    def __post_init__(self) -> None:
        """Refuse a residual that is not a multiple of the group (`UserError`)."""
        super().__post_init__()
        if self.residual % self._tokens:
            whole = max(1, self.residual // self._tokens) * self._tokens
            raise UserError(
                f"{self.card.name}: residual must be a multiple of the group of {self._tokens} tokens, got "
                f"{self.residual}: keys are packed in whole groups. Use {whole}, or another group."
            )

    @property
    def _tokens(self) -> int:
        return GROUP if self.group is None else self.group

    def _channels(self, width: int) -> int:
        return min(GROUP, width) if self.group is None else self.group

    def packing(self) -> Packing:
        """The settings of the stores."""
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

    def identity(self, shape: Shape) -> bool:
        """Whether the context is too short for a packed block."""
        return max(shape.entries(x) for x in shape.layers) < self.residual

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room for later tokens, and for the exact keys and values that are not there yet."""
        return super().later_bytes(shape, tokens + 2 * self.residual)

    def layer(self, index: int) -> LayerKV:
        """A store like the other method's, which is packed at the end of the context."""
        store = super().layer(index)
        assert type(store) is LayerKV and not store.bounded, "`Kivi.over` refuses methods with other stores"
        return PackedKV(
            queries=store.queries, column_sums=store.column_sums, track=store.track, packing=self.packing()
        )

    def packed_stores(self, kv: LayerKV) -> list[PackedKV]:
        """The stores of a layer that are packed."""
        assert isinstance(kv, PackedKV)
        return [kv]

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Pack the remaining entries at the end of the context, and later entries when their turn ends."""
        super().evict(kv, step)
        if not step.moment.is_last:
            return
        for store in self.packed_stores(kv):
            if store.packed is not None:
                store.flush()
            elif step.moment.compresses:
                store.pack()
