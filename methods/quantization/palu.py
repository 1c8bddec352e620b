"""Palu: keys before rotation and values of groups of heads as low-rank latents, restored in every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Gt, Le, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, resolved
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.coded import CodedKV
from kvbench.store.coders import Coder, HadamardCoder, Parts, as_norm
from kvbench.techniques.calibration import calibrate, calibrated

if TYPE_CHECKING:
    from kvbench.hf import Model

EXACT_BITS = 16
NUMBER_BYTES = 2


@dataclass(frozen=True)
class Palu(CodedMethod):
    """Stores, instead of the keys and values of a group of heads, their coordinates in a subspace of the group's."""

    rank: Annotated[float, Gt(0), Le(1)] = 0.5
    """Rank of a group of heads, as a share of its channels; rounded down to whole numbers per head."""
    group: Positive = 4
    """KV heads that share a subspace; fewer where a layer has fewer."""
    bits: Literal[2, 3, 4, 16] = 16
    """16: latents in float16; less: they are rotated and quantized, with a scale and a minimum per token and head."""
    tokens: Positive = 2048
    """Tokens of text on which subspaces are found, before the run."""

    subspaces: str | None = resolved(by_bind=True)
    """SHA-256 of the subspaces of all layers."""

    card: ClassVar[Card] = Card(
        name="palu",
        title="Palu: Compressing KV-Cache with Low-Rank Projection",
        idea="The projections that make keys and values are nearly of low rank, more so for several heads together. "
        "The cache holds the narrow product, and attention restores keys and values from it.",
        arxiv="2407.21118",
        year=2024,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        calibration="subspaces of keys and values, in one pass",
        heads="pooled",
        upstream=None,
        deviations=(
            ("Latents are projections of keys before rotation and of values, not outputs of factored weights. With the "
            "factors that are best on a text, which the paper finds by whitening its activations, the two are equal: "
            "the best weights project keys on the subspace of the text's keys."),
            ("All layers have the same rank; the paper gives layers different ranks by the Fisher information, for "
            "which it needs gradients."),
            "Values are restored too; the paper merges their second factor into the output projection.",
            "Subspaces are found on Python's manual when a run starts; the paper's text is Wikitext.",
            ("The context is stored exactly until its last chunk, so the first token is exact; with factored weights "
            "the prefill is approximate as well."),
        ),
        unverified=(
            "The paper's code was not read. rank and group are the paper's main setting, from memory.",
            "tokens: chosen so that calibration takes seconds.",
        ),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            ("A step restores and rotates every key: in plain PyTorch it is many times slower than the full cache."),
            ("The subspaces count as stored bytes, 2 bytes for each channel and rank of a group; in the paper they are "
            "weights, and the model's own become smaller."),
            "The manual's text differs between versions of Python; the result records a hash of the subspaces.",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Find subspaces, once per process and model (`UserError` where rotations cannot be inverted)."""
        require_inverse_rotation(model, "palu")
        recorder = ProjectionRecorder(heads=self.group)
        return replace(self, subspaces=calibrate(model, recorder, self.tokens, recorder.summarize))

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse groups that do not divide the heads, unequal widths, and a rank of zero (`UserError`)."""
        for layer in shape.layers:
            if layer.kv_heads % min(self.group, layer.kv_heads):
                raise UserError(
                    f"palu: groups of {self.group} do not divide {layer.kv_heads} KV heads. Set group to a divisor of "
                    f"{layer.kv_heads}."
                )
            if layer.key_dim != layer.value_dim:
                raise UserError(
                    f"palu: keys of {layer.key_dim} and values of {layer.value_dim} channels are not supported. Use "
                    "another method, such as kivi."
                )
            if not int(self.rank * layer.key_dim):
                raise UserError(
                    f"palu: a rank of {self.rank:g} of {layer.key_dim} channels is less than one. Set rank higher."
                )
        return super().fit(budget, shape)

    def coders(self, layer: int) -> tuple[Coder, Coder]:
        """Subspaces of keys and of values."""
        if self.subspaces is None:
            keys = values = None
        else:
            keys, values = calibrated(self.subspaces, layer)  # [H_kv / g, g, D, g * D], the largest first
        return (LatentCoder.of(keys, self.rank, self.group, self.bits),
                LatentCoder.of(values, self.rank, self.group, self.bits))

    def layer(self, index: int) -> LayerKV:
        """A store of keys before rotation."""
        keys, values = self.coders(index)
        return CodedKV(key_coder=keys, value_coder=values, plain=True)

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of the subspaces, which all sequences use."""
        return self.tensor_bytes(shape)


@dataclass(frozen=True)
class LatentCoder(Coder):
    """Coordinates of a group of heads in an orthonormal basis, shared out evenly to the heads of the group."""

    rank: float
    group: int
    bits: int
    basis: Tensor | None = None
    """Orthonormal columns by group of heads. [H_kv / g, g * D, g * r] float16; None: not found yet."""

    @classmethod
    def of(cls, vectors: Tensor | None, rank: float, group: int, bits: int) -> Self:
        """The coder of the first vectors of each group. vectors: [H_kv / g, g, D, g * D]; None: not found yet."""
        if vectors is None:
            return cls(rank, group, bits)
        heads, channels = vectors.shape[1:3]
        return cls(rank, group, bits, vectors[..., : heads * int(rank * channels)].flatten(1, 2).half())

    def _find(self, heads: int) -> tuple[Tensor, int]:
        assert self.basis is not None, "call bind first: subspaces are found on the model"
        return self.basis.float(), heads // len(self.basis)

    def encode(self, x: Tensor) -> Parts:
        """Project groups of heads."""
        basis, heads = self._find(x.shape[1])
        latent = _split(_join(x.float(), heads) @ basis.to(x.device), heads)
        return {"latent": as_norm(latent)} if self.bits == EXACT_BITS else self._quantizer.encode(latent)

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Restore groups of heads."""
        rank = int(self.rank * width)
        if self.bits == EXACT_BITS:
            latent = parts["latent"].float()
        else:
            latent = self._quantizer.back(self._quantizer.decode(parts, rank))
        basis, heads = self._find(latent.shape[1])
        return _split(_join(latent, heads) @ basis.mT.to(latent.device), heads)

    @property
    def _quantizer(self) -> HadamardCoder:
        return HadamardCoder(self.bits, None)

    def entry_bytes(self, width: int) -> int:
        """Latents."""
        rank = int(self.rank * width)
        return rank * NUMBER_BYTES if self.bits == EXACT_BITS else self._quantizer.entry_bytes(rank)

    def fixed_bytes(self, width: int, heads: int) -> int:
        """The basis."""
        group = min(self.group, heads)
        return heads * width * group * int(self.rank * width) * NUMBER_BYTES

    def tensors(self) -> list[Tensor]:
        """The basis."""
        return [] if self.basis is None else [self.basis]


def _join(x: Tensor, heads: int) -> Tensor:
    """The vectors of a group's heads as one. [B, H, n, D] -> [B, H / heads, n, heads * D]"""
    found: Tensor = x.unflatten(1, (-1, heads)).transpose(2, 3).flatten(3)
    return found


def _split(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_join`."""
    found: Tensor = x.unflatten(3, (heads, -1)).transpose(2, 3).flatten(1, 2)
    return found


@dataclass(frozen=True)
class ProjectionRecorder(Method):
    """The full cache; sums up products of the channels of groups of heads, of keys before rotation and of values."""

    heads: int = 4

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        plain = step.rope.rotate(step.key.float(), step.positions, inverse=True)
        heads = min(self.heads, plain.shape[1])
        kv.state["heads"] = torch.tensor(heads)
        for name, x in (("key", plain), ("value", step.value.float())):
            joined = _join(x, heads)[0].double()
            kv.state[name] = joined.mT @ joined + kv.state.get(name, 0)
        return kv.attend(step)

    def summarize(self, state: dict[str, Tensor], tokens: int) -> Tensor:
        """Orthonormal vectors of keys and of values, the largest first. [2, H_kv / g, g, D, g * D]"""
        del tokens
        vectors = torch.linalg.eigh(torch.stack([state["key"], state["value"]])).eigenvectors.flip(-1).float()
        found: Tensor = vectors.unflatten(2, (int(state["heads"]), -1))
        return found
