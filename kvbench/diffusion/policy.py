"""The denoising loop of masked diffusion models, and the hooks through which a cache policy changes it.

An answer begins as a response block of mask tokens. Each denoising step computes some tokens, predicts the masked ones,
and commits the most confident predictions; a committed token never changes. Blocks of the answer are finished one after
the other. A policy selects the tokens that a step computes and those that its attention reads; without a policy, each
step computes all of them.

One loop serves every policy. Schedule, confidences (float32), order of random reveals and noise are equal, so policies
differ by their caches only. Each step computes a token at most once, and logits only where a token may be committed.

Source: LLaDA's sampler (arXiv 2502.09992, generate.py); the threshold is Fast-dLLM's (arXiv 2505.22618). Deviations: a
mask token is never sampled (LLaDA's sampler may sample it, and leaves the position masked); confidences are float32,
where published codes use bfloat16 or float64.
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
from kvbench.errors import UserError, nan_error
from kvbench.hf.adapter import attached
from kvbench.hf.masked import Blocks
from kvbench.method import Method
from kvbench.step import Step
from kvbench.store import storage_bytes
from kvbench.store.positions import PositionKV

if TYPE_CHECKING:
    from kvbench.hf import Model

HEAD_TOKENS = 1024
"""Tokens whose logits exist at the same time."""


@dataclass(frozen=True)
class PassPlan:
    """The tokens that one forward pass computes and reads.

    compute: positions to compute [B, N]; None: all.
    read: positions that attention reads, including the computed ones [B, N]; None: all.
    keep: True: write the computed entries into the stores. False: the computed tokens attend to each other only.
    """

    compute: Tensor | None = None
    read: Tensor | None = None
    keep: bool = True


@dataclass(frozen=True)
class Policy(Method):
    """A cache policy of diffusion models. The base class has no cache; override the hooks that a paper changes."""

    graphable: ClassVar[str | None] = "the number of computed tokens changes from step to step"
    prefixed: ClassVar[bool] = False
    """Whether it runs on models whose prompts attend to themselves only."""
    scheduled: ClassVar[bool] = True
    """Whether every pass commits as many tokens as the schedule says, or more. Otherwise one is enough."""

    def identity(self, shape: Shape) -> bool:
        """True if these settings compute everything that a run without a cache computes."""
        del shape
        return False

    def store(self, length: int) -> PositionKV:
        """STORAGE: an empty store for one layer of a sequence of `length` positions."""
        return PositionKV(length)

    def check_model(self, model: Model) -> None:
        """Refuse a model whose prompts attend to themselves only (`UserError`), unless the policy runs on it."""
        assert model.masking is not None, "a diffusion model"
        if model.masking.attention == "prefix" and not self.prefixed:
            raise UserError(
                f"{self.card.name} computes prompts that attend to the answer, and {model.id} is trained with "
                "prompts that do not. Use `none` or `lavida`."
            )

    def check(self, sampling: Sampling, answer: int) -> None:
        """APPLICABILITY: raise a UserError for settings of the run that the policy does not support."""

    def begin(self, d: Denoising) -> None:
        """Called when a block begins, at positions `d.start` to `d.end`."""

    def plan(self, d: Denoising) -> PassPlan:
        """SELECTION: the tokens to compute and read in this step. By default all, and nothing is kept."""
        del d
        return PassPlan(keep=False)

    def run(self, d: Denoising, plan: PassPlan, index: Tensor) -> Tensor:
        """FORWARD PASS: hidden states after the last layer. index: positions to compute [B, m]. Returns [B, m, D]"""
        return d.blocks.run(
            d.blocks.embed(d.ids.gather(1, index)), index, lambda step: self.look(d, d.stores[step.layer], plan, step)
        )

    def look(self, d: Denoising, kv: PositionKV, plan: PassPlan, step: Step) -> Tensor:
        """ATTENTION: the output of the computed tokens over the entries that they read. [B, H_q, m, D_v]"""
        if not plan.keep:
            count = d.prompt - d.masking.shifted if d.masking.attention == "prefix" else 0
            return kv.attend_after_prefix(step, count)
        kv.write(step)
        return kv.attend(step, plan.read)

    def open(self, d: Denoising) -> Tensor:
        """Positions that may be committed in this step: the masks of the block. [B, N]"""
        return d.masked & d.within(d.start, d.end)

    def confidence(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """CONFIDENCE: how sure a prediction is; by default, the token's probability. logits: [M, V]. Returns [M]"""
        return (logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()

    def accept(self, d: Denoising, confidence: Tensor) -> Tensor:
        """ACCEPTANCE: the tokens to commit. confidence: [B, N], -inf where there is no candidate. Returns [B, N]"""
        if d.sampling.threshold is None:
            return top(confidence, d.quota)
        return (confidence >= d.sampling.threshold) | top(confidence, torch.ones_like(d.quota))

    def commit(self, d: Denoising, accepted: Tensor) -> None:
        """Called after tokens at these positions [B, N] were committed to `d.ids`."""


class Denoising:
    """State of the denoising loop: a batch of sequences of one length, each a prompt and a response block.

    Attributes:
        ids: [B, N]. prompt: length of the prompt.
        start, end: positions of the current block. step: denoising steps in this block. steps_done: in all blocks.
        nfe: forward passes so far, which may include passes that denoise nothing.
        quota: tokens to commit in this step, by sequence [B].
        known: positions decoded when this step began, including the prompt [B, N].
        before: the same for the previous step of this block; equal to `known` at the first step.
        order: random numbers by position, which order the reveals of this block if remasking is random [B, N].
        notes: tensors that a policy keeps from step to step, in addition to its stores.
        facts: differences from a run without a cache: tokens that passes did not compute (mean over layers), entries
            that attention did not read, tokens committed earlier than the schedule says.
    """

    def __init__(
        self, model: Model, method: Policy, prompt: Tensor, answer: int, sampling: Sampling, seed: int = 0,
        never_first: Sequence[int] = (),
    ) -> None:
        assert model.masking is not None, "a diffusion model"
        sampling.check(answer)
        method.check_model(model)
        method.check(sampling, answer)
        self.model, self.method, self.sampling = model, method, sampling
        self.masking = model.masking
        self.blocks = Blocks(model.module)
        self.never_first = list(never_first)
        self.prompt = prompt.shape[1]
        masks = prompt.new_full((len(prompt), answer), self.masking.mask_id)
        self.ids = torch.cat([prompt, masks], dim=1)
        self.stores = [method.store(self.ids.shape[1]) for _ in self.blocks.layers]
        self.positions = torch.arange(self.ids.shape[1], device=self.ids.device)  # [N]
        self.seed = seed
        self.orders = torch.Generator(self.ids.device).manual_seed(seed)  # used for nothing else
        self.known = self.before = ~self.masked
        self.start = self.end = self.prompt
        self.step = self.steps_done = self.nfe = self.peak_bytes = 0
        self.quota = torch.zeros(len(prompt), dtype=torch.long, device=self.ids.device)
        self.order = torch.empty(0)
        self.notes: dict[str, Tensor] = {}
        self.facts = {"tokens_skipped": 0, "entries_unread": 0, "tokens_early": 0}

    @property
    def masked(self) -> Tensor:
        """Positions that are still masks. [B, N]"""
        return (self.ids == self.masking.mask_id) & (self.positions >= self.prompt)

    def within(self, start: int, end: int) -> Tensor:
        """Positions from start to before end. [N]"""
        return (self.positions >= start) & (self.positions < end)

    def predictors(self, mask: Tensor) -> Tensor:
        """Positions whose outputs predict these: themselves, or the previous ones if the head is shifted. [B, N]"""
        return mask if not self.masking.shifted else torch.cat([mask[:, 1:], mask[:, :1]], dim=1)

    @property
    def block_count(self) -> int:
        """Blocks of the response block."""
        return (self.ids.shape[1] - self.prompt) // self.sampling.block

    def steps_of(self, block: int) -> int:
        """The denoising steps that the schedule gives to a block, counted from 0."""
        return self.sampling.steps // self.block_count + (block < self.sampling.steps % self.block_count)

    def denoise(self) -> None:
        """Denoise the response block, block by block."""
        with attached(self.model.module), torch.no_grad():
            for start in range(self.prompt, self.ids.shape[1], self.sampling.block):
                self._begin(start)
                while bool((self.masked & self.within(self.prompt, self.end)).any()):
                    self._advance()

    def _begin(self, start: int) -> None:
        self.start, self.end, self.step = start, start + self.sampling.block, 0
        self.known = self.before = ~self.masked
        self.left = self.masked[:, start : self.end].sum(-1)  # [B]
        self.steps = self.steps_of((start - self.prompt) // self.sampling.block)
        self.order = torch.rand(self.ids.shape, generator=self.orders, device=self.ids.device)
        masks = int(self.masked.sum())
        self.method.begin(self)
        self.facts["tokens_early"] += masks - int(self.masked.sum())  # tokens that it wrote, such as a scaffold

    def _advance(self) -> None:
        self.quota = self.left // self.steps + (self.step < self.left % self.steps)
        plan = self.method.plan(self)
        index = indices_of(plan.compute) if plan.compute is not None else self.positions.expand(len(self.ids), -1)
        hidden = self.method.run(self, plan, index)
        self.nfe, self.peak_bytes = self.nfe + 1, max(self.peak_bytes, self.nbytes())
        slots = torch.full_like(self.ids, -1).scatter_(
            1, index, torch.arange(index.shape[1], device=index.device).expand(len(index), -1)
        )
        slots = slots.roll(int(self.masking.shifted), dims=1)  # index of the output that predicts each position
        sequence, position = (self.method.open(self) & (slots >= 0)).nonzero(as_tuple=True)
        tokens, confidence = self._sample(hidden[sequence, slots[sequence, position]], sequence, position)
        if self.sampling.remasking == "random":
            confidence = self.order[sequence, position]
        scores = torch.full(self.ids.shape, float("-inf"), device=self.ids.device)
        scores[sequence, position] = confidence
        drawn = self.ids.clone()
        drawn[sequence, position] = tokens
        accepted = self.method.accept(self, scores)
        self.facts["tokens_early"] += int((accepted & ~Policy.accept(self.method, self, scores)).sum())
        self.facts["tokens_skipped"] = self.nfe * self.ids.numel() - self.blocks.computed // len(self.stores)
        if plan.read is not None:
            self.facts["entries_unread"] += int((~plan.read).sum())
        if not accepted.any():
            raise RuntimeError(f"{self.method.card.name} computed no token that could be committed at step {self.step}")
        self.before, self.known = self.known, self.known | accepted
        self.ids = torch.where(accepted, drawn, self.ids)
        self.method.commit(self, accepted)
        self.step, self.steps_done = self.step + 1, self.steps_done + 1

    def _sample(self, hidden: Tensor, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Sampled tokens and their confidences without noise.

        hidden: [M, D]. sequence, position: where the tokens belong [M]. Returns [M], [M]

        Raises:
            UserError: the logits are not numbers.
        """
        tokens, confidences = [], []
        noise: dict[int, Tensor] = {}
        if self.sampling.temperature > 0:
            ahead = (position - self.start) // self.sampling.block
            noise = {block: self._noise(block) for block in ahead.unique().tolist()}
        for part, where, at in zip(*(x.split(HEAD_TOKENS) for x in (hidden, sequence, position)), strict=True):
            begins = at == self.prompt
            logits = self.blocks.head(part).float()
            logits[:, self.masking.mask_id] = float("-inf")
            logits[:, self.never_first] = logits[:, self.never_first].masked_fill(begins[:, None], float("-inf"))
            best = logits.argmax(-1)
            for block, drawn in noise.items():
                place = at - self.start - block * self.sampling.block
                inside = (place >= 0) & (place < self.sampling.block)
                uniform = drawn[where[inside], place[inside]]
                best[inside] = (logits[inside].double() / self.sampling.temperature - (-uniform.log()).log()).argmax(-1)
            tokens.append(best)
            confidences.append(self.method.confidence(logits, best))
        if not tokens:
            return self.ids.new_empty(0), torch.empty(0, device=self.ids.device)
        confidence = torch.cat(confidences)
        if bool(confidence.isnan().any()):  # once, because a GPU waits for it
            raise nan_error(self.model.dtype, self.method.card.name)
        return torch.cat(tokens), confidence

    def _noise(self, ahead: int) -> Tensor:
        """Uniform random numbers of this step for all positions of a block. [B, K, V]

        ahead: blocks after the current one. They depend on seed, step and block only, so they are equal for policies
        that compute different tokens.
        """
        device = self.ids.device
        place = f"{self.seed}/{self.steps_done + 1}" + (f"/{ahead}" if ahead else "")
        passing = torch.Generator(device).manual_seed(random.Random(place).getrandbits(63))
        shape = len(self.ids), self.sampling.block, len(self.blocks.module.lm_head.weight)
        return torch.rand(shape, generator=passing, device=device, dtype=torch.float64)

    def nbytes(self) -> int:
        """Bytes of the stores and of `notes`."""
        return sum(x.nbytes() for x in self.stores) + storage_bytes(self.notes.values())


@dataclass(frozen=True)
class Denoised:
    """An answer and its cost.

    ids: tokens of the answer by sequence, without masks. nfe: forward passes. computed_tokens: per pass, mean over
    layers, sequences and passes. sequence_length: tokens of prompt and response block. peak_bytes: of the stores, over
    all sequences. read_bytes: of the keys and values that attention read, over all passes. facts: see `Denoising`.
    """

    ids: list[list[int]]
    nfe: int
    computed_tokens: float
    sequence_length: int
    peak_bytes: int
    read_bytes: int
    facts: dict[str, int]


def denoise(
    model: Model, method: Policy, prompt: Sequence[int] | Tensor, answer: int, sampling: Sampling, seed: int = 0,
    never_first: Sequence[int] = (),
) -> Denoised:
    """Generate an answer of `answer` tokens.

    prompt: ids of one sequence, or of several of one length [B, P]. never_first: tokens that may not begin an answer.

    Raises:
        UserError: steps or blocks do not fit the length of the answer.
    """
    ids = torch.as_tensor(prompt, dtype=torch.long, device=model.device)
    d = Denoising(model, method, ids[None] if ids.dim() == 1 else ids, answer, sampling, seed, never_first)
    d.denoise()
    computed = d.blocks.computed / (d.nfe * len(d.stores) * len(d.ids))
    return Denoised(
        ids=d.ids[:, d.prompt :].tolist(), nfe=d.nfe, computed_tokens=computed, sequence_length=d.ids.shape[1],
        peak_bytes=d.peak_bytes, read_bytes=sum(x.read_bytes for x in d.stores), facts=d.facts,
    )


def require_single(denoising: Denoising, name: str, reason: str) -> None:
    """Raise a `UserError` if there are several sequences; `reason` says why the policy `name` decodes one."""
    if len(denoising.ids) > 1:
        raise UserError(f"{name} decodes one sequence at a time, because {reason}. Pass one prompt at a time.")


def top(scores: Tensor, n: Tensor) -> Tensor:
    """The n greatest finite scores of each sequence; ties go to the first. scores: [B, N]. n: [B]. Returns [B, N]"""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return (rank < n[:, None]) & scores.isfinite()


def indices_of(mask: Tensor) -> Tensor:
    """Positions set in a mask, ascending; sequences with fewer repeat their first one. [B, N] -> [B, m]"""
    counts = mask.sum(-1)
    order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[:, : int(counts.max())]
    spare = torch.arange(order.shape[1], device=mask.device) >= counts[:, None]
    return torch.where(spare, order[:, :1], order)
