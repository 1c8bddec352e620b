"""The full cache in 8 bits: the baseline to beat."""

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
        idea="Every entry stays, as symmetric 8-bit codes with one scale per token and head. "
        "Scales fold into logits and weights, so no exact copy of the cache exists after the context.",
        arxiv=None,
        year=None,
        family="quantization",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=None,
        deviations=("The context is held exactly until its last chunk: results do not depend on the chunk size.",),
        limits=(
            ("In plain PyTorch on a CPU turning codes into the model's type costs more than reading exact rows: a step "
            "is slower than full's."),
        ),
    )

    recompressible: ClassVar[str | None] = "every entry becomes codes once, later ones as they come."

    def layer(self, index: int) -> LayerKV:
        """Entries that turn into codes at the end of the context; later entries are coded as they come."""
        return Int8KV()

    def evict(self, kv: LayerKV, step: Step) -> None:
        """The end of the context: exact entries become codes."""
        if isinstance(kv, Int8KV) and step.moment.compresses and not kv.quantized:
            kv.quantize()
