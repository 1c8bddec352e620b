"""WeDLM: causal attention over decoded tokens, then masks, which keeps a prefix of entries exact (arXiv 2512.22737)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Ge, Gt, Positive
from kvbench.diffusion.policy import Denoising, PassPlan, Policy, require_single, top
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.kernels.dense_attention import dense_attention
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.store.positions import PositionKV


@dataclass
class CausalKV(PositionKV):
    """Entries in the order in which causal attention reads them: committed tokens, then the pass's own."""

    final: int = field(default=0, init=False)
    """Committed entries, which never change."""

    def append(self, step: Step) -> Tensor:
        """Write the pass's entries behind the committed ones; their attention. [B, H_q, m, D_v]"""
        held_keys, held_values = self.reserve(step)
        end = self.final + step.key.shape[2]
        held_keys[:, :, self.final : end], held_values[:, :, self.final : end] = step.key, step.value
        keys, values = held_keys[:, :, :end], held_values[:, :, :end]
        self.read_bytes += keys.nbytes + values.nbytes
        return dense_attention(step.query, keys, values, scale=step.scale, seen=end)


@dataclass(frozen=True)
class WeDlm(Policy):
    """window: positions that a pass computes, from the first mask on.

    entropy: tokens below it are committed, with `penalty` added per position behind the first mask; none: every pass
    commits one token.
    """

    window: Positive = 16
    entropy: Annotated[float, Gt(0)] | None = 0.4
    penalty: Annotated[float, Ge(0)] = 0.02

    scheduled: ClassVar[bool] = False

    card: ClassVar[Card] = Card(
        name="wedlm", title="WeDLM: causal attention in diffusion models", models="diffusion",
        idea="In every pass, decoded tokens stand before masks, at their own rotary positions, and attention is "
             "causal. So the entries of decoded tokens that have no mask before them never change, and are kept.",
        arxiv="2512.22737", year=2025, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="Tencent/WeDLM", commit="0216110", license="License Terms of WeDLM"),
        deviations=(
            "an answer of fixed length is filled; the reference stops at the first end of text",
            "with a shifted head the last committed position is computed again in every pass, as a predictor",
        ),
        limits=(
            ("its authors train models for causal attention; on models trained with full attention the cache is exact, "
            "and the answers are those of a model that it was not trained to be"),
            "it decides by entropy how many tokens a pass commits: --gen steps has no effect on it",
            "the answer is one block: leave --gen block out", "one sequence at a time",
        ),
    )

    def store(self, length: int) -> PositionKV:
        """A store in causal order."""
        return CausalKV(length)

    def check(self, sampling: Sampling, answer: int) -> None:
        """Refuse blocks and other rules of acceptance.

        Raises:
            UserError: the answer has several blocks, a threshold, or random remasking.
        """
        sampling.require_one_block("wedlm", answer)
        if sampling.threshold is not None or sampling.remasking == "random":
            raise UserError(
                "wedlm commits tokens by their entropy: leave --gen threshold and --gen remasking out, and use "
                "--set entropy=0.4."
            )

    def begin(self, d: Denoising) -> None:
        """Require a single sequence.

        Raises:
            UserError: there are several.
        """
        require_single(d, self.card.name, "windows move by their own progress")

    def plan(self, d: Denoising) -> PassPlan:
        """Decoded tokens that are not committed, and the masks of the window."""
        kv = d.stores[0]
        assert isinstance(kv, CausalKV)
        return PassPlan(compute=d.within(kv.final, self._end(d)).expand_as(d.ids))

    def run(self, d: Denoising, plan: PassPlan, index: Tensor) -> Tensor:
        """Decoded tokens before masks, each in ascending order. [1, m, D]"""
        order = d.masked[0, index[0]].to(torch.uint8).argsort(stable=True)
        hidden = super().run(d, plan, index[:, order])
        return hidden[:, order.argsort()]

    def look(self, d: Denoising, kv: PositionKV, plan: PassPlan, step: Step) -> Tensor:
        """Causal attention over committed entries and the pass's own."""
        del d, plan
        assert isinstance(kv, CausalKV)
        return kv.append(step)

    def open(self, d: Denoising) -> Tensor:
        """The masks of the window. [1, N]"""
        return d.masked & d.within(d.prompt, self._end(d))

    def confidence(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The negative entropy of the prediction. [M]"""
        del tokens
        chances = logits.log_softmax(-1)
        return (chances.exp() * chances.masked_fill(chances == -torch.inf, 0.0)).sum(-1)

    def accept(self, d: Denoising, confidence: Tensor) -> Tensor:
        """Tokens of low entropy, which counts for more the farther they are behind the first mask; one at least."""
        scores = confidence - self.penalty * (d.positions - self._first(d))
        best = top(scores, torch.ones_like(d.quota))
        return best if self.entropy is None else best | (scores > -self.entropy)

    def commit(self, d: Denoising, accepted: Tensor) -> None:
        """Keep the entries of tokens that had no mask before them in this pass."""
        del accepted
        first = int((~d.before[0]).nonzero()[0])
        for kv in d.stores:
            assert isinstance(kv, CausalKV)
            kv.final = first - d.masking.shifted

    def _first(self, d: Denoising) -> int:
        """The position of the first mask."""
        return int(d.masked[0].nonzero()[0])

    def _end(self, d: Denoising) -> int:
        """The end of the window."""
        return min(self._first(d) + self.window, d.ids.shape[1])
