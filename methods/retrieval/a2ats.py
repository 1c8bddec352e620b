"""A2ATS: codewords of a calibrated codebook stand for keys, scored as if all were at one distance from the query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import torch
from torch import Tensor

from kvbench.constraints import Ge, Le, Natural, Positive
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Method, Shape, Step, Upstream, resolved
from kvbench.selection import require_inverse_rotation
from kvbench.store import LayerKV
from kvbench.store.chosen import ChosenKV
from kvbench.store.scores import plain_keys
from kvbench.techniques.calibration import calibrate, calibrated
from kvbench.techniques.clustering import cluster, nearest
from kvbench.techniques.reading import EndsMethod, mark_ends_and_best

if TYPE_CHECKING:
    from kvbench.hf import Model

CODE_BYTES = 2
RIDGE = 1e-6
ROUNDING = 0.01
"""Share of the root mean square by which the channels of equal keys may differ."""
UNUSED = 1e4
"""Channels of a codeword that no key of the text is nearest to: far from every key."""


@dataclass(frozen=True)
class A2ATS(EndsMethod):
    """Reads what any query head of a group chooses by codewords, and the first and last entries."""

    codewords: Annotated[int, Ge(2), Le(32767)] = 256
    """Codewords of each KV head."""
    distance: Positive = 2048
    """The distance from the query at which all keys are scored."""
    sinks: Natural = 8
    """First entries, which are always read."""
    recent: Positive = 64
    """Last entries, which are always read."""
    tokens: Positive = 4096
    """Tokens of text on which codebooks are made, before the run."""
    iterations: Positive = 20
    """Most iterations of k-means."""

    codebooks: str | None = resolved(by_bind=True)
    """SHA-256 of the codebooks of all layers."""

    card: ClassVar[Card] = Card(
        name="a2ats",
        title="A2ATS: Retrieval-Based KV Cache Reduction via Windowed Rotary Position Embedding and Query-Aware "
        "Vector Quantization",
        idea="Distant keys are scored as if at one distance, so that a key before rotation can be replaced by a "
        "codeword that was learned beforehand, with the error that queries see as its measure. A token scores the "
        "codewords once, and looks up every entry's score.",
        arxiv="2502.12665",
        year=2025,
        version="2",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        calibration="codebooks of keys, in one pass",
        heads="pooled",
        upstream=Upstream(repo="junhuihe-hjh/A2ATS", commit="71f10b0", license=None),
        deviations=(
            ("The budget counts entries per query head, first and last ones included; the group reads the union, "
            "as in the authors' code, whose ratio of 3 % excludes them."),
            ("Codebooks are made from Python's manual when a run starts; the authors use at least 65,536 tokens of web "
            "text and 16,384 of random strings."),
            ("256 codewords; the authors have 4,096, which take more bytes than the entries of a short context. Use "
            "--set codewords=4096 for long ones."),
            ("Chosen entries are read with the query at its own position, as in the authors' llama_masked.py; their "
            "llama.py reads them with the query at position 2,048, too."),
            ("k-means starts from evenly spaced keys; the authors' from k-means++ with at most 300 iterations. A "
            "codeword that no key of the text is nearest to is not used; the authors' k-means sets it to zero."),
            ("By default entries stay on the device. With tier=host they are on the host, as in the paper, which also "
            "computes their attention there."),
            "Each token of a question chooses its own entries, as if it were decoded.",
        ),
        unverified=("tokens and iterations: chosen so that calibration takes seconds.",),
        limits=(
            "It needs rotary embeddings that kvbench can invert.",
            ("The codebooks count as stored bytes of every context, and are read for every token: the codewords by "
            "its query, and the metric of the queries by its own key."),
            "The manual's text differs between versions of Python; the result records a hash of the codebooks.",
        ),
    )

    def bind(self, model: Model) -> Self:
        """Make the codebooks, once per process and model (`UserError` where rotations cannot be inverted)."""
        require_inverse_rotation(model, "a2ats")
        recorder = CodebookRecorder(self.codewords, self.distance, self.iterations)
        return replace(self, codebooks=calibrate(model, recorder, self.tokens, recorder.summarize))

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Store the number of every key's codeword."""
        assert self.codebooks is not None
        held = calibrated(self.codebooks, step.layer).to(kv.keys.device)  # [H_kv, C + D, D]
        codes = self.encode(plain_keys(kv, step), held)
        kv.start({"book": held[None].to(kv.keys.dtype, copy=True)}, codes={"code": codes})

    def extend(self, kv: ChosenKV, step: Step) -> None:
        """Find the codewords of new keys, for which each reads the metric; the codewords are read by its query, too."""
        assert kv.codes is not None
        plain = step.rope.rotate(step.key.float(), step.positions, inverse=True)
        metric = kv.index["book"][:, :, self.codewords :]
        kv.reads["bytes"] += metric.numel() * metric.itemsize * plain.shape[2]
        kv.codes.append({"code": self.encode(plain, kv.index["book"][0].float())})

    def encode(self, plain: Tensor, book: Tensor) -> Tensor:
        """The codeword nearest to each key in the queries' metric. plain: [B, H_kv, n, D]. [B, H_kv, n, 1] int16"""
        words, metric = book.split((self.codewords, plain.shape[3]), dim=1)
        return nearest(plain @ metric, words @ metric)[..., None].to(torch.int16)

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the union of what the query heads of a group choose, and the first and last entries."""
        assert self.rows is not None
        heads = kv.keys.shape[1]
        plain = step.rope.rotate(step.query.float(), step.positions, inverse=True)
        query = step.rope.rotate(plain, torch.full_like(step.positions, self.distance))[:, :, 0]
        words = kv.scan(kv.index["book"][0, :, : self.codewords]).float()
        table = query.unflatten(1, (heads, -1)) @ words.mT  # [B, H_kv, G, C]
        codes = kv.scan(kv.code("code")[:, :, self.sinks : seen - self.recent, 0]).long()
        scores = table.new_zeros((*table.shape[:3], seen))
        places = codes[:, :, None].expand(-1, -1, table.shape[2], -1)
        scores[..., self.sinks : seen - self.recent] = table.gather(3, places)
        return kv.read(step, mark_ends_and_best(scores, self.rows, self.sinks, self.recent).any(2))

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the codewords and their metric, and of the entries' codes."""
        return self._book_bytes(layer, shape) + layer.kv_heads * shape.length * CODE_BYTES

    def shared_bytes(self, shape: Shape) -> int:
        """Bytes of the codewords and their metric, which all sequences use."""
        return 0 if self.identity(shape) else sum(
            self._book_bytes(x, shape) for x in shape.layers if x.window is None
        )

    def _book_bytes(self, layer: LayerShape, shape: Shape) -> int:
        return layer.kv_heads * (self.codewords + layer.key_dim) * layer.key_dim * shape.itemsize

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads at most, if no two query heads choose the same entry."""
        inner = self.chosen * (layer.query_heads // layer.kv_heads)
        entries = min(shape.length, self.sinks + self.recent + inner)
        width = (layer.key_dim + layer.value_dim) * shape.itemsize
        return self._scanned_bytes(layer, shape) + layer.kv_heads * entries * width

    def _scanned_bytes(self, layer: LayerShape, shape: Shape) -> int:
        codes = (shape.length - self.sinks - self.recent) * CODE_BYTES
        return self._book_bytes(layer, shape) + layer.kv_heads * codes

    def least_token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads at least, if all query heads choose the same entries."""
        return self._scanned_bytes(layer, shape) + self.entry_bytes(layer, shape)


