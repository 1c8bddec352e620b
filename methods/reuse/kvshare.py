"""KVShare: entries of a similar prompt, found token by token, and those of high deviation computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Positive, Share
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.techniques.reuse import LIMITS, MixedPrompt, ReusedKV, ReuseMethod, attention_rows, run_earlier

CHECK_LAYER = 1
CODE = "vllm/attention/backends/xformers.py"
PUNCTUATION = frozenset(".,!?;:\n\u3002\uff0c\uff01\uff1f\uff1b\uff1a")


def align(source: Sequence[int], target: Sequence[int], width: int) -> list[tuple[int, int] | None]:
    """The source token of each target token in the longest common segment of `width` or more tokens around it.

    Returns the segment's length and the place in the source; None: no segment. A target segment takes the first source
    segment that begins alike.
    """
    first: dict[tuple[int, ...], int] = {}
    for i in range(len(source) - width + 1):
        first.setdefault(tuple(source[i : i + width]), i)
    starts = [(j, first.get(tuple(target[j : j + width]))) for j in range(len(target) - width + 1)]
    found: list[tuple[int, int] | None] = [None] * len(target)
    for offset, run in groupby(starts, key=lambda x: None if x[1] is None else x[1] - x[0]):
        places = [j for j, _ in run]
        if offset is None:
            continue
        length = len(places) + width - 1
        for j in range(places[0], places[0] + length):
            old = found[j]
            if old is None or old[0] < length:
                found[j] = length, j + offset
    return found


@dataclass(frozen=True)
class KVShare(ReuseMethod):
    """Takes over tokens of earlier prompts in common segments, and computes again those of high deviation."""

    ratio: Share = 0.15
    """Share of the tokens taken over that is computed again in every layer."""
    width: Positive = 5
    """Fewest tokens of a common segment."""
    as_released: bool = False
    """Choose by the rank of tokens among those taken over, where the released code means their places."""
    card: ClassVar[Card] = Card(
        name="kvshare",
        title="KVShare: an LLM service system with efficient and effective multi-tenant KV cache reuse",
        idea="Common segments of a similar earlier prompt are taken over token by token. Of these, the tokens whose "
        "values deviate most in an early layer, weighted by the attention that they receive, are computed again.",
        arxiv="2503.16525",
        year=2025,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=Upstream(
            repo="SheepHuan/vllm_plus", commit="b425db84738f608ffb1a6af8aafefa2e294fa148", license="Apache-2.0"
        ),
        deviations=(
            ("The released code takes ranks among the tokens taken over (" + CODE + ", line 742) for places in the "
            "prompt (lines 748, 756 and 784), and so scores and computes other tokens behind the first new one; "
            "`as_released` does the same."),
            ("The token whose attention counts is the prompt's last but one. In the released code (" + CODE + ", line "
            "747) it is that of the batch's last prompt, for every prompt of a batch."),
            ("A token takes the longest common segment around it. Where a text repeats itself, the released code "
            "(examples/final/libs/edit2.py, line 103) merges fewer overlapping segments, and may take another "
            "occurrence of the same tokens."),
            "Every earlier prompt of the example is a candidate; sentence embeddings do not choose among them.",
            "Tokens of high deviation are not computed again while decoding, which is an option of the released code.",
            "The last token that is always computed is the prompt's; all that was not taken over is computed, too.",
            ("Punctuation is not taken over, and of the last tokens one is not. In the released code that rule is "
            "commented out (examples/final/libs/edit2.py, lines 559 to 569), and three last tokens are not (line 572); "
            "an older form (edit.py, line 332) leaves out commas, full stops, line breaks, tabs and the last token."),
        ),
        unverified=("Fewest tokens of a common segment: scripts of the released code use 2 to 15.",),
        limits=(
            *LIMITS,
            ("With a hidden question the prompt's last token but one, whose attention counts, is text of the last "
            "document and not the question."),
        ),
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over tokens of common segments, except punctuation and the last token."""
        ids = mixed.ids[0].tolist()
        best: list[tuple[int, int, int] | None] = [None] * len(ids)  # length, earlier prompt, place in it
        for age, prompt in enumerate(mixed.reuse.earlier):
            for j, match in enumerate(align([x for part in prompt for x in part], ids, self.width)):
                old = best[j]
                if match is not None and (old is None or old[0] < match[0]):
                    best[j] = match[0], age, match[1]
        decode = mixed.model.tokenizer.decode
        marks = {x for x in set(ids) if str(decode([x])).strip(" ") in PUNCTUATION}
        taken = [(j, x[1], x[2]) for j, x in enumerate(best[:-1]) if x is not None and ids[j] not in marks]
        chunks = {age: run_earlier(mixed, mixed.reuse.earlier[age]) for age in dict.fromkeys(x[1] for x in taken)}
        numbered = [(j, age, place, i) for i, (j, age, place) in enumerate(taken)]
        for (_, age, _), run in groupby(numbered, key=lambda x: (x[0] - x[3], x[1], x[0] - x[2])):
            span = list(run)
            mixed.add(chunks[age], span[0][0], first=span[0][2], count=len(span))

    def run(self, mixed: MixedPrompt) -> Tensor:
        """Compute two layers whole, then new tokens and those of high deviation."""
        last = min(CHECK_LAYER, len(mixed.layers) - 1)

        def narrow(step: Step, kv: ReusedKV) -> Tensor | None:
            if step.layer != last:
                return None
            at_hand = mixed.reused.nonzero()[:, 0]
            scored = torch.arange(len(at_hand), device=at_hand.device) if self.as_released else at_hand
            if not len(scored):
                return mixed.fresh
            deviation = (step.value - kv.values).abs().float().sum((0, 1, 3))[scored]
            query = slice(max(0, mixed.length - 2), max(1, mixed.length - 1))
            weights = attention_rows(step, step.key[:, :, scored], None, query)
            importance = weights.mean((0, 1)) * deviation
            chosen = importance.topk(max(1, int(self.ratio * len(at_hand)))).indices
            return mixed.with_fresh(scored[chosen[importance[chosen] > 0]])

        return mixed.run(mixed.places, narrow=narrow)
