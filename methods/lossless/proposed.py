"""The base of lossless methods whose drafts need no second cache: tokens are proposed, and the full cache verifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from kvbench.budget import LayerShape
from kvbench.constraints import Positive
from kvbench.engine.speculation import speculate
from kvbench.method import Method, Round, Shape, Step, resolved
from kvbench.methods.baseline.full import Full
from kvbench.store import LayerKV
from kvbench.store.facts import Fact

if TYPE_CHECKING:
    from kvbench.engine.autoregressive import Tokens
    from kvbench.engine.session import Session
    from kvbench.hf import Model

ID_BYTES = 4


@dataclass
class DraftedKV(LayerKV):
    """Every entry of a layer, which verifies; in one layer, also the ids of all tokens.

    remembers: whether it stores ids. drafts: whether drafting reads its entries.
    """

    remembers: bool = False
    drafts: bool = False

    drafted: int = field(default=0, init=False)
    """Drafted tokens."""
    passes: int = field(default=0, init=False)
    """Verification passes."""
    generated: int = field(default=0, init=False)
    """Tokens that the verification passes gave."""
    reloaded: int = field(default=0, init=False)
    """Bytes fetched from host memory: none."""

    @property
    def target(self) -> LayerKV:
        """The cache that verifies: itself."""
        return self

    @property
    def ids(self) -> Tensor:
        """The ids of all tokens so far. [B, seen] int32"""
        return self.state["ids"][:, : self.seen]

    def append(self, step: Step) -> None:
        """Add a forward's entries, and its ids."""
        super().append(step)
        if not self.remembers:
            return
        assert step.ids is not None, "steps need their ids"
        room = max(self.capacity, step.seen)
        held = self.state.get("ids")
        if held is None or held.shape[1] < step.seen:
            self.state["ids"] = torch.zeros(len(step.ids), room, dtype=torch.int32, device=step.ids.device)
            if held is not None:
                self.state["ids"][:, : held.shape[1]] = held
        self.state["ids"][:, step.seen - step.ids.shape[1] : step.seen] = step.ids

    def fork(self) -> LayerKV:
        """A copy that counts for itself."""
        other = super().fork()
        assert isinstance(other, DraftedKV)
        other.drafted = other.passes = other.generated = 0
        return other

    def credit(self, branch: LayerKV) -> None:
        """Add the tokens that a fork drafted and verified to those of this store."""
        super().credit(branch)
        assert isinstance(branch, DraftedKV)
        self.drafted += branch.drafted
        self.passes += branch.passes
        self.generated += branch.generated

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Bytes of the entries, and of the ids."""
        return super().bytes_for(layer, shape, entries) + self.remembers * ID_BYTES * shape.length

    def spare_bytes(self) -> int:
        """Bytes that hold no entry and no id yet."""
        unused = self.state["ids"].nbytes - self.ids.nbytes if "ids" in self.state else 0
        return super().spare_bytes() + unused

    def read_bytes(self) -> int:
        """Bytes that drafting and verification read per generated token."""
        return self._per_token(super().read_bytes())

    def _per_token(self, entries: int) -> int:
        reads = self.passes + self.drafts * self.drafted
        return entries * reads // self.generated if self.generated else entries

    def facts(self) -> dict[str, Fact]:
        """Drafted tokens, in the layer that stores their ids."""
        return {**super().facts(), "tokens_drafted": Fact(self.drafted * self.remembers, restarts=True)}


@dataclass(frozen=True)
class Proposed(Method):
    """Verifies with the full cache what `propose` drafts."""

    draft_length: Positive = 8
    """Most tokens that are drafted in a round."""

    graphable: ClassVar[str | None] = "the number of accepted tokens differs from round to round."
    recompressible: ClassVar[str | None] = "every entry is stored."
    drafts_from_entries: ClassVar[bool] = False
    """Whether drafting reads entries."""

    holder: int | None = resolved(by_bind=True)
    """The layer whose store has the ids, and whose entries drafting may read."""

    def bind(self, model: Model) -> Self:
        """Store the ids in the last layer."""
        return replace(self, holder=len(model.layers) - 1)

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Store the ids where the result says."""
        holder, last = resolution.get("holder"), len(shape.layers) - 1
        return replace(self, holder=holder if isinstance(holder, int) and 0 <= holder <= last else last)

    def round(self, shape: Shape) -> Round:
        """A draft that runs no pass of the model, and may read one layer, and a pass over everything."""
        drafts = self.draft_length * shape.layer_bytes(shape.layers[-1]) if self.drafts_from_entries else 0
        return Round(self.draft_length, 1, drafts + self.declared_read_bytes(shape))

    def least_read_bytes(self, shape: Shape) -> int:
        """No bound: a round may give any number of tokens, which share its reads."""
        del shape
        return 0

    def layer(self, index: int) -> LayerKV:
        """A store of every entry, and of the ids in one layer."""
        return DraftedKV(remembers=index == self.holder, drafts=index == self.holder and self.drafts_from_entries)

    def held(self, session: Session) -> DraftedKV:
        """The store that has the ids."""
        assert self.holder is not None, "bind the method to a model first"
        store = session.layers[self.holder]
        assert isinstance(store, DraftedKV)
        return store

    def propose(self, session: Session, token: Tensor, count: int) -> Tensor:
        """At most `count` next tokens. token: the newest one, which no store holds yet [B]. [B, at most count]"""
        raise NotImplementedError

    def generate(self, session: Session, max_new_tokens: int, stop: frozenset[int]) -> Tokens:
        """Draft and verify in rounds."""
        with torch.no_grad():
            return speculate(
                session, lambda token, count: self.propose(session, token, count), self.draft_length, max_new_tokens,
                stop,
            )

    def target(self, session: Session) -> Session | None:
        """The session itself, decoded token by token."""
        return session.over(list(session.layers), Full(), type(session))
