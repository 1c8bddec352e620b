"""ReasonCACHE: trained entries before the text stand for demonstrations in the prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Step, resolved
from kvbench.methods.reuse.trained_prefix import Batch, Prefix, train
from kvbench.store import LayerKV
from kvbench.store.facts import Fact
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import check_shapes, find_part, get_part

if TYPE_CHECKING:
    from kvbench.hf import Model

TEXT = 96
"""Tokens of a text, where a prefix of no more entries is trained when a run starts."""
_PREFIXES: dict[str, list[tuple[Tensor, Tensor]]] = {}
"""Keys and values of every layer in float32, by hash of the weights."""


@dataclass
class PrefixedKV(LayerKV):
    """Every entry, after those of a prefix."""

    before: tuple[Tensor, Tensor] | None = None
    """Keys, rotated to the positions before 0, and values of the prefix. [H_kv, m, D] each"""

    prefixed: int = field(default=0, init=False)
    """Entries of the prefix that are stored, over all heads."""

    def append(self, step: Step) -> None:
        """Add a forward's entries; before the first ones, those of the prefix."""
        if self.before is not None:
            batch, (keys, values) = step.key.shape[0], self.before
            self.before, count = None, keys.shape[1]
            self.capacity += count
            places = torch.arange(-count, 0, device=step.key.device).expand(batch, -1)
            super().append(replace(
                step, seen=0, positions=places, query=step.query[:, :, :0],
                key=keys.to(step.key).expand(batch, -1, -1, -1), value=values.to(step.value).expand(batch, -1, -1, -1),
            ))
            self.prefixed = batch * keys.shape[0] * count
        super().append(step)

    def entries_kept(self) -> list[int]:
        """Stored entries of tokens of each (batch, KV head), without those of the prefix."""
        return [min(x, self.seen) for x in super().entries_kept()]

    def facts(self) -> dict[str, Fact]:
        """Entries of the prefix."""
        return {**super().facts(), "prefix_entries": Fact(self.prefixed, changed=True)}


@dataclass(frozen=True)
class ReasonCache(Method):
    """Stores `entries` trained entries per KV head before the text."""

    entries: Positive = 16
    weights: str = ""
    """A safetensors file of `scripts/train_part.py`. Empty: the shipped one, or training when a run starts."""
    steps: Positive = 4
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the prefix's weights."""
    trained_on: str | None = resolved()
    """The data of its training."""

    card: ClassVar[Card] = Card(
        name="reasoncache",
        title="ReasonCACHE: Teaching LLMs To Reason Without Weight Updates",
        idea="A few keys and values per layer are trained on demonstrations of a task and stored before the text. "
        "They stand for the demonstrations, which then take no room in the prompt.",
        arxiv="2602.02366",
        year=2026,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.BITS,
        calibration="a prefix, trained",
        heads="indexed",
        upstream=None,
        deviations=(
            ("The prefix stands at positions below 0 instead of moving the text: the same distances, by the shift of "
            "its keys."),
            "16 entries per KV head; the paper's numbers are for larger models.",
            ("Without a file of weights for the model, the prefix is trained when a run starts, on Python's manual; "
            "that of `mini` was trained to answer `kv-short` in another format (scripts/train_part.py)."),
        ),
        unverified=(
            "No code was published when this was written, and we read only the paper's abstract.",
            "The prefix starts as the last entries of one demonstration; the paper's choice of them is unknown to us.",
        ),
        limits=(
            "It stores the full cache and the prefix: it saves demonstrations, not memory.",
            "Training leaves out soft caps and learned sinks, so that it sees other attention in a model with them.",
            "A prefix serves the task and the format of answers that it was trained on, and may harm others.",
            "Models that learned their positions are refused: the prefix stands before them.",
        ),
    )

    inexact_prefill: ClassVar[str | None] = "the context attends to a trained prefix."
    recompressible: ClassVar[str | None] = "every entry is stored."

    def bind(self, model: Model) -> Self:
        """Find the prefix's weights, or train it (`UserError`: its keys cannot be moved on this model)."""
        if not model.entries_move:
            raise UserError(
                f"reasoncache moves keys to the positions before the text, which {model.id} does not allow: its "
                "positions are learned, or not understood. Use a model with rotary embedding."
            )
        sha256 = find_part(
            self, model, lambda: self._train(model), f"Python's manual, {self.steps} steps, {self.entries} entries",
        )
        part = get_part(sha256)
        prefix = Prefix(model, self.entries)
        held = part.weights.get("keys.0")
        if held is not None and held.dim() == 3 and held.shape[1] != self.entries:
            raise UserError(
                f"reasoncache: entries is {self.entries}, and the prefix trained for {model.id} has {held.shape[1]}. "
                f"Use --set entries={held.shape[1]}, or --set weights=FILE with a prefix of {self.entries} entries."
            )
        check_shapes("reasoncache", model, part, {name: tuple(x.shape) for name, x in prefix.state_dict().items()})
        if sha256 not in _PREFIXES or _PREFIXES[sha256][0][0].device != model.device:
            prefix.load_state_dict(dict(part.weights))
            prefix.to(model.device).requires_grad_(requires_grad=False)
            back = torch.full((1, self.entries), -self.entries, device=model.device)
            _PREFIXES[sha256] = [
                (rope.shift(keys[None], back)[0], values)
                for rope, keys, values in zip(model.ropes, prefix.keys, prefix.values, strict=True)
            ]
        return replace(self, part=sha256, trained_on=part.data)

    def layer(self, index: int) -> LayerKV:
        """A store that starts with the prefix."""
        return PrefixedKV(before=None if self.part is None else _PREFIXES[self.part][index])

    def layer_bytes(self, index: int, shape: Shape, entries: int) -> int:
        """Bytes of every entry and of the prefix, within the layer's window."""
        layer: LayerShape = shape.layers[index]
        held = entries + self.entries if layer.window is None else min(layer.window, entries + self.entries)
        return super().layer_bytes(index, shape, held)

    def _train(self, model: Model) -> Mapping[str, Tensor]:
        """Train on the manual: a prefix that starts as its first tokens, and predicts those after."""
        longest = max(TEXT, self.entries)  # a prefix starts as that many tokens
        ids = calibration_ids(model, longest * 8)
        size = min(longest, ids.shape[1] // 2)
        if size < self.entries:
            raise UserError(
                f"reasoncache: entries={self.entries} is too many for {model.id}, on which a prefix starts as {size} "
                f"tokens at most. Use --set entries={size} or fewer."
            )

        def draw(step: int) -> Batch:
            start = size + step * size % max(1, ids.shape[1] - 2 * size)
            text = ids[:, start : start + size]
            labels = torch.cat([text[:, 1:], torch.full_like(text[:, :1], -100)], dim=1)
            return text, labels

        return train(model, self.entries, self.steps, ids[:, :size], draw)
