"""The stores of a conversation, by layer, and single forward passes that read and extend them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from kvbench.engine.ledger import Ledger
from kvbench.engine.recording import InexactPrefillError, Pass, Recording
from kvbench.engine.timing import now
from kvbench.errors import UserError
from kvbench.hf import Forward, Model, attached, bypassing, catching_hidden
from kvbench.kernels.choice import note
from kvbench.method import Method
from kvbench.runs.journal import CacheBytes, Effect
from kvbench.step import Moment, Step
from kvbench.store import LayerKV


class Stores:
    """One store per layer; a `Session` is a conversation over them and documents the arguments."""

    def __init__(
        self, model: Model, method: Method, *, capacity: int, recompress: bool, track: bool,
        recording: Recording | None, compare: bool,
    ) -> None:
        method.require_bound()
        self.model, self.method, self.recompress = model, method, recompress
        self.layers: list[LayerKV] = []
        for index in range(len(model.layers)):
            store = method.layer(index)
            store.prepare(capacity, track=track)
            self.layers.append(store)
        self.seen = 0
        self.behind = 0
        """How far positions are behind the count of tokens, where a method gave parts of the context the same ones.

        Below 0, they are ahead: it left some positions out.
        """
        self.compress_seconds = 0.0
        self._recording, self._compare = recording, compare
        self.taken: list[Pass] = []
        """The recorded passes that were taken; forks have the same list."""
        self.ledger = Ledger(self.layers)
        self._static: Tensor | None = None
        self._shared: dict[str, Tensor] = {}
        self._places: dict[int, Tensor] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(attached(self.model.module))
        if self.method.reads_hidden:
            self._open.enter_context(catching_hidden(self.model.module))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the KV entries and restore the model's attention."""
        for store in self.layers:
            store.close()
        self._open.close()

    # Forward passes

    def forward(self, ids: Tensor, moment: Moment, *, keep: int = 1) -> Tensor:
        """Run one forward pass. ids: new tokens [B, T]. Returns logits of the last `keep` positions [B, keep, V]."""
        if self._recording is not None and moment.in_context:
            found = self._recording.find(self.seen, ids)
            if found is not None and keep == 1:
                return self._replay(found, moment)
        if not (self.method.skips_layers and moment.in_context):
            return self.run_model(ids, moment, self.attend, keep)
        self._shared, self._places = {}, {}
        with bypassing(self.model.module, lambda layer: self._choose(layer, ids)):
            return self.run_model(ids, moment, self.attend, keep)

    def run_model(self, ids: Tensor, moment: Moment, attend: Callable[[Step], Tensor], keep: int) -> Tensor:
        """Run the model over the next tokens with this attention. ids: [B, T]. Returns logits [B, keep, V]"""
        positions = self.take_positions(ids)
        forward = Forward(moment=moment, positions=positions, seen=self.seen, attend=attend, ropes=self.model.ropes)
        return self.model.run(ids, forward, keep)

    def _choose(self, layer: int, ids: Tensor) -> Tensor | None:
        """The tokens of a context's pass that a layer runs; None: all."""
        chosen = self.method.choose_tokens(layer, ids, self._shared)
        if chosen is not None:
            self._places[layer] = chosen
        return chosen

    def take_positions(self, ids: Tensor) -> Tensor:
        """Positions of the next tokens, which count as seen from now on. ids: [B, T]. Returns [B, T]."""
        count = ids.shape[1]
        if self._static is None:
            positions = torch.arange(self.seen - self.behind, self.seen - self.behind + count, device=ids.device)
        else:
            positions = self._static - self.behind + torch.arange(count, device=ids.device)
            self._static.add_(count)
        self.seen += count
        return positions.expand(ids.shape[0], -1)

    def attend(self, step: Step) -> Tensor:
        """Store a step's entries, compute its attention, and let the method evict. [B, H_q, T, D_v]"""
        step = self._share(step)
        places = self._places.pop(step.layer, None)
        if places is not None:  # the other tokens skip this layer
            ids = None if step.ids is None else step.ids.gather(1, places)
            step = replace(step, positions=step.positions.gather(1, places), ids=ids)
        kv = self.layers[step.layer]
        kv.append(step)
        output = self.method.attend(kv, step)
        self._evict(kv, step)
        return output

    def _replay(self, recorded: Pass, moment: Moment) -> Tensor:
        """Take the entries and logits of a recorded pass instead of running the model. Returns logits [B, 1, V].

        Raises:
            InexactPrefillError: the method's own pass would have been different.
        """
        assert self._recording is not None
        if self.method.reads_hidden and not self._recording.hidden:
            raise InexactPrefillError("it reads the model's hidden states, which the recorded prefill does not have.")
        if self.method.inexact_prefill is not None:
            raise InexactPrefillError(self.method.inexact_prefill)
        self.seen += recorded.ids.shape[1]
        for layer, made in enumerate(recorded.steps):
            step = replace(made, moment=moment, hidden=made.hidden if self.method.reads_hidden else None)
            if not self._compare:
                self._store(step, exact=True)
            elif not torch.equal(self.attend(step), recorded.outputs[layer]):
                raise InexactPrefillError(f"its attention in layer {layer} differs from the full cache's.")
        for label, implementation in self._recording.kernels.items():  # of a refused prefill, none has run
            note(label, implementation)
        self.taken.append(recorded)
        return recorded.logits.clone()

    def _store(self, step: Step, *, exact: bool = False) -> None:
        """Store, score and compress a step's entries without computing attention.

        exact: require that the method holds every entry and passes attention on unchanged (`InexactPrefillError`).
        """
        step = self._share(step)
        kv = self.layers[step.layer]
        kv.append(step)
        new = step.key.shape[2]
        before = step.seen - new if step.window is None else min(step.seen - new, step.window)
        if exact and set(kv.entries_kept()) != {before + new}:
            raise InexactPrefillError("it drops entries before the end of the context.")
        if not observe(self.method, kv, step) and exact:
            raise InexactPrefillError("its attention in the prefill is not the store's.")
        self._evict(kv, step)

    def _share(self, step: Step) -> Step:
        """The step with what the layers of this pass have in common, empty at the first one."""
        if not self.method.shares_layers:
            return step
        if step.layer == 0:
            self._shared = {}
        return replace(step, shared=self._shared)

    def _evict(self, kv: LayerKV, step: Step) -> None:
        if step.moment is Moment.DECODE:
            self.method.evict(kv, step)
            return
        self.ledger.note_layer(step.layer)
        if step.window is not None and step.moment.in_context:
            kv.keep_last(step.window)
        compresses = step.moment.compresses
        started = now(step.key.device) if compresses else 0.0  # work queued before does not count as compression
        self.method.evict(kv, step)
        if compresses:
            self.method.end_of_layer(self.layers, step)
            self.compress_seconds += now(step.key.device) - started
            if not self.recompress:
                kv.settle()
            if type(self.method).end_of_layer is not Method.end_of_layer:
                for index in range(step.layer):  # the method may have trimmed them
                    self.ledger.note_layer(index)
        self.ledger.note_layer(step.layer)

    # Room and counts

    def reserve(self, tokens: int, forward: int) -> None:
        """Reserve space for `tokens` more tokens, at most `forward` per pass, so that decoding never reallocates."""
        for store in self.layers:
            store.reserve(tokens, min(tokens, forward))

    @property
    def is_static(self) -> bool:
        """Whether all later steps have the same shapes (`make_static`)."""
        return self._static is not None

    def make_static(self) -> None:
        """Give all later steps the same shapes, with positions and lengths on the device, for CUDA graphs.

        Raises:
            UserError: the method, or one of the stores, has no static decode step.
        """
        if self.method.graphable is not None:
            raise UserError(f"{self.method.card.name} has no static decode step: {self.method.graphable}")
        for store in self.layers:
            store.make_static()
        self._static = torch.tensor(self.seen, device=self.model.device)

    def memory(self) -> CacheBytes:
        """Bytes of the cache right after compression and now."""
        return self.ledger.memory()

    def effect(self) -> Effect:
        """The stores' counters of changes to KV entries."""
        return self.ledger.effect()


def observe(method: Method, kv: LayerKV, step: Step) -> bool:
    """Let a method see a step, for its scores, without the store's attention. Whether it would have passed that on."""
    nothing = step.value.new_zeros(()).expand(*step.query.shape[:3], step.value.shape[3])

    def attend(step: Step) -> Tensor:
        kv.observe(step)
        return nothing

    kv.attend = attend  # type: ignore[method-assign]  # of this object, for this call
    try:
        return method.attend(kv, step) is nothing
    finally:
        del kv.attend
