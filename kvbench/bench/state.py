"""Sessions that hold a context: from a prefill, or from synthetic KV entries without a forward pass."""

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
from kvbench.method import Method
from kvbench.step import Moment, Step


@dataclass(frozen=True)
class Setting:
    """Values that all cells of a job share."""

    model: Model
    state: State = "prefill"
    chunk: int | None = None
    later: int = LATER
    """Tokens after the context for which stores allocate room."""

    def tokens(self, batch: int, count: int, seed: int) -> Tensor:
        """Seeded random token ids, the same for every method. [B, count]"""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(len(self.model.tokenizer), (batch, count), generator=generator)
        return ids.to(self.model.device)


@dataclass(frozen=True)
class OpenContext:
    """A session with a compressed context, and what the prefill took."""

    session: Session
    prefill_s: float | None
    """None if the context is synthetic."""
    device_memory: DeviceMemory | None


@contextmanager
def open_context(setting: Setting, method: Method, length: int, batch: int) -> Iterator[OpenContext]:
    """Open a session with a compressed context of `length` tokens. The method must be fitted to this length."""
    device = setting.model.device
    ids = setting.tokens(batch, length, seed=1)
    before = _start_counting(device)
    with Session(setting.model, method, capacity=length + setting.later, chunk=setting.chunk) as session:
        started = now(device)
        if setting.state == "prefill":
            session.prefill(ids)
        else:
            session.fill(make_entries(setting, length, batch))
        seconds = now(device) - started
        yield OpenContext(
            session, seconds if setting.state == "prefill" else None,
            None if device.type != "cuda" else DeviceMemory(
                steady_bytes=torch.cuda.memory_allocated(device) - before,
                peak_bytes=torch.cuda.max_memory_allocated(device) - before,
            ),
        )


def _start_counting(device: torch.device) -> int:
    """Reset the allocator's peak and return the bytes allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def make_entries(setting: Setting, length: int, batch: int) -> Iterator[Step]:
    """Yield normally distributed KV entries of a whole context, one step per layer, shaped as the model's own steps.

    One query is expanded to all positions: values do not change the time, and the queries of a long context in every
    layer would not fit into memory.
    """
    ids = setting.tokens(batch, length, seed=1)
    with attached(setting.model.module):
        caught = catch_steps(setting.model.module, ropes=setting.model.ropes)
    for step in caught:
        device = step.key.device
        generator = torch.Generator(device).manual_seed(step.layer)
        query, key, value = (
            torch.randn(
                (batch, x.shape[1], count, x.shape[3]), dtype=x.dtype, device=device, generator=generator
            ) for x, count in ((step.query, 1), (step.key, length), (step.value, length))
        )
        yield replace(
            step, moment=Moment.CONTEXT_END, seen=length,
            positions=torch.arange(length, device=device).expand(batch, -1),
            query=query.expand(-1, -1, length, -1), key=key, value=value, ids=ids,
        )
