"""MInference: every head has a pattern, found on calibration text, whose place in a prompt its last queries show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.constraints import Natural, Positive
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.method import BudgetKind, Card, Method, Moment, Shape, Step, Upstream, resolved
from kvbench.methods.prefill.patterns import diagonal_sums, last_attention, pool_blocks
from kvbench.store import LayerKV
from kvbench.store.prompt import Chosen
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.sparse_prefill import SparsePrefillMethod, first_and_own

if TYPE_CHECKING:
    from kvbench.hf import Model

Pattern = Literal["a-shape", "vertical-slash", "block-sparse"]
CANDIDATES: tuple[tuple[Pattern, int, int], ...] = (
    ("a-shape", 100, 800), ("vertical-slash", 30, 800), ("vertical-slash", 100, 750), ("vertical-slash", 500, 700),
    ("vertical-slash", 3500, 100), ("block-sparse", 8, 0),
)
"""Patterns of the authors' search: first and last entries; columns and diagonals; one block in so many."""
PUBLISHED_LENGTH = 32_768
JUDGED = 64
"""Queries in the second half of the calibration text by which a pattern is judged."""
_FOUND: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}


@dataclass(frozen=True)
class MInference(SparsePrefillMethod):
    """A-shape, vertical-slash or block-sparse by query head; the last queries place columns and diagonals."""

    pattern: Pattern | None = None
    """The pattern of all heads, in the size that fits each best. None: the best of all patterns."""
    window: Positive = 64
    """Last queries, which place columns and diagonals."""
    sinks: Natural = 30
    """First entries, which vertical-slash always has among its columns."""
    recent: Positive = 100
    """Nearest diagonals, which vertical-slash always has."""
    tokens: Positive = 2048
    """Tokens of the calibration text."""

    patterns: tuple[tuple[int, ...], ...] | None = resolved(by_bind=True)
    """By layer, the number of every query head's pattern in CANDIDATES."""

    published_block: ClassVar[int] = 64
    card: ClassVar[Card] = Card(
        name="minference",
        title="MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention",
        idea="Heads attend in one of three patterns, which depend on the head and not on the text. Each head gets the "
        "best one on calibration text, and the last queries show where in the prompt its columns and diagonals are.",
        arxiv="2407.02490",
        year=2024,
        family="prefill",
        stages=("generation",),
        budget=BudgetKind.PROMPT,
        calibration="a pattern per head, in one pass",
        heads="indexed",
        upstream=Upstream(
            repo="microsoft/MInference", commit="fb56c917f618e8645f1cfc37535afd7424d78f0d", license="MIT"
        ),
        deviations=(
            ("In contexts below 32,768 tokens, sizes shrink in proportion: the published ones cover most of a short "
            "context. The authors' are constant."),
            ("Patterns are judged by the attention mass that a sample of queries keeps, on Python's manual; the "
            "authors judge on a retrieval task of 30,000 tokens."),
            ("A diagonal is widened to the blocks of a grid that it touches, mostly two. The authors' kernel begins a "
            "block at the diagonal itself, and so computes down to half as much where diagonals are few. Columns are "
            "single ones in both."),
            ("Block-sparse computes one block in eight, as in the authors' search, and always the first and the own "
            "one; their kernel computes 100 blocks of every row."),
            "Blocks of a context below 2,048 tokens are smaller than 64 tokens.",
        ),
        unverified=("tokens: chosen so that calibration takes seconds.",),
        limits=(
            "Blocks are chosen by logits without soft caps and learned sinks; the attention itself has them.",
            "It saves arithmetic in the prompt, not memory: every entry is stored, and decode steps read all of them.",
            "The context runs in one pass, whatever --chunk says.",
            ("The authors' search never returns two of the three patterns: minference/modules/minference_forward.py, "
            "lines 222 to 225, turns A-shape into vertical-slash, and block-sparse into vertical-slash with 1,000 "
            "columns and 6,096 diagonals."),
        ),
    )

    def bind(self, model: Model) -> Self:
        """Find the heads' patterns, once per process, model and settings."""
        key = model.sha256, model.dtype, *self.settings.values()
        if key not in _FOUND:
            ids = calibration_ids(model, self.tokens)
            fitted = self.fit(None, model.shape(ids.shape[1]))
            with Session(model, Search(method=fitted), capacity=ids.shape[1]) as session:
                session.forward(ids, Moment.CONTEXT_CHUNK)
                _FOUND[key] = tuple(tuple(x.state["best"].tolist()) for x in session.layers)
        return replace(self, patterns=_FOUND[key])

    def rebind(self, resolution: Mapping[str, object], shape: Shape) -> Self:
        """Take the patterns from a result (`UserError` unless there is one for every query head)."""
        patterns: Any = resolution.get("patterns")
        if patterns is None:
            return self
        if [len(x) for x in patterns] != [x.query_heads for x in shape.layers] or not all(
            0 <= y < len(CANDIDATES) for x in patterns for y in x
        ):
            raise UserError("minference: the patterns do not name one of every query head of the model.")
        return replace(self, patterns=tuple(tuple(x) for x in patterns))

    def choose(self, query: Tensor, key: Tensor, step: Step) -> Chosen:
        """The entries of every head's pattern."""
        assert self.patterns is not None
        batch, heads = query.shape[:2]
        found = [
            self.place(self.patterns[step.layer][head], query[b, head], key[b, head * key.shape[1] // heads],
                       step.scale)
            for b in range(batch) for head in range(heads)
        ]
        blocks, columns = (torch.stack(x).unflatten(0, (batch, heads)) for x in zip(*found, strict=True))
        assert self.block_size is not None
        return Chosen(self.block_size, blocks, columns)

    def place(self, number: int, query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Blocks and columns of one head. query, key: [T, D]. Returns [T / block, T / block], [T] bool"""
        assert self.block_size is not None
        kind, first, second = CANDIDATES[number]
        tokens, count = len(query), -(-len(query) // self.block_size)
        none = torch.zeros(tokens, dtype=torch.bool, device=query.device)
        if kind == "block-sparse":
            logits = pool_blocks(query, self.block_size) @ pool_blocks(key, self.block_size).mT
            logits.masked_fill_(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
            best = logits.topk(max(1, count // first), dim=-1).indices
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, True)
            return chosen | first_and_own(count, query), none
        first, second = (self.scaled(x, PUBLISHED_LENGTH) for x in (first, second))
        if kind == "a-shape":
            near = none.clone()
            near[:second] = True
            columns = none.clone()
            columns[:first] = True
            return self.widen(near), columns
        shares = last_attention(query, key, self.window, scale)
        columns, diagonals = shares.sum(0), diagonal_sums(shares)
        columns[: self.scaled(self.sinks, PUBLISHED_LENGTH)] = torch.inf
        diagonals[: self.scaled(self.recent, PUBLISHED_LENGTH)] = torch.inf
        lines = [
            none.clone().index_fill(0, x.argsort(descending=True, stable=True)[:size], True)
            for x, size in ((columns, first), (diagonals, second))
        ]
        return self.widen(lines[1]), lines[0]

    def widen(self, diagonals: Tensor) -> Tensor:
        """The blocks that diagonals touch, the own ones included. diagonals: [T] bool. [T / block, T / block] bool"""
        assert self.block_size is not None
        block = self.block_size
        # A block touches the diagonals from its last row's first column to its first row's last one.
        touched = F.pad(diagonals, (block - 1, -len(diagonals) % block)).unfold(0, 2 * block - 1, block).any(1)
        touched[0] = True
        row = torch.arange(len(touched), device=diagonals.device)
        return touched[(row[:, None] - row).clamp_min(0)]


@dataclass(frozen=True)
class Search(Method):
    """The full cache; notes for every query head the pattern that keeps most attention of a sample of queries."""

    method: MInference | None = None

    def attend(self, kv: LayerKV, step: Step) -> Tensor:
        """Attention over every entry, after the judgment. [B, H_q, T, D_v]"""
        assert self.method is not None and self.method.block_size is not None
        tokens, heads, block = kv.n, step.query.shape[1], self.method.block_size
        entries = torch.arange(tokens, device=step.query.device)
        queries = torch.linspace(tokens // 2, tokens - 1, JUDGED, device=entries.device).long()
        best = []
        for head in range(heads):
            query, key = step.query[0, head], kv.keys[0, head * kv.keys.shape[1] // heads]
            mass = query[queries].float() @ key.float().mT * step.scale
            mass = mass.masked_fill(entries > queries[:, None], -torch.inf)
            kept = {}
            for number, (kind, *_) in enumerate(CANDIDATES):
                if self.method.pattern in (None, kind):
                    blocks, columns = self.method.place(number, query, key, step.scale)
                    seen = Chosen(block, blocks[None, None], columns[None, None]).visible(0, 0, queries, entries)
                    kept[number] = float((mass.softmax(-1) * seen).sum())
            best.append(max(kept, key=lambda x: kept[x]))
        kv.state["best"] = torch.tensor(best)
        return kv.attend(step)
