"""The decoding loop of masked diffusion models, and what a cache policy says in it.

An answer begins as masks. Every step computes some rows, looks at the distributions of masked tokens, and commits the
ones that it is surest of; what is committed never changes. Blocks of the answer are finished one after the other. A
policy says which rows a step computes and which it looks at; without one every step computes them all.

One loop serves every policy: the schedule, the confidences (float32, in every policy), the order of random reveals and
the noise are the same, so that policies differ by their caches alone. Rows are computed once, the head only where a
token may be committed.

Source: LLaDA's sampler (arXiv 2502.09992, generate.py); the threshold is Fast-dLLM's (arXiv 2505.22618). Departures: a
mask is never sampled (LLaDA's own sampler may, and leaves it masked); confidences are in float32, where codes differ
between bfloat16 and float64.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvbench.budget import Shape
from kvbench.diffusion.sampling import Sampling
from kvbench.hf.adapter import attached
from kvbench.hf.masked import Blocks
from kvbench.method import Method, Step
from kvbench.store import storage_bytes
from kvbench.store.positions import PositionKV

if TYPE_CHECKING:
    from kvbench.hf import Model

HEAD_ROWS = 1024
"""Rows whose logits exist at a time."""


@dataclass(frozen=True)
class Plan:
    """What a policy wants of a step.

    rows: places that are computed [B, N]; None: all.
    read: places that attention looks at, those computed among them [B, N]; None: all.
    keep: whether the computed rows go into the stores; without, they attend to each other alone.
    """

    rows: Tensor | None = None
    read: Tensor | None = None
    keep: bool = True


@dataclass(frozen=True)
class Policy(Method):
    """A cache policy of diffusion models; this one has no cache. An author overrides what the paper changes."""

    graphable: ClassVar[str | None] = "the rows that a step computes change from step to step"

    def identity(self, shape: Shape) -> bool:
        """Whether these settings are declared to compute all that a pass without a cache does."""
        del shape
        return False

    def store(self, length: int) -> PositionKV:
        """WHAT IS STORED: an empty store for one layer and so many positions."""
        return PositionKV(length)

    def check(self, sampling: Sampling, answer: int) -> None:
        """WHERE IT APPLIES: raise a `UserError` at settings of the run that make no sense with it."""

    def begin(self, d: Denoising) -> None:
        """A block begins: `d.start` and `d.end` are its places."""

    def plan(self, d: Denoising) -> Plan:
        """WHICH ROWS are computed and read in this step: all, and nothing is kept."""
        del d
        return Plan(keep=False)

    def run(self, d: Denoising, plan: Plan, rows: Tensor) -> Tensor:
        """HOW ROWS PASS the layers: hidden states after the last one. rows: positions [B, m]. Returns [B, m, D]"""
        return d.blocks.run(
            d.blocks.embed(d.ids.gather(1, rows)), rows, lambda step: self.look(d, d.stores[step.layer], plan, step)
        )

    def look(self, d: Denoising, kv: PositionKV, plan: Plan, step: Step) -> Tensor:
        """WHAT IS READ: the attention output of the step's rows. [B, H_q, m, D_v]"""
        del d
        if not plan.keep:
            return kv.attend_over(step, step.key, step.value)
        kv.write(step)
        return kv.attend(step, plan.read)

    def open(self, d: Denoising) -> Tensor:
        """Places whose tokens may be committed in this step: the masks of the block. [B, N]"""
        return d.masked & d.within(d.start, d.end)

    def accept(self, d: Denoising, confidence: Tensor) -> Tensor:
        """WHICH TOKENS are committed. confidence: [B, N], -inf where there is no candidate. Returns [B, N]"""
        if d.sampling.threshold is None:
            return top(confidence, d.quota)
        return (confidence >= d.sampling.threshold) | top(confidence, torch.ones_like(d.quota))

    def commit(self, d: Denoising, accepted: Tensor) -> None:
        """Tokens were committed: places [B, N], already in `d.ids`."""


