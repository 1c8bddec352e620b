"""Palu: keys before rotation and values of groups of heads as low-rank latents, restored in every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from kvbench.constraints import Gt, Le, Positive
from kvbench.errors import UserError
from kvbench.hf.adapter import find_bias
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, Upstream, resolved
from kvbench.methods.quantization.coded import CodedMethod
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.coded import CodedKV
from kvbench.store.coders import Coder, HadamardCoder, Parts, as_half
from kvbench.techniques.calibration import calibrate, calibrated

if TYPE_CHECKING:
    from kvbench.hf import Model

EXACT_BITS = 16
NUMBER_BYTES, BIAS_BYTES = 2, 4


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
    """SHA-256 of the subspaces and biases of all layers."""
    biased: tuple[tuple[int, ...], tuple[int, ...]] | None = resolved(by_bind=True)
    """The layers whose projection of keys has a bias, and those whose projection of values has one."""

    card: ClassVar[Card] = Card(
        name="palu",
        version="2",
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
        upstream=Upstream(repo="shadowpa0327/Palu", commit="bb22666", license="MIT"),
        deviations=(
            ("Latents are projections of the model's keys before rotation and of its values, less the bias of their "
            "projection, which is added back to what is restored; they are not outputs of factored weights. With the "
            "factors that are best on a text, which the paper finds by whitening its activations, the two are equal "
            "up to the rounding of the model's keys: the best weights project keys without bias on the subspace of "
            "the text's."),
            ("Below 16 bits, latents are coordinates in an orthonormal basis, quantized with a scale and a minimum per "
            "token and head. The authors' latents carry the square roots of the singular values and have one scale "
            "and a whole zero point per token and group of heads. Their code rotates them only if asked to. Here "
            "scales are rounded up and minima down to float16."),
            ("All layers have the same rank; the paper gives layers different ranks by the Fisher information, for "
            "which it needs gradients."),
            ("A rank is a whole number per head, rounded down; the authors' code rounds that of a group of heads to a "
            "multiple of 32."),
            "Values are restored too; the paper merges their second factor into the output projection.",
            "Subspaces are found on Python's manual when a run starts; the paper's text is Wikitext.",
            ("The context is stored exactly until its last chunk, so the first token is exact; with factored weights "
            "the prefill is approximate as well."),
        ),
        unverified=("tokens: chosen so that calibration takes seconds.",),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            ("A step restores and rotates every key: in plain PyTorch it is many times slower than the full cache."),
            ("The subspaces count as stored bytes, 2 bytes for each channel and rank of a group, and biases 4 bytes "
            "for each channel; in the paper they are weights, and the model's own become smaller."),
            ("Biases are found where projections are called k_proj and v_proj and no norm follows; those of a "
            "projection of queries, keys and values in one stay in the latents."),
            "The manual's text differs between versions of Python; the result records a hash of the subspaces.",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Find subspaces, once per process and model (`UserError` where rotations cannot be inverted)."""
        require_inverse_rotation(model, "palu")
        biases = tuple(
            (find_bias(attention, "k", x.kv_heads, x.key_dim), find_bias(attention, "v", x.kv_heads, x.value_dim))
            for attention, x in zip(model.attentions, model.layers, strict=True)
        )
        recorder = ProjectionRecorder(heads=self.group, biases=biases)
        keys, values = (tuple(i for i, x in enumerate(kind) if x.any()) for kind in zip(*biases, strict=True))
        found = calibrate(model, recorder, self.tokens, recorder.summarize)
        return replace(self, subspaces=found, biased=(keys, values))

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the layers with biases from a result (`UserError` unless they are layers of the model)."""
        biased: Any = resolution.get("biased")
        if biased is None:
            return self
        if len(biased) != 2 or any(layer not in range(len(shape.layers)) for layers in biased for layer in layers):
            raise UserError("palu: biased does not name layers of the model, for keys and for values.")
        keys, values = (tuple(layers) for layers in biased)
        return replace(self, biased=(keys, values))

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
        found = (None, None) if self.subspaces is None else calibrated(self.subspaces, layer)
        keys, values = (
            LatentCoder.of(x, self.rank, self.group, self.bits, biased=layer in layers)
            for x, layers in zip(found, self.biased or ((), ()), strict=True)
        )
        return keys, values

    def layer(self, index: int) -> LayerKV:
        """A store of keys before rotation."""
        keys, values = self.coders(index)
        return CodedKV(key_coder=keys, value_coder=values, plain=True)

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of the subspaces and biases, which all sequences use."""
        return self.tensor_bytes(shape)


