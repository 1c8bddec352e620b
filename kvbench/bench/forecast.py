"""What a clock's cell will take, told from configurations alone: bytes, the floor of a step, the largest batch.

A step cannot be faster than its bytes through the memory: the weights once, and what every sequence's cache gives to
read. Bytes of a cache are the method's own account, which the conformance suite holds to the ledger. Work space of a
pass is an estimate, and so is what launching costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.budget import DEFAULT_BUDGET, Budget, BudgetKind
from kvbench.errors import UserError, unknown
from kvbench.hf import Prediction, predict_memory
from kvbench.method import Method, ModelKind
from kvbench.registry import find_method, list_entries
from kvbench.runs.spec import Record
from kvbench.settings import configure

State = Literal["prefill", "synthetic"]
ALL = "all"
ANCHORS: dict[ModelKind, tuple[str, ...]] = {"autoregressive": ("full", "full-int8"), "diffusion": ("none",)}
"""What every method is measured beside: the dense cache, and the dense cache in 8 bits, the baseline to beat; no cache
where a model fills masks in."""
LATER = 144
"""Tokens that stores have room for after the context: 128 measured steps, and those of the warm-up."""
GIB = 1 << 30
COPY_SHARE = 0.9
"""Of a memory's nominal bandwidth, what a copy reaches: 4.3 of 4.8 TB/s on an H200; assumed of the others."""
SPARE_BYTES = 2 * GIB
"""Kept free on a GPU: its context, libraries' work space, graphs, and what the allocator cannot use. A twentieth of a
small memory."""
LAYER_COPIES = 4
"""Of the layer that is compressed: as it comes, in the store, and as the method works on it. In plain PyTorch 4.2 for
snapkv and 4.1 for full-int8, and up to 35 for others, of which fewer sequences than predicted will fit."""
PYTHON_SECONDS = 0.64e-3
"""Of a step per layer, where Python launches it: 20.5 ms for 32 tiny layers by this repository's own loop, the fastest
of 60 steps on one core of an AMD EPYC; 7.2 ms by transformers' own on another machine. A GPU's host will differ."""
KERNEL_SECONDS = 11e-6
"""Of an attention at its least, in a graph too: one sequence of 1,024 rows on an H200 took vLLM so long (#43232)."""
VISIBLE = 1.05
"""Gain from which a comparison of medians is expected to tell it from none."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory."""

    title: str
    memory_bytes: int
    bandwidth: float
    """Nominal, bytes per second."""


GPUS = {
    "h200": Gpu("NVIDIA H200", 143_771 << 20, 4.8e12),
    "h100": Gpu("NVIDIA H100 SXM", 80 * GIB, 3.35e12),
    "h100-pcie": Gpu("NVIDIA H100 PCIe", 80 * GIB, 2.0e12),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 80 * GIB, 2.039e12),
    "a100-40gb": Gpu("NVIDIA A100 SXM 40 GB", 40 * GIB, 1.555e12),
    "l40s": Gpu("NVIDIA L40S", 48 * GIB, 0.864e12),
    "rtx-4090": Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 1.008e12),
}
"""By NVIDIA's datasheets; the H200's memory as nvidia-smi shows it."""


