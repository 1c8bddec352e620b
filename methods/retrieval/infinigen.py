"""InfiniGen: a layer's entries are chosen one layer earlier, by a guess of its queries and a part of skewed keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvbench.constraints import Gt, Le, Positive
from kvbench.errors import UserError
from kvbench.hf.adapter import project_queries
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Method, Shape, Step, Upstream, resolved
from kvbench.store import LayerKV
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.calibration import calibrate, calibrated
from kvbench.techniques.reading import ReadingMethod

if TYPE_CHECKING:
    from kvbench.hf import Model

CHANNEL_BYTES = 2
ROUNDING = 0.05
"""Difference that rounding may make between a layer's queries and those that its projection gives, relative."""
_MODELS: WeakValueDictionary[tuple[str, int], Model] = WeakValueDictionary()
"""Models by the hash of their skewing matrices and their `id`: they project hidden states.

Each job has an object of its own for the same model, and one job may end before another.
"""


@dataclass(frozen=True)
class InfiniGen(ReadingMethod):
    """Reads, in every KV head of a layer, equally many entries of the highest guessed logits."""

    alpha: Annotated[float, Gt(0)] = 5.0
    """Entries count whose guessed logit is at most this much below the largest one of their head."""
    share: Annotated[float, Gt(0), Le(1)] = 0.3
    """Share of a key's channels, after skewing, that give the guess."""
    tokens: Positive = 2048
    """Tokens of text on which skewing matrices are found, before the run."""

    skew: str | None = resolved(by_bind=True)
    """SHA-256 of the skewing matrices of all layers."""
    exact_layers: int | None = resolved()
    """Number of first layers that read everything: 2, or 1 in a model of two layers."""

    card: ClassVar[Card] = Card(
        name="infinigen",
        title="InfiniGen: Efficient Generative Inference of Large Language Models with Dynamic KV Cache Management",
        idea="A layer's input is much like that of the layer before, so its queries can be guessed early enough to "
        "fetch entries from the host in time. A rotation that concentrates queries in few channels makes a part of "
        "each key enough for the guess.",
        arxiv="2406.19707",
        year=2024,
        version="2",
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="20%",
        calibration="skewing matrices of queries, in one pass",
        heads="pooled",
        upstream=Upstream(repo="snu-comparch/InfiniGen", commit="3754f52d", license="Apache-2.0"),
        deviations=(
            ("The budget is the most entries that a head reads, the current one included; alpha may read fewer. In the "
            "paper the most is a fifth of the cache."),
            ("Channels have the largest magnitude of the prompt's queries and keys together. The authors' code takes "
            "the best of queries and the best of keys of another text, a share of 0.2 each; the paper chooses 0.3."),
            "Skewing matrices are found on Python's manual; the authors' code takes 2,048 tokens of a book.",
            "alpha is 5 as in the authors' code for Llama 2, whose queries are rotated; theirs for OPT is 4.",
            ("In a model of two layers the second one chooses, or the method would have no effect; the authors' models "
            "have more, and their first two read every entry."),
            ("An entry counts by the largest logit of its own head, as in the paper; the authors' code for accuracy "
            "takes the largest one of the first head for all heads."),
            ("The current entry is always read; in the authors' code for accuracy it is chosen like the others, so "
            "that a token may not read its own."),
            "The mean number of entries is rounded; the authors' code rounds it down.",
            ("A group of query heads shares a matrix, the channels, and the entries: an entry has the best margin of "
            "any of its heads. The paper's models have no groups."),
            ("By default entries stay on the device. With tier=host they are fetched from the host for every token; "
            "nothing is fetched ahead, and the limit on the host's memory is left out."),
            "Each token of a question chooses its own entries, as if it were decoded.",
        ),
        limits=(
            "It saves reads; a part of every key is stored in addition to all entries.",
            ("The first two layers read every entry: no layer comes before the first, and the authors' code takes no "
            "guess from the first for the second."),
            "The prompt is run with full attention.",
            "The skewing matrices are not counted as bytes of the cache: they stand for changed weights.",
            "The manual's text differs between versions of Python; the result records a hash of the matrices.",
        ),
    )

    reads_hidden: ClassVar[bool] = True
    shares_layers: ClassVar[bool] = True

    def bind(self, model: Model) -> Self:
        """Find the skewing matrices, and check that queries can be guessed on this model (`UserError`)."""
        sha256 = calibrate(model, SkewRecorder(), self.tokens, lambda state, _: find_skew(model, state))
        _MODELS.pop((sha256, id(model)), None)  # the last one that was bound is the last one here
        _MODELS[sha256, id(model)] = model
        return replace(self, skew=sha256)

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the number of layers that read everything, and the budget."""
        exact = max(1, min(2, len(shape.layers) - 1))
        return super(InfiniGen, replace(self, exact_layers=exact)).fit(budget, shape)

    def minimum_entries(self) -> int:
        """The current entry and one to choose."""
        return 2

    def chooses(self, index: int, window: int | None) -> bool:
        """Every layer of full attention but the first ones."""
        assert self.exact_layers is not None
        return index >= self.exact_layers and super().chooses(index, window)

    def skewing(self, layer: int, like: Tensor) -> Tensor:
        """The skewing matrix of every KV head. [H_kv, D, D] float32"""
        assert self.skew is not None
        return calibrated(self.skew, layer).to(like.device)

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Guess the next layer's queries, and read what the layer before chose for this one. [B, H_q, T, D_v]"""
        guess = step.shared.pop("query", None)
        if self.rows is not None and not step.moment.in_context:
            self._guess(step)
        if not isinstance(kv, ChosenKV) or not kv.selective:
            if self.rows is not None and step.moment.in_context and self.chooses(step.layer, step.window):
                self._observe(kv, step)
                if step.moment.compresses and self.rows >= step.seen:
                    del kv.state["magnitude"]
            return kv.attend(step)
        assert guess is not None
        self.extend(kv, step)
        return kv.attend_each(step, lambda token, seen: self.read(kv, replace(
            token, shared={"query": guess[:, :, token.seen - step.seen - 1]}
        ), seen))

    def _guess(self, step: Step) -> None:
        """Leave the queries that the next layer's projection makes of this layer's input. [B, H_q, T, D]"""
        model, layer = [x for (skew, _), x in _MODELS.items() if skew == self.skew][-1], step.layer + 1
        if layer < len(model.layers) and self.chooses(layer, model.layers[layer].window):
            assert step.hidden is not None
            query = project_queries(model.attentions[layer], step.hidden, model.layers[layer].key_dim)
            assert query is not None
            step.shared["query"] = model.ropes[layer].rotate(query, step.positions.to(query.device))

    def _observe(self, kv: LayerKV, step: Step) -> None:
        """Sum up the magnitudes of the context's skewed queries by channel. [B, H_kv, D]"""
        skew = self.skewing(step.layer, step.query)
        grouped = step.query.float().unflatten(1, (len(skew), -1)).flatten(2, 3) @ skew
        kv.state["magnitude"] = grouped.abs().sum(2) + kv.state.get("magnitude", 0)

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Choose the channels, and store those of every skewed key."""
        keys = kv.keys.float() @ self.skewing(step.layer, kv.keys)
        group = step.query.shape[1] // keys.shape[1]
        magnitude = kv.state.pop("magnitude") + group * keys.abs().sum(2)
        channels = magnitude.topk(self.channels(keys.shape[3]), dim=-1).indices.to(torch.int16)
        kv.start({"channels": channels}, codes={"partial": take(keys, channels).to(kv.keys.dtype)})

    def extend(self, kv: ChosenKV, step: Step) -> None:
        """Store the channels of new keys."""
        assert kv.codes is not None
        keys = step.key.float() @ self.skewing(step.layer, step.key)
        kv.codes.append({"partial": take(keys, kv.index["channels"]).to(step.key.dtype)})

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the entries that the guess chooses, and the current one."""
        query = step.shared["query"].float().unflatten(1, (kv.keys.shape[1], -1))  # [B, H_kv, G, D]
        skewed = take(query @ self.skewing(step.layer, query), kv.scan(kv.index["channels"]))
        partial = kv.scan(kv.code("partial")[:, :, : seen - 1]).float()
        mask = self.mark((skewed @ partial.mT) * step.scale)
        return kv.read(step, torch.cat([mask, torch.ones_like(mask[..., :1])], dim=-1))

    def mark(self, logits: Tensor) -> Tensor:
        """Mark equally many entries in all heads: as many as are near the largest logit on average. [B, H_kv, n]

        logits: guessed, [B, H_kv, G, n].
        """
        assert self.rows is not None
        margin = (logits - logits.amax(-1, keepdim=True)).amax(2)  # [B, H_kv, n], at most 0
        count = (margin > -self.alpha).sum(-1).float().mean(-1).round().clamp(1, self.rows - 1)  # [B]
        order = margin.argsort(dim=-1, descending=True, stable=True)
        taken = torch.arange(order.shape[-1], device=order.device) < count[:, None, None]
        return torch.zeros_like(margin, dtype=torch.bool).scatter_(-1, order, taken.expand_as(order))

    def channels(self, width: int) -> int:
        """Channels of a key that are stored a second time."""
        return max(1, round(self.share * width))

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of the numbers of the channels, and of these channels of every key."""
        channels = self.channels(layer.key_dim)
        return layer.kv_heads * channels * (CHANNEL_BYTES + shape.length * shape.itemsize)

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads at most: the index, and as many entries as the budget allows."""
        return self.index_bytes(layer, shape) + self.entry_bytes(layer, shape)

    def least_read_bytes(self, shape: Shape) -> int:
        """Bytes that a token reads where one entry is near the largest logit: that one and its own."""
        if self.identity(shape):
            return shape.full_bytes
        return replace(self, rows=self.minimum_entries()).declared_read_bytes(shape)


