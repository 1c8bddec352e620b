"""Runs a text through a model and hands every layer's queries, keys, values and attention to functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvbench.hf import Model
from kvbench.hf.adapter import Forward, attached, run_model
from kvbench.step import Moment, Step

Values = dict[str, float | list[float]]
"""Statistics of one text by name; a list has one number per layer."""


class Layer:
    """One layer in the forward pass of one text, batch 1."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.index = step.layer
        self.query, self.key, self.value = step.query[0].float(), step.key[0].float(), step.value[0].float()
        self.length = self.query.shape[1]

    @cached_property
    def attention(self) -> Tensor:
        """Causal attention, in a sliding layer within its window. [H_q, T, T]"""
        return attend(self.query, self.key, self.step.scale, causal_mask(self.length, self.step.window))

    @property
    def rotated(self) -> bool:
        """Whether the layer rotates queries and keys."""
        return self.step.rope.angles is not None

    @cached_property
    def plain_key(self) -> Tensor:
        """Keys before rotation. [H_kv, T, D]"""
        return self.step.rope.rotate(self.step.key, self.step.positions, inverse=True)[0].float()

    @cached_property
    def plain_query(self) -> Tensor:
        """Queries before rotation. [H_q, T, D]"""
        return self.step.rope.rotate(self.step.query, self.step.positions, inverse=True)[0].float()


class Observer(ABC):
    """Collects statistics layer by layer."""

    @abstractmethod
    def see(self, layer: Layer) -> None:
        """Add a layer."""

    @abstractmethod
    def result(self) -> Values:
        """The statistics of the text, after the last layer."""


def causal_mask(length: int, window: int | None = None) -> Tensor:
    """True where a query may attend. [T, T]"""
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return mask if window is None else mask.triu(1 - window)


def attend(query: Tensor, key: Tensor, scale: float, allowed: Tensor) -> Tensor:
    """Attention weights where it is allowed. query: [H_q, R, D], key: [H_kv, T, D]. Returns [H_q, R, T]"""
    repeated = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    return (query @ repeated.mT * scale).masked_fill(~allowed, -torch.inf).softmax(-1)


def mix(weights: Tensor, value: Tensor) -> Tensor:
    """Attention output. weights: [H_q, R, T], value: [H_kv, T, D_v]. Returns [1, H_q, R, D_v]"""
    return (weights @ value.repeat_interleave(weights.shape[0] // value.shape[0], dim=0))[None]


def observe(model: Model, ids: Sequence[int], functions: Sequence[Callable[[Layer], None]]) -> None:
    """Run a text exactly, and show each layer to every function."""
    def compute(layer: Layer) -> Tensor:
        for see in functions:
            see(layer)
        return mix(layer.attention, layer.value)

    run_layers(model, ids, compute, keep=1)


def run_layers(
    model: Model, ids: Sequence[int], compute: Callable[[Layer], Tensor], *, keep: int, first_position: int = 0
) -> Tensor:
    """Log-probabilities of the last `keep` positions, with attention computed by a function of the layer. [keep, V]"""
    positions = torch.arange(first_position, first_position + len(ids))[None]
    forward = Forward(
        moment=Moment.CONTEXT_CHUNK, positions=positions, seen=first_position + len(ids),
        attend=lambda step: compute(Layer(step)).to(step.value.dtype), ropes=model.ropes,
    )
    with attached(model.module):
        return run_model(model.module, torch.tensor([list(ids)]), forward, keep)[0].float().log_softmax(-1)
