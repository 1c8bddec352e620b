"""One conversation, or a batch of equal length, on one model under one method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from kvbench.budget import Shape
from kvbench.engine.autoregressive import Tokens, greedy
from kvbench.engine.ledger import Ledger
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.hf import Forward, Model, attached
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes, Effect
from kvbench.step import Moment, Step
from kvbench.store import LayerKV

SCORE_CHUNK = 512
"""Positions whose full-vocabulary logits exist at a time."""


class Session:
    """`prefill` a context once, then `ask`; use it in a `with` statement.

    Args:
        model: a loaded model; its attention is switched while the session is open, and switched back.
        method: settings with the budget fitted (`Method.fit`).
        capacity: tokens that the conversation may come to, so that decoding never reallocates.
        chunk: most prompt tokens per forward pass; None: the whole prompt at once.
        recompress: compress again at the end of every question.
        track: have the stores keep logical positions, for checks; costs bytes.
    """

    def __init__(
        self, model: Model, method: Method, *, capacity: int = 0, chunk: int | None = None, recompress: bool = False,
        track: bool = False,
    ) -> None:
        self.model, self.method = model, method
        self.capacity, self.chunk, self.recompress = capacity, chunk, recompress
        self.layers: list[LayerKV] = []
        for index in range(len(model.layers)):
            store = method.layer(index)
            store.capacity, store.track = capacity, store.track or track
            self.layers.append(store)
        self.seen = 0
        self.batch = 1
        self.logits: Tensor | None = None  # [B, V], of the last position
        self.compress_seconds = 0.0
        self.answer_started = 0.0  # perf_counter when the last question had been run and its answer began
        self.shape: Shape | None = None  # of the context
        self._pending: list[list[int]] = []
        self._ledger = Ledger(self.layers)
        self._static: Tensor | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(attached(self.model.module))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the rows and give the model its attention back."""
        for store in self.layers:
            store.close()
        self.logits = None
        self._open.close()

    # Running

    def prefill(self, context: Sequence[int] | Tensor, visible: Sequence[int] | Tensor | None = None) -> Tensor:
        """Run a context, and a question that the method may see, and compress at the end. Logits [B, V]."""
        if self.seen:
            raise RuntimeError("this session already holds a context: open another one or fork")
        ids = self._ids(context)
        if visible is not None and len(visible):
            ids = torch.cat([ids, self._ids(visible)], dim=1)
        if ids.shape[1] == 0:
            raise UserError("the context is empty: there is nothing to prefill.")
        self.batch = ids.shape[0]
        self.shape = self.model.shape(ids.shape[1])
        chunks = ids.split(self.chunk or ids.shape[1], dim=1)
        self.logits = self.method.prefill(self, chunks)
        self.method.end_of_context(self)
        self._ledger.note_context(self.method, self.shape, self.batch)
        return self.logits

    def fill(self, steps: Iterable[Step]) -> None:
        """Take rows that no forward pass made as a whole context, one step per layer, and compress them: for clocks.

        A method sees queries as in a pass, but the rows are not attended to: it costs what storing, scoring and
        compressing cost, and no logits follow.

        Raises:
            UserError: the method runs the context in a way of its own.
        """
        if self.method.replays_context:
            raise UserError(f"{self.method.card.name} looks at the context by running it: made-up rows do not do.")
        for step in steps:
            kv = self.layers[step.layer]
            self.batch, self.seen = step.key.shape[0], step.seen
            kv.append(step)
            kv.attend = _attend_to_nothing  # type: ignore[method-assign]  # of this object, for this call
            self.method.attend(kv, step)
            del kv.attend
            self._evict(kv, step)
        self.shape = self.model.shape(self.seen)
        self.method.end_of_context(self)
        self._ledger.note_context(self.method, self.shape, self.batch)

    def ask(
        self, query: Sequence[int] | Tensor, max_new_tokens: int, *, history: Sequence[int] | None = None,
        stop: frozenset[int] | None = None,
    ) -> Tokens:
        """Run a question (none, if the context held it) and generate at most `max_new_tokens` tokens.

        With a reference `history` the answer is generated on a fork, and the history stands in its place from the next
        question on. Without it the generated rows stay; the last token, which no forward has seen, goes before the
        next question unless it is a stop token.
        """
        self.question(query, max_new_tokens)
        return self.answer(max_new_tokens, history=history, stop=stop)

    def question(self, query: Sequence[int] | Tensor, max_new_tokens: int) -> None:
        """Run a pending answer and the question, and reserve room for `max_new_tokens` tokens of its answer."""
        ids = torch.cat([self._ids(self._pending), self._ids(query)], dim=1)
        if ids.shape[1]:
            if self.recompress:
                self.method.require_recompressible()
            self.reserve(ids.shape[1] + max_new_tokens, ids.shape[1])
            chunks = ids.split(self.chunk or ids.shape[1], dim=1)
            self.logits = self.run_chunks(chunks, Moment.RECOMPRESS if self.recompress else Moment.TURN_END)
            self._pending = []

    def answer(
        self, max_new_tokens: int, *, history: Sequence[int] | None = None, stop: frozenset[int] | None = None
    ) -> Tokens:
        """Generate at most `max_new_tokens` tokens after the last question; see `ask`."""
        stop = self.model.stop_ids if stop is None else stop
        if history is not None:
            with self.fork() as branch:
                self.answer_started = now(self.model.device)
                tokens = self.method.generate(branch, max_new_tokens, stop)
                self.credit(branch)
            self.remember(history)
            return tokens
        self.answer_started = now(self.model.device)
        tokens = self.method.generate(self, max_new_tokens, stop)
        last = [[x for x in ids[-1:] if x not in stop] for ids in tokens.ids]
        if len({len(x) for x in last}) > 1:
            raise UserError("sequences of one batch ended differently: own history needs batch 1.")
        self._pending = last if last[0] else []
        self._ledger.note_layers()
        return tokens

    def greedy(self, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
        """Generate the most likely token at each step, at most `max_new_tokens` of them."""
        return greedy(self, max_new_tokens, stop)

    def ban_first(self, ids: Iterable[int]) -> None:
        """None of these tokens can be the first of the next answer."""
        assert self.logits is not None, "prefill first"
        self.logits[..., list(ids)] = float("-inf")

    def remember(self, ids: Sequence[int]) -> None:
        """From the next question on, these ids stand as the last answer."""
        self._pending = [list(ids)] * self.batch

    def score(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Log-probabilities of these tokens after what the session holds; appended as in `force`. [B, T]"""
        tokens = self._ids(ids)
        scores = [
            logits.float().log_softmax(-1).gather(-1, chunk[..., None])[..., 0]
            for chunk, logits in self._forced(tokens)
        ]
        return torch.cat(scores, dim=1)

    def force(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Logits that predict each of these tokens after what the session holds; they are appended. [B, T, V]

        They are those of decode steps: a method without static ones may drop or round a row after each, so its tokens
        are run one at a time; any other's at once, which is the same.
        """
        return torch.cat([logits for _, logits in self._forced(self._ids(ids))], dim=1)

    def _forced(self, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Chunks of tokens with the logits that predict them, so that few positions' logits exist at a time."""
        assert self.logits is not None, "prefill first"
        pending = self._ids(self._pending)
        stepwise = self.method.graphable is not None
        size = 1 if stepwise else min(self.chunk or SCORE_CHUNK, SCORE_CHUNK)
        self.reserve(pending.shape[1] + tokens.shape[1], max(pending.shape[1], size))
        if pending.shape[1]:
            self.logits = self.run_chunks(pending.split(self.chunk or SCORE_CHUNK, dim=1), Moment.TURN_END)
            self._pending = []
        chunks = tokens.split(size, dim=1)
        for i, chunk in enumerate(chunks):
            end = Moment.DECODE if stepwise else Moment.TURN_END
            moment = end if stepwise or i == len(chunks) - 1 else end.chunk
            logits = self.forward(chunk, moment, keep=chunk.shape[1])
            yield chunk, torch.cat([self.logits[:, None], logits[:, :-1]], dim=1)
            self.logits = logits[:, -1]
        self._ledger.note_layers()

    def run_chunks(self, chunks: Iterable[Tensor], end: Moment) -> Tensor:
        """Run chunks of ids; `end` is the moment of the last one. Logits of the last position [B, V]."""
        *parts, last = chunks
        for ids in parts:
            self.forward(ids, end.chunk)
        return self.forward(last, end)[:, -1]

    def forward(self, ids: Tensor, moment: Moment, *, keep: int = 1) -> Tensor:
        """One forward pass over new tokens. ids: [B, T]. Logits of the last `keep` positions [B, keep, V]."""
        count = ids.shape[1]
        if self._static is None:
            positions = torch.arange(self.seen, self.seen + count, device=ids.device).expand(ids.shape[0], -1)
        else:
            positions = (self._static + torch.arange(count, device=ids.device)).expand(ids.shape[0], -1)
            self._static.add_(count)
        self.seen += count
        return self.model.run(
            ids,
            Forward(moment=moment, positions=positions, seen=self.seen, attend=self._attend, ropes=self.model.ropes),
            keep,
        )

    def _attend(self, step: Step) -> Tensor:
        kv = self.layers[step.layer]
        kv.append(step)
        output = self.method.attend(kv, step)
        self._evict(kv, step)
        return output

    def _evict(self, kv: LayerKV, step: Step) -> None:
        if step.moment is Moment.DECODE:
            self.method.evict(kv, step)
            return
        self._ledger.note_layer(step.layer)
        if step.window is not None and step.moment.in_context:
            kv.keep_last(step.window)
        compresses = step.moment.compresses
        started = now(step.key.device) if compresses else 0.0  # what the pass still has to do is no compression
        self.method.evict(kv, step)
        if compresses:
            self.compress_seconds += now(step.key.device) - started
            if not self.recompress:
                kv.settle()
        self._ledger.note_layer(step.layer)

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens, at most `forward` at a time, so that decoding reallocates nothing."""
        for store in self.layers:
            store.reserve(tokens, min(tokens, forward))

    def fork(self) -> Session:
        """A session that goes on from here by itself; rows are shared until one of the two writes."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.layers = [store.fork() for store in self.layers]
        other._pending = [list(x) for x in self._pending]
        other._ledger = self._ledger.fork(other.layers)
        other._static = None if self._static is None else self._static.clone()
        other._open = ExitStack()
        return other

    def credit(self, branch: Session) -> None:
        """Count as this session's own what a fork of it read to answer for it, and the most that it held."""
        self._ledger.credit(branch._ledger)

    def make_static(self) -> None:
        """Give every later step the same shapes: positions and lengths live on the device (CUDA graphs).

        Raises:
            UserError: the method cannot, with its reason.
        """
        if self.method.graphable is not None:
            raise UserError(f"{self.method.card.name} has no static decode step: {self.method.graphable}")
        self._static = torch.tensor(self.seen, device=self.model.device)
        for store in self.layers:
            store.make_static()

    def _ids(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        x = torch.as_tensor(ids, dtype=torch.long, device=self.model.device)
        return x.expand(self.batch, -1) if x.dim() == 1 else x

    # Counting

    def memory(self) -> CacheBytes:
        """Bytes after the context and now."""
        return self._ledger.memory()

    def effect(self) -> Effect:
        """What the stores say happened."""
        return self._ledger.effect()


def _attend_to_nothing(step: Step) -> Tensor:
    """An attention output of the right shape, without a value."""
    return step.value.new_zeros(()).expand(*step.query.shape[:3], step.value.shape[3])