class Denoising:
    """An answer in the making: a batch of sequences of one length, prompt first.

    Attributes:
        ids: [B, N]. prompt: places before the answer.
        start, end: the block's places. step: forward passes made in this block.
        quota: tokens to commit in this step, by sequence [B].
        known: places that were decoded when this step began, the prompt among them [B, N].
        before: the same of the step before, within this block; at its first step equal to `known`.
        order: random numbers of this block by place, after which tokens are revealed where remasking is random [B, N].
        notes: what a policy keeps from step to step beside its stores.
        facts: what was done otherwise than without a cache: rows that passes left out (mean over layers), rows that
            attention did not look at, tokens committed before their turn.
    """

    def __init__(
        self, model: Model, method: Policy, prompt: Tensor, answer: int, sampling: Sampling, seed: int = 0,
        never_first: Sequence[int] = (),
    ) -> None:
        assert model.masking is not None, "a diffusion model"
        sampling.check(answer)
        method.check(sampling, answer)
        self.model, self.method, self.sampling = model, method, sampling
        self.masking = model.masking
        self.blocks = Blocks(model.module)
        self.never_first = list(never_first)
        self.prompt = prompt.shape[1]
        masks = prompt.new_full((len(prompt), answer), self.masking.mask_id)
        self.ids = torch.cat([prompt, masks], dim=1)
        self.stores = [method.store(self.ids.shape[1]) for _ in self.blocks.layers]
        self.places = torch.arange(self.ids.shape[1], device=self.ids.device)  # [N]
        self.seed = seed
        self.orders = torch.Generator(self.ids.device).manual_seed(seed)  # of nothing else: every policy's are the same
        self.known = self.before = ~self.masked
        self.start = self.end = self.prompt
        self.step = self.passes = self.peak_bytes = 0
        self.quota = torch.zeros(len(prompt), dtype=torch.long, device=self.ids.device)
        self.order = torch.empty(0)
        self.notes: dict[str, Tensor] = {}
        self.facts = {"rows_skipped": 0, "rows_unread": 0, "tokens_early": 0}

    @property
    def masked(self) -> Tensor:
        """Places that are still masks. [B, N]"""
        return (self.ids == self.masking.mask_id) & (self.places >= self.prompt)

    def within(self, start: int, end: int) -> Tensor:
        """Places from start up to end. [N]"""
        return (self.places >= start) & (self.places < end)

    def predictors(self, places: Tensor) -> Tensor:
        """Rows that predict the tokens at these places: themselves, or the ones before them. [B, N] -> [B, N]"""
        return places if not self.masking.shifted else torch.cat([places[:, 1:], places[:, :1]], dim=1)

    def denoise(self) -> None:
        """Make the answer, block by block."""
        with attached(self.model.module), torch.no_grad():
            for start in range(self.prompt, self.ids.shape[1], self.sampling.block):
                self._begin(start)
                while bool((self.masked & self.within(self.prompt, self.end)).any()):
                    self._advance()

    def _begin(self, start: int) -> None:
        self.start, self.end, self.step = start, start + self.sampling.block, 0
        self.known = self.before = ~self.masked
        self.left = self.masked[:, start : self.end].sum(-1)  # [B]
        index, blocks = ((x - self.prompt) // self.sampling.block for x in (start, self.ids.shape[1]))
        self.steps = self.sampling.steps // blocks + (index < self.sampling.steps % blocks)
        self.order = torch.rand(self.ids.shape, generator=self.orders, device=self.ids.device)
        self.method.begin(self)

    def _advance(self) -> None:
        self.quota = self.left // self.steps + (self.step < self.left % self.steps)
        plan = self.method.plan(self)
        rows = positions_of(plan.rows) if plan.rows is not None else self.places.expand(len(self.ids), -1)
        hidden = self.method.run(self, plan, rows)
        self.passes, self.peak_bytes = self.passes + 1, max(self.peak_bytes, self.nbytes())
        slots = torch.full_like(self.ids, -1).scatter_(
            1, rows, torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        )
        slots = slots.roll(int(self.masking.shifted), dims=1)  # of the row that predicts each place
        sequence, place = (self.method.open(self) & (slots >= 0)).nonzero(as_tuple=True)
        tokens, confidence = self._sample(hidden[sequence, slots[sequence, place]], sequence, place)
        if self.sampling.remasking == "random":
            confidence = self.order[sequence, place]
        scores = torch.full(self.ids.shape, float("-inf"), device=self.ids.device)
        scores[sequence, place] = confidence
        drawn = self.ids.clone()
        drawn[sequence, place] = tokens
        accepted = self.method.accept(self, scores)
        self.facts["tokens_early"] += int((accepted & ~Policy.accept(self.method, self, scores)).sum())
        self.facts["rows_skipped"] = self.passes * self.ids.numel() - self.blocks.rows // len(self.stores)
        if plan.read is not None:
            self.facts["rows_unread"] += int((~plan.read).sum())
        if not accepted.any():
            raise RuntimeError(f"{self.method.card.name} computed no row that could be committed at step {self.step}")
        self.before, self.known = self.known, self.known | accepted
        self.ids = torch.where(accepted, drawn, self.ids)
        self.method.commit(self, accepted)
        self.step += 1

    def _sample(self, hidden: Tensor, sequence: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and the probabilities that they have without noise.

        hidden: [M, D]. sequence, place: where they will stand [M]. Returns [M], [M]
        """
        tokens, probabilities = [], []
        noise = self._noise() if self.sampling.temperature > 0 else None
        for part, where, at in zip(*(x.split(HEAD_ROWS) for x in (hidden, sequence, place)), strict=True):
            begins = at == self.prompt
            logits = self.blocks.head(part).float()
            logits[:, self.masking.mask_id] = float("-inf")
            logits[:, self.never_first] = logits[:, self.never_first].masked_fill(begins[:, None], float("-inf"))
            best = logits.argmax(-1)
            if noise is not None:
                uniform = noise[where, at - self.start]
                best = (logits.double() / self.sampling.temperature - (-uniform.log()).log()).argmax(-1)
            tokens.append(best)
            probabilities.append((logits.gather(-1, best[:, None])[:, 0] - logits.logsumexp(-1)).exp())
        if not tokens:
            return self.ids.new_empty(0), torch.empty(0, device=self.ids.device)
        return torch.cat(tokens), torch.cat(probabilities)

    def _noise(self) -> Tensor:
        """Numbers from 0 to 1 of this pass, for all places of the block, whichever of them a policy computed. [B, K, V]

        They are a function of seed and pass, so policies that compute other rows meet the same.
        """
        device = self.ids.device
        passing = torch.Generator(device).manual_seed(random.Random(f"{self.seed}/{self.passes}").getrandbits(63))
        shape = len(self.ids), self.sampling.block, len(self.blocks.module.lm_head.weight)
        return torch.rand(shape, generator=passing, device=device, dtype=torch.float64)

    def nbytes(self) -> int:
        """Bytes of the stores, and of what the policy keeps beside them."""
        return sum(x.nbytes() for x in self.stores) + storage_bytes(self.notes.values())


@dataclass(frozen=True)
class Denoised:
    """An answer and what it took.

    ids: tokens of the answer, by sequence; masks none. passes: forward passes. rows: rows computed per pass, mean over
    layers, sequences and passes. total: positions of a sequence. peak_bytes: of the stores, over all sequences.
    read_bytes: of the keys and values that attention looked at, over all passes. facts: as of `Denoising`.
    """

    ids: list[list[int]]
    passes: int
    rows: float
    total: int
    peak_bytes: int
    read_bytes: int
    facts: dict[str, int]


def denoise(
    model: Model, method: Policy, prompt: Sequence[int] | Tensor, answer: int, sampling: Sampling, seed: int = 0,
    never_first: Sequence[int] = (),
) -> Denoised:
    """Make an answer of so many tokens.

    prompt: ids of one sequence, or of several of one length [B, P]. never_first: tokens that no answer begins with.

    Raises:
        UserError: steps and blocks that do not fit the answer.
    """
    ids = torch.as_tensor(prompt, dtype=torch.long, device=model.device)
    d = Denoising(model, method, ids[None] if ids.dim() == 1 else ids, answer, sampling, seed, never_first)
    d.denoise()
    rows = d.blocks.rows / (d.passes * len(d.stores) * len(d.ids))
    return Denoised(
        ids=d.ids[:, d.prompt :].tolist(), passes=d.passes, rows=rows, total=d.ids.shape[1], peak_bytes=d.peak_bytes,
        read_bytes=sum(x.read_bytes for x in d.stores), facts=d.facts,
    )


def top(scores: Tensor, n: Tensor) -> Tensor:
    """The n greatest finite scores of each sequence; of equal ones the first. scores: [B, N]. n: [B]. Returns [B, N]"""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return (rank < n[:, None]) & scores.isfinite()


def positions_of(places: Tensor) -> Tensor:
    """Positions of the places that are set, ascending; shorter rows repeat their first one. [B, N] -> [B, m]"""
    counts = places.sum(-1)
    order = (~places).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(counts.max())]
    spare = torch.arange(order.shape[1], device=places.device) >= counts[:, None]
    return torch.where(spare, order[:, :1], order)
