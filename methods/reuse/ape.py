"""APE: documents at the same positions behind one instruction, and a corrected attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Gt, Le
from kvbench.errors import UserError
from kvbench.kernels.blocks import float_products
from kvbench.method import BudgetKind, Card, Step, Upstream
from kvbench.techniques.reuse import LIMITS, MixedPrompt, ReusedKV, ReuseMethod

Factor = Annotated[float, Gt(0), Le(1)]


@dataclass
class ParallelKV(ReusedKV):
    """Entries of documents in parallel, whose attention has a temperature and a scale of its own."""

    temperature: float = 1.0
    scale: float = 1.0
    documents: tuple[int, int] = field(default=(0, 0), init=False)
    """Their entries: the first, and the end."""

    def attend(self, step: Step) -> Tensor:
        """Attention of the last T tokens. [1, H_q, T, D_v]"""
        count = step.query.shape[2]
        if self.documents == (0, 0):
            return super().attend(step)
        return self.attend_parallel(step, torch.arange(self.n - count, self.n, device=step.query.device))

    def make_static(self) -> None:
        """Give all later steps the same shapes; with documents (`UserError`), the entries after them are a slice."""
        if self.documents != (0, 0):
            raise UserError(
                "ape has no static decode step after a prompt with documents: the entries after them are sliced by "
                "their number, which a captured step would repeat. Leave make_static out."
            )
        super().make_static()

    def attend_at(self, step: Step, places: Tensor) -> Tensor:
        """Attention of tokens at these places [m]. [1, H_q, m, D_v]"""
        self.computed += len(places)
        return self.attend_parallel(step, places)

    def attend_parallel(self, step: Step, places: Tensor) -> Tensor:
        """The attention over documents and that over everything else, weighted by their corrected sums."""
        if step.softcap is not None or step.sinks is not None:
            raise UserError("ape does not support models with soft caps or learned sinks. Use a model without.")
        start, end = self.documents
        parts = [
            self._part(step, places, slice(0, start), 1.0), self._part(step, places, slice(end, self.n), 1.0),
            self._part(step, places, slice(start, end), self.temperature),
        ]
        sums = torch.stack([x for _, x in parts])
        sums[2] *= self.scale * self.temperature
        weights = sums.softmax(0)[..., None]  # [3, H_q, m, 1]
        output = sum((w * x for w, (x, _) in zip(weights, parts, strict=True)), torch.zeros(()))
        return output[None].to(step.query.dtype)

    def _part(self, step: Step, places: Tensor, entries: slice, temperature: float) -> tuple[Tensor, Tensor]:
        """Attention over some entries, and the log of its sum. [H_q, m, D_v] and [H_q, m] float32"""
        keys, values = self.keys[0, :, None, entries], self.values[0, :, None, entries]
        query = step.query[0].unflatten(0, (keys.shape[0], -1))  # [H_kv, G, m, D]
        logits = float_products(query, keys) * (step.scale / temperature)
        at = torch.arange(entries.start, entries.stop, device=keys.device)
        logits = logits.masked_fill(at > places[:, None], -torch.inf)
        total = logits.logsumexp(-1)
        weights = torch.exp(logits - total.masked_fill(total == -torch.inf, 0.0)[..., None])
        return (weights.to(values.dtype) @ values).float().flatten(0, 1), total.flatten(0, 1)


@dataclass(frozen=True)
class Ape(ReuseMethod):
    """Every document stands behind the instruction, at the same positions as the others."""

    temperature: Factor = 0.9
    scale: Factor = 0.9
    card: ClassVar[Card] = Card(
        name="ape",
        version="2",
        title="APE: faster and longer context-augmented generation via adaptive parallel encoding",
        idea="Documents are run in parallel behind one shared instruction, at the same positions. A temperature and a "
        "scale bring the attention that they receive together close to that of documents in sequence.",
        arxiv="2502.05431",
        year=2025,
        family="reuse",
        stages=("generation", "loading"),
        budget=BudgetKind.NONE,
        heads="independent",
        upstream=Upstream(repo="Infini-AI-Lab/APE", commit="52513bc", license=None),
        deviations=(
            "Sums of attention are kept in float32; the released code rounds them to 16 bits.",
            "Follows the code for Llama. The code for Mistral and Gemma exchanges the roles of documents and rest.",
        ),
        limits=(
            *LIMITS,
            ("A document that never ran is run apart from the others, too, and counts as computed. One of an earlier "
            "prompt counts as at hand behind this prompt's instruction, also if it ran behind another."),
            "No soft caps or learned sinks.",
        ),
    )

    def layer(self, index: int) -> ParallelKV:
        """Every entry, with the documents apart."""
        del index
        return ParallelKV(temperature=self.temperature, scale=self.scale)

    def place(self, mixed: MixedPrompt) -> None:
        """Take over the known parts, every document behind the instruction at the same positions."""
        (_, instruction), *documents = mixed.parts
        first = len(instruction)
        for start, part in mixed.parts:
            before, at = (instruction, first) if start else ((), 0)
            if part in mixed.reuse.known:
                mixed.add(mixed.obtain(before, part), start, at=at)
            else:
                mixed.add_new(before, part, start, at=at)
        end = first + max((len(part) for _, part in documents), default=0)
        mixed.go_on(end)
        for kv in mixed.layers:
            assert isinstance(kv, ParallelKV)
            kv.documents = first, mixed.tail