@dataclass(frozen=True)
class LatentCoder(Coder):
    """Coordinates, less a bias, of a group of heads in an orthonormal basis, shared out evenly to its heads."""

    rank: float
    group: int
    bits: int
    biased: bool = False
    """Whether the model's projection has a bias."""
    basis: Tensor | None = None
    """Orthonormal columns by group of heads. [H_kv / g, g * D, g * r] float16; None: not found yet."""
    bias: Tensor | None = None
    """That bias. [H_kv, D] float32; None: there is none, or it is not found yet."""

    @classmethod
    def of(cls, found: Tensor | None, rank: float, group: int, bits: int, *, biased: bool = False) -> Self:
        """The coder of the first vectors of each group. found: see `ProjectionRecorder`; None: not found yet."""
        if found is None:
            return cls(rank, group, bits, biased)
        heads, channels = found.shape[1:3]
        basis = found[..., : heads * int(rank * channels)].flatten(1, 2).half()
        bias = found[..., -1].flatten(0, 1).clone() if biased else None  # a view would keep all vectors alive
        return cls(rank, group, bits, biased, basis, bias)

    def _find(self, heads: int) -> tuple[Tensor, int]:
        assert self.basis is not None, "call bind first: subspaces are found on the model"
        return self.basis.float(), heads // len(self.basis)

    def encode(self, x: Tensor) -> Parts:
        """Project groups of heads."""
        basis, heads = self._find(x.shape[1])
        # A bias is the same for all tokens and can be hundreds of times larger than what differs: in latents it would
        # take a rank, and their 16 bits or levels.
        apart = x.float() if self.bias is None else x.float() - self.bias[:, None].to(x.device)
        latent = _split(_join(apart, heads) @ basis.to(x.device), heads)
        return {"latent": as_half(latent)} if self.bits == EXACT_BITS else self._quantizer.encode(latent)

    def decode(self, parts: Parts, width: int) -> Tensor:
        """Restore groups of heads."""
        rank = int(self.rank * width)
        if self.bits == EXACT_BITS:
            latent = parts["latent"].float()
        else:
            latent = self._quantizer.back(self._quantizer.decode(parts, rank))
        basis, heads = self._find(latent.shape[1])
        restored = _split(_join(latent, heads) @ basis.mT.to(latent.device), heads)
        return restored if self.bias is None else restored + self.bias[:, None].to(latent.device)

    @property
    def _quantizer(self) -> HadamardCoder:
        return HadamardCoder(self.bits, None)

    def entry_bytes(self, width: int) -> int:
        """Latents."""
        rank = int(self.rank * width)
        return rank * NUMBER_BYTES if self.bits == EXACT_BITS else self._quantizer.entry_bytes(rank)

    def fixed_bytes(self, width: int, heads: int) -> int:
        """The basis and the bias."""
        bias = BIAS_BYTES if self.biased else 0
        return heads * width * (min(self.group, heads) * int(self.rank * width) * NUMBER_BYTES + bias)

    def tensors(self) -> list[Tensor]:
        """The basis and the bias."""
        return [x for x in (self.basis, self.bias) if x is not None]


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
    """The full cache; sums up products of the channels of groups of heads, of keys before rotation and of values.

    Both are without the bias of their projection.
    """

    heads: int = 4
    biases: tuple[tuple[Tensor, Tensor], ...] = field(default=(), compare=False)
    """Of keys and of values, by layer; the model decides them. [H_kv, D] each"""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        plain = step.rope.rotate(step.key.float(), step.positions, inverse=True)
        heads = min(self.heads, plain.shape[1])
        kv.state["heads"] = torch.tensor(heads)
        for name, x, bias in zip(("key", "value"), (plain, step.value.float()), self.biases[step.layer], strict=True):
            joined = _join(x - bias[:, None].to(x.device), heads)[0].double()
            kv.state[name] = joined.mT @ joined + kv.state.get(name, 0)
            kv.state[f"{name}_bias"] = bias.to(x.device)
        return kv.attend(step)

    def summarize(self, state: dict[str, Tensor], tokens: int) -> Tensor:
        """Orthonormal vectors of keys and of values, the largest first, and last the bias.

        [2, H_kv / g, g, D, g * D + 1]
        """
        del tokens
        heads = int(state["heads"])
        vectors = torch.linalg.eigh(torch.stack([state["key"], state["value"]])).eigenvectors.flip(-1).float()
        bias = torch.stack([state["key_bias"], state["value_bias"]]).unflatten(1, (-1, heads))
        return torch.cat([vectors.unflatten(2, (heads, -1)), bias[..., None]], dim=-1)
