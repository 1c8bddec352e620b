"""Mustafar: keeps the largest elements of every key and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.constraints import Natural, Share
from kvbench.method import BudgetKind, Card, Method, Shape, Step, Upstream
from kvbench.store import LayerKV
from kvbench.store.sparse import SparseKV


@dataclass(frozen=True)
class Mustafar(Method):
    """Drops the elements of smallest magnitude from every key and value, and keeps every token."""

    key_sparsity: Share = 0.5
    """Share of the elements of a key that are dropped."""
    value_sparsity: Share = 0.5
    """Share of the elements of a value that are dropped."""
    recent: Natural = 32
    """Last entries, which stay whole."""

    recompressible: ClassVar[str | None] = "every entry is pruned once, later ones when enough newer entries follow."
    graphable: ClassVar[str | None] = "later entries are pruned in blocks, and the store counts them on the host."
    card: ClassVar[Card] = Card(
        name="mustafar",
        title="MUSTAFAR: Promoting Unstructured Sparsity for KV Cache Pruning in LLM Inference",
        idea="Most elements of a key or value are small, at places that differ from token to token. "
        "Each vector keeps its largest elements and a bitmap of their places: no token and no whole channel is lost.",
        arxiv="2505.22913",
        year=2025,
        family="channels",
        stages=("compression",),
        budget=BudgetKind.BITS,
        heads="independent",
        upstream=Upstream(repo="dhjoo98/mustafar", commit="d83ee7e", license="Apache-2.0"),
        deviations=(
            ("Every vector of D elements keeps D - int(sparsity * D), ties by place; the authors' threshold keeps one "
            "more, and more where elements tie."),
            ("Bitmaps and elements of a token have slots of one size, so keys need no offsets and no padding; the "
            "authors' format stores keys by channel in tiles of 64 tokens and takes 65 % of the bytes at a sparsity of "
            "50 %, this one 56 % at 128 channels in 16 bits."),
            ("A later turn attends to its own entries whole; after the prompt the authors' code expects single tokens. "
            "Entries leave the whole ones in blocks of `recent`, so that decode steps copy little; in the authors' "
            "code one leaves in every step, or 256 together with its kernels."),
        ),
        limits=(
            "On a CPU a step is slower than with the full cache: expanding bitmaps costs more than it saves.",
            "Magnitude is the paper's main rule; its output-aware rule, which scores by queries, is not built.",
        ),
    )

    def layer(self, index: int) -> LayerKV:
        """A store that is pruned at the end of the context; later entries when their turn ends."""
        return SparseKV(key_sparsity=self.key_sparsity, value_sparsity=self.value_sparsity, recent=self.recent)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Prune after the attention of the context's last chunk, so that the prefill is exact."""
        assert isinstance(kv, SparseKV)
        if not step.moment.is_last:
            return
        if step.moment.compresses:
            kv.refuse_frozen()
        if step.moment.compresses or kv.sparse is not None:
            kv.prune()

    def identity(self, shape: Shape) -> bool:
        """Whether no element is dropped: none by the settings, or no entry is old enough."""
        return all(
            int(x.key_dim * self.key_sparsity) == int(x.value_dim * self.value_sparsity) == 0
            or shape.entries(x) <= self.recent
            for x in shape.layers
        )
