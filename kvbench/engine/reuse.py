"""Running a prompt whose entries are partly at hand from other prompts.

Entries are kept before rotation, so they can be used at any position. A prompt is put together from pieces of chunks;
tokens without a piece, and those that a method wants anew, run through the model at their own positions. A token sees
all entries before it, whether they were taken over or computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import accumulate
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.hf import Forward, narrowing
from kvbench.runs.journal import ReuseLine
from kvbench.step import Moment, Step
from kvbench.store import LayerKV
from kvbench.store.chunks import Chunk, ChunkStore, Owner, name_chunk
from kvbench.store.reused import ReusedKV

if TYPE_CHECKING:
    from kvbench.hf import Model

Look = Callable[[Step, LayerKV], None]
"""Called with each layer's step and its store, which holds the step's entries."""
Ids = tuple[int, ...]


@dataclass
class Reuse:
    """A session's prompt by parts, the prompts that ran before, and their chunks.

    parts: an instruction, then documents.
    template: hash of the chat template.
    origin: the code that computes entries, and the kind of device that it runs on.
    """

    parts: tuple[Ids, ...]
    earlier: tuple[tuple[Ids, ...], ...]
    store: ChunkStore = field(default_factory=ChunkStore)
    template: str | None = None
    origin: str = ""
    build_seconds: float = 0.0
    """Time to compute the chunks that were not in the store."""
    moved_bytes: int = 0
    """Bytes of chunks that were copied into the prompt's cache."""

    @property
    def known(self) -> set[Ids]:
        """The parts that occur in earlier prompts."""
        return {part for prompt in self.earlier for part in prompt}


def refuse_unfit(model: Model) -> None:
    """Refuse models whose layers forget entries, or whose entries cannot be moved (`UserError`)."""
    if any(x.window is not None for x in model.layers):
        raise UserError(f"{model.id} has sliding windows, and entries cannot be reused there. Use a model without.")
    if not model.entries_move:
        raise UserError(
            f"{model.id} learned its positions, or they are not understood, and its entries cannot be reused at other "
            "positions. Use a model with rotary embedding."
        )


@dataclass(frozen=True)
class Piece:
    """Neighboring tokens of a chunk, and their place in the prompt."""

    chunk: Chunk
    first: int
    """In the chunk."""
    start: int
    """In the prompt."""
    count: int


