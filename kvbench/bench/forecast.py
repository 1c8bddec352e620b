"""Predicts memory, a lower bound of the decode step time and the largest batch from model configurations alone.

The lower bound is the bandwidth roofline: a step reads the weights once and, for every sequence, the part of the cache
that the method reads. Cache bytes are those that the method declares, which `kvbench check` compares with the measured
ones. Work space of a forward pass and launch times are estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.budget import DEFAULT_BUDGET, Budget, BudgetKind, solve
from kvbench.errors import UndeclaredError, UserError, check_number, unknown
from kvbench.hf import ModelSize, predict_memory
from kvbench.log import say
from kvbench.method import Method, ModelKind
from kvbench.registry import find_method, list_entries
from kvbench.runs.spec import Record
from kvbench.settings import configure

State = Literal["prefill", "synthetic"]
ALL = "all"
ANCHORS: dict[ModelKind, tuple[str, ...]] = {"autoregressive": ("full", "full-int8"), "diffusion": ("none",)}
"""Baselines of every comparison: the full cache and the full cache in 8 bits; no cache for diffusion models."""
LATER = 144
"""Tokens after the context for which stores allocate room: 128 measured steps and the warm-up."""
GIB = 1 << 30
COPY_SHARE = 0.9
"""Share of the nominal memory bandwidth that a copy reaches: 4.3 of 4.8 TB/s on an H200; assumed for other GPUs."""
SPARE_BYTES = 2 * GIB
"""Memory kept free for CUDA's context, libraries, graphs and fragmentation; at most 1/20 of the memory."""
LAYER_COPIES = 4
"""Copies of one layer's entries during its compression: input, store and work space. Measured in plain PyTorch: 4.2
for snapkv, 4.1 for full-int8, up to 35 for others, for which fewer sequences than predicted fit."""
PYTHON_SECONDS = 0.64e-3
"""Python's launch time of a decode step, per layer: 20.5 ms for 32 tiny layers in kvbench's own loop, the fastest of
60 steps on one core of an AMD EPYC; 7.2 ms in transformers' own loop on another machine. GPU hosts will differ."""
KERNEL_SECONDS = 11e-6
"""Minimum attention latency per layer inside a CUDA graph: 1,024 tokens, batch 1, on an H200 (vLLM #43232)."""
VISIBLE = 1.05
"""The smallest speed-up that a comparison of medians is expected to detect."""


@dataclass(frozen=True)
class Gpu:
    """Memory size and bandwidth of a GPU."""

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
"""From NVIDIA's datasheets; the H200's memory size as nvidia-smi shows it."""


