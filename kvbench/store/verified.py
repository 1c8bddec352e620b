"""Stores of a layer with two caches: one that drafts tokens, and one that verifies them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.budget import LayerShape, Shape
from kvbench.step import Step
from kvbench.store.entries import storage_bytes
from kvbench.store.facts import Fact
from kvbench.store.host import host_fact
from kvbench.store.layer import LayerKV


@dataclass
class HostKV(LayerKV):
    """Every entry of a layer, in host memory once the context is complete; attention fetches them.

    On a CPU there is no other memory: the tier is then simulated, and says so.
    """

    reloaded: int = field(default=0, init=False)
    """Bytes of entries that attention has fetched from host memory."""
    device: torch.device | None = field(default=None, init=False)
    """Where attention is computed; None: the entries are still there."""

    def move(self) -> None:
        """Move the entries to host memory."""
        held = self._held()
        self.device = held["key"].device
        if self.device.type != "cpu":
            self._replace({name: x.cpu() for name, x in held.items()}, self.n + self.remaining)

    def _view(self, name: str) -> Tensor:
        entries = super()._view(name)
        return entries if self.device is None else entries.to(self.device)

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over every entry held. [B, H_q, T, D_v]"""
        if self.device is not None:
            self.reloaded += sum(x.nbytes for x in self._held().values())
        return super().attend(step)

    def fork(self) -> LayerKV:
        """A copy that counts for itself."""
        other = super().fork()
        assert isinstance(other, HostKV)
        other.reloaded = 0
        return other

    def credit(self, branch: LayerKV) -> None:
        """Add the bytes that a fork fetched."""
        assert isinstance(branch, HostKV)
        self.reloaded += branch.reloaded


@dataclass
class VerifiedKV(LayerKV):
    """Two caches of the same tokens, which append and crop in step.

    The target computes all attention outside of drafting. The draft takes the same entries and keeps a part of them.
    """

    target: LayerKV = field(default_factory=LayerKV)
    draft: LayerKV = field(default_factory=LayerKV)

    drafted: int = field(default=0, init=False)
    """Draft steps."""
    passes: int = field(default=0, init=False)
    """Passes over the target that gave tokens: verifications, and of a drafter the pass before its first round."""
    generated: int = field(default=0, init=False)
    """Tokens that these passes gave."""
    chosen_bytes: int = field(default=0, init=False)
    """Bytes of the target that were read after rounds, to choose the draft's entries anew and to copy them."""

    def prepare(self, capacity: int, *, track: bool) -> None:
        """Take the session's options for both caches."""
        super().prepare(capacity, track=track)
        for store in (self.target, self.draft):
            store.prepare(capacity, track=track)

    @property
    def _host(self) -> bool:
        return isinstance(self.target, HostKV) and self.target.device is not None

    @property
    def reloaded(self) -> int:
        """Bytes of entries that verification and questions have fetched from host memory."""
        return self.target.reloaded if isinstance(self.target, HostKV) else 0

    def bytes_for(self, layer: LayerShape, shape: Shape, entries: int) -> int:
        """Bytes of the draft, and of the target unless it is in host memory."""
        target = 0 if isinstance(self.target, HostKV) else self.target.bytes_for(layer, shape, shape.entries(layer))
        return target + self.draft.bytes_for(layer, shape, entries)

    def resume(self) -> None:
        """Bring both caches into the form that an answer reads, once, before they are forked."""
        self.target.resume()
        self.draft.resume()

    def append(self, step: Step) -> None:
        """Add a forward's entries to both caches."""
        self.seen, self._window = step.seen, step.window
        self.target.append(step)
        self.draft.append(step)

    def attend(self, step: Step) -> Tensor:
        """Attention output of the last T entries over the target. [B, H_q, T, D_v]"""
        return self.target.attend(step)

    def reserve(self, tokens: int, forward: int) -> None:
        """Make room for `tokens` more tokens in both caches."""
        self.target.reserve(tokens, forward)
        self.draft.reserve(tokens, forward)

    def keep_last(self, entries: int) -> None:
        """Keep the last entries of every head in both caches, for a sliding window."""
        self.target.keep_last(entries)
        self.draft.keep_last(entries)

    def settle(self) -> None:
        """No compression is to come."""
        super().settle()
        self.target.settle()
        self.draft.settle()

    def fork(self) -> VerifiedKV:
        """An independent copy with its own counters."""
        other = copy.copy(self)
        other.target, other.draft = self.target.fork(), self.draft.fork()
        other.drafted = other.passes = other.generated = other.chosen_bytes = 0
        return other

    def credit(self, branch: LayerKV) -> None:
        """Add a fork's counters of drafts, verifications and reads."""
        assert isinstance(branch, VerifiedKV)
        self.drafted += branch.drafted
        self.passes += branch.passes
        self.generated += branch.generated
        self.chosen_bytes += branch.chosen_bytes
        self.target.credit(branch.target)
        self.draft.credit(branch.draft)

    def close(self) -> None:
        """Free the entries of both caches."""
        self.target.close()
        self.draft.close()

    # Counting

    def tensors(self) -> list[Tensor]:
        """Every tensor of the draft, and of the target unless it is in host memory."""
        return self.draft.tensors() + ([] if self._host else self.target.tensors())

    def host_tensors(self) -> list[Tensor]:
        """Every tensor in host memory."""
        return self.draft.host_tensors() + (self.target.tensors() if self._host else [])

    def spare_bytes(self) -> int:
        """Bytes that hold no entry yet, outside host memory."""
        return self.draft.spare_bytes() + (0 if self._host else self.target.spare_bytes())

    def host_spare_bytes(self) -> int:
        """Bytes in host memory that hold no entry yet."""
        return self.draft.host_spare_bytes() + (self.target.spare_bytes() if self._host else 0)

    def file_bytes(self) -> int:
        """Bytes of entries of both caches in files."""
        return self.draft.file_bytes() + self.target.file_bytes()

    def read_bytes(self) -> int:
        """Bytes that drafting and verification read per generated token; before the first, those of the target."""
        return self._per_token(self.draft.read_bytes(), _entry_bytes(self.target), self.chosen_bytes)

    def distinct_read_bytes(self) -> int:
        """As `read_bytes`, with an entry of the draft counted once that several query heads read."""
        return self._per_token(self.draft.distinct_read_bytes(), _entry_bytes(self.target), self.chosen_bytes)

    def tier_read_bytes(self) -> tuple[int, int]:
        """The parts of `read_bytes` that come from the host and from a file."""
        host, file = self.target.tier_read_bytes()
        if self._host:
            host = _entry_bytes(self.target)
        from_host, from_file = self.draft.tier_read_bytes()
        return self._per_token(from_host, host), self._per_token(from_file, file)

    def _per_token(self, draft: int, target: int, chosen: int = 0) -> int:
        total = self.drafted * draft + self.passes * target + chosen
        return total // self.generated if self.generated else target

    def entries_kept(self) -> list[int]:
        """Entries that the draft holds of each (batch, KV head)."""
        return self.draft.entries_kept()

    def facts(self) -> dict[str, Fact]:
        """Counters of the draft, and the target's entries in host memory."""
        if not isinstance(self.target, HostKV) or self.target.device is None:
            return self.draft.facts()
        return {**self.draft.facts(), **host_fact(sum(self.target.entries_kept()), self.target.device)}


def _entry_bytes(store: LayerKV) -> int:
    """Bytes of the entries that a pass over a whole store reads."""
    return storage_bytes(store.tensors()) - store.spare_bytes()