class MixedPrompt:
    """A prompt under construction: pieces of chunks, and tokens to run.

    ids: [1, N].
    owner: whose chunks may be used.
    """

    def __init__(self, session: Session, ids: Tensor, reuse: Reuse, owner: Owner) -> None:
        self.session, self.model, self.ids, self.reuse, self.owner = session, session.model, ids, reuse, owner
        self.length = ids.shape[1]
        self.pieces: list[Piece] = []
        self.places = torch.arange(self.length, device=ids.device)
        """The place of every token in the prompt. [N]"""
        self.positions = self.places.clone()
        """Positions that tokens are rotated to, by their place in the prompt. [N]"""
        self.reused = torch.zeros(self.length, dtype=torch.bool, device=ids.device)
        """True for tokens with entries at hand. [N]"""
        self._anew, self._apart = torch.zeros_like(self.reused), torch.zeros_like(self.reused)

    @property
    def layers(self) -> list[ReusedKV]:
        """The stores of the session."""
        return cast("list[ReusedKV]", self.session.layers)

    @property
    def parts(self) -> list[tuple[int, Ids]]:
        """Each part with its place in the prompt."""
        starts = accumulate((len(x) for x in self.reuse.parts), initial=0)
        return list(zip(starts, self.reuse.parts, strict=False))

    @property
    def tail(self) -> int:
        """The place after the last part."""
        return sum(map(len, self.reuse.parts))

    @property
    def fresh(self) -> Tensor:
        """The places that must run: those without entries or with a new choice, and the last, for its logits. [m]"""
        mask = ~self.reused | self._anew
        mask[-1] = True
        return mask.nonzero()[:, 0]

    def with_fresh(self, places: Tensor) -> Tensor:
        """These places and those that must run. [m] -> [n], ascending"""
        chosen: Tensor = torch.cat([self.fresh, places]).unique()
        return chosen

    def obtain(
        self, before: Sequence[int], ids: Sequence[int], make: Callable[[], Chunk] | None = None,
        also: Sequence[int] = (),
    ) -> Chunk:
        """The chunk of these tokens, run after those; from the store, or made and kept there.

        make: computes it; None: one pass over all of these tokens. also: what it depends on besides the tokens.
        """
        name = name_chunk(before, ids, also)
        found = self.reuse.store.get(self.owner, name)
        if found is None:
            started = now(self.model.device)
            found = run_apart(self.model, before, ids) if make is None else make()
            self.reuse.store.put(self.owner, name, found)
            self.reuse.build_seconds += now(self.model.device) - started
        return found

    def add(
        self, chunk: Chunk, start: int, *, first: int = 0, count: int | None = None, at: int | None = None
    ) -> None:
        """Use a chunk, or a part of it, at this place. at: the position of its first token; None: its place."""
        count = chunk.length - first if count is None else count
        self.pieces.append(Piece(chunk, first, start, count))
        self.reused[start : start + count] = True
        if at is not None:
            self.positions[start : start + count] = torch.arange(at, at + count, device=self.positions.device)

    def add_new(self, before: Sequence[int], ids: Sequence[int], start: int, *, at: int) -> None:
        """Run tokens that no earlier prompt has, behind those of `before`, and use their entries at this place.

        They count as computed. at: the position of the first one.
        """
        self.add(run_apart(self.model, before, ids), start, at=at)
        self._apart[start : start + len(ids)] = True

    def go_on(self, position: int) -> None:
        """Give the tokens after the last part, and all later ones of the conversation, positions from this one on.

        Raises:
            UserError: the conversation then needs more positions than the model has.
        """
        after, most = self.length - self.tail, self.model.max_length
        self.positions[self.tail :] = torch.arange(position, position + after, device=self.positions.device)
        self.session.behind = self.tail - position
        needed = max(self.length, self.session.capacity) - self.session.behind
        if self.session.behind < 0 and needed > most:
            raise UserError(
                f"text after the documents starts at position {position}, so this conversation needs {needed} "
                f"positions, and {self.model.id} has {most}. Use a smaller --length."
            )

    def renew(self, places: Tensor) -> None:
        """Compute the tokens at these places [m], although their entries are at hand."""
        self._anew[places] = True

    def run(
        self, rows: Tensor, *, narrow: Callable[[Step, ReusedKV], Tensor | None] | None = None,
        writes: Callable[[int], bool] | None = None, look: Look | None = None,
    ) -> Tensor:
        """Run the tokens at these places. Returns the logits of the last. [1, V]

        rows: [m], ascending; the last is the prompt's last token.
        narrow: called in each layer with the step and the store, before the step's entries are written; returns the
            places that go on to the next layer [m], or None for all.
        writes: whether a layer takes the computed entries of tokens that have others; None: every layer does.
        look: called in each layer before its attention.
        """
        assert int(rows[-1]) == self.length - 1, "the last token must run"
        places = rows  # of the layer that runs

        def attend(step: Step) -> Tensor:
            nonlocal places
            kv, here = self.layers[step.layer], places
            if kv.n == 0:
                self._load(kv, step)
            chosen = None if narrow is None else narrow(step, kv)
            kept = None if writes is None or writes(step.layer) else (~self.reused[here]).nonzero()[:, 0]
            kv.overwrite(step, here, kept)
            if look is not None:
                look(step, kv)
            places = here if chosen is None else chosen
            return kv.attend_at(step, here)

        forward = Forward(
            moment=Moment.CONTEXT_END, positions=self.positions[rows][None], seen=self.length, attend=attend,
            ropes=self.model.ropes,
        )
        with ExitStack() as stack:
            if narrow is not None:
                stack.enter_context(narrowing(self.model.module, lambda _: torch.searchsorted(rows, places)))
            return self.model.run(self.ids[:, rows], forward)[:, -1]

    def finish(self) -> None:
        """Note that the session has seen the prompt, and from which entries."""
        self.session.seen = self.length
        for kv in self.layers:
            kv.finish(self._apart)
        self.session.exact = not (self._apart.any() or any(kv.reused for kv in self.layers))

    def _load(self, kv: ReusedKV, step: Step) -> None:
        """Fill a layer with the entries at hand, rotated to their positions."""
        shape = (1, step.key.shape[1], self.length)
        keys = step.key.new_zeros(*shape, step.key.shape[3])
        values = step.value.new_zeros(*shape, step.value.shape[3])
        for x in self.pieces:
            place, source = slice(x.start, x.start + x.count), slice(x.first, x.first + x.count)
            key, value = x.chunk.keys[step.layer][:, :, source], x.chunk.values[step.layer][:, :, source]
            keys[:, :, place], values[:, :, place] = key, value
            self.reuse.moved_bytes += key.nbytes + value.nbytes
        kv.load(step, step.rope.rotate(keys, self.positions[None]), values, self.reused)


