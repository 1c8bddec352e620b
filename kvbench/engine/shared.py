"""The prefill of a context, run once for all methods that compress it after an exact prefill.

A method needs no flag for this. The recording gives its stores the queries, keys and values of the exact prefill, layer
by layer and chunk by chunk, as the model would. A method that runs other passes takes nothing and runs the model. Three
checks show whether its own prefill would have been the same: on the first context of a run its attention outputs must
equal the recorded ones bit for bit in every layer; on every context it must pass the store's attention on unchanged,
and keep every entry until the end of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.agreement import FullCache
from kvbench.engine.recording import Pass, Recording
from kvbench.engine.session import Session
from kvbench.hf import catching_hidden
from kvbench.kernels.choice import using
from kvbench.log import say
from kvbench.machine import free_bytes
from kvbench.step import Moment

if TYPE_CHECKING:
    from kvbench.hf import Model
    from kvbench.method import Method
    from kvbench.runs.spec import RunSpec
    from kvbench.step import Step

SHARE_OF_MEMORY = 0.25
"""Most of the memory that is free before the first recording that all recordings may take."""


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
    """Records contexts: runs on the same contexts take turns, and those of a batch are in memory together."""

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], tuple[Recording, int]] = {}
        """Recordings with their bytes; those that were taken last stand last."""
        self._first: dict[str, tuple[object, ...]] = {}
        """The first context of each run, on which it compares its attention."""
        self._proven: set[str] = set()
        self._alone: set[str] = set()
        self._kept = 1
        self._limit: int | None = None
        self._warned = False
        self._hidden = False
        """Whether recordings hold hidden states."""

    def expect(self, method: Method) -> None:
        """Note a method that will take recordings: from now on they hold hidden states if it reads them.

        Call it for every method before the first `keep`, which otherwise counts on smaller recordings.
        """
        self._hidden |= method.reads_hidden

    def fits(self, model: Model, tokens: int) -> bool:
        """Whether a context can be recorded: a run that does not compare its attention first takes no other."""
        return self._predict(model, tokens, outputs=True) <= self._room(model)

    def keep(self, contexts: int, model: Model, tokens: int) -> int:
        """From now on keep the recordings of so many contexts, or of as many as fit into memory. Returns how many."""
        left = self._room(model) - self._predict(model, tokens, outputs=True)  # that of the first context
        contexts = max(1, min(contexts, 1 + left // self._predict(model, tokens, outputs=False)))
        self._kept = max(self._kept, contexts)
        return contexts

    def take(self, model: Model, context: Sequence[int], spec: RunSpec) -> tuple[Recording | None, bool]:
        """The recording of a context, and whether the run must compare its attention with it.

        None: the run's method cannot use one, or it would take too much memory.
        """
        if spec.run_id in self._alone:
            return None, False
        key = (id(model.module), tuple(context), spec.chunk, spec.kernels)
        proves = spec.run_id not in self._proven and self._first.setdefault(spec.run_id, key) == key
        recording, need = self._held.pop(key, (None, 0))
        if recording is None or (proves and not recording.passes[0].outputs):
            need = self._predict(model, len(context), outputs=proves)
            recording = self._record(model, context, spec, need, outputs=proves)
            if recording is None:
                if proves:
                    self.retract(spec)
                return None, False
        self._held[key] = recording, need
        return recording, proves

    def _record(
        self, model: Model, context: Sequence[int], spec: RunSpec, need: int, *, outputs: bool
    ) -> Recording | None:
        """Run the prefill; None if there is no memory for its recording."""
        if not self._make_room(model, need, len(context)):
            return None
        try:
            return record(model, context, spec.chunk, spec.kernels, outputs=outputs, hidden=self._hidden)
        except torch.OutOfMemoryError:
            say(f"no memory to share a context of {len(context)} tokens: {spec.method.name} runs it alone.")
            self._held.clear()
            return None

    @property
    def _bytes(self) -> int:
        return sum(need for _, need in self._held.values())

    def _predict(self, model: Model, tokens: int, *, outputs: bool) -> int:
        return predict_bytes(model, tokens, outputs=outputs, hidden=self._hidden)

    def _room(self, model: Model) -> int:
        """Bytes that all recordings may take."""
        # Found once: the caches of a batch are no reason to free recordings that the next method takes in the same
        # order, since each would then be freed just before it is taken.
        if self._limit is None:
            self._limit = int(SHARE_OF_MEMORY * free_bytes(model.device.type))
        return self._limit

    def _make_room(self, model: Model, need: int, tokens: int) -> bool:
        """Free recordings, those first that were taken longest ago. False: another one does not even fit alone."""
        room = self._room(model)
        if need > room:
            if not self._warned:
                say(
                    f"a context of {tokens} tokens takes {need / 1e9:.1f} GB to share, and at most {room / 1e9:.1f} GB "
                    f"are used, {SHARE_OF_MEMORY:.0%} of the free memory: every method runs it alone."
                )
                self._warned = True
            return False
        while self._held and (len(self._held) >= self._kept or need + self._bytes > room):
            self._held.pop(next(iter(self._held)))
        return True

    def accept(self, spec: RunSpec) -> None:
        """Note that the run's attention equals the recorded one."""
        self._proven.add(spec.run_id)

    def retract(self, spec: RunSpec) -> None:
        """Compare on the next context, if the first one ended before the run's attention was accepted."""
        if spec.run_id not in self._proven:
            self._first.pop(spec.run_id, None)

    def refuse(self, spec: RunSpec, reason: str) -> None:
        """Note that the run's method must run every context alone."""
        say(f"{spec.method.name} runs every context alone: {reason}")
        self._alone.add(spec.run_id)


def predict_bytes(model: Model, tokens: int, *, outputs: bool, hidden: bool = False) -> int:
    """Bytes of the recording of a context."""
    total = len(model.layers) * model.width if hidden else 0
    for layer in model.layers:
        total += layer.query_heads * (layer.key_dim + (layer.value_dim if outputs else 0))
        total += layer.kv_heads * (layer.key_dim + layer.value_dim)
    return total * tokens * model.shape(tokens).itemsize


def record(
    model: Model, context: Sequence[int], chunk: int | None, kernels: str, *, outputs: bool, hidden: bool = False
) -> Recording:
    """Run the prefill of a context with the full cache. Keeps the attention outputs or the hidden states, if asked."""
    passes: list[Pass] = []
    ids = torch.tensor([context], device=model.device)
    chunks = ids.split(chunk or ids.shape[1], dim=1)
    catching = catching_hidden(model.module) if hidden else nullcontext()
    with using(kernels) as ran, catching, RecordingSession(model, ids.shape[1]) as session:
        for number, part in enumerate(chunks, 1):
            start = session.seen
            moment = Moment.CONTEXT_END if number == len(chunks) else Moment.CONTEXT_CHUNK
            logits = session.forward(part, moment)
            passes.append(Pass(start, part, session.steps, session.outputs if outputs else [], logits))
            session.steps, session.outputs = [], []
    return Recording(passes, dict(ran), hidden)
