"""LServe: streaming heads keep a window, and retrieval heads read pages that they choose every few tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.budget import DEFAULT_BUDGET, too_small
from kvbench.constraints import Positive, Share
from kvbench.errors import UserError
from kvbench.kernels.page_select import page_scores, select_pages
from kvbench.method import Budget, BudgetKind, Card, LayerShape, Method, Shape, Step, Upstream, resolved
from kvbench.methods.heads.groups import Head, HeadMethod, by_score
from kvbench.methods.heads.profile import find_profile
from kvbench.methods.heads.store import HeadGroupsKV
from kvbench.store import LayerKV
from kvbench.store.paged import COUNTER_BYTES, PagedKV

if TYPE_CHECKING:
    from kvbench.hf import Model

PARTS = 4
"""Logical pages, with bounds of their own, in a page."""
LEAST_PAGES = 3
NO_PAGE = 1 << 40
SHORT = 4096
"""Tokens below which pages are smaller by default."""


@dataclass
class HierarchicalPagedKV(PagedKV):
    """Pages with bounds of their parts; between two choices tokens read the pages that were chosen last.

    `page`, of the base class, is a part: the unit of bounds and of attention.
    """

    count: int = 0
    """Pages that a token chooses, its own included."""
    interval: int = 1
    """Tokens from one choice to the next."""

    chosen_at: int = field(default=0, init=False)
    """Entries when the context was complete; choices are made every `interval` tokens from there."""
    chooser: int = field(default=0, init=False)
    """The entry of the token that chose last."""

    def index(self) -> None:
        """The context is complete: from now on attention may select."""
        super().index()
        self.chosen_at = self.n

    def attend(self, step: Step) -> Tensor:
        """Attention of the new tokens over the pages chosen last and their own; over everything before the index."""
        if not self.selective:
            return super().attend(step)
        before = self.n - step.query.shape[2]
        return torch.cat([self._attend_one(x, before + t) for t, x in enumerate(step.tokens())], dim=2)

    def _attend_one(self, token: Step, at: int) -> Tensor:
        """Attention of the token of this entry. [B, H_q, 1, D_v]"""
        assert self._bounds is not None
        size, bounds = self.page * PARTS, self.get_bounds()
        chooses = (at - self.chosen_at) % self.interval == 0 or "pages" not in self.state
        if chooses:
            self.keep_choice(self.choose(token.query, at)[:, :, 0])
            self.chooser = at
            self.reads["choices"] += 1
        pages = self.state["pages"][:, :, None]  # [B, H_q, 1, k]
        if at // size > self.chooser // size:  # its page began after the choice
            pages = F.pad(pages, (0, 1), value=at // size)
        parts = (pages[..., None] * PARTS + torch.arange(PARTS, device=pages.device)).flatten(3)
        output = self.attend_pages(token, parts.clamp_max(self._bounds.whole()["bounds"].shape[2]), at)
        if not chooses:
            self.reads["bytes"] -= bounds.numel() * bounds.itemsize  # not scored
        return output

    def choose(self, query: Tensor, at: int) -> Tensor:
        """The pages with the largest bound of a part, and the own one. query: [B, H_q, 1, D]. [B, H_q, 1, k]

        at: the token's own entry. Pages that no choice fills are those of no entry, now or later.
        """
        scores = page_scores(query, self.get_bounds())
        whole = scores.shape[3] // PARTS
        best = scores[..., : whole * PARTS].unflatten(3, (whole, PARTS)).amax(-1)
        pages = select_pages(best, count=self.count, page=self.page * PARTS, before=at, window=self._window)
        pages = F.pad(pages, (0, self.count - pages.shape[3]), value=NO_PAGE)
        return pages.masked_fill(pages > at // (self.page * PARTS), NO_PAGE)

    def keep_choice(self, pages: Tensor) -> None:
        """Remember the last token's pages, in place where there is room. pages: [B, H_q, k]"""
        held = self.state.get("pages")
        if held is not None and held.shape == pages.shape:
            held.copy_(pages)
        else:
            self.state["pages"] = pages.clone()