@dataclass(frozen=True)
class CodebookRecorder(Method):
    """The full cache; keeps keys before rotation, and sums up products of queries at one position."""

    codewords: int = 256
    distance: int = 2048
    iterations: int = 20

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        plain = step.rope.rotate(step.query.float(), step.positions, inverse=True)
        query = step.rope.rotate(plain, torch.full_like(step.positions, self.distance))[0].double()
        grouped = query.unflatten(0, (step.key.shape[1], -1)).flatten(1, 2)  # [H_kv, G * T, D]
        key = step.rope.rotate(step.key.float(), step.positions, inverse=True)[0]
        held = kv.state
        held["outer"] = held["outer"] + grouped.mT @ grouped if "outer" in held else grouped.mT @ grouped
        held["key"] = torch.cat([held["key"], key], dim=1) if "key" in held else key
        return kv.attend(step)

    def summarize(self, state: dict[str, Tensor], tokens: int) -> Tensor:
        """Codewords before rotation and, below them, the metric of the queries. [H_kv, C + D, D] float32"""
        del tokens
        metric = query_metric(state["outer"])
        keys = state["key"].double() @ metric
        words = keys.new_full((len(keys), self.codewords, keys.shape[2]), UNUSED)
        for head, own in enumerate(keys):
            distinct = find_distinct(own)
            centers, labels = cluster(own, min(self.codewords, len(distinct)), self.iterations, among=distinct)
            used = labels.unique()
            words[head, : len(used)] = torch.linalg.solve(metric[head], centers[used].double(), left=False)
        return torch.cat([words, metric], dim=1).float()


def find_distinct(keys: Tensor) -> Tensor:
    """The first of every set of equal keys: a token's key in the first layer is the same at every place. [m]"""
    cells = (keys / keys.square().mean().sqrt() / ROUNDING).round()
    _, inverse = cells.unique(dim=0, return_inverse=True)
    order = inverse.argsort(stable=True)
    starts = inverse[order].diff(prepend=inverse.new_full((1,), -1)) > 0
    found: Tensor = order[starts].sort().values
    return found


def query_metric(outer: Tensor) -> Tensor:
    """L with L L^T = H, the queries' products by their root mean square: |(k - c) L| is the error that they see."""
    scaled = outer / outer.square().mean((-2, -1), keepdim=True).sqrt()
    ridge = RIDGE * torch.eye(outer.shape[-1], dtype=outer.dtype, device=outer.device)
    found: Tensor = torch.linalg.cholesky(scaled + ridge)
    return found