@dataclass(frozen=True)
class Need:
    """Predicted bytes of sequences of one length under a method."""

    model: ModelSize
    method: Method
    """Fitted to the model's shape and the length."""
    chunk: int | None = None
    """Prompt tokens per forward pass; None: all."""
    later: int = LATER

    @property
    def cache(self) -> int:
        """Stored bytes of one sequence's compressed context."""
        return self.method.declared_bytes(self.model.shape)

    def stored(self, batch: int) -> int:
        """Stored bytes of a batch's compressed contexts."""
        return batch * self.cache - (batch - 1) * self.method.shared_bytes(self.model.shape)

    @property
    def spare(self) -> int:
        """Upper bound of one sequence's room for later tokens."""
        return self.method.later_bytes(self.model.shape, self.later)

    @property
    def bytes_while_running(self) -> int:
        """Upper bound of one sequence's bytes in a prefill, by chunks or not: full cache, statistics, later tokens."""
        twice = 2 if self.method.replays_context else 1
        entries = max(self.model.shape.full_bytes, self.cache) + self.spare
        running = self.method.running_bytes(self.model.shape)
        return twice * entries + running + -(-self.later * running // self.model.shape.length)

    @property
    def prefill(self) -> int:
        """Peak bytes of one sequence during prefill, including the work space of a forward pass."""
        length = self.model.shape.length
        return self.bytes_while_running + self._work(min(self.chunk or length, length))

    @property
    def decode(self) -> int:
        """Bytes of one sequence while it decodes."""
        return self.cache + self.spare + self._work(1)

    def _work(self, tokens: int) -> int:
        """Work space of a forward pass: hidden states, a feed-forward layer, and the last logits, also in float32."""
        size = self.model.shape.itemsize
        return tokens * (6 * self.model.hidden + 3 * self.model.inner) * size + self.model.vocabulary * (4 + size)

    @property
    def _layer(self) -> int:
        """Work space of compressing the largest layer: LAYER_COPIES copies of its full entries."""
        return LAYER_COPIES * max(map(self.model.shape.layer_bytes, self.model.shape.layers))

    def device_bytes(self, batch: int, state: State) -> int:
        """Peak bytes without the weights."""
        most = self.prefill if state == "prefill" else self.decode + self._layer
        return batch * max(most, self.decode)

    def peak(self, batch: int, state: State) -> int:
        """Peak bytes, including the weights."""
        return self.model.weight_bytes + self.device_bytes(batch, state)

    def pinned_bytes(self, batch: int) -> int:
        """Pinned host memory of a batch: one block per layer, which torch rounds up to a power of two."""
        layers = len(self.model.shape.layers)
        block = -(-batch * self.method.declared_host_bytes(self.model.shape) // layers)
        return layers * (1 << (block - 1).bit_length()) if block else 0

    def max_batch(self, memory: int, state: State, host_memory: int | None = None) -> int:
        """The largest number of sequences that fit; 0 if not even one fits. host_memory: for pinned blocks, if any."""
        weights, spare = self.model.weight_bytes, min(SPARE_BYTES, memory // 20)
        most = max(0, (memory - spare - weights) // self.device_bytes(1, state))
        return most if host_memory is None else solve(self.pinned_bytes, host_memory, range(most + 1)) or 0


class MethodForecast(Record):
    """The forecast for one method."""

    method: str
    stored_share: float
    """Stored bytes over the full cache's, including those in host memory and in files."""
    stored_bytes: int
    host_bytes: int
    spare_bytes: int
    peak_bytes: int
    fits: bool
    step_bytes: int
    bound_s: float
    """Lower bound of a decode step's time: `step_bytes` over the bandwidth that a copy reaches."""
    speedup_bound: float
    """The full cache's bound over this method's."""
    drafted: int | None = None
    """Tokens that a lossless method drafts per round; null for other methods. Its bytes and bounds are those of a token
    of rounds that are accepted whole."""
    break_even: float | None = None
    """Accepted tokens per round at which its bound is the full cache's."""
    speedup_graph: float | None
    """The same if each layer's attention takes at least KERNEL_SECONDS; null if the method cannot be a CUDA graph."""
    speedup_python: float
    """The same if a step takes at least PYTHON_SECONDS per layer, because Python launches it."""
    max_batch: int
    """Largest batch if contexts are synthetic."""
    max_batch_prefill: int
    """Largest batch if the prompts of the whole batch are prefilled together."""


class Forecast(Record):
    """The forecast of a cell for every method."""

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
    """Bytes of the full caches of all sequences."""
    methods: tuple[MethodForecast, ...]


def read_budget(text: str | None, method: Method) -> Budget | None:
    """Parse the budget of a method, 25 % by default; None for methods whose settings decide what they store."""
    if method.budget_kind not in (BudgetKind.STORED, BudgetKind.READ):
        return None
    return DEFAULT_BUDGET if text is None else Budget.parse(text)


def name_methods(asked: Sequence[str], kind: ModelKind) -> list[str]:
    """The anchors and then the requested methods, each once; `all` stands for all registered for this kind of model."""
    names = list(ANCHORS[kind])
    for name in asked:
        names += [name] if name != ALL else [x.name for x in list_entries("method") if x.models == kind]
    return list(dict.fromkeys(names))


def make_methods(
    asked: Sequence[str], settings: dict[str, str], model: str, kind: ModelKind
) -> dict[str, Method]:
    """Create the anchors and the requested methods, unfitted. Settings belong to the one requested method.

    Raises:
        UserError: an unknown name or setting, or a method for the other kind of model.
    """
    if settings and (len(asked) != 1 or ALL in asked):
        raise UserError("--set applies to one method: leave it out, or give one --method.")
    made = {}
    for name in name_methods(asked, kind):
        made[name] = configure(find_method(name), settings if name in asked else {}, "--set", name)
        if made[name].card.models != kind:
            raise UserError(f"{name} is for {made[name].card.models} models, and {model} is {kind}.")
    return made


def make_forecast(
    model: str, methods: Sequence[str], *, gpu: str, length: int, batch: int, budget: str | None = None,
    settings: dict[str, str] | None = None, chunk: int | None = None, dtype: str | None = None,
) -> Forecast:
    """Predict every method and the anchors. Settings belong to the one requested method.

    `all` leaves out methods that cannot declare their bytes, and says so.

    Raises:
        UserError: an unknown name, an invalid budget or setting, or a named method that cannot declare its bytes.
    """
    if gpu not in GPUS:
        raise unknown("gpu", gpu, GPUS)
    for name, value in (("length", length), ("batch", batch), ("chunk", chunk)):
        if value is not None:
            check_number(name, value)
    if budget is not None:
        Budget.parse(budget)
    outline = predict_memory(model, dtype, length)
    if outline.kind == "diffusion":
        raise UserError(f"{model} is a diffusion model, whose caches last for one answer only: nothing to plan.")
    if length > outline.max_length:
        say(f"{model} takes {outline.max_length:,} positions: `kvbench run` refuses {length:,} tokens.")
    card = GPUS[gpu]
    needs = {}
    for name, x in make_methods(methods, settings or {}, model, outline.kind).items():
        fitted = x.fit(read_budget(budget, x), outline.shape)
        try:
            fitted.declared_bytes(outline.shape)
        except UndeclaredError as reason:
            if name in methods:
                raise
            say(f"not predicted: {reason}")
            continue
        needs[name] = Need(outline, fitted, chunk)
    return Forecast(
        model=model, gpu=card.title, memory_bytes=card.memory_bytes, bandwidth=card.bandwidth * COPY_SHARE,
        length=length, batch=batch, chunk=chunk, budget=budget, params=outline.params,
        weight_bytes=outline.weight_bytes, full_bytes=batch * outline.shape.full_bytes,
        methods=tuple(_forecast(name, need, next(iter(needs.values())), card, batch) for name, need in needs.items()),
    )


def _forecast(name: str, need: Need, full: Need, gpu: Gpu, batch: int) -> MethodForecast:
    shape, bandwidth = need.model.shape, gpu.bandwidth * COPY_SHARE
    host = need.method.declared_host_bytes(shape)
    cached = need.cache + host + need.method.declared_file_bytes(shape)

    def seconds(x: Need, kernels: float, least: float) -> float:
        """Time of a token; of a lossless method, of one in a round that is accepted whole."""
        found = x.method.round(x.model.shape)
        drafted, passes, reads = found or (0, 1, x.method.declared_read_bytes(x.model.shape))
        caches = max(passes * kernels, batch * reads / bandwidth)
        return max(passes * least, passes * x.model.step_bytes / bandwidth + caches) / (drafted + 1)

    def speedup(kernels: float = 0.0, least: float = 0.0) -> float:
        return seconds(full, kernels, least) / seconds(need, kernels, least)

    layers, bound, found = len(shape.layers), seconds(need, 0.0, 0.0), need.method.round(shape)
    return MethodForecast(
        method=name, stored_share=cached / shape.full_bytes, stored_bytes=need.stored(batch),
        host_bytes=batch * host, spare_bytes=batch * need.spare, peak_bytes=need.peak(batch, "prefill"),
        fits=batch <= need.max_batch(gpu.memory_bytes, "prefill"), step_bytes=round(bound * bandwidth),
        bound_s=bound, speedup_bound=speedup(), drafted=None if found is None else found.drafted,
        break_even=None if found is None else (found.drafted + 1) / speedup() - 1,
        speedup_graph=None if need.method.graphable is not None else speedup(kernels=layers * KERNEL_SECONDS),
        speedup_python=speedup(least=layers * PYTHON_SECONDS),
        max_batch=need.max_batch(gpu.memory_bytes, "synthetic"),
        max_batch_prefill=need.max_batch(gpu.memory_bytes, "prefill"),
    )
