"""Rotary position embedding of one layer, as the model itself applies it, and its inverse."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.errors import UserError

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}
"""Mean relative difference of shifted keys that rounding can cause."""


@dataclass(frozen=True)
class Rope:
    """Rotates keys and queries of one layer, in partial, interleaved and per-layer-type variants, or not at all.

    The model's own rotary module computes the angles and its own function applies them, so no convention is
    reimplemented here. `prove_ropes` checks on the loaded model that a shift moves keys as the model does.
    """

    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    """(x, positions [B, T]) -> cos, sin [B, T, D_rot], attention scaling included."""
    apply: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    """(x [B, H, T, width], cos, sin) -> x, rotated."""
    scaling: float
    """YaRN's factor on rotated queries and keys; 1 without YaRN."""
    width: int
    """Number of leading channels of a head that are rotated."""
    trusted: bool
    """Whether the load check confirmed that this rotation, or none, explains how keys depend on positions."""
    movable: bool = True
    """Whether a rotated key can be moved to another position; false for models with learned positions."""

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate vectors to their positions as the model does; with `inverse`, undo rotation and scaling.

        x: [B, H, T, D]. positions: [B, T].

        Raises:
            UserError: the layer's rotary embedding is not understood.
        """
        factor = 1 / self.scaling if inverse else self.scaling
        return self._turn(x, positions, factor, back=inverse)

    def rotate_from(self, x: Tensor, start: int, *, inverse: bool = False) -> Tensor:
        """As `rotate`, for tokens in a row, the first of which is at `start`. x: [B, H, T, D]"""
        positions = torch.arange(start, start + x.shape[2], device=x.device).expand(x.shape[0], -1)
        return self.rotate(x, positions, inverse=inverse)

    def shift(self, x: Tensor, distance: Tensor) -> Tensor:
        """Move rotated vectors by a number of positions. x: [B, H, T, D]. distance: [B, T], may be negative.

        Raises:
            UserError: the layer's rotary embedding is not understood, or the model learned its positions.
        """
        if not self.movable:
            raise UserError(
                "this model adds learned positions to its input, so its keys cannot be moved to other positions. "
                "Use a method that leaves keys where they are."
            )
        return self._turn(x, distance, 1.0)

    def terms(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The coefficients of `rotate` for use in a kernel: channel c becomes x[c] * cos[c] + x[partner[c]] * sin[c].

        positions: [B, T]. Returns cos and sin [B, T, W] in float32 for the leading W channels, sin with its sign, and
        partner [W]; None if nothing is rotated.

        Raises:
            UserError: the layer's rotary embedding is not understood.
        """
        self._refuse_unknown()
        if self.angles is None or self.apply is None:
            return None
        cos, sin = self.angles(torch.zeros((), device=positions.device), positions)
        ones = cos.new_ones((*positions.shape, self.width))[:, None]
        numbers = torch.arange(1.0, self.width + 1, device=cos.device)[None, None, None]
        one = torch.ones_like(cos[:1, :1])
        partner = self.apply(numbers, torch.zeros_like(one), one)[0, 0, 0].abs().long() - 1
        return (
            self.apply(ones, cos, torch.zeros_like(sin))[:, 0], self.apply(ones, torch.zeros_like(cos), sin)[:, 0],
            partner,
        )

    def _refuse_unknown(self) -> None:
        if not self.trusted:
            raise UserError(
                "this model's rotary embedding is not understood on every layer, and the method needs to rotate keys. "
                "Use a method that leaves keys where they are."
            )

    def _turn(self, x: Tensor, positions: Tensor, factor: float, *, back: bool = False) -> Tensor:
        self._refuse_unknown()
        if self.angles is None or self.apply is None:
            return x
        cos, sin = self.angles(x.float(), positions)
        cos, sin = cos.float(), -sin.float() if back else sin.float()
        if self.scaling != 1:
            cos, sin = cos / self.scaling * factor, sin / self.scaling * factor
        turned = self.apply(x[..., : self.width].float(), cos, sin).to(x.dtype)
        return turned if self.width == x.shape[-1] else torch.cat([turned, x[..., self.width :]], dim=-1)