class Watched(Session):
    """A session that shows each step after its attention, with the store that holds its entries."""

    look: Look | None = None

    def attend(self, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        output = super().attend(step)
        if self.look is not None:
            self.look(step, self.layers[step.layer])
        return output


def run_prompt(model: Model, ids: Sequence[int], look: Look | None = None) -> Chunk:
    """The entries of a whole prompt, run with the full cache. look: called in each layer after its attention.

    Raises:
        UserError: it has more tokens than the model has positions.
    """
    if len(ids) > model.max_length:
        raise UserError(
            f"a prompt whose entries are to be reused has {len(ids)} tokens, and {model.id} has {model.max_length} "
            "positions. Use a smaller --length."
        )
    with Watched(model, FullCache(), capacity=len(ids)) as session:
        session.look = look
        session.prefill(ids)
        pairs = list(zip(model.ropes, session.layers, strict=True))
        keys = [rope.rotate_from(kv.keys, 0, inverse=True) for rope, kv in pairs]
        return Chunk(keys, [kv.values for _, kv in pairs])


def cut(chunk: Chunk, start: int, count: int) -> Chunk:
    """A copy of some neighboring tokens of a chunk, without its notes."""
    part = slice(start, start + count)
    return Chunk([x[:, :, part].clone() for x in chunk.keys], [x[:, :, part].clone() for x in chunk.values])


def run_apart(model: Model, before: Sequence[int], ids: Sequence[int]) -> Chunk:
    """The entries of some tokens, run after others and nothing else."""
    return cut(run_prompt(model, [*before, *ids]), len(before), len(ids))


@dataclass(frozen=True)
class Edit:
    """Replaces the tokens from `start` to before `stop` by others; inserts or deletes where one of the two is empty."""

    start: int
    stop: int
    ids: Ids


def apply_edits(ids: Sequence[int], edits: Sequence[Edit]) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Edit a prompt. Returns its new tokens, and the kept spans: place before, place after, and number of tokens.

    Raises:
        UserError: an edit is not within the prompt, or two overlap.
    """
    found: list[int] = []
    spans: list[tuple[int, int, int]] = []
    place = 0
    for x in sorted(edits, key=lambda x: (x.start, x.stop)):
        if not 0 <= x.start <= x.stop <= len(ids):
            raise UserError(f"the edit of tokens {x.start} to {x.stop} is not within the prompt of {len(ids)} tokens.")
        if x.start < place:
            raise UserError(f"the edit of tokens {x.start} to {x.stop} overlaps one before it. Join the two.")
        spans.append((place, len(found), x.start - place))
        found += [*ids[place : x.start], *x.ids]
        place = x.stop
    spans.append((place, len(found), len(ids) - place))
    return [*found, *ids[place:]], [x for x in spans if x[2]]


def find_edits(old: Sequence[Ids], new: Sequence[Ids]) -> list[Edit]:
    """Edits that turn a prompt into another, in whole parts."""
    starts = list(accumulate((len(x) for x in old), initial=0))
    codes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [
        Edit(starts[i], starts[j], tuple(x for part in new[k:n] for x in part))
        for tag, i, j, k, n in codes if tag != "equal"
    ]


def count_reuse(session: Session) -> ReuseLine | None:
    """Counts of a session's prompt, taken over and computed; None: its method reuses nothing."""
    reuse, shape = session.reuse, session.shape
    if reuse is None or shape is None:
        return None
    tokens = shape.length * len(session.layers)
    reused = sum(kv.reused for kv in session.layers if isinstance(kv, ReusedKV))
    computed = sum(kv.computed for kv in session.layers if isinstance(kv, ReusedKV))
    store = reuse.store
    return ReuseLine(
        tokens=tokens, computed=computed, reused=reused, hits=store.hits, misses=store.misses,
        mismatched=store.mismatched, refused=store.refused, loaded=store.loaded, chunk_bytes=store.nbytes,
        moved_bytes=reuse.moved_bytes, build_s=reuse.build_seconds,
    )
