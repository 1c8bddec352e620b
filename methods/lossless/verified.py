"""The base of lossless methods: another method's cache drafts tokens, and a cache of every entry verifies them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from kvbench.constraints import Positive
from kvbench.engine.speculation import draft_with, find_stores, open_draft, speculate
from kvbench.engine.stores import observe
from kvbench.method import Method, Moment, Round, Shape, Step
from kvbench.methods.baseline.full import Full
from kvbench.store import LayerKV
from kvbench.store.verified import HostKV, VerifiedKV

if TYPE_CHECKING:
    from kvbench.engine.autoregressive import Tokens
    from kvbench.engine.session import Session


@dataclass(frozen=True)
class Verified(Method):
    """Drafts up to `draft_length` tokens with one cache per round and verifies them with another."""

    draft_length: Positive = 8
    """Most tokens that are drafted in a round."""

    replays_context: ClassVar[bool] = False
    recompressible: ClassVar[str | None] = "its answers are those of the cache that verifies, however often it drafts."
    graphable: ClassVar[str | None] = "the number of accepted tokens differs from round to round."

    @cached_property
    def drafter(self) -> Method:
        """The method of the cache that drafts, with the same budget."""
        raise NotImplementedError

    def target_layer(self, index: int) -> LayerKV:
        """An empty store of the cache that verifies."""
        del index
        return LayerKV()

    def layer(self, index: int) -> LayerKV:
        """A store with both caches."""
        return VerifiedKV(target=self.target_layer(index), draft=self.drafter.layer(index))

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over the cache that verifies; the drafter scores its entries. [B, H_q, T, D_v]"""
        assert isinstance(kv, VerifiedKV)
        output = kv.attend(step)
        observe(self.drafter, kv.draft, step)
        return output

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Let the drafter decide which entries its cache keeps."""
        assert isinstance(kv, VerifiedKV)
        self.drafter.evict(kv.draft, step)

    def follow(self, kv: VerifiedKV, step: Step) -> None:
        """Give verified entries to the cache that drafts."""
        kv.draft.append(step)
        observe(self.drafter, kv.draft, step)
        self.evict(kv, step)

    def end_of_layer(self, layers: Sequence[LayerKV], step: Step) -> None:
        """Let the drafter decide across its layers."""
        self.drafter.end_of_layer([x.draft for x in layers if isinstance(x, VerifiedKV)], step)

    def prefill(self, session: Session, chunks: Iterable[Tensor]) -> Tensor:
        """Run the context once for both caches, in the drafter's way. [B, V]"""
        if not self.drafter.replays_context:
            return session.run_chunks(chunks, Moment.CONTEXT_END)
        draft = open_draft(session, self.drafter)
        logits = self.drafter.prefill(draft, chunks)
        session.compress_seconds += draft.compress_seconds
        return logits

    def end_of_context(self, session: Session) -> None:
        """Let the drafter decide across layers, and move entries that verify from host memory there."""
        self.drafter.end_of_context(open_draft(session, self.drafter))
        for store in find_stores(session):
            if isinstance(store.target, HostKV):
                store.target.move()

    def generate(self, session: Session, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
        """Draft and verify in rounds."""
        return speculate(
            session, partial(draft_with, session, self.drafter), self.draft_length, max_new_tokens, stop,
            stepwise=self.drafter.stepwise, follow=self.follow,
        )

    def target(self, session: Session) -> Session | None:
        """The session of the cache that verifies."""
        return session.over([store.target for store in find_stores(session)], Full(), type(session))

    def minimum_entries(self) -> int:
        """Those of the drafter."""
        return self.drafter.minimum_entries()

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the draft, and of the cache that verifies unless it is in host memory."""
        draft = self.drafter.declared_bytes(shape)
        return draft if isinstance(self.target_layer(0), HostKV) else draft + self.target_bytes(shape)

    def declared_host_bytes(self, shape: Shape) -> int:
        """Bytes of the drafter in host memory, and of the cache that verifies if it is there."""
        draft = self.drafter.declared_host_bytes(shape)
        return draft + self.target_bytes(shape) if isinstance(self.target_layer(0), HostKV) else draft

    def target_bytes(self, shape: Shape) -> int:
        """Bytes of the cache that verifies."""
        return shape.full_bytes

    def running_bytes(self, shape: Shape) -> int:
        """Running statistics of the drafter, and the cache that verifies: the drafter's holds all entries as well."""
        return self.drafter.running_bytes(shape) + self.target_bytes(shape)

    def later_bytes(self, shape: Shape, tokens: int) -> int:
        """Room in the drafter's cache, and in the one that verifies unless it is in host memory."""
        draft = self.drafter.later_bytes(shape, tokens)
        if isinstance(self.target_layer(0), HostKV):
            return draft
        return draft + -(-tokens * shape.full_bytes // shape.length)

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes of a token if every drafted one is rejected: all steps of a draft, and a pass over everything."""
        return self.draft_length * self.drafter.declared_read_bytes(shape) + self.target_bytes(shape)

    def round(self, shape: Shape) -> Round:
        """A draft, itself in rounds if the drafter has them, and a pass over everything."""
        inner = self.drafter.round(shape)
        if inner is None:
            return Round(self.draft_length, self.draft_length + 1, self.declared_read_bytes(shape))
        times = -(-self.draft_length // (inner.drafted + 1))
        return Round(
            self.draft_length, times * inner.passes + 1, times * inner.read_bytes + self.target_bytes(shape)
        )

    def least_read_bytes(self, shape: Shape) -> int:
        """No bound: a round may give any number of tokens, which share its reads."""
        del shape
        return 0
