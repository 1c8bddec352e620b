"""VeriCache: any compressed cache drafts, and the full cache in host memory verifies."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

from kvbench.constraints import Positive
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method
from kvbench.methods.eviction.kvzip import KVzip
from kvbench.methods.lossless.verified import Verified
from kvbench.store import LayerKV
from kvbench.store.verified import HostKV

DEVIATIONS = (
    ("After a round the draft's cache takes the accepted entries as the full cache computed them, and its method may "
    "evict or quantize them as it does while decoding."),
    ("The entries of a verification pass are fetched layer by layer before their attention; they are not prefetched "
    "while tokens are drafted, and rounds of different requests are not staggered."),
    "A batch accepts as many tokens per round as its sequence with the fewest.",
)
LIMITS = (
    "The budget counts the draft's cache. The full cache is stored in host memory in addition.",
    ("Greedy decoding only. Answers equal those of the full cache as far as a pass over several tokens gives the "
    "logits of single steps: always in float32 as tested, and up to near ties in 16 bits."),
    "A round fetches the full cache once, so few accepted tokens per round make it slower than the full cache.",
)


@dataclass(frozen=True)
class VerifiedOnHost(Verified):
    """Verifies with every entry, in host memory after the context."""

    draft_length: Positive = 25
    """Most tokens that are drafted in a round."""

    def target_layer(self, index: int) -> LayerKV:
        """Every entry."""
        del index
        return HostKV()


@dataclass(frozen=True)
class VeriCache(VerifiedOnHost):
    """Drafts with KVzip's cache, as in the paper; `x+vericache` drafts with that of method x."""

    card: ClassVar[Card] = Card(
        name="vericache",
        version="2",
        title="VeriCache: lossless decoding from a compressed KV cache",
        idea="A compressed cache predicts most of the full cache's next tokens. It drafts tokens, and one pass over "
        "the full cache in host memory verifies them, so that the answer is that of the full cache.",
        arxiv="2605.17613",
        year=2026,
        family="lossless",
        stages=("generation", "compression", "loading"),
        budget=BudgetKind.STORED,
        paper_budget="20%",
        heads="pooled",
        upstream=None,
        deviations=DEVIATIONS,
        unverified=("The paper's draft length with KVzip, 25, and its budget, 20 %, are from a summary of it.",),
        limits=LIMITS,
    )

    replays_context: ClassVar[bool] = True  # KVzip does

    @cached_property
    def drafter(self) -> Method:
        """KVzip."""
        return KVzip(rows=self.rows, length=self.length)

    @classmethod
    def over(cls, inner: type[Method]) -> type[Method]:
        """Create `inner+vericache`: the other method's cache drafts.

        Raises:
            UserError: the other method has no cache that could draft.
        """
        name = f"{inner.card.name}+{cls.card.name}"
        if (reason := _reason(inner)) is not None:
            raise UserError(
                f"{name} makes no sense: {reason}. Use a method that stores a part of the entries, such as "
                "snapkv+vericache."
            )
        card = inner.card.model_copy(update={
            "name": name, "version": f"{inner.card.version}.2", "family": cls.card.family,
            "deviations": (*inner.card.deviations, *DEVIATIONS), "limits": (*inner.card.limits, *LIMITS),
        })
        body = {
            "card": card, "inner": inner, "replays_context": inner.replays_context, "__doc__": inner.__doc__,
            "__module__": inner.__module__,
        }
        return dataclass(frozen=True)(type(name, (Drafted, inner), body))


def _reason(inner: type[Method]) -> str | None:
    """Why a method's cache cannot draft; None: it can."""
    name = inner.card.name
    if inner.card.models != "autoregressive":
        return f"{name} works on diffusion models"
    if inner.card.budget in (BudgetKind.NONE, BudgetKind.PROMPT):
        return f"{name} stores every entry, and drafts nothing faster"
    if inner.prepares_questions:
        return f"{name} loads another cache for every question"
    if inner.skips_layers:
        return "tokens skip layers, so no cache has every entry"
    if issubclass(inner, Verified):
        return f"{name} verifies its tokens itself"
    return None


class Drafted(VerifiedOnHost):
    """Verifies what another method's cache drafts; settings and budget are those of the other method."""

    inner: ClassVar[type[Method]]

    @cached_property
    def drafter(self) -> Method:
        """The other method alone, with what `bind` and `fit` have resolved."""
        return self.inner(**{x.name: getattr(self, x.name) for x in fields(self.inner)})

    def minimum_entries(self) -> int:
        """Those of the other method."""
        return self.drafter.minimum_entries()