def take(x: Tensor, channels: Tensor) -> Tensor:
    """These channels of vectors. x: [B, H_kv, n, D]. channels: [B, H_kv, m]. Returns [B, H_kv, n, m]"""
    return x.gather(3, channels.long()[:, :, None].expand(-1, -1, x.shape[2], -1))


@dataclass(frozen=True)
class SkewRecorder(Method):
    """The full cache; sums up products of the channels of queries, and keeps the queries and inputs of a chunk."""

    reads_hidden: ClassVar[bool] = True

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry. [B, H_q, T, D_v]"""
        grouped = step.query[0].double().unflatten(0, (step.key.shape[1], -1)).flatten(1, 2)  # [H_kv, G * T, D]
        kv.state["outer"] = grouped.mT @ grouped + kv.state.get("outer", 0)
        kv.state.update(layer=torch.tensor(step.layer), query=step.query, positions=step.positions)
        if step.hidden is not None:
            kv.state["hidden"] = step.hidden
        return kv.attend(step)


def find_skew(model: Model, state: dict[str, Tensor]) -> Tensor:
    """The right singular vectors of a layer's queries, the largest first. [H_kv, D, D] float32

    Raises:
        UserError: the layer's queries are not those of its projection, so that they cannot be guessed.
    """
    layer, query = int(state["layer"]), state["query"]
    found = None
    if "hidden" in state:
        found = project_queries(model.attentions[layer], state["hidden"], query.shape[3])
    if found is None or found.shape != query.shape or _differ(
        model.ropes[layer].rotate(found, state["positions"]), query
    ):
        raise UserError(
            f"infinigen: queries of layer {layer} of {model.id} are not those of a linear projection that kvbench "
            "finds, so they cannot be guessed. Use another method, such as quest."
        )
    vectors: Tensor = torch.linalg.eigh(state["outer"]).eigenvectors
    return vectors.flip(-1).float()


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).float().norm() > ROUNDING * other.float().norm())
