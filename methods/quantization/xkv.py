"""xKV: keys before rotation and values of several layers share one low-rank basis of the context's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Gt, Le, Positive
from kvbench.errors import UserError
from kvbench.kernels.lowrank_keys import factor_keys
from kvbench.kernels.ragged_attention import dense_partial, merge_partials
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.coded import attend_block, block_entries
from kvbench.store.entries import storage_bytes
from kvbench.store.facts import Fact

if TYPE_CHECKING:
    from kvbench.hf import Model, Rope

OFFSET_BYTES = 4


@dataclass
class CrossLayerKV(LayerKV):
    """Exact entries until `factor`; from then on those of the context are products of factors, and later ones exact."""

    factors: tuple[Tensor, ...] = field(default=(), init=False)
    """Of keys and of values, less their means, shared with the other layers of the group. [B, n, r] each"""
    bases: tuple[Tensor, ...] = field(default=(), init=False)
    """Of keys and of values, this layer's own. [B, H_kv, r, D] each"""
    offsets: tuple[Tensor, ...] = field(default=(), init=False)
    """Products of the means and the bases. [B, H_kv, 1, D] float32 each"""
    counts: bool = field(default=False, init=False)
    """Whether the factors count as stored in this layer: in one of the group."""
    _rope: Rope | None = field(default=None, init=False)

    @property
    def apart(self) -> int:
        """Entries per KV head that are stored as factors."""
        return self.factors[0].shape[1] if self.factors else 0

    def append(self, step: Step) -> None:
        """Add a forward's entries."""
        self._rope = step.rope
        super().append(step)

    def _turn(self, keys: Tensor, start: int, *, inverse: bool = False) -> Tensor:
        """Keys of the tokens from `start` on, rotated to their positions or back. [B, H_kv, n, D]"""
        assert self._rope is not None
        return self._rope.rotate_from(keys, start, inverse=inverse)

    def plain(self) -> tuple[Tensor, Tensor]:
        """Keys before rotation in float32, and values, of all exact entries. [B, H_kv, n, D] each"""
        return self._turn(self.keys.float(), 0, inverse=True), self.values

    def factor(
        self, factors: tuple[Tensor, ...], bases: tuple[Tensor, ...], offsets: tuple[Tensor, ...], *, counts: bool
    ) -> None:
        """Replace the exact entries by factors. counts: whether the factors count as stored in this layer."""
        self.factors, self.bases, self.offsets, self.counts = factors, bases, offsets, counts
        self._replace({name: x[:, :, :0] for name, x in self._held().items()}, self.remaining)

    def restore(self, low: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some entries of the context. [B, H_kv, stop - low, D] float32 each"""
        # Added and rotated in float32: next to a large offset, 16 bits would round away the product.
        keys, values = (
            (x[:, None, low:stop] @ basis).float() + offset
            for x, basis, offset in zip(self.factors, self.bases, self.offsets, strict=True)
        )
        return self._turn(keys, low), values

    def attend(self, step: Step) -> Tensor:
        """Attention over the context, restored block by block, and later entries. [B, H_q, T, D_v]"""
        if not self.factors:
            return super().attend(step)
        size = block_entries(self.bases[0], self.bases[0].shape[3])
        parts = [
            attend_block(step.query, *self.restore(low, min(low + size, self.apart)), low, step.options)
            for low in range(0, self.apart, size)
        ]
        parts.append(dense_partial(step.query, self.keys, self.values, **step.options))
        return merge_partials(parts, step.sinks).to(step.query.dtype)

    def tensors(self) -> list[Tensor]:
        """Every tensor that the layer keeps alive; the shared factors where they count."""
        return [*super().tensors(), *self.bases, *self.offsets, *(self.factors if self.counts else ())]

    def read_bytes(self) -> int:
        """Bytes that a step reads: the factors in every layer."""
        return super().read_bytes() + (0 if self.counts else storage_bytes(self.factors))

    def close(self) -> None:
        """Free the entries."""
        super().close()
        self.factors = self.bases = self.offsets = ()

    def entries_kept(self) -> list[int]:
        """Entries of each (batch, KV head), in whatever form."""
        return [x + self.apart for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries that are stored as factors."""
        entries = self.apart * len(super().entries_kept())
        return {**super().facts(), "entries_factored": Fact(entries, changed=True)}


@dataclass(frozen=True)
class XKV(Method):
    """Factors keys and values of groups of adjacent layers together, at the end of the context."""

    group: Positive = 4
    """Adjacent layers that share a basis; the last group may have fewer."""
    key_rank: Annotated[float, Gt(0), Le(1)] = 0.125
    """Rank of a group's keys, as a share of the channels of all its heads and layers; rounded down."""
    value_rank: Annotated[float, Gt(0), Le(1)] = 0.1875
    """The same for values."""

    card: ClassVar[Card] = Card(
        name="xkv",
        version="2",
        title="xKV: Cross-Layer SVD for KV-Cache Compression",
        idea="The dominant singular vectors of the caches of different layers are close to each other. So the entries "
        "of a group of layers share the factor that depends on the token, and each layer has a small basis.",
        arxiv="2503.18893",
        year=2025,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="pooled",
        upstream=Upstream(repo="abdelfattah-lab/xKV", commit="bfe5d72", license="Apache-2.0"),
        deviations=(
            ("The factors come from the eigenvectors of the Gram matrix of a group's channels; they span the same "
            "subspace as the singular vectors."),
            ("The authors' code multiplies in float32 and stores the product in the model's type. Here factors are "
            "stored in that type, less their mean over tokens; the mean times the basis is stored in float32, 4 bytes "
            "for each channel of a layer, and added to what is restored."),
            ("Ranks are shares of a group's channels. For Llama-3.1-8B, with 4,096 in a group of 4 layers, the "
            "defaults are ranks of 512 and 768, as in the authors' README."),
        ),
        unverified=("We did not have the paper; groups, ranks and what is factored are those of the authors' code.",),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            ("A step restores and rotates every key of the context: in plain PyTorch it is many times slower than the "
            "full cache. The authors' later version restores only selected entries."),
            "Each layer reads the shared factors, so a step reads more bytes than are stored.",
            ("A context shorter than the rank takes more bytes than the full cache: the bases do not shrink with it."),
            "Models with sliding-window layers, with layers of unequal heads or on several devices are refused.",
        ),
    )

    recompressible: ClassVar[str | None] = "the context is factored once, and later entries stay exact."
    graphable: ClassVar[str | None] = "entries are restored in blocks, and the store counts them on the host."

    def bind(self, model: Model) -> Self:
        """Refuse a model whose rotary embedding cannot be inverted, or that several devices hold (`UserError`)."""
        require_inverse_rotation(model, "xkv")
        if model.device_map is not None:
            raise UserError(
                f"xkv stores the factors of adjacent layers once, and {model.id} is spread over several devices. Leave "
                "--device-map out, or use palu."
            )
        return self

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse layers that cannot share a basis, and ranks of zero (`UserError`)."""
        first = shape.layers[0]
        if any(x.window is not None for x in shape.layers) or len({
            (x.kv_heads, x.key_dim, x.value_dim) for x in shape.layers
        }) > 1:
            raise UserError(
                "xkv: layers of this model have sliding windows, or unequal heads, and cannot share a basis. Use palu."
            )
        for name, share, width in (
            ("key_rank", self.key_rank, first.key_dim), ("value_rank", self.value_rank, first.value_dim)
        ):
            least = min(self.layers_of(shape), default=1) * first.kv_heads * width
            if not int(share * least):
                raise UserError(f"xkv: {name}={share:g} of {least} channels is less than one. Set {name} higher.")
        return super().fit(budget, shape)

    def layers_of(self, shape: Shape) -> list[int]:
        """The number of layers of each group."""
        count = len(shape.layers)
        return [min(self.group, count - low) for low in range(0, count, self.group)]

    def layer(self, index: int) -> LayerKV:
        """A store of exact entries that `end_of_layer` factors."""
        del index
        return CrossLayerKV()

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """After the last layer of a group, factor the entries of all its layers together."""
        if (step.layer + 1) % self.group and step.layer + 1 < len(layers):
            return
        group = layers[step.layer // self.group * self.group : step.layer + 1]
        stores = [x for x in group if isinstance(x, CrossLayerKV)]
        dtype, found = stores[0].keys.dtype, []
        for share, own in zip((self.key_rank, self.value_rank), zip(*(x.plain() for x in stores), strict=True),
                              strict=True):
            joined = torch.cat([x.float() for x in own], dim=1)  # [B, layers * H_kv, n, D]
            factors, basis = factor_keys(joined, int(share * joined.shape[1] * joined.shape[3]))
            # A bias of keys can be hundreds of times larger than what differs between tokens, and so would be the
            # rounding of factors that contain it.
            mean = factors.mean(1, keepdim=True)
            by_layer = (x.chunk(len(stores), dim=1) for x in (basis.to(dtype), mean[:, None] @ basis))
            found.append(((factors - mean).to(dtype), *by_layer))
        shared, bases, offsets = zip(*found, strict=True)
        for i, store in enumerate(stores):
            store.factor(shared, *(tuple(x[i].clone() for x in parts) for parts in (bases, offsets)), counts=not i)

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the factors of every group, and of the bases and offsets of every layer."""
        return sum(self._group_bytes(count, shape) for count in self.layers_of(shape))

    def declared_read_bytes(self, shape: Shape) -> int:
        """As stored, with the factors of a group once for each of its layers."""
        return sum(self._group_bytes(count, shape, reads=count) for count in self.layers_of(shape))

    def _group_bytes(self, count: int, shape: Shape, reads: int = 1) -> int:
        """Bytes of a group of layers. reads: how often the factors count."""
        heads, total = shape.layers[0].kv_heads, 0
        for share, width in ((self.key_rank, shape.layers[0].key_dim), (self.value_rank, shape.layers[0].value_dim)):
            channels = count * heads * width
            total += int(share * channels) * (reads * shape.length + channels) * shape.itemsize
            total += channels * OFFSET_BYTES
        return total
