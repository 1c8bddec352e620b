"""The full cache in 8 bits: a simple baseline for quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import BudgetKind, Card, Method, Step
from kvbench.store import LayerKV
from kvbench.store.int8 import Int8KV


@dataclass(frozen=True)
class FullInt8(Method):
    """Keeps every entry as 8-bit codes with one fp16 scale per token and KV head, for keys and values alike."""

    card: ClassVar[Card] = Card(
        name="full-int8",
        title="Full KV cache in 8 bits",
        idea="Every entry is stored as symmetric 8-bit codes with one scale per token and head. "
        "The scales are applied to logits and weights, so no exact copy of the cache is left after the context.",
        arxiv=None,
        year=None,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=("The context is stored exactly until its last chunk, so results do not depend on the chunk size.",),
        limits=(
            ("In plain PyTorch on a CPU converting codes to the model's type costs more than reading exact entries: a "
            "step is slower than with the full cache."),
        ),
    )

    recompressible: ClassVar[str | None] = "every entry is quantized once, and later entries as they are added."

    def layer(self, index: int) -> LayerKV:
        """A store that is quantized at the end of the context; later entries are quantized when added."""
        return Int8KV()

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Quantize the entries at the end of the context."""
        if isinstance(kv, Int8KV) and step.moment.compresses and not kv.quantized:
            kv.quantize()
