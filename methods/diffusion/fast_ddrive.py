"""Fast-dDrive: an answer with a fixed scaffold, committed section by section (arXiv 2605.23163)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from kvbench.diffusion.policy import Denoising
from kvbench.diffusion.sampling import Sampling
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, resolved
from kvbench.methods.diffusion.sections import Sections

if TYPE_CHECKING:
    from kvbench.hf import Model

FREE = -1
"""In place of the id of a token that is not fixed."""


@dataclass(frozen=True)
class FastDdrive(Sections):
    """scaffold: the beginning of every answer, in which `{8}` stands for 8 tokens to decode; all else is fixed."""

    scaffold: str = ""

    fixed: tuple[int, ...] | None = resolved()
    """Ids of the scaffold's tokens, -1 where they are decoded."""

    card: ClassVar[Card] = Card(
        name="fast-ddrive", title="Fast-dDrive's scaffold decoding", models="diffusion",
        idea="The structural tokens of an answer are fixed, and the others are decoded section by section. Sections "
             "attend to earlier ones only, so the entries of a finished section are kept and never change.",
        arxiv="2605.23163", year=2026, family="diffusion", stages=("generation",), budget=BudgetKind.NONE,
        heads="independent", upstream=None,
        deviations=(
            "the scaffold is a setting, and the run's blocks are the sections; the paper's are the fields of its JSON",
            "sections are not verified by the autoregressive head of its model, which other models lack",
            ("rollouts are sequences of a batch with one prompt, whose entries are stored once; the paper averages "
            "their trajectories, and an answer of text has no average"),
        ),
        unverified=(
            ("We had neither the paper nor the authors' decoding, which is a part of their model's repository at "
            "Hugging Face: the method follows summaries of the paper."),
        ),
        limits=(
            "its model is trained with attention across sections in one direction; on others this is an approximation",
            "without --gen block the whole answer is one section, and it equals lavida",
            "the pass over the prompt counts as a forward pass",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Tokenize the scaffold."""
        ids: list[int] = []
        for text, count in re.findall(r"((?:(?!\{\d+\}).)+)|\{(\d+)\}", self.scaffold, flags=re.DOTALL):
            ids += [FREE] * int(count) if count else model.tokenizer(text, add_special_tokens=False).input_ids
        return replace(self, fixed=tuple(ids))

    def check(self, sampling: Sampling, answer: int) -> None:
        """Refuse a scaffold that is longer than the answer, or leaves nothing of it to decode (`UserError`)."""
        del sampling
        fixed = self.fixed or ()
        if len(fixed) > answer:
            raise UserError(
                f"fast-ddrive: the scaffold has {len(fixed)} tokens, and the answer {answer}. Use a shorter scaffold, "
                "or a task with longer answers."
            )
        if len(fixed) - fixed.count(FREE) == answer:
            raise UserError(
                f"fast-ddrive: the scaffold fixes all {answer} tokens of the answer. Use one with tokens to decode, "
                "such as {8}, or a task with longer answers."
            )

    def begin(self, d: Denoising) -> None:
        """Run the prompt and write the scaffold, whose tokens are never masks."""
        super().begin(d)
        if d.start == d.prompt and self.fixed:
            fixed = d.ids.new_tensor(self.fixed)
            places = (fixed != FREE).nonzero()[:, 0]
            d.ids[:, d.prompt + places] = fixed[places]
            d.known = d.before = ~d.masked
            d.left = (d.masked & d.within(d.start, d.end)).sum(-1)