NO_ROPE = Rope(angles=None, apply=None, scaling=1.0, width=0, trusted=True)


def prove_ropes(
    module: PreTrainedModel, near: Sequence[Tensor], far: Sequence[Tensor], distance: int
) -> tuple[Rope, ...]:
    """The rotary embedding of each layer, trusted if shifting a single token's keys by `distance` matches the model.

    near, far: keys of the same single token at two positions, by layer. [1, H, 1, D]
    """
    types = getattr(module.config.get_text_config(), "layer_types", None) or [None] * len(near)
    learned = not _rotates(module)
    moves = torch.tensor([[distance]], device=near[0].device)
    ropes = []
    for before, after, kind in zip(near, far, types, strict=True):
        if learned:
            ropes.append(replace(NO_ROPE, movable=_difference(before, after) <= TOLERANCE[before.dtype]))
            continue
        # Both are judged, because a small error can be large dimensions that hardly turn.
        judged = [(_difference(x.shift(before, moves), after), x) for x in (NO_ROPE, *_find(module, kind, before))]
        error, best = min(judged, key=lambda pair: pair[0])
        ropes.append(best if error <= TOLERANCE[before.dtype] else replace(NO_ROPE, trusted=False, movable=False))
    return tuple(ropes)


def rope_types(config: object) -> set[str]:
    """The types of rotary scaling in a configuration, over all layer types."""
    return {str(x["rope_type"]) for x in _parameters(config) if "rope_type" in x}


def max_length(config: object) -> int:
    """Positions that one set of rotary frequencies covers: the model's maximum, or LongRoPE's original length."""
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    key = "original_max_position_embeddings"
    longropes = [x for x in _parameters(config) if x.get("rope_type") == "longrope"]
    originals = [x.get(key) or getattr(config, key, None) for x in longropes]
    return min([longest, *(int(x) for x in originals if x)])


def _parameters(config: object) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(x for x in parameters.values() if isinstance(x, dict))]


def _rotates(module: PreTrainedModel) -> bool:
    """Whether the names in the model's module and source file indicate a rotary embedding."""
    names = [*vars(sys.modules[type(module).__module__]), *(name for name, _ in module.named_modules())]
    return any("rotary" in x.lower() or "rope" in x.lower().split("_") for x in names)


def _difference(x: Tensor, y: Tensor) -> float:
    """Mean relative difference; elements near zero are compared with the typical magnitude."""
    x, y = x.float(), y.float()
    typical = 0.01 * y.square().mean().sqrt() + 1e-12
    return ((x - y).abs() / (x.abs() + y.abs() + typical)).mean().item()


def _find(module: PreTrainedModel, layer_type: str | None, key: Tensor) -> Iterator[Rope]:
    """Candidates for the layer's rotation, to be compared by their effect. key: a key of the layer. [B, H, T, D]"""
    rotary: Any = next((x.rotary_emb for x in module.modules() if hasattr(x, "rotary_emb")), None)
    function = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if rotary is None or function is None:
        return
    typed = "layer_type" in inspect.signature(rotary.forward).parameters
    scaling = float(getattr(rotary, f"{layer_type}_attention_scaling" if typed else "attention_scaling", 1.0))
    alone = list(inspect.signature(function).parameters)[1] == "cos"  # some models rotate queries and keys separately

    def angles(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(x, positions, layer_type) if typed else rotary(x, positions)
        return cos.to(x.device), sin.to(x.device)  # the rotary module may be on another device than the layer

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned: Tensor = function(x, cos, sin) if alone else function(x, x[:, :1], cos, sin)[0]  # one head is cheaper
        return turned

    # Some models pass the whole head to their function, some only the rotated part; some compute angles for half of it.
    cos, sin = angles(key.float(), torch.zeros(key.shape[0], key.shape[2], dtype=torch.long, device=key.device))
    for width in dict.fromkeys((cos.shape[-1], 2 * cos.shape[-1], key.shape[-1])):
        part = key[..., :width].float()
        try:
            turned = apply(part, cos, sin)
        except (RuntimeError, TypeError):
            continue
        if turned.shape == part.shape:
            yield Rope(angles=angles, apply=apply, scaling=scaling, width=width, trusted=True)
