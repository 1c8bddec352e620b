"""CacheBlend: the tokens whose entries deviate most in an early layer are computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.constraints import Natural, Share
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.techniques.reuse import LIMITS, ApartMethod, MixedPrompt, ReusedKV


@dataclass(frozen=True)
class CacheBlend(ApartMethod):
    """All tokens run through the layers up to the check layer, a share of them through all layers."""

    ratio: Share = 0.15
    """Share of the tokens with entries at hand that is computed again in every layer."""
    metric: Literal["values", "keys"] = "values"
    """The entries whose squared deviation chooses: values, as in the paper's code, or rotated keys, as in LMCache."""
    check_layer: Natural = 1
    card: ClassVar[Card] = Card(
        name="cacheblend",
        title="CacheBlend: fast large language model serving for RAG with cached knowledge fusion",
        idea="In an early layer, compare computed entries with those taken over. The tokens that deviate most also do "
        "so in later layers, and only they are computed there.",
        arxiv="2405.16444",
        year=2024,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=Upstream(repo="YaoJiayi/CacheBlend", commit="55ad026", license=None),
        deviations=(
            ("A computed token sees the entries up to its own. The released code aligns the causal mask to the last "
            "entry, so that chosen tokens see later ones."),
            ("All tokens after the documents are computed, as in the released blend_samsum.py. The other three "
            "examples compute only the last one, and take the question's other entries from a run of it alone."),
            "The other tokens run through the whole check layer, not only up to its values.",
            "One ratio for all layers, as in the released code; the paper lowers it layer by layer.",
            "The default of ratio is 0.15; that of the released code is 0.16, and two of its four examples set 0.18.",
        ),
        limits=LIMITS,
    )

    def run(self, mixed: MixedPrompt) -> Tensor:
        """Compute everything up to the check layer, then the tokens that deviate most there."""
        last = min(self.check_layer, len(mixed.layers) - 1)

        def narrow(step: Step, kv: ReusedKV) -> Tensor | None:
            if step.layer != last:
                return None
            old, new = (kv.values, step.value) if self.metric == "values" else (kv.keys, step.key)
            deviation = (new.float() - old.float()).square().sum((0, 1, 3))  # [N]
            at_hand = mixed.reused.nonzero()[:, 0]
            count = int(self.ratio * len(at_hand))
            return mixed.with_fresh(at_hand[deviation[at_hand].topk(count).indices])

        return mixed.run(mixed.places, narrow=narrow)
