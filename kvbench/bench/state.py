"""Sessions at a length and a batch: their context run, or their stores filled with rows that no pass made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.bench.forecast import LATER, State
from kvbench.bench.records import DeviceMemory
from kvbench.engine.session import Session
from kvbench.engine.timing import now
from kvbench.hf import Model, attached, catch_steps
from kvbench.method import Method, Step
from kvbench.runs.journal import CacheBytes


@dataclass(frozen=True)
class Setting:
    """What the cells of a job share."""

    model: Model
    state: State = "prefill"
    chunk: int | None = None
    seed: int = 0
    later: int = LATER
    """Tokens that stores have room for after the context."""

    def tokens(self, batch: int, count: int, seed: int) -> Tensor:
        """Seeded ids, the same for every method. [B, count]"""
        generator = torch.Generator().manual_seed(self.seed + seed)
        ids = torch.randint(len(self.model.tokenizer), (batch, count), generator=generator)
        return ids.to(self.model.device)


@dataclass(frozen=True)
class Stand:
    """A session that holds its context, and what that took."""

    session: Session
    prefill_s: float | None
    """None: the context was not run."""
    device_memory: DeviceMemory | None


@contextmanager
def open_stand(setting: Setting, method: Method, length: int, batch: int) -> Iterator[Stand]:
    """A session with a context of so many tokens, compressed. The method's budget is fitted to the length."""
    device = setting.model.device
    ids = setting.tokens(batch, length, seed=1)
    before = _start_counting(device)
    with Session(setting.model, method, capacity=length + setting.later, chunk=setting.chunk) as session:
        started = now(device)
        if setting.state == "prefill":
            session.prefill(ids)
        else:
            session.fill(make_rows(setting, length, batch))
        seconds = now(device) - started
        yield Stand(
            session, seconds if setting.state == "prefill" else None,
            None if device.type != "cuda" else DeviceMemory(
                steady_bytes=torch.cuda.memory_allocated(device) - before,
                peak_bytes=torch.cuda.max_memory_allocated(device) - before,
            ),
        )


def _start_counting(device: torch.device) -> int:
    """Bytes allocated now; the peak counts from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def make_rows(setting: Setting, length: int, batch: int) -> Iterator[Step]:
    """Normally distributed rows of a whole context, a layer at a time, in steps as the model's own layers make them.

    One query stands for all of them: values do not matter to a clock, and 32 times the queries of a long context would
    not fit.
    """
    with attached(setting.model.module):
        asked = catch_steps(setting.model.module, ropes=setting.model.ropes)
    for step in asked:
        device = step.key.device
        generator = torch.Generator(device).manual_seed(setting.seed + step.layer)
        query, key, value = (
            torch.randn(
                (batch, x.shape[1], rows, x.shape[3]), dtype=x.dtype, device=device, generator=generator
            ) for x, rows in ((step.query, 1), (step.key, length), (step.value, length))
        )
        yield replace(
            step, compress=True, observe=True, seen=length,
            positions=torch.arange(length, device=device).expand(batch, -1),
            query=query.expand(-1, -1, length, -1), key=key, value=value,
        )


def count_bytes(session: Session) -> CacheBytes:
    """The ledger's account, as a record."""
    return session.memory()