@dataclass(frozen=True)
class Need:
    """Bytes on the device that a number of sequences of one length take under a method."""

    model: Prediction
    method: Method
    """With its budget fitted to the model's shape."""
    chunk: int | None = None
    """Most tokens of a prompt per pass; None: all."""
    later: int = LATER

    @property
    def cache(self) -> int:
        """What holds a sequence's context after compression."""
        return self.method.declared_bytes(self.model.shape)

    @property
    def tail(self) -> int:
        """Room for a sequence's later tokens, at most: exact rows, and what a method keeps beside them."""
        dense = self.model.shape.full_bytes
        return -(-self.later * max(dense, self.cache) // self.model.shape.length)

    @property
    def rows_while_running(self) -> int:
        """What a sequence holds while its context runs, at most: the exact cache, room for later tokens, and notes."""
        twice = 2 if type(self.method).prefill is not Method.prefill else 1  # it may run the context again
        rows = max(self.model.shape.full_bytes, self.cache) + self.tail
        return twice * rows + self.method.running_bytes(self.model.shape)

    @property
    def prefill(self) -> int:
        """The most that a sequence holds while its prompt is run, a pass's work space included."""
        length = self.model.shape.length
        return self.rows_while_running + self._work(min(self.chunk or length, length))

    @property
    def decode(self) -> int:
        """What a sequence holds while it decodes."""
        return self.cache + self.tail + self._work(1)

    def _work(self, tokens: int) -> int:
        """Of a pass: hidden states, a feed-forward part, and the last token's logits in float32 beside the model's."""
        size = self.model.shape.itemsize
        return tokens * (6 * self.model.hidden + 3 * self.model.inner) * size + self.model.vocabulary * (4 + size)

    @property
    def _layer(self) -> int:
        """What the layer that is being compressed takes beside its rows: LAYER_COPIES of its exact rows."""
        shape = self.model.shape
        return LAYER_COPIES * max(
            shape.rows(x) * x.kv_heads * (x.key_dim + x.value_dim) * shape.itemsize for x in shape.layers
        )

    def rows(self, batch: int, state: State) -> int:
        """The most bytes at once, without the weights."""
        most = self.prefill if state == "prefill" else self.decode + self._layer
        return batch * max(most, self.decode)

    def peak(self, batch: int, state: State) -> int:
        """The most bytes at once."""
        return self.model.weight_bytes + self.rows(batch, state)

    def largest_batch(self, memory: int, state: State) -> int:
        """The most sequences that fit; 0: not one does."""
        weights, spare = self.model.weight_bytes, min(SPARE_BYTES, memory // 20)
        return max(0, (memory - spare - weights) // self.rows(1, state))

    def step_bytes(self, batch: int) -> int:
        """What a decode step reads of weights and caches."""
        return self.model.step_bytes + batch * self.method.declared_read_bytes(self.model.shape)


class Forecast(Record):
    """What one method will take."""

    method: str
    held: float
    """Of the dense cache's bytes, those in host memory included."""
    stored_bytes: int
    host_bytes: int
    spare_bytes: int
    peak_bytes: int
    fits: bool
    step_bytes: int
    floor_s: float
    """Of a decode step."""
    gain: float
    """The dense cache's floor over this one's."""
    gain_captured: float | None
    """The same where each attention takes at least as long as a kernel does at its least; null: it is no graph."""
    gain_python: float
    """The same where a step takes at least as long as Python takes to launch it."""
    largest_batch: int
    """From stores that were filled without running the prompt."""
    largest_batch_prefill: int
    """With the prompts of the whole batch run together."""


class Plan(Record):
    """What a cell will take, for every method."""

    model: str
    gpu: str
    memory_bytes: int
    bandwidth: float
    length: int
    batch: int
    chunk: int | None
    budget: str | None
    params: int
    weight_bytes: int
    full_bytes: int
    """Of the dense caches of all sequences."""
    forecasts: tuple[Forecast, ...]


def read_budget(text: str | None, method: Method) -> Budget | None:
    """The budget of a method that is given one, 25 % where none was asked for; others hold what their settings say."""
    if method.card.budget not in (BudgetKind.STORED, BudgetKind.READ):
        return None
    return DEFAULT_BUDGET if text is None else Budget.parse(text)


def name_methods(asked: Sequence[str], kind: ModelKind) -> list[str]:
    """The anchors, and then the methods asked for, each once; `all` are those registered for this kind of model."""
    names = list(ANCHORS[kind])
    for name in asked:
        names += [name] if name != ALL else [x.name for x in list_entries("method") if x.models == kind]
    return list(dict.fromkeys(names))


def make_methods(
    asked: Sequence[str], settings: dict[str, str], model: str, kind: ModelKind
) -> dict[str, Method]:
    """The anchors and the methods asked for, unfitted; settings are of the one that was asked for.

    Raises:
        UserError: an unknown name or setting, or a method for the other kind of model.
    """
    if settings and len(asked) != 1:
        raise UserError("--set is for one method: leave it out, or give one --method.")
    made = {}
    for name in name_methods(asked, kind):
        made[name] = configure(find_method(name), settings if name in asked else {}, "--set", name)
        if made[name].card.models != kind:
            raise UserError(f"{name} is for {made[name].card.models} models, and {model} is {kind}.")
    return made


def make_plan(
    model: str, methods: Sequence[str], *, gpu: str, length: int, batch: int, budget: str | None = None,
    settings: dict[str, str] | None = None, chunk: int | None = None, dtype: str | None = None,
) -> Plan:
    """Predict every method beside the anchors. Settings are of the one method that is no anchor.

    Raises:
        UserError: an unknown name, or a budget or setting that cannot be.
    """
    if gpu not in GPUS:
        raise unknown("gpu", gpu, GPUS)
    for name, value in (("length", length), ("batch", batch), ("chunk", chunk)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be 1 or more.")
    outline = predict_memory(model, dtype, length)
    if outline.kind == "diffusion":
        raise UserError(f"{model} is a diffusion model, whose stores live as long as one answer: nothing to plan.")
    card = GPUS[gpu]
    needs = {
        name: Need(outline, x.fit(read_budget(budget, x), outline.shape), chunk)
        for name, x in make_methods(methods, settings or {}, model, outline.kind).items()
    }
    return Plan(
        model=model, gpu=card.title, memory_bytes=card.memory_bytes, bandwidth=card.bandwidth * COPY_SHARE,
        length=length, batch=batch, chunk=chunk, budget=budget, params=outline.params,
        weight_bytes=outline.weight_bytes, full_bytes=batch * outline.shape.full_bytes,
        forecasts=tuple(_forecast(name, need, next(iter(needs.values())), card, batch) for name, need in needs.items()),
    )


def _forecast(name: str, need: Need, dense: Need, gpu: Gpu, batch: int) -> Forecast:
    shape, bandwidth = need.model.shape, gpu.bandwidth * COPY_SHARE
    host = need.method.declared_host_bytes(shape)

    def seconds(x: Need, kernels: float, least: float) -> float:
        caches = max(kernels, (x.step_bytes(batch) - x.model.step_bytes) / bandwidth)
        return max(least, x.model.step_bytes / bandwidth + caches)

    def gain(kernels: float = 0.0, least: float = 0.0) -> float:
        return seconds(dense, kernels, least) / seconds(need, kernels, least)

    layers = len(shape.layers)
    return Forecast(
        method=name, held=(need.cache + host) / shape.full_bytes, stored_bytes=batch * need.cache,
        host_bytes=batch * host, spare_bytes=batch * need.tail, peak_bytes=need.peak(batch, "prefill"),
        fits=batch <= need.largest_batch(gpu.memory_bytes, "prefill"), step_bytes=need.step_bytes(batch),
        floor_s=seconds(need, 0.0, 0.0), gain=gain(),
        gain_captured=None if need.method.graphable is not None else gain(kernels=layers * KERNEL_SECONDS),
        gain_python=gain(least=layers * PYTHON_SECONDS),
        largest_batch=need.largest_batch(gpu.memory_bytes, "synthetic"),
        largest_batch_prefill=need.largest_batch(gpu.memory_bytes, "prefill"),
    )
