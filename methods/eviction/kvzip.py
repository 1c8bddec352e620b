"""KVzip: what the model looks at when it repeats the context stays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.kernels.column_sums import column_maxima
from kvbench.method import BudgetKind, Card, LayerShape, Method, Moment, Step, Upstream
from kvbench.selection import top_entries
from kvbench.store import LayerKV
from kvbench.template import Frame

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "


@dataclass(frozen=True)
class KVzip(Method):
    """Keeps the rows that receive the most attention from one query while the context is repeated, over all heads."""

    chunk_size: Positive = 2048
    """Tokens of the context that are repeated at a time."""
    hint: Natural = 8
    """Tokens before a chunk that the prompt names as its start."""
    sinks: Natural = 4
    """First entries, which always stay."""

    card: ClassVar[Card] = Card(
        name="kvzip",
        title="KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
        idea="A row that the model does not need to repeat the context, it will hardly need for a question about it. "
        "So the model is made to repeat it once, and the entries that some query then looks at most stay.",
        arxiv="2505.23416",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="30%",
        heads="pooled",
        upstream=Upstream(repo="snu-mllab/KVzip", commit=None, license=None),
        deviations=(
            ("Exactly the budget's rows are kept, of equal scores the first; the authors' threshold drops every row "
            "that equals it."),
            ("The first rows (`sinks`, as in kvpress) stand for the system prompt, which a context here is not parted "
            "from: they are not repeated, and always stay."),
            "Chunks are kvpress's 2,048 tokens; the authors' code takes 2,000.",
            "Softmax in float32; the authors' is in the model's type, in which many scores are equal.",
            "Layers with a sliding window share a budget of their own, the same share of what they hold.",
        ),
        limits=(
            ("The context is run twice, and all its entries and those of one repeated chunk are held until it is "
            "compressed. The time counts as compression, the room as part of the peak."),
            "A repeat stands behind the context, and both must fit the positions that the model was made for.",
            ("It looks at no question. One that is visible is part of the context: it is repeated and compressed with "
            "it."),
            "In a sliding layer a repeat sees only what its window leaves; entries out of its sight count nothing.",
            "Only the level of entries: the paper's scores per head, which need no second pass, are not here.",
        ),
    )

    recompressible: ClassVar[str | None] = "it repeats and compresses a context once: later entries stay."

    def minimum_entries(self) -> int:
        """The sinks and an entry to choose."""
        return self.sinks + 1

    def layer(self, index: int) -> LayerKV:
        """Entries that heads will keep in unequal numbers."""
        return LayerKV(ragged=True)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Nothing here: entries are dropped once, after the repeat."""

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """The context as it is, then its repeat on forks that leave no row behind, then the choice over all layers."""
        parts = list(chunks)
        ids = torch.cat(parts, dim=1)
        if self.rows is None or self.rows >= ids.shape[1]:
            return super().prefill(session, parts)
        repeats = list(self.repeats(session.model, ids))
        longest = max(x.shape[1] for _, x in repeats)
        if ids.shape[1] + longest > session.model.max_length:
            raise UserError(
                f"kvzip repeats up to {longest} tokens behind a context of {ids.shape[1]}, beyond what model "
                f"{session.model.id} was made for, {session.model.max_length}. Use a smaller --length, or "
                f"--set chunk_size below {self.chunk_size}."
            )
        for store in session.layers:
            store.capacity += longest  # so that a repeat is appended in place, not to a copy
        logits = super().prefill(session, parts)
        started = now(session.model.device)
        for store in session.layers:
            store.capacity -= longest
            store.state["score"] = torch.zeros(store.keys.shape[:3], dtype=torch.float32, device=store.keys.device)
        for span, repeat in repeats:
            with session.fork() as branch:
                branch.method = Repeat(span.start, span.stop, ids.shape[1], self.sinks)
                branch.run_chunks(repeat.split(session.chunk or repeat.shape[1], dim=1), Moment.TURN_END)
                for store, twin in zip(session.layers, branch.layers, strict=True):
                    store.state["score"] = twin.state["score"]
                session.credit(branch)
        self._keep(session)
        session.compress_seconds += now(session.model.device) - started
        return logits

    def repeats(self, model: Model, ids: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Chunks of the context, as positions, and what is run for each: a prompt, the chunk's start, the chunk."""
        tail = Frame.of(model.tokenizer).tail
        first, later, answer = (
            ids.new_tensor(model.tokenizer(x, add_special_tokens=False).input_ids if x else [])
            for x in (FIRST, LATER, tail)
        )
        for start in range(self.sinks, ids.shape[1], self.chunk_size):
            span = range(start, min(start + self.chunk_size, ids.shape[1]))
            begins = start > self.sinks
            hint = ids[:, max(self.sinks, start - self.hint) : start]
            prompt = (later if begins else first).expand(ids.shape[0], -1)
            yield span, torch.cat(
                [prompt, hint, answer.expand(ids.shape[0], -1), ids[:, span.start : span.stop]], dim=1
            )

    def _keep(self, session: Session) -> None:
        """Keep the best entries of all layers of a kind, whichever layers and heads they are in."""
        kinds: dict[LayerShape, list[int]] = {}
        for index, shape in enumerate(session.model.layers):
            kinds.setdefault(shape, []).append(index)
        for shape, layers in kinds.items():
            scores = [session.layers[x].state.pop("score") for x in layers]
            rows = self.entries_in(layers[0], shape.window)
            assert rows is not None
            if rows >= scores[0].shape[2]:
                continue
            for x, index in zip(scores, layers, strict=True):
                store = session.layers[index]
                x[store.logical_positions().expand_as(x) < self.sinks] = torch.inf
            pool = torch.stack([x.to(scores[0].device) for x in scores], dim=1)  # [B, layers, H_kv, n]
            best = top_entries(pool.flatten(1), rows * len(layers) * shape.kv_heads)
            masks = torch.zeros_like(pool, dtype=torch.bool).flatten(1).scatter_(1, best, True).view_as(pool)
            for i, index in enumerate(layers):
                store = session.layers[index]
                store.keep_where(masks[:, i].to(store.keys.device))


@dataclass(frozen=True)
class Repeat(Method):
    """The pass that repeats a chunk: attends as ever, and notes on the store how much each of its rows is looked at."""

    start: int = 0
    stop: int = 0
    """The chunk's positions."""
    context: int = 0
    """Tokens of the context."""
    sinks: int = 0

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; scores come from the sinks, the chunk and the repeat so far alone."""
        gone = kv.seen - kv.n  # of a sliding layer
        rows = torch.cat([torch.arange(max(low, gone), max(high, gone), device=kv.keys.device) for low, high in (
            (0, self.sinks), (self.start, self.stop), (self.context, kv.seen)
        )])
        chunk = (rows >= self.start) & (rows < self.stop)
        if chunk.any():
            found = column_maxima(
                step.query, kv.keys[:, :, rows - gone], scale=step.scale, seen=step.seen, window=step.window,
                positions=rows.expand(*kv.keys.shape[:2], -1), softcap=step.softcap, sinks=step.sinks,
            )[:, :, chunk]
            at = rows[chunk] - gone
            kv.state["score"][:, :, at] = torch.maximum(kv.state["score"][:, :, at], found)
        return kv.attend(step)
