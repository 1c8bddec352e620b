"""NOSA: a part of the blocks is chosen by the query, and the larger part by trained scores that no query changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor, nn

from kvbench.constraints import Positive, Share
from kvbench.errors import UserError
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import BudgetKind, Card, LayerShape, Shape, Step, Upstream, resolved
from kvbench.methods.retrieval.value_gate import (
    STRIDES,
    best_stride,
    compress,
    make_gates,
    mark_by_query,
    score_by_query,
    train,
)
from kvbench.store.chosen import ChosenKV
from kvbench.store.layer import SCORE_BYTES
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import find_part, get_module, get_part, load_module, rename_layers
from kvbench.techniques.reading import ReadingMethod

if TYPE_CHECKING:
    from kvbench.hf import Model

AUTHORS = rename_layers(
    r"model\.layers\.(\d+)\.self_attn\.(A|delta\.weight)", {x: x for x in ("A", "delta.weight")}
)
"""Names of the authors' weights, which are those of the released code."""
TEXT = 256
"""Tokens of a text, where the gates are trained when a run starts; the last quarter stands for the answer."""


@dataclass(frozen=True)
class Nosa(ReadingMethod):
    """Reads the first block, the last ones, those that match the query, and those with the highest scores."""

    block: Positive = 16
    """Entries per block, a multiple of 4."""
    local: Share = 0.25
    """Share of the budget's blocks that are the last ones of the context."""
    aware: Share = 0.25
    """Share of the budget's blocks that the query chooses; the scores choose the rest."""
    weights: str = ""
    """A safetensors file of `scripts/train_part.py`. Empty: the shipped one, or training when a run starts."""
    steps: Positive = 8
    """Training steps when a run starts."""

    part: str | None = resolved(by_bind=True)
    """SHA-256 of the gates' weights."""
    trained_on: str | None = resolved()
    """The data of their training."""

    card: ClassVar[Card] = Card(
        name="nosa",
        version="3",
        title="NOSA: Native and Offloadable Sparse Attention",
        idea="Entries in host memory are slow to fetch, so the choice should change little from token to token. The "
        "query chooses only a quarter of the blocks; a trained score of each entry's value chooses most of the others.",
        arxiv="2510.13602",
        year=2025,
        family="retrieval",
        stages=("retrieval", "loading"),
        budget=BudgetKind.READ,
        paper_budget="4096",
        calibration="a gate per layer that scores entries by their values, trained",
        heads="pooled",
        upstream=Upstream(
            repo="thunlp/NOSA", commit="94d5f7567d5bd12618fb2312d7fe985d32732520", license=None
        ),
        deviations=(
            ("Only the gates are trained, on the loss of the answers; the authors go on to train the whole model, "
            "which then also reads its prompt in blocks. Here the prompt is run with full attention, without scores."),
            ("Blocks have 16 entries and the parts of the budget are shares, as contexts here are short; the authors "
            "have blocks of 64 and read 64 of them: the first, 16 local ones, 16 by the query and 31 by scores."),
            ("In training the blocks that scores choose are read to a share that falls with the score, to the power 8, "
            "so that scores of unread blocks learn, too; the authors' choice is hard."),
            ("Gates start with A = 1 and delta = 0, the authors' with A = 0 and a random delta; both prefer no entry "
            "at first."),
            "Scores are added to logits while decoding, too; the authors' benchmark code does so in the prompt only.",
            ("The last compressed key averages the one stride that is left, and has a share of the attention over "
            "compressed keys; the authors' code has keys of two whole strides only."),
            "Entries after the context are always read, in addition to the budget.",
            "Each token of a question chooses its own blocks, as if it were decoded.",
            ("Without a file of weights for the model, the gates are trained when a run starts, on Python's manual; "
            "those of `mini` were trained on text of the tasks (scripts/train_part.py)."),
        ),
        unverified=("The training of the scores: we had the authors' benchmark code and not the paper.",),
        limits=(
            "It saves reads, not memory: every entry is stored, and the index in addition.",
            "The gates' weights are not counted as bytes of the cache; every entry's score is.",
            "Training leaves out soft caps and learned sinks, so that it sees other attention in a model with them.",
            ("The authors' gates are part of whole models (openbmb/NOSA-8B): their folder is the model and the "
            "weights, which are read by the names in the authors' code; no published file has been read yet."),
        ),
    )

    def __post_init__(self) -> None:
        """Refuse blocks that strides do not divide, and shares that leave no block to the scores (`UserError`)."""
        super().__post_init__()
        if self.block % STRIDES:
            raise UserError(
                f"nosa: block={self.block} is not a multiple of {STRIDES}, the strides of a block. Use "
                f"block={self.block // STRIDES * STRIDES or STRIDES} or {-(-self.block // STRIDES) * STRIDES}."
            )
        if self.local + self.aware >= 1:
            raise UserError(
                f"nosa: local={self.local:g} and aware={self.aware:g} leave no block to the scores. Use shares whose "
                "sum is less than 1."
            )

    def minimum_entries(self) -> int:
        """The first block and one of each choice."""
        return 4 * self.block

    def divide(self, blocks: int) -> tuple[int, int, int]:
        """Of a budget's blocks those of local, query-aware and query-agnostic choice; the first block is apart."""
        left = blocks - 1
        local = min(max(1, round(self.local * blocks)), left)
        aware = min(round(self.aware * blocks), left - local)
        return local, aware, left - local - aware

    def bind(self, model: Model) -> Self:
        """Find the weights of the gates, or train them."""
        sha256 = find_part(
            self, model, lambda: self._train(model),
            f"Python's manual, {self.steps} steps in blocks of {self.block}, local={self.local:g}, "
            f"aware={self.aware:g}", AUTHORS,
        )
        load_module("nosa", model, sha256, lambda: make_gates(model))
        return replace(self, part=sha256, trained_on=get_part(sha256).data)

    def score(self, layer: int, value: Tensor) -> Tensor:
        """The gate's scores of entries. [B, H_kv, n] float32"""
        found: Tensor = get_module(self.part, nn.ModuleList)[layer](value)
        return found

    def start(self, kv: ChosenKV, step: Step) -> None:
        """Store compressed keys, the score of every entry, and those of the blocks."""
        scores = self.score(step.layer, kv.values)
        kv.start(
            {
                "compressed": compress(kv.keys, self.block).to(kv.keys.dtype),
                "blocks": best_stride(compress(scores[..., None], self.block)[..., 0]),
            },
            codes={"score": scores},
        )

    def extend(self, kv: ChosenKV, step: Step) -> None:
        """Store the scores of new entries."""
        assert kv.codes is not None
        kv.codes.append({"score": self.score(step.layer, step.value)})

    def read(self, kv: ChosenKV, step: Step, seen: int) -> Partial:
        """Attention over the chosen blocks and all later entries."""
        chosen = self.choose(kv, step)
        mask = torch.ones((*chosen.shape[:2], seen), dtype=torch.bool, device=chosen.device)
        mask[:, :, : kv.indexed] = chosen.repeat_interleave(self.block, 2)[..., : kv.indexed]
        scores = kv.code("score")
        return kv.read(step, mask, lambda _, batch, head, entry: kv.scan(scores[batch, head, entry]))

    def choose(self, kv: ChosenKV, step: Step) -> Tensor:
        """Mark the blocks that one token reads. [B, H_kv, blocks]"""
        assert self.rows is not None
        local, aware, agnostic = self.divide(self.rows // self.block)
        asked = score_by_query(step.query, kv.scan(kv.index["compressed"]), step.scale)[:, :, 0]
        chosen = mark_by_query(asked, local, aware)
        others = kv.scan(kv.index["blocks"]).masked_fill(chosen, -torch.inf)
        best = others.argsort(dim=-1, descending=True, stable=True)[..., :agnostic]
        return chosen.scatter(2, best, True)

    def index_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of compressed keys, and of the scores of entries and blocks."""
        return self._block_bytes(layer, shape) + layer.kv_heads * shape.length * SCORE_BYTES

    def _block_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes of compressed keys, and of the scores of blocks."""
        strides, blocks = -(-shape.length // (self.block // STRIDES)), -(-shape.length // self.block)
        return layer.kv_heads * (strides * layer.key_dim * shape.itemsize + blocks * SCORE_BYTES)

    def token_bytes(self, layer: LayerShape, shape: Shape) -> int:
        """Bytes that a token reads: by block what chooses, and the entries of the chosen ones with their scores.

        The context's last block may be short. The token's own score is among them.
        """
        assert self.rows is not None
        entries = self.rows // self.block * self.block - -shape.length % self.block
        scores = layer.kv_heads * (entries + 1) * SCORE_BYTES
        return self._block_bytes(layer, shape) + scores + self.entry_bytes(layer, shape) * entries // self.rows

    def _train(self, model: Model) -> Mapping[str, Tensor]:
        """Train on the manual."""
        ids = calibration_ids(model, TEXT * 8)
        size = min(TEXT, ids.shape[1])
        texts = [x for x in ids.split(size, dim=1) if x.shape[1] == size]

        def draw(step: int) -> tuple[Tensor, Tensor, int]:
            text, context = texts[step % len(texts)], size * 3 // 4
            labels = text.new_full(text.shape, -100)
            labels[0, context:-1] = text[0, context + 1 :]
            return text, labels, context

        return train(model, self.steps, self.block, partial(self.divide_context, share=0.25), draw)

    def divide_context(self, blocks: int, share: float) -> tuple[int, int, int]:
        """As `divide`, for a share of a context's blocks."""
        return self.divide(max(4, round(share * blocks)))
