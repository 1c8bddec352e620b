"""KVzip: keeps the entries that the model attends to when it repeats the context."""

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
from kvbench.selection import keep_best
from kvbench.store import LayerKV
from kvbench.text.template import Frame
from kvbench.text.tokens import find_last, tokenize

if TYPE_CHECKING:
    from kvbench.engine.session import Session
    from kvbench.hf import Model

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
ANSWER = "\n\nAnswer: "
"""Text between prompt and repeat for models without a chat template."""


@dataclass(frozen=True)
class KVzip(Method):
    """Keeps the entries with the highest attention from any query while the context is repeated, over all heads."""

    chunk_size: Positive = 2048
    """Tokens of the context that are repeated in one pass."""
    hint: Natural = 8
    """Tokens before a chunk that its prompt quotes."""
    sinks: Natural = 4
    """First entries, which are not repeated and always kept; more if the head of the chat template is longer."""

    card: ClassVar[Card] = Card(
        name="kvzip",
        version="3",
        title="KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
        idea="An entry that the model does not need to repeat the context is rarely needed for questions about it. "
        "So the model repeats the context once, and the entries with the highest attention from a query are kept.",
        arxiv="2505.23416",
        year=2025,
        family="eviction",
        stages=("compression",),
        budget=BudgetKind.STORED,
        paper_budget="30%",
        heads="pooled",
        upstream=Upstream(repo="snu-mllab/KVzip", commit="5d84729", license="MIT"),
        deviations=(
            ("Exactly the budget's entries are kept, the first ones of equal scores; the authors' threshold drops "
            "every entry that equals it."),
            ("The head of the chat template is not repeated and always kept, as the authors' system prompt, but it "
            "counts toward the budget. Where it is shorter than `sinks`, or absent, so are the first `sinks` entries. "
            "kvpress gives its first four entries the highest score, and overwrites it where it repeats them."),
            ("The authors' system prompt ends in an instruction (\"Given the context, answer ...\"), which kvbench "
            "leaves to the task."),
            "Chunks are kvpress's 2,048 tokens; the authors' code takes 2,000.",
            "Softmax in float32; the authors' is in the model's type, in which many scores are equal.",
            "Layers with a sliding window have a budget of their own, the same share of their window.",
        ),
        limits=(
            ("The context is run twice, and all its entries and those of one repeated chunk are stored until it is "
            "compressed. The second run counts as compression time, and its memory in the peak."),
            "A repeat follows the context, and both together must fit the positions of the model.",
            ("It does not use the question. A visible question is part of the context: it is repeated and compressed "
            "too, and with a chat template its answer is ended before the repeat is asked for."),
            "In a sliding layer a repeat sees only its window; entries outside the window score 0.",
            "Only scores per entry: the paper's scores per head, which need no second pass, are not implemented.",
        ),
    )

    recompressible: ClassVar[str | None] = "it repeats and compresses a context once, and later entries stay."

    def minimum_entries(self) -> int:
        """The sinks and one entry to choose."""
        return self.sinks + 1

    def layer(self, index: int) -> LayerKV:
        """A store in which heads can keep unequal numbers of entries."""
        return LayerKV(ragged=True)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Drop nothing here: `prefill` drops entries once, after the repeats."""

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context, repeat it on forks to score its entries, then drop entries in all layers. [B, V]"""
        parts = list(chunks)
        ids = torch.cat(parts, dim=1)
        if self.rows is None or self.rows >= ids.shape[1]:
            return super().prefill(session, parts)
        protected = self.protected(session.model, ids)
        if self.rows <= protected:
            raise UserError(
                f"{self.card.name} keeps the {protected} tokens of the chat template before the context, so a budget "
                f"of {self.rows} tokens per KV head leaves nothing to choose. Use --budget {protected + 1} or more, or "
                "--template none."
            )
        repeats = list(self.repeats(session.model, ids))
        longest = max(x.shape[1] for _, x in repeats)
        if ids.shape[1] + longest > session.model.max_length:
            raise UserError(
                f"{self.card.name} repeats up to {longest} tokens after a context of {ids.shape[1]}, and model "
                f"{session.model.id} takes at most {session.model.max_length} positions. Use a smaller --length, or "
                f"--set chunk_size below {self.chunk_size}."
            )
        for store in session.layers:
            store.capacity += longest  # so that a repeat is appended without a copy
        logits = super().prefill(session, parts)
        started = now(session.model.device)
        for store in session.layers:
            store.capacity -= longest
            store.state["score"] = torch.zeros(store.keys.shape[:3], dtype=torch.float32, device=store.keys.device)
        for span, repeated in repeats:
            with session.fork() as branch:
                branch.method = self.make_pass(span.start, span.stop, ids.shape[1], protected)
                branch.run_chunks(repeated.split(session.chunk or repeated.shape[1], dim=1), Moment.TURN_END)
                for store, forked in zip(session.layers, branch.layers, strict=True):
                    store.state["score"] = forked.state["score"]
                session.credit(branch)
        self._keep(session, protected)
        session.compress_seconds += now(session.model.device) - started
        return logits

    def make_pass(self, start: int, stop: int, context: int, protected: int) -> Repeat:
        """The pass that repeats the context's positions from `start` to `stop`."""
        return Repeat(start, stop, context, protected)

    def protected(self, model: Model, ids: Tensor) -> int:
        """Number of first tokens that are not repeated and always kept: sinks, and the head of the chat template.

        ids: the context [B, T], of which as much is the head as equals the head's tokens.
        """
        head = ids.new_tensor(tokenize(model.tokenizer, Frame.of(model.tokenizer).head, special=False))
        head = head[: ids.shape[1]]
        return max(self.sinks, int((ids[:, : len(head)] == head).all(0).cumprod(0).sum()))

    def repeats(self, model: Model, ids: Tensor) -> Iterator[tuple[range, Tensor]]:
        """The positions of each chunk of the context, and the ids to run for it: prompt, hint, answer header, chunk."""
        frame = Frame.of(model.tokenizer)
        texts = [FIRST, LATER]
        if find_last(ids[0].tolist(), tokenize(model.tokenizer, frame.tail, special=False)) is not None:
            # A visible question ends in the start of an answer: end it, so that the user asks for the repeat.
            texts = [f"{frame.middle}{x.lstrip()}" for x in texts]
        first, later, answer = (
            ids.new_tensor(tokenize(model.tokenizer, x, special=False))
            for x in (*texts, ANSWER if frame.sha is None else frame.tail)
        )
        protected = self.protected(model, ids)
        for start in range(protected, ids.shape[1], self.chunk_size):
            span = range(start, min(start + self.chunk_size, ids.shape[1]))
            hint = ids[:, max(protected, start - self.hint) : start]
            prompt = (later if start > protected else first).expand(ids.shape[0], -1)
            yield span, torch.cat(
                [prompt, hint, answer.expand(ids.shape[0], -1), ids[:, span.start : span.stop]], dim=1
            )

    def _keep(self, session: Session, protected: int) -> None:
        """Keep the first `protected` entries, and the best others over all heads and layers of the same shape."""
        kinds: dict[LayerShape, list[int]] = {}
        for index, shape in enumerate(session.model.layers):
            kinds.setdefault(shape, []).append(index)
        for shape, layers in kinds.items():
            scores = [session.layers[x].state.pop("score") for x in layers]
            entries = self.entries_in(layers[0], shape.window)
            assert entries is not None
            if entries >= scores[0].shape[2]:
                continue
            for x, index in zip(scores, layers, strict=True):
                store = session.layers[index]
                x[store.logical_positions().expand_as(x) < protected] = torch.inf
            keep_best([session.layers[x] for x in layers], scores, entries)


