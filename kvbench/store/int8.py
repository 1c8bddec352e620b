"""Entries in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.kernels.int8_attention import int8_attention, quantize_rows
from kvbench.step import Step
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV

SCALE_BYTES = 2


@dataclass
class Int8KV(LayerKV):
    """Exact entries in 8 bits, one fp16 scale per token and head; exact until `quantize` ends the context."""

    quantized: bool = field(default=False, init=False)

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """One byte per element and two scales per entry."""
        del shape
        return entries * layer.kv_heads * (layer.key_dim + layer.value_dim + 2 * SCALE_BYTES)

    def quantize(self) -> None:
        """Replace the exact entries by their codes and free them."""
        exact = self._held()
        self._replace(quantize_rows(exact["key"], exact["value"]), self.n + self.remaining)
        self.quantized = True

    def _entries(self, step: Step) -> dict[str, Tensor]:
        return quantize_rows(step.key, step.value) if self.quantized else super()._entries(step)

    def attend(self, step: Step) -> Tensor:
        """Attention over codes, scales folded into queries and weights; exact before `quantize`."""
        if not self.quantized:
            return super().attend(step)
        assert self._buffer is not None
        return int8_attention(
            step.query, **{name: self._view(name) for name in self._buffer.tensors}, scale=step.scale,
            window=step.window, softcap=step.softcap, sinks=step.sinks, length=self.length,
        )

    def facts(self) -> dict[str, Fact]:
        """Entries in 8 bits and the distinct key codes among them."""
        entries = self.n * len(self.entries_kept()) if self.quantized else 0
        codes = int(torch.bincount(self.keys.flatten().view(torch.uint8)).count_nonzero()) if entries else 0
        return {
            **super().facts(), "entries_quantized": Fact(entries, changed=True),
            "distinct_codes": Fact(codes, maximum=True),
        }
