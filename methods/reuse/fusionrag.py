"""FusionRAG: documents are run behind similar ones, and the tokens that the question attends to are computed again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural, Share
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.store import LayerKV
from kvbench.techniques.reuse import LIMITS, MixedPrompt, ReuseMethod, attention_rows


@dataclass(frozen=True)
class FusionRag(ReuseMethod):
    """The question runs twice: to choose tokens by its attention to each document, and with them."""

    ratio: Share = 0.15
    """Share of the documents' tokens that is computed again."""
    similar: Natural = 1
    """Similar documents before each one when it is run for its chunk; all others if there are fewer."""
    card: ClassVar[Card] = Card(
        name="fusionrag",
        version="2",
        title="From prefix cache to fusion RAG cache",
        idea="Offline, each document is run behind the instruction and similar documents, so that its entries have "
        "seen some. Online, the question's attention chooses the few tokens that are computed again.",
        arxiv="2601.12904",
        year=2026,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="pooled",
        upstream=Upstream(repo="qiyuxinlin/FusionRAG", commit="41864e8", license=None),
        deviations=(
            ("Similarity is the cosine of mean input embeddings of the model, not of a retrieval model's, and similar "
            "documents are those of the earlier prompts."),
            ("One similar document; the authors' runner takes 9 of a corpus (`topk=10`, the document among them). "
            "Earlier prompts have about four: with 9, each would run behind all others, whatever their similarity."),
            ("All tokens after the documents choose what is computed again; the authors' code takes those after "
            "`Question: ` only."),
        ),
        limits=(*LIMITS, "The question must stand in the prompt (`--visibility visible`)."),
    )

    reads_question: ClassVar[bool] = True

    def place(self, mixed: MixedPrompt) -> None:
        """Take over known parts, the documents each behind the instruction and those most similar to it."""
        known, instruction = mixed.reuse.known, mixed.reuse.parts[0]
        library = sorted(x for x in known if x != instruction or x in mixed.reuse.parts[1:])
        embed = mixed.model.module.get_input_embeddings()
        means = [embed(mixed.ids.new_tensor(x)).float().mean(0) for x in library]
        for i, (start, part) in enumerate(mixed.parts):
            if part not in known:
                continue
            before: tuple[int, ...] = ()
            if i:
                own = library.index(part)
                scores = torch.cosine_similarity(means[own][None], torch.stack(means))
                nearest = [x for x in scores.argsort(descending=True, stable=True).tolist() if x != own]
                before = instruction + tuple(x for y in nearest[: self.similar] for x in library[y])
            mixed.add(mixed.obtain(before, part), start)

    def run(self, mixed: MixedPrompt) -> Tensor:
        """Compute the tokens of documents that the question attends to most in the last layer, each by itself."""
        first, asked = len(mixed.reuse.parts[0]), mixed.length - mixed.tail
        if not asked:
            raise UserError(
                "fusionrag chooses tokens by the question, which is not in this prompt. Use mode single or multi-turn, "
                "and leave --visibility out."
            )
        rows, importance = mixed.fresh, torch.zeros(mixed.length, device=mixed.ids.device)

        def look(step: Step, kv: LayerKV) -> None:
            if step.layer != len(mixed.layers) - 1:
                return
            question = step.query[:, :, len(rows) - asked :]
            for start, part in mixed.parts[1:]:
                # The document's stored keys stand behind the instruction; moving the question instead is the same.
                moved = step.rope.shift(question, torch.full((1, asked), start - first, device=question.device))
                keys = kv.keys[:, :, start : start + len(part)]
                weights = attention_rows(replace(step, query=moved), keys, None, slice(None))
                importance[start : start + len(part)] = weights.sum((0, 1))

        logits = mixed.run(rows, look=look)
        documents = mixed.places[first : mixed.tail]
        count = int(self.ratio * len(documents))
        if not count:
            return logits
        return mixed.run(mixed.with_fresh(documents[importance[documents].topk(count).indices]))
