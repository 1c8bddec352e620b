"""A conversation, or a batch of conversations of equal length, on one model under one method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import torch
from torch import Tensor

from kvbench.budget import Shape
from kvbench.engine.autoregressive import Tokens, greedy_passes
from kvbench.engine.ledger import Ledger
from kvbench.engine.passes import Passes, finish, request
from kvbench.engine.recording import Recording
from kvbench.engine.saved import read_session, write_session
from kvbench.engine.stores import Stores
from kvbench.engine.timing import now
from kvbench.errors import UserError, nan_error
from kvbench.hf import Model
from kvbench.method import Method
from kvbench.step import Moment, Step
from kvbench.store import LayerKV

if TYPE_CHECKING:
    from kvbench.engine.reuse import Reuse

S = TypeVar("S", bound="Session")
SCORE_CHUNK = 512
"""Most positions whose logits over the whole vocabulary are in memory at once."""


class Session(Stores):
    """Call `prefill` once, then `ask` for each question, inside a `with` statement.

    Args:
        model: a loaded model; its attention is replaced while the session is open.
        method: a method with a fitted budget (`Method.fit`).
        capacity: most tokens of the conversation; allocated at once, so that decoding never reallocates.
        chunk: most prompt tokens per forward pass; None: the whole prompt at once.
        recompress: compress again after every question.
        track: store the logical position of every entry, for checks; uses extra bytes.
        recording: the exact prefill of the context to come, which `prefill` then takes instead of running the model.
        compare: compute the attention of a recorded prefill all the same, and require that it is equal.
        reuse: the parts of the context, and the chunks that stand for them; for methods that reuse entries.
    """

    def __init__(
        self, model: Model, method: Method, *, capacity: int = 0, chunk: int | None = None, recompress: bool = False,
        track: bool = False, recording: Recording | None = None, compare: bool = False, reuse: Reuse | None = None,
    ) -> None:
        super().__init__(
            model, method, capacity=capacity, recompress=recompress, track=track, recording=recording, compare=compare
        )
        self.capacity, self.chunk = capacity, chunk
        self.reuse = reuse
        self.exact = True
        """Whether the context's entries are those of a prefill of all of it, before any compression."""
        self.batch = 1
        self.logits: Tensor | None = None  # [B, V], of the last position
        self.answer_started = 0.0  # perf_counter at the end of the last question
        self.answer_ended = 0.0  # perf_counter at the last token of the answer
        self.shape: Shape | None = None  # of the context
        self.pending: list[list[int]] = []

    def close(self) -> None:
        """Free the KV entries and restore the model's attention."""
        self.logits = None
        super().close()

    # Saving

    def save(self, path: Path | str) -> int:
        """Write the session with its compressed cache to a file (safetensors). Returns the file's bytes.

        Raises:
            UserError: there is no context, its steps are static, or the disk fails.
        """
        return write_session(self, Path(path))

    @classmethod
    def load(cls, path: Path | str, model: Model, method: Method) -> Self:
        """A session as `save` wrote it, bit for bit. model, method: those that it was saved with, the method fitted.

        Raises:
            UserError: there is no such file, it is damaged, or it is of another model, method or version.
        """
        return read_session(Path(path), model, method, cls)

    # Running

    def prefill(self, context: Sequence[int] | Tensor, visible: Sequence[int] | Tensor | None = None) -> Tensor:
        """Run the context and compress it at the end. Returns the last logits [B, V].

        visible: a question to run with the context, so that the method sees it when it compresses.

        Raises:
            UserError: there are no tokens, more than the model has positions, or an id outside its vocabulary.
        """
        if self.seen:
            raise RuntimeError("this session already holds a context: open another session, or fork this one")
        ids = self._ids(context)
        if visible is not None and len(visible):
            ids = torch.cat([ids, self._ids(visible)], dim=1)
        if ids.shape[1] == 0:
            raise UserError("the context is empty: there is nothing to prefill.")
        if self.reuse is None:  # else chunks may share positions, and the method says how many there are
            self._check_positions(ids.shape[1])
        self.batch = ids.shape[0]
        self.shape = self.model.shape(ids.shape[1])
        chunks = ids.split(self.chunk or ids.shape[1], dim=1)
        self.logits = self.method.prefill(self, chunks)
        self._recording = None
        started = now(self.model.device)
        self.method.end_of_context(self)
        self.compress_seconds += now(self.model.device) - started
        self.ledger.note_context(self.method, self.shape, self.batch, exact=self.exact)
        return self.logits

    def fill(self, steps: Iterable[Step]) -> None:
        """Store synthetic entries as the context, one step per layer, and compress them. For timing.

        Storing, scoring and compressing are run as in a prefill; attention is not, and there are no logits.

        Raises:
            UserError: the method replays the context through the model, reads its hidden states or skips layers.
        """
        if self.method.reads_hidden:
            raise UserError(f"{self.method.card.name} reads the model's hidden states, which synthetic entries lack.")
        if self.method.skips_layers:
            raise UserError(f"{self.method.card.name} skips layers by scores of tokens, which synthetic entries lack.")
        if self.method.replays_context:
            raise UserError(
                f"{self.method.card.name} replays the context through the model and cannot take synthetic entries."
            )
        for step in steps:
            self.batch, self.seen = step.key.shape[0], step.seen
            self._store(step)
        self.shape = self.model.shape(self.seen)
        self.method.end_of_context(self)
        self.ledger.note_context(self.method, self.shape, self.batch)

    def ask(
        self, query: Sequence[int] | Tensor, max_new_tokens: int, *, history: Sequence[int] | None = None,
        stop: frozenset[int] | None = None,
    ) -> Tokens:
        """Run a question (empty if the context held it) and generate at most `max_new_tokens` tokens.

        With a reference `history`, the answer is generated on a fork, and later questions see the history instead.
        Without, later questions see the generated answer: its entries stay, and its last token, which has not been
        run, is run before the next question unless it is a stop token.

        Raises:
            UserError: the conversation can have more tokens than the model has positions, the question has an id
                outside its vocabulary, or sequences of one batch end differently without `history`.
        """
        self.question(query, max_new_tokens)
        return self.answer(max_new_tokens, history=history, stop=stop)

    def question(self, query: Sequence[int] | Tensor, max_new_tokens: int) -> None:
        """Run a pending answer and the question, and reserve room for `max_new_tokens` tokens of its answer."""
        finish(self.question_passes(query, max_new_tokens))

    def question_passes(self, query: Sequence[int] | Tensor, max_new_tokens: int) -> Passes[None]:
        """The passes of `question`."""
        asked = self._ids(query)
        ids = torch.cat([self._ids(self.pending), asked], dim=1)
        self._check_positions(ids.shape[1] + max_new_tokens - 1)  # the last token of an answer is not run
        if asked.shape[1]:
            self.method.begin_question(self, asked)
        if ids.shape[1] and self.recompress:
            self.method.require_recompressible()
        self.reserve(ids.shape[1] + max_new_tokens, max(1, ids.shape[1]))
        if ids.shape[1]:
            chunks = ids.split(self.chunk or ids.shape[1], dim=1)
            self.logits = yield from self._chunk_passes(
                chunks, Moment.RECOMPRESS if self.recompress else Moment.TURN_END
            )
            self.pending = []

    def answer(
        self, max_new_tokens: int, *, history: Sequence[int] | None = None, stop: frozenset[int] | None = None
    ) -> Tokens:
        """Generate at most `max_new_tokens` tokens after the last question; see `ask`."""
        return finish(self.answer_passes(max_new_tokens, history=history, stop=stop))

    def answer_passes(
        self, max_new_tokens: int, *, history: Sequence[int] | None = None, stop: frozenset[int] | None = None
    ) -> Passes[Tokens]:
        """The passes of `answer`."""
        stop = self.model.stop_ids if stop is None else stop
        self.resume()
        if history is not None:
            with self.fork() as branch:
                self.answer_started = now(self.model.device)
                tokens = yield from branch.generate_passes(max_new_tokens, stop)
                self.answer_ended = now(self.model.device)
                branch.check_logits()
                self.credit(branch)
            self.remember(history)
            return tokens
        self.answer_started = now(self.model.device)
        tokens = yield from self.generate_passes(max_new_tokens, stop)
        self.answer_ended = now(self.model.device)
        self.check_logits()
        last = [[x for x in ids[-1:] if x not in stop] for ids in tokens.ids]
        # Also where both stopped, but not at once: the earlier one has run on behind its stop token.
        if len({(len(ids), len(x)) for ids, x in zip(tokens.ids, last, strict=True)}) > 1:
            raise UserError("sequences of one batch ended differently: own history needs batch 1.")
        self.pending = last if last[0] else []
        self.ledger.note_layers()
        return tokens

    def check_logits(self) -> None:
        """Refuse logits that are not numbers (`UserError`): entries that are not make those of all later tokens so."""
        assert self.logits is not None
        if bool(self.logits.isnan().any()):
            raise nan_error(self.model.dtype, self.method.card.name)

    def resume(self) -> None:
        """Prepare every layer for an answer; this belongs to the time to its first token."""
        for store in self.layers:
            store.resume()

    def generate_passes(self, max_new_tokens: int, stop: frozenset[int]) -> Passes[Tokens]:
        """The passes of the method's `generate`; there are none to wait for if it generates in its own way."""
        if self.method.generates_alone:
            return self.method.generate(self, max_new_tokens, stop)
        return (yield from greedy_passes(self, max_new_tokens, stop))

    def greedy(self, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
        """Generate the most likely token at each step, at most `max_new_tokens` of them."""
        return finish(greedy_passes(self, max_new_tokens, stop))

    def ban_first(self, ids: Iterable[int]) -> None:
        """Forbid these tokens as the first token of the next answer."""
        assert self.logits is not None, "prefill first"
        self.logits = self.logits.clone()  # [B, V], which forks share
        self.logits[..., list(ids)] = float("-inf")

    def remember(self, ids: Sequence[int]) -> None:
        """Run these ids before the next question, as the last answer."""
        self.pending = [list(ids)] * self.batch

    def score(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Log-probabilities of these tokens as the continuation; they are appended, as by `force`. [B, T]

        Raises:
            UserError: see `force`.
        """
        return finish(self._forced(self._ids(ids), score_tokens))

    def force(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Append these tokens and return the logits that predict each of them (teacher forcing). [B, T, V]

        The logits equal those of decode steps. `stepwise` methods may evict or quantize entries at every step, so their
        tokens are run one at a time; for all others one forward pass gives the same logits.

        Raises:
            UserError: there are no tokens, more than the model has positions for, or an id outside its vocabulary.
        """
        return finish(self.force_passes(ids))

    def force_passes(self, ids: Sequence[int] | Tensor) -> Passes[Tensor]:
        """The passes of `force`."""
        return self._forced(self._ids(ids), lambda _, logits: logits)

    def _forced(self, tokens: Tensor, take: Callable[[Tensor, Tensor], Tensor]) -> Passes[Tensor]:
        """Force tokens in chunks, to bound the memory of logits; joins `take(chunk, logits that predict it)`."""
        assert self.logits is not None, "prefill first"
        if tokens.shape[1] == 0:
            raise UserError("there are no tokens to force or score. Give one or more.")
        pending = self._ids(self.pending)
        stepwise = self.method.stepwise
        size = 1 if stepwise else min(self.chunk or SCORE_CHUNK, SCORE_CHUNK)
        self._check_positions(pending.shape[1] + tokens.shape[1])
        self.reserve(pending.shape[1] + tokens.shape[1], max(pending.shape[1], size))
        if pending.shape[1]:
            chunks = pending.split(self.chunk or SCORE_CHUNK, dim=1)
            self.logits = yield from self._chunk_passes(chunks, Moment.TURN_END)
            self.pending = []
        taken = []
        chunks = tokens.split(size, dim=1)
        for i, chunk in enumerate(chunks):
            end = Moment.DECODE if stepwise else Moment.TURN_END
            moment = end if stepwise or i == len(chunks) - 1 else end.chunk
            logits = yield from request(self, chunk, moment, chunk.shape[1])
            taken.append(take(chunk, torch.cat([self.logits[:, None], logits[:, :-1]], dim=1)))
            self.logits = logits[:, -1]
        self.check_logits()
        self.ledger.note_layers()
        return torch.cat(taken, dim=1)

    def run_chunks(self, chunks: Iterable[Tensor], end: Moment) -> Tensor:
        """Run chunks of ids. end: the moment of the last chunk. Returns the last logits [B, V]."""
        return finish(self._chunk_passes(chunks, end))

    def _chunk_passes(self, chunks: Iterable[Tensor], end: Moment) -> Passes[Tensor]:
        *parts, last = chunks
        for ids in parts:
            yield from request(self, ids, end.chunk)
        return (yield from request(self, last, end))[:, -1]

    def fork(self) -> Session:
        """An independent continuation of this session. Entries are shared until one of the two writes."""
        other = object.__new__(Session)
        other.__dict__.update(self.__dict__)
        other.layers = [store.fork() for store in self.layers]
        other.pending = [list(x) for x in self.pending]
        other.ledger = self.ledger.fork(other.layers)
        other._static = None if self._static is None else self._static.clone()
        other._open = ExitStack()
        return other

    def over(self, layers: list[LayerKV], method: Method, kind: type[S]) -> S:
        """A session at the same place of the conversation, over other stores that hold it."""
        other = object.__new__(kind)
        other.__dict__.update(self.__dict__)
        other.layers, other.method, other.ledger = layers, method, Ledger(layers, self.ledger)
        other._recording, other.pending, other._open = None, [], ExitStack()
        return other

    def credit(self, branch: Session) -> None:
        """Add a fork's read counters to this session, and take the larger peak of the two."""
        self.ledger.credit(branch.ledger)

    def _ids(self, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        x = torch.as_tensor(ids, dtype=torch.long)
        refuse_unknown(x, self.model)
        x = x.to(self.model.device)
        return x.expand(self.batch, -1) if x.dim() == 1 else x

    def _check_positions(self, tokens: int) -> None:
        """Refuse more tokens than the model has positions for, at which it would answer badly."""
        needed = self.seen - self.behind + tokens
        if needed > self.model.max_length:
            raise UserError(
                f"the conversation needs {needed} positions, and model {self.model.id} has {self.model.max_length}. "
                "Use a shorter context, shorter questions or a smaller max_new_tokens."
            )


def score_tokens(tokens: Tensor, logits: Tensor) -> Tensor:
    """Log-probabilities of tokens. tokens: [B, T]. logits: [B, T, V]. Returns [B, T]."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def refuse_unknown(ids: Tensor, model: Model) -> None:
    """Refuse token ids that are not of the model (`UserError`): a GPU would end the process at them."""
    unknown = ids[(ids < 0) | (ids >= model.vocabulary)]
    if unknown.numel():
        raise UserError(f"model {model.id} has the token ids 0 to {model.vocabulary - 1}, and not {int(unknown[0])}.")
