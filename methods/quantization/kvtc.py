"""KVTC: principal components with as many bits as their variance is worth, entropy coded, as images are."""

from __future__ import annotations

import heapq
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Gt, Le, Natural, Positive
from kvbench.errors import UserError
from kvbench.method import Budget, BudgetKind, Card, Method, Shape, Step, resolved
from kvbench.methods.quantization.streams import StreamMethod
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.stream import Stream, StreamKV
from kvbench.techniques.calibration import calibrate, calibrated

if TYPE_CHECKING:
    from kvbench.hf import Model, Rope

RECENT = 128
STEPS = (0.0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
"""By bits: the step of the uniform quantizer with the least squared error for a normal number (Max)."""
ERRORS = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869)
"""By bits: that error."""


@dataclass(frozen=True)
class Kvtc(StreamMethod):
    """Stores a context's principal components, quantized and compressed with DEFLATE, and first and last entries."""

    bits: Annotated[float, Gt(0), Le(8)] = 2.0
    """Mean number of bits per element before entropy coding."""
    sinks: Natural = 4
    """First entries, which stay exact."""
    recent: Natural | None = None
    """Last entries of the context, which stay exact; None: 128, or a quarter of a context below 512 tokens."""
    tokens: Positive = 2048
    """Tokens of text on which components are found, before the run."""

    components: str | None = resolved(by_bind=True)
    """SHA-256 of the components of all layers."""
    exact: int | None = resolved()
    """First and last entries that stay exact, as resolved."""

    card: ClassVar[Card] = Card(
        name="kvtc",
        title="KV Cache Transform Coding for Compact Storage in LLM Inference",
        idea="Channels of all heads are correlated, so principal components hold most of a cache in a few numbers. "
        "Each component gets the bits that its variance is worth, many get none, and DEFLATE compresses the codes.",
        arxiv="2511.01815",
        year=2025,
        family="quantization",
        stages=("compression", "loading"),
        budget=BudgetKind.BITS,
        calibration="principal components, in one pass",
        heads="pooled",
        upstream=None,
        deviations=(
            ("Components are those of one layer's keys or values over all heads; the paper joins all layers in one "
            "transform, which finds more correlation and needs more text."),
            ("Bits are given one by one to the component whose error falls the most. Because a further bit always "
            "gains less, this is the optimum that the paper's dynamic program finds without its groups of components "
            "that share scales."),
            "Ranges of components come from the text's variances, not from the context's own.",
            ("bits is 2, the least of the paper's four compressions, 8 to 64 before DEFLATE. Its budget includes the "
            "scales of groups."),
            "DEFLATE is that of zlib on the host; the paper uses nvCOMP on the GPU.",
            ("Components are found on Python's manual when a run starts, from all tokens; the paper's text is larger "
            "and mixed, without the first 4 and last 128 tokens of a sequence."),
        ),
        unverified=("tokens: chosen so that calibration takes seconds.",),
        limits=(
            ("Stored bytes are those of the streams, the exact entries and the components in use. They depend on the "
            "text, so they are measured and cannot be declared, and there is no budget."),
            ("While a question is answered, the decoded context takes as many bytes as the full cache, and every step "
            "reads them."),
            "A context of no more than the exact entries is not compressed.",
            "It needs rotary embeddings that kvbench can invert.",
            "The manual's text differs between versions of Python; the result records a hash of the components.",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Find components, once per process and model (`UserError` where rotations cannot be inverted)."""
        require_inverse_rotation(model, "kvtc")
        recorder = ComponentRecorder()
        return replace(self, components=calibrate(model, recorder, self.tokens, recorder.summarize))

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Refuse a budget, unequal widths, and layers without a bit (`UserError`); resolve the exact entries."""
        if any(x.key_dim != x.value_dim for x in shape.layers):
            raise UserError("kvtc: keys and values of unequal width are not supported. Use another method.")
        channels = min(x.kv_heads * x.key_dim for x in shape.layers)
        if not round(self.bits * channels):
            raise UserError(
                f"kvtc: bits={self.bits:g} gives a layer of {channels} channels no bit. Use {1 / channels:.2g} or more."
            )
        last = min(RECENT, shape.length // 4) if self.recent is None else self.recent
        return replace(super().fit(budget, shape), exact=self.sinks + last)

    def identity(self, shape: Shape) -> bool:
        """Whether all entries are first or last ones."""
        assert self.exact is not None, "call fit first: the number of exact entries depends on the context"
        return max(map(shape.entries, shape.layers)) <= self.exact

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Encode the context at its end, if anything is between the exact entries."""
        assert isinstance(kv, StreamKV) and self.exact is not None
        if kv.n > self.exact:
            super().evict(kv, step)

    def encode(self, kv: StreamKV, step: Step) -> Stream:
        """Transform, quantize and compress what is between the exact entries."""
        assert self.components is not None and self.exact is not None, "call bind and fit first"
        start, stop = self.sinks, kv.n - (self.exact - self.sinks)
        first = step.seen - kv.n + start
        middle = kv.keys[:, :, start:stop].float()
        plain = step.rope.rotate_from(middle, first, inverse=True)
        tables = calibrated(self.components, step.layer).to(kv.keys.device)
        inner = [
            Transformed.encode(x, table, self.bits)
            for x, table in zip((plain, kv.values[:, :, start:stop].float()), tables, strict=True)
        ]
        ends = [x[:, :, part].clone() for x in (kv.keys, kv.values) for part in (slice(start), slice(stop, None))]
        return KvtcStream(inner, ends, first, step.rope)


@dataclass(frozen=True)
class Transformed:
    """Keys or values as compressed codes of their components."""

    stream: Tensor  # [bytes] uint8
    basis: Tensor  # the components in use, the largest variance first, [r, H_kv * D] float16
    mean: Tensor  # [H_kv * D] float32
    spread: Tensor  # standard deviations, [r] float32
    bits: Tensor  # of each component in use, [r] uint8
    shape: tuple[int, ...]

    @classmethod
    def encode(cls, x: Tensor, table: Tensor, mean_bits: float) -> Transformed:
        """table: mean, variances and components. [M + 2, M]. x: [B, H_kv, n, D] float32"""
        mean, variances = table[0], table[1].clamp_min(0)
        bits = allocate(variances.tolist(), round(mean_bits * len(mean)))
        used = [i for i, x in enumerate(bits) if x]
        basis, spread = table[2:][used].half(), variances[used].sqrt()
        numbers = (x.transpose(1, 2).flatten(2) - mean) @ basis.float().mT / spread.clamp_min(1e-8)  # [B, n, r]
        chosen = torch.tensor([bits[i] for i in used], device=x.device)
        steps = torch.tensor(STEPS, device=x.device)[chosen]
        levels = 2**chosen
        codes = (numbers / steps + levels / 2).floor().clamp(torch.zeros_like(levels), levels - 1).to(torch.uint8)
        packed = zlib.compress(codes.movedim(2, 0).contiguous().cpu().numpy().tobytes(), level=9)
        stream = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(x.device)
        return cls(stream, basis.clone(), mean.clone(), spread, chosen.to(torch.uint8), tuple(x.shape))

    def decode(self) -> Tensor:
        """The vectors, from the middles of their levels. [B, H_kv, n, D] float32"""
        batch, heads, count, _ = self.shape
        raw = zlib.decompress(self.stream.cpu().numpy().tobytes())
        codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(self.stream.device)
        bits = self.bits.long()
        steps = torch.tensor(STEPS, device=bits.device)[bits]
        numbers = codes.view(len(bits), batch, count).movedim(0, 2).float() - 2**bits / 2 + 0.5
        joined = numbers * steps * self.spread @ self.basis.float() + self.mean
        found: Tensor = joined.unflatten(2, (heads, -1)).transpose(1, 2)
        return found

    def tensors(self) -> list[Tensor]:
        """Everything that is stored."""
        return [self.stream, self.basis, self.mean, self.spread, self.bits]


def allocate(variances: list[float], total: int) -> list[int]:
    """Bits of each component that leave the least squared error, `total` in all."""
    bits = [0] * len(variances)
    gains = [(-variance * (ERRORS[0] - ERRORS[1]), i) for i, variance in enumerate(variances)]
    heapq.heapify(gains)
    for _ in range(total):
        if not gains or not gains[0][0]:
            break
        _, i = heapq.heappop(gains)
        bits[i] += 1
        if bits[i] + 1 < len(ERRORS):
            heapq.heappush(gains, (-variances[i] * (ERRORS[bits[i]] - ERRORS[bits[i] + 1]), i))
    return bits


@dataclass(frozen=True)
class KvtcStream(Stream):
    """The entries between the exact ones, and these."""

    inner: list[Transformed]
    ends: list[Tensor]
    """First and last keys, first and last values."""
    start: int
    """Position of the first entry between them."""
    rope: Rope

    def decode(self) -> dict[str, Tensor]:
        """Keys, rotated to their positions, and values."""
        keys, values = (x.decode() for x in self.inner)
        first_keys, last_keys, first_values, last_values = self.ends
        rotated = self.rope.rotate_from(keys, self.start).to(first_keys.dtype)
        return {
            "key": torch.cat([first_keys, rotated, last_keys], dim=2),
            "value": torch.cat([first_values, values.to(first_values.dtype), last_values], dim=2),
        }

    def tensors(self) -> list[Tensor]:
        """Streams, components in use and exact entries."""
        return [*self.ends, *(y for x in self.inner for y in x.tensors())]


@dataclass(frozen=True)
class ComponentRecorder(Method):
    """The full cache; sums up channels of keys before rotation and of values, and their products."""

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        plain = step.rope.rotate(step.key.float(), step.positions, inverse=True)
        joined = torch.stack([x[0].transpose(0, 1).flatten(1).double() for x in (plain, step.value)])  # [2, T, M]
        for name, x in (("sum", joined.sum(1)), ("outer", joined.mT @ joined)):
            kv.state[name] = x + kv.state.get(name, 0)
        return kv.attend(step)

    def summarize(self, state: dict[str, Tensor], tokens: int) -> Tensor:
        """Mean, variances and components of keys and of values, the largest first. [2, M + 2, M] float32"""
        mean = state["sum"] / tokens
        found = torch.linalg.eigh(state["outer"] / tokens - mean[:, :, None] * mean[:, None])
        vectors = found.eigenvectors.flip(-1).mT
        return torch.cat([mean[:, None], found.eigenvalues.flip(-1)[:, None], vectors], dim=1).float()
