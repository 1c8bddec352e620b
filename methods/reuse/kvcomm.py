"""KVCOMM: a document's own entries, and offsets that similar texts had in the same place of earlier prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Gt, Positive, Share
from kvbench.method import BudgetKind, Card, Upstream
from kvbench.techniques.reuse import LIMITS, ApartMethod, Chunk, MixedPrompt, run_earlier


@dataclass(frozen=True)
class Anchor:
    """A text of an earlier prompt: its entries alone, and those that it had there. [L, H_kv, T, D]"""

    keys: Tensor
    values: Tensor
    key_offset: Tensor
    value_offset: Tensor


def mix(own: Tensor, anchors: list[Tensor], offsets: list[Tensor], temperature: float) -> Tensor:
    """Entries plus the anchors' offsets, weighted token by token by distance; layer 0 stays. own: [L, H_kv, T, D]"""
    count = own.shape[2]
    distances = torch.stack([(own - x[:, :, :count]).abs().mean((0, 1, 3)) for x in anchors])  # [A, T]
    weights = (-distances / temperature).softmax(0)
    change = sum((w[:, None] * x[:, :, :count] for w, x in zip(weights, offsets, strict=True)), torch.zeros(()))
    found = own + change
    found[0] = own[0]
    return found


@dataclass(frozen=True)
class KVComm(ApartMethod):
    """Documents in the same place of earlier prompts are anchors for those that take that place now."""

    entropy: Share = 0.3
    """A document is computed if the entropy of the anchors' weights exceeds this share of its maximum."""
    anchors: Positive = 20
    """Most anchors of a place; the latest stay."""
    temperature: Annotated[float, Gt(0)] = 1.0
    as_released: bool = False
    """Compare and add keys as rotated in their own prompts."""
    card: ClassVar[Card] = Card(
        name="kvcomm",
        title="KVCOMM: online cross-context KV-cache communication for LLM-based multi-agent systems",
        idea="The same place of a prompt changes the entries of similar texts alike. A text's own entries are rotated "
        "to its place, and the changes of texts that stood there before are added, weighted by similarity.",
        arxiv="2510.12872",
        year=2025,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=Upstream(repo="FastMAS/KVCOMM", commit="48ca0b3", license=None),
        deviations=(
            ("Keys are compared and added before rotation. The released code uses them as rotated, so that offsets fit "
            "only equal positions; `as_released` does the same."),
            "Anchors are the documents with the same number in earlier prompts; the least used are not dropped first.",
            "The text that follows a placeholder is computed, not corrected.",
            "Only a document without enough anchors is computed; the released code then computes all of the prompt.",
            ("A text's own entries are those of a run behind the prompt's first token. For an agent's answer the "
            "released code takes those of the prompt in which it was decoded (gpt_chat.py, line 1346)."),
        ),
        limits=LIMITS,
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over known parts with the offsets of their anchors; the others are computed."""
        known = mixed.reuse.known
        for i, (start, part) in enumerate(mixed.parts):
            if part not in known:
                continue
            own = mixed.obtain(self.before(mixed) if i else (), part)
            if not i:
                mixed.add(own, start)
            elif (found := self._correct(mixed, i, start, own)) is not None:
                mixed.add(found, start)

    def _correct(self, mixed: MixedPrompt, index: int, start: int, own: Chunk) -> Chunk | None:
        """A document's entries with the offsets of its anchors; None: there are too few, or none stands out."""
        keys, values = self._keys(mixed, own.keys, start), torch.cat(own.values).float()
        prompts = [x for x in mixed.reuse.earlier if len(x) > index and len(x[index]) >= own.length][-self.anchors :]
        if len(prompts) < 2:
            return None
        anchors = [self._anchor(mixed, prompt, index) for prompt in prompts]
        distances = torch.stack([(values - x.values[:, :, : own.length]).norm() for x in anchors])
        weights = (-distances).softmax(0)
        if -(weights * weights.clamp(min=1e-30).log2()).sum() > self.entropy * math.log2(len(anchors)):
            return None
        keys = mix(keys, [x.keys for x in anchors], [x.key_offset for x in anchors], self.temperature)
        values = mix(values, [x.values for x in anchors], [x.value_offset for x in anchors], self.temperature)
        kind = own.keys[0].dtype
        return Chunk(
            self._keys_back(mixed, keys, start, kind), [x[None].to(kind) for x in values]
        )

    def _anchor(self, mixed: MixedPrompt, prompt: tuple[tuple[int, ...], ...], index: int) -> Anchor:
        own = mixed.obtain(self.before(mixed), prompt[index])
        whole, first = run_earlier(mixed, prompt), sum(map(len, prompt[:index]))
        span = slice(first, first + own.length)
        keys, values = self._keys(mixed, own.keys, first), torch.cat(own.values).float()
        there = self._keys(mixed, [x[:, :, span] for x in whole.keys], first)
        return Anchor(keys, values, there - keys, torch.cat([x[:, :, span] for x in whole.values]).float() - values)

    def _keys(self, mixed: MixedPrompt, keys: list[Tensor], start: int) -> Tensor:
        """Keys of all layers, before rotation or, as released, at their positions. [L, H_kv, T, D] float32"""
        if not self.as_released:
            return torch.cat(keys).float()
        return torch.cat([rope.rotate_from(x.float(), start) for rope, x in zip(mixed.model.ropes, keys, strict=True)])

    def _keys_back(self, mixed: MixedPrompt, keys: Tensor, start: int, kind: torch.dtype) -> list[Tensor]:
        """The reverse of `_keys`, by layer. [1, H_kv, T, D]"""
        if not self.as_released:
            return [x[None].to(kind) for x in keys]
        return [
            rope.rotate_from(x[None], start, inverse=True).to(kind)
            for rope, x in zip(mixed.model.ropes, keys, strict=True)
        ]