@dataclass
class LServeKV(HeadGroupsKV):
    """Retrieval heads in pages, streaming heads in a window."""

    part: int = 16
    count: int = 0
    interval: int = 1

    def make_whole(self) -> LayerKV:
        """Pages of the heads that keep every entry."""
        return HierarchicalPagedKV(page=self.part, count=self.count, interval=self.interval)

    def index(self) -> None:
        """The context is complete: retrieval heads select from now on."""
        for store in self._stores():
            if isinstance(store, HierarchicalPagedKV):
                store.index()

    def read_bytes(self) -> int:
        """Bytes that a decode step reads in both groups."""
        return sum(store.read_bytes() for store in self._stores())

    def distinct_read_bytes(self) -> int:
        """As `read_bytes`, with a page counted once that several heads of a group select."""
        return sum(store.distinct_read_bytes() for store in self._stores())

    def full_read_tokens(self) -> float:
        """Tokens that the full cache reads at the same steps."""
        return max(store.full_read_tokens() for store in self._stores())

    def credit(self, branch: LayerKV) -> None:
        """Add the reads of a fork, which answers for this store, to its own."""
        assert isinstance(branch, LServeKV)
        for store, other in zip(self._stores(), branch._stores(), strict=True):  # noqa: SLF001  # the same class
            store.credit(other)


