"""Rotary embedding of one layer, as the model itself applies it, and its inverse."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.errors import UserError


@dataclass(frozen=True)
class Rope:
    """Rotates keys and queries of one layer; knows partial, interleaved and per-layer-type variants, and none.

    The model's own rotary module makes the angles and the model's own function applies them, so their conventions
    need no copy here. `kvbench.hf.proof` checks on the loaded model that a shift moves keys as the model would.
    """

    angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None
    """(x, positions [B, T]) -> cos, sin [B, T, D_rot], attention scaling included."""
    apply: Callable[..., tuple[Tensor, Tensor]] | None
    scaling: float
    """YaRN's factor on rotated queries and keys; 1 elsewhere."""
    width: int
    """Leading dimensions of a head that are rotated."""
    trusted: bool
    """Whether the proof at load found that a shift of positions is this rotation."""

    def rotate(self, x: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
        """Rotate rows to their positions as the model does, or take the rotation (and its scaling) off again.

        x: [B, H, T, D]. positions: [B, T].

        Raises:
            UserError: the layer's rotary embedding is not understood.
        """
        factor = 1 / self.scaling if inverse else self.scaling
        return self._turn(x, positions, -1.0 if inverse else 1.0, factor)

    def shift(self, x: Tensor, distance: Tensor) -> Tensor:
        """Move rotated rows by a number of positions. x: [B, H, T, D]. distance: [B, T], may be negative."""
        return self._turn(x, distance, 1.0, 1.0)

    def _turn(self, x: Tensor, positions: Tensor, sign: float, factor: float) -> Tensor:
        if not self.trusted:
            raise UserError(
                "this model's rotary embedding is not understood on every layer, and the method needs to rotate keys. "
                "Use a method that leaves keys where they are."
            )
        if self.angles is None or self.apply is None:
            return x
        cos, sin = self.angles(x.float(), positions)
        cos, sin = cos.float() / self.scaling * factor, sin.float() / self.scaling * factor * sign
        part = x[..., : self.width].float()
        turned, _ = self.apply(part, part, cos, sin)
        return torch.cat([turned.to(x.dtype), x[..., self.width :]], dim=-1)


NO_ROPE = Rope(angles=None, apply=None, scaling=1.0, width=0, trusted=True)


def find_rope(decoder: nn.Module, attention: nn.Module, layer_type: str | None, key: Tensor) -> Rope | None:
    """The candidate for one attention module, to be trusted after the proof. key: one of its keys. [B, H, T, D]"""
    rotary: Any = getattr(decoder, "rotary_emb", None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotary is None or apply is None:
        return None
    typed = "layer_type" in inspect.signature(rotary.forward).parameters
    scaling = getattr(rotary, f"{layer_type}_attention_scaling" if typed else "attention_scaling", 1.0)

    def angles(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rotary(x, positions, layer_type) if typed else rotary(x, positions)
        return cos, sin

    # Some models hand the whole head to their function and some only the part that is rotated; some give angles for
    # half of it. The width that fits is found by trying.
    cos, sin = angles(key.float(), torch.zeros(key.shape[0], key.shape[2], dtype=torch.long, device=key.device))
    for width in (cos.shape[-1], 2 * cos.shape[-1], key.shape[-1]):
        part = key[..., :width].float()
        try:
            turned, _ = apply(part, part, cos, sin)
        except RuntimeError:
            continue
        if turned.shape == part.shape:
            return Rope(angles=angles, apply=apply, scaling=float(scaling), width=width, trusted=True)
    return None
