"""Prompt Cache: every document is run at the positions that a schema gives it, and stays there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvbench.method import BudgetKind, Card, Upstream
from kvbench.techniques.reuse import LIMITS, ApartMethod, Behind, MixedPrompt


@dataclass(frozen=True)
class PromptCache(ApartMethod):
    """Documents keep the positions of the earlier prompt in which they first occur, which is the schema."""

    behind: Behind = "nothing"
    card: ClassVar[Card] = Card(
        name="prompt-cache",
        version="2",
        title="Prompt Cache: modular attention reuse for low-latency inference",
        idea="A schema gives every module of a prompt a range of positions. A module's entries are computed there by "
        "themselves and used there in every prompt, without any rotation.",
        arxiv="2311.04934",
        year=2023,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="yale-sys/prompt-cache", commit="9027040", license="MIT"),
        deviations=(
            ("Prompts come without a schema: a document has the positions of the earlier prompt in which it first "
            "occurs. Documents of different earlier prompts may overlap in positions, as in a union of the schema."),
            ("A document is run by itself. The released code (promptcache/cache_engine.py, lines 221 to 248) runs all "
            "modules of a schema that no union separates in one causal pass, so that each sees those before it; "
            "scaffolds, which are the paper's way to encode modules together, are not implemented."),
            ("A part that no earlier prompt has keeps its position in the prompt, where documents of the schema can be "
            "as well. In the released code all text without a module follows the schema."),
        ),
        limits=LIMITS,
    )

    def place(self, mixed: MixedPrompt) -> None:
        """Take over parts of earlier prompts, at their positions there. The text after the parts follows them all."""
        schema: dict[tuple[int, ...], int] = {}
        for prompt in mixed.reuse.earlier:
            start = 0
            for part in prompt:
                schema.setdefault(part, start)
                start += len(part)
        ends = [start + len(part) for part, start in schema.items()]
        for i, (start, part) in enumerate(mixed.parts):
            if part in schema:
                before = self.before(mixed) if i else ()
                mixed.add(mixed.obtain(before, part), start, at=schema[part])
            else:
                ends.append(start + len(part))
        mixed.go_on(max(ends))
