"""The prefill of a context, run once for all methods that compress it after an exact prefill.

A method needs no flag for this. The recording gives its stores the queries, keys and values of the exact prefill, layer
by layer and chunk by chunk, as the model would. Three checks show whether its own prefill would have been the same:
on the first context of a run its attention outputs must equal the recorded ones bit for bit in every layer; on every
context it must pass the store's attention on unchanged, and keep every entry until the end of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.agreement import FullCache
from kvbench.engine.recording import Pass, Recording
from kvbench.engine.session import Session
from kvbench.kernels.choice import using
from kvbench.log import say
from kvbench.machine import free_bytes
from kvbench.step import Moment

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.runs.spec import RunSpec
    from kvbench.step import Step

SHARE_OF_MEMORY = 0.25
"""Most of the free memory that a recording may take."""


class RecordingSession(Session):
    """A session that collects the steps of its forward passes and their attention outputs."""

    def __init__(self, model: Model, capacity: int) -> None:
        super().__init__(model, FullCache(), capacity=capacity)
        self.steps: list[Step] = []
        self.outputs: list[Tensor] = []

    def attend(self, step: Step) -> Tensor:
        """Attention over every entry, recorded. [B, H_q, T, D_v]"""
        output = super().attend(step)
        self.steps.append(step)
        self.outputs.append(output)
        return output


class SharedPrefill:
    """Records one context at a time: runs on the same contexts take turns, sample by sample."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._recording: Recording | None = None
        self._proven: set[str] = set()
        self._alone: set[str] = set()
        self._warned = False

    def take(self, model: Model, context: Sequence[int], spec: RunSpec) -> tuple[Recording | None, bool]:
        """The recording of a context, and whether the run must compare its attention with it.

        None: the run's method cannot use one, or it would take too much memory.
        """
        if spec.run_id in self._alone:
            return None, False
        proves = spec.run_id not in self._proven
        key = (id(model.module), tuple(context), spec.chunk, spec.kernels)
        held = self._key == key and self._recording is not None
        if held and not (proves and not self._has_outputs):
            return self._recording, proves
        self._key = self._recording = None  # free it before the next one is made
        need = predict_bytes(model, len(context), outputs=proves)
        free = free_bytes(model.device.type)
        if need > SHARE_OF_MEMORY * free:
            if not self._warned:
                say(
                    f"a context of {len(context)} tokens takes {need / 1e9:.1f} GB to share, and {free / 1e9:.1f} GB "
                    f"are free, of which at most {SHARE_OF_MEMORY:.0%} is used: every method runs it alone."
                )
                self._warned = True
            return None, False
        self._key, self._recording = key, record(model, context, spec.chunk, spec.kernels, outputs=proves)
        return self._recording, proves

    @property
    def _has_outputs(self) -> bool:
        return self._recording is not None and bool(self._recording.passes[0].outputs)

    def accept(self, spec: RunSpec) -> None:
        """Note that the run's attention equals the recorded one."""
        self._proven.add(spec.run_id)

    def refuse(self, spec: RunSpec, reason: str) -> None:
        """Note that the run's method must run every context alone."""
        say(f"{spec.method.name} runs every context alone: {reason}")
        self._alone.add(spec.run_id)


def predict_bytes(model: Model, tokens: int, *, outputs: bool) -> int:
    """Bytes of the recording of a context."""
    total = 0
    for layer in model.layers:
        total += layer.query_heads * (layer.key_dim + (layer.value_dim if outputs else 0))
        total += layer.kv_heads * (layer.key_dim + layer.value_dim)
    return total * tokens * model.shape(tokens).itemsize


def record(model: Model, context: Sequence[int], chunk: int | None, kernels: str, *, outputs: bool) -> Recording:
    """Run the prefill of a context with the full cache. outputs: keep the attention outputs, too."""
    passes: list[Pass] = []
    ids = torch.tensor([context], device=model.device)
    chunks = ids.split(chunk or ids.shape[1], dim=1)
    with using(kernels) as ran, RecordingSession(model, ids.shape[1]) as session:
        for number, part in enumerate(chunks, 1):
            start = session.seen
            moment = Moment.CONTEXT_END if number == len(chunks) else Moment.CONTEXT_CHUNK
            logits = session.forward(part, moment)
            passes.append(Pass(start, part, session.steps, session.outputs if outputs else [], logits))
            session.steps, session.outputs = [], []
    return Recording(passes, dict(ran))