@dataclass(frozen=True)
class Repeat(Method):
    """The pass that repeats a chunk: records the highest attention to each of its entries on the store."""

    start: int = 0
    stop: int = 0
    """The chunk's positions."""
    context: int = 0
    """Tokens of the context."""
    protected: int = 0
    """First tokens of the context, which are not repeated."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry; scores are normalized over first tokens, chunk and repeat. [B, H_q, T, D_v]"""
        gone = kv.seen - kv.n  # entries that a sliding window has dropped
        positions = torch.cat([torch.arange(max(low, gone), max(high, gone), device=kv.keys.device) for low, high in (
            (0, self.protected), (self.start, self.stop), (self.context, kv.seen)
        )])
        chunk = (positions >= self.start) & (positions < self.stop)
        if chunk.any():
            found = self.weigh(kv, step, positions, gone)[:, :, chunk]
            at = positions[chunk] - gone
            kv.state["score"][:, :, at] = torch.maximum(kv.state["score"][:, :, at], found)
        return kv.attend(step)

    def weigh(self, kv: LayerKV, step: Step, positions: Tensor, gone: int) -> Tensor:
        """The highest attention of any query to the entries at these positions. [B, H_kv, n]"""
        return column_maxima(
            step.query, kv.keys[:, :, positions - gone], scale=step.scale, seen=step.seen, window=step.window,
            positions=positions.expand(*kv.keys.shape[:2], -1), softcap=step.softcap, sinks=step.sinks,
        )