@dataclass(frozen=True)
class LServe(HeadMethod):
    """Half of the heads keep first and last entries; the others store all, and read the pages with the best bounds."""

    sinks: Positive = 128
    recent: Positive = 256
    """Last entries that a streaming head keeps."""
    sparsity: Share = 0.5
    """Share of streaming heads, over all layers together."""
    page: Positive | None = None
    """Entries per page, in four parts with bounds. None: 64, and 16 in contexts of fewer than 4,096 tokens."""
    interval: Positive = 4
    """Tokens that read the same pages."""

    page_size: int | None = resolved()
    """Entries per page, as resolved."""

    card: ClassVar[Card] = Card(
        name="lserve",
        version="2",
        title="LServe: Efficient Long-sequence LLM Serving with Unified Sparse Attention",
        idea="Half of the KV heads stream. In the others every query head reads the pages whose parts have the best "
        "bounds, and chooses them again only every few tokens.",
        arxiv="2502.14866",
        year=2025,
        family="heads",
        stages=("compression", "retrieval"),
        budget=BudgetKind.READ,
        paper_budget="4096",
        calibration="head profile",
        heads="indexed",
        upstream=Upstream(repo="mit-han-lab/omniserve", commit="02b2925", license="Apache-2.0"),
        deviations=(
            ("Heads are ranked by the induction score of a head profile; the authors take DuoAttention's trained "
            "gates. Equal scores are ordered by layer and head; the authors add noise."),
            ("All heads use full attention in the prompt; in the authors' code streaming heads see 128 first and 8,192 "
            "last tokens there, 4,096 in its runs of LongBench."),
            ("Entries and weights are not quantized; the authors' code has both in 8 or 4 bits, and 8 in its runs of "
            "LongBench and needles."),
            ("A token that reuses a choice also reads its own page; in the authors' code pages that were begun since "
            "then and are not the last one cannot be read."),
            ("The first token after the context chooses, and every fourth one from there. In the authors' code the "
            "first token of an answer chooses, and every later one with a multiple of four tokens before it."),
            ("Each token of a question reads pages as if it were decoded. Within a question, windows of streaming "
            "heads slide once, at its end."),
            ("The number of streaming heads is rounded down; the authors' quantile of the gates gives one more for "
            "some values of `sparsity`, not for 0.5."),
            ("Streaming heads keep at most as many entries as retrieval heads read, and proportionally fewer first "
            "ones."),
        ),
        unverified=("page: smaller pages in short contexts, where 64 entries are a large part of a budget.",),
        limits=(
            "Streaming heads lose the middle of the text.",
            ("A model that does not copy random tokens, such as the bundled one, shows no retrieval heads in a head "
            "profile, so the ranking is noise."),
        ),
    )
    graphable: ClassVar[str | None] = "the host counts the tokens until pages are chosen again."

    def __post_init__(self) -> None:
        """Refuse pages that do not divide into parts (`UserError`)."""
        super().__post_init__()
        if self.page is not None and self.page % PARTS:
            raise UserError(
                f"lserve: pages of {self.page} entries do not divide into {PARTS} parts. Use a multiple of {PARTS}."
            )

    def minimum_entries(self) -> int:
        """Three pages."""
        return LEAST_PAGES * (self.page or 16)

    def rank(self, model: Model) -> tuple[Head, ...]:
        """Heads by descending induction score."""
        return by_score(find_profile(model, self.probe).induction)

    def fit(self, budget: Budget | None, shape: Shape) -> Self:
        """Resolve the entries that a retrieval head reads, the size of pages and the two kinds of heads."""
        size = self.page or (64 if shape.length >= SHORT else 16)
        fitted = Method.fit(self, budget, shape)
        if fitted.rows is None or fitted.rows >= shape.length:
            return replace(fitted, retrieval=None, streaming=None, page_size=size)
        if fitted.rows < LEAST_PAGES * size:
            raise too_small(self.card.name, budget or DEFAULT_BUDGET, fitted.rows, shape.length, LEAST_PAGES * size)
        heads = sum(x.kv_heads for x in shape.layers)
        return replace(
            fitted, page_size=size, retrieval=heads - int(heads * self.sparsity),
            streaming=min(self.sinks + self.recent, fitted.rows),
        )

    def identity(self, shape: Shape) -> bool:
        """Whether every head reads every entry."""
        return self.rows is None or self.rows >= shape.length

    def sinks_in(self, entries: int) -> int:
        """First entries among this many: proportionally fewer if there are fewer than `sinks` plus `recent`."""
        return min(self.sinks, self.sinks * entries // (self.sinks + self.recent))

    def make_groups(self, retrieval: tuple[int, ...]) -> LServeKV:
        """A store in which these KV heads read pages."""
        return LServeKV(retrieval=retrieval, part=self.part, count=self.pages, interval=self.interval)

    @property
    def part(self) -> int:
        """Entries per part of a page."""
        assert self.page_size is not None
        return self.page_size // PARTS

    @property
    def pages(self) -> int:
        """Pages that a token chooses."""
        assert self.rows is not None and self.page_size is not None
        return self.rows // self.page_size

    def evict(self, kv: LayerKV, step: Step) -> None:
        """Trim streaming heads, and at the end of the context let retrieval heads select."""
        super().evict(kv, step)
        if step.moment.compresses and isinstance(kv, LServeKV):
            kv.index()

    def declared_bytes(self, shape: Shape) -> int:
        """Bytes of the entries of both kinds of heads, of the bounds of parts, and of the counters."""
        total = super().declared_bytes(shape)
        if self.streaming is None:
            return total
        whole = self.whole_heads(shape)
        for index, layer in enumerate(shape.layers):
            if whole[index]:
                total += self._bound_bytes(layer, shape, whole[index]) + COUNTER_BYTES
        return total

    def _bound_bytes(self, layer: LayerShape, shape: Shape, heads: int) -> int:
        return heads * (shape.entries(layer) // self.part) * 2 * layer.key_dim * shape.itemsize

    def declared_read_bytes(self, shape: Shape) -> int:
        """Bytes that a token reads which chooses: bounds, pages of every query head, and the streaming heads'."""
        return self._read_bytes(shape, bounds=True)

    def least_read_bytes(self, shape: Shape) -> int:
        """Bytes that a token reads which does not choose."""
        return self._read_bytes(shape, bounds=False)

    def _read_bytes(self, shape: Shape, *, bounds: bool) -> int:
        if self.streaming is None:
            return shape.full_bytes
        total, whole = 0, self.whole_heads(shape)
        assert self.page_size is not None
        for index, layer in enumerate(shape.layers):
            width = (layer.key_dim + layer.value_dim) * shape.itemsize
            group, heads = layer.query_heads // layer.kv_heads, whole[index]
            kept = min(shape.entries(layer), self._trimmed(layer.window) or shape.entries(layer))
            total += LayerKV().bytes_for(replace(layer, kv_heads=layer.kv_heads - heads), shape, kept)
            total += heads * group * self.pages * self.page_size * width
            total += self._bound_bytes(layer, shape, heads) if bounds else 0
        return total
