"""Policies written out from their cards, for one sequence and low-confidence remasking, without kvbench's code.

They share nothing with what they check but the weights: attention, rotation, schedule and commits are written here.
Cards: methods-diffusion-reuse.md, 1.1 (sampler), 1.5 to 1.9, 1.11, 1.12 with A3.12, A3.13, A3.14.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MASK, VOCABULARY, THETA = 63, 64, 10000.0
HEADS, KV_HEADS, WIDTH = 4, 2, 16
Rows = tuple[Tensor, Tensor, Tensor]
"""Queries [H_q, m, d], keys and values [H, m, d]."""


@dataclass
class Writing:
    """An answer in the making, and the model's layers on any rows. module: a Llama of these sizes."""

    module: Any
    prompt: Tensor
    answer: int
    shifted: bool
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """The prompt and masks."""
        self.ids = torch.cat([self.prompt, torch.full((self.answer,), MASK)])
        self.layers = list(self.module.model.layers)
        self.start, self.n = len(self.prompt), len(self.ids)

    def rows(self, layer: int, hidden: Tensor, positions: Tensor) -> Rows:
        """The part of a layer before attention. hidden: [m, D]"""
        block = self.layers[layer]
        x = block.input_layernorm(hidden)
        q, k, v = (
            part(x).view(len(x), -1, WIDTH).transpose(0, 1)
            for part in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        )
        return turn(q, positions), turn(k, positions), v

    def attention(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Residual update of attention. mask: what a row may read [m, n]. [m, D]"""
        read = weigh(queries, keys, mask) @ values.repeat_interleave(HEADS // KV_HEADS, 0)
        added: Tensor = self.layers[layer].self_attn.o_proj(read.transpose(0, 1).reshape(queries.shape[1], -1))
        return added

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """Residual update of the feed-forward part. [m, D]"""
        block = self.layers[layer]
        added: Tensor = block.mlp(block.post_attention_layernorm(hidden))
        return added

    def embed(self, positions: Tensor) -> Tensor:
        """Hidden states before the first layer. [m, D]"""
        found: Tensor = self.module.model.embed_tokens(self.ids[positions])
        return found

    def whole(self) -> tuple[Tensor, list[Rows]]:
        """A pass of all rows: hidden states [N, D], and every layer's rows."""
        positions, kept = torch.arange(self.n), []
        hidden = self.embed(positions)
        for layer in range(len(self.layers)):
            kept.append(self.rows(layer, hidden, positions))
            hidden = hidden + self.attention(layer, *kept[-1])
            hidden = hidden + self.mlp(layer, hidden)
        return hidden, kept

    def pass_under(self, positions: Tensor, mask: Tensor) -> tuple[Tensor, list[Rows]]:
        """A pass of these rows, in this order, under a mask: hidden states [m, D], and every layer's rows."""
        hidden, kept = self.embed(positions), []
        for layer in range(len(self.layers)):
            kept.append(self.rows(layer, hidden, positions))
            hidden = hidden + self.attention(layer, *kept[-1], mask)
            hidden = hidden + self.mlp(layer, hidden)
        return hidden, kept

    def masks(self, end: int | None = None) -> list[int]:
        """Places of the answer that are still masks, up to end."""
        return [p for p in range(self.start, self.n if end is None else end) if self.ids[p] == MASK]

    def chances(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Probabilities of each position's token, by the row that predicts it. [N, V]"""
        logits = torch.zeros(self.n, VOCABULARY)
        logits[positions] = self.module.lm_head(self.module.model.norm(hidden))
        logits[:, MASK] = -math.inf
        logits = torch.cat([logits[:1], logits[:-1]]) if self.shifted else logits
        return logits.softmax(-1)

    def commit(self, hidden: Tensor, positions: Tensor, candidates: list[int], n: int) -> list[int]:
        """The n surest candidates, each by the row that predicts it. hidden: [m, D] of rows at these positions."""
        sure, tokens = self.chances(hidden, positions).max(-1)
        taken = sorted(candidates, key=lambda p: -float(sure[p]))[:n]
        self.ids[taken] = tokens[taken]
        return taken

    def written(self) -> list[int]:
        """The answer."""
        return [int(x) for x in self.ids[self.start :]]


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Rotated by their positions, a half against the other. x: [heads, m, d]"""
    angles = positions[:, None] * THETA ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1)


def weigh(queries: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention weights. [H_q, m, n]"""
    products = queries @ keys.repeat_interleave(HEADS // KV_HEADS, 0).transpose(1, 2)
    products = products if mask is None else products.masked_fill(~mask, -math.inf)
    return (products / math.sqrt(WIDTH)).softmax(-1)


def share_out(tokens: int, steps: int) -> list[int]:
    """How many tokens each step commits."""
    return [tokens // steps + (step < tokens % steps) for step in range(steps)]


def dllm_cache(w: Writing, steps: int, *, prompt: int, answer: int, share: float) -> list[int]:
    """dLLM-Cache (card 1.8): what branches added is kept by row; changed answer rows are renewed."""
    every, kept = torch.arange(w.n), [dict[str, Tensor]() for _ in w.layers]
    for step, n in enumerate(share_out(w.answer, steps)):
        hidden = w.embed(every)
        for layer, c in enumerate(kept):
            if not c:
                c.update(
                    k=torch.zeros(KV_HEADS, w.n, WIDTH), v=torch.zeros(w.n, KV_HEADS * WIDTH),
                    attention=torch.zeros_like(hidden), mlp=torch.zeros_like(hidden),
                )
            own = every[w.start :]
            if layer > 0 and step % answer > 0:
                block = w.layers[layer]
                values = block.self_attn.v_proj(block.input_layernorm(hidden[w.start :]))
                alike = F.cosine_similarity(values, c["v"][w.start :], dim=-1)
                own = w.start + alike.topk(int(share * w.answer), largest=False).indices
                c["v"][w.start :] = values
            places = torch.cat([every[: w.start] if layer == 0 or step % prompt == 0 else every[:0], own])
            q, c["k"][:, places], v = w.rows(layer, hidden[places], places)
            c["v"][places] = v.transpose(0, 1).reshape(len(places), -1)
            values = c["v"].view(w.n, KV_HEADS, WIDTH).transpose(0, 1)
            c["attention"][places] = w.attention(layer, q, c["k"], values)
            hidden = hidden + c["attention"]
            c["mlp"][places] = w.mlp(layer, hidden[places])
            hidden = hidden + c["mlp"]
        w.commit(hidden, every, w.masks(), n)
    return w.written()


def sparse_dllm(w: Writing, block: int, *, keep: float, pool: int, delay: int, by_head: bool) -> list[int]:
    """Sparse-dLLM (card 1.9), one token a step, a head that is not shifted: rows outside the block by its queries."""
    for start in range(w.start, w.n, block):
        inside = torch.arange(start, start + block)
        outside = torch.tensor([p for p in range(w.n) if not start <= p < start + block])
        kept: list[tuple[Tensor, Tensor]] = []
        for step in range(block):
            if step <= delay:
                hidden, rows = w.whole()
                places = torch.arange(w.n)
            if step == delay:
                for q, k, v in rows:
                    keys = k[:, outside].repeat_interleave(HEADS // KV_HEADS, 0)
                    scores = torch.einsum("hd,hrd->hr", q[:, inside].mean(1), keys)
                    scores = scores.view(KV_HEADS, -1, len(outside)).amax(1) if by_head else scores.mean(0)[None]
                    scores = F.max_pool1d(scores[None], pool, 1, pool // 2)[0]
                    chosen = outside[scores.topk(int(keep * len(outside))).indices.expand(KV_HEADS, -1)]
                    each = torch.arange(KV_HEADS)[:, None]
                    kept.append((k[each, chosen], v[each, chosen]))
            if step > delay:
                hidden, places = w.embed(inside), inside
                for layer, (keys, values) in enumerate(kept):
                    q, k, v = w.rows(layer, hidden, inside)
                    hidden = hidden + w.attention(layer, q, torch.cat([keys, k], 1), torch.cat([values, v], 1))
                    hidden = hidden + w.mlp(layer, hidden)
            w.commit(hidden, places, w.masks(start + block), 1)
    return w.written()


def window_diffusion(w: Writing, steps: int, *, refresh: int, window: int, active: int) -> list[int]:
    """Window-Diffusion (card 1.6): the first masks, and what was decoded in this phase, over a window fixed for it."""
    for step, n in enumerate(share_out(w.answer, steps)):
        if step % refresh == 0:
            hidden, rows = w.whole()
            fresh = w.commit(hidden, torch.arange(w.n), w.masks(), n)
            left = w.masks()
            seen = set(range(w.n)) - set(left[window:])
            phase: list[int] = []
            continue
        first = w.masks()[:active]
        computed = {*first, *fresh, *phase}
        read = torch.tensor(sorted(seen | computed))
        places = torch.tensor(sorted(computed | {p - 1 for p in first if w.shifted}))
        hidden, fresh = w.embed(places), []
        for layer, (_, keys, values) in enumerate(rows):
            q, keys[:, places], values[:, places] = w.rows(layer, hidden, places)
            hidden = hidden + w.attention(layer, q, keys[:, read], values[:, read])
            hidden = hidden + w.mlp(layer, hidden)
        phase += w.commit(hidden, places, first, n)
    return w.written()


def elastic_cache(w: Writing, steps: int, *, window: int, gamma: float, tracked: int, axis: str) -> list[int]:
    """Elastic-Cache (card 1.5): from the layer above the first that drifted all rows are computed."""
    inputs: list[Tensor] = []
    state: list[Rows] = []
    every = torch.arange(w.n)
    watched: list[int] = []
    new: list[int] = []
    for step, n in enumerate(share_out(w.answer, steps)):
        masks = w.masks()
        near = [p - w.shifted for p in masks[:window]]
        rows = every if step == 0 else torch.tensor(list(dict.fromkeys([*watched, *new, *near])))
        reset = -1 if step == 0 else len(w.layers)
        hidden, places, following = w.embed(rows), rows, set[int]()
        for layer in range(len(w.layers)):
            if step == 0:
                inputs.append(hidden.clone())
            inputs[layer][places] = hidden
            if layer == reset:
                hidden, places = inputs[layer].clone(), every
            made = w.rows(layer, hidden, places)
            if step == 0:
                state.append(made)
            queries, keys, values = state[layer]
            before = weigh(queries[:, watched], keys)
            for old, fresh in zip(state[layer], made, strict=True):
                old[:, places] = fresh.clone()
            if layer < reset and watched:
                alike = F.cosine_similarity(before, weigh(queries[:, watched], keys), dim=0 if axis == "heads" else 2)
                reset = layer + 1 if alike.mean() < gamma else reset
            mass = weigh(queries[:, near], keys).sum((0, 1))
            mass[masks] = 0
            following |= set(mass.topk(tracked).indices.tolist())
            hidden = hidden + w.attention(layer, made[0], keys, values)
            hidden = hidden + w.mlp(layer, hidden)
        watched = sorted(following)
        new = w.commit(hidden, places, masks[:window], n)
    return w.written()


def multi_block(w: Writing, block: int, *, blocks: int, add: float) -> list[int]:
    """Multi-Block (card 1.12): each running block commits its surest token; a full pass when the first is complete."""
    count, first, running, known = w.answer // block, -1, set[int](), list[Rows]()
    while left := w.masks():
        current = (left[0] - w.start) // block
        number = [(p - w.start) // block for p in left]
        done = [(block - number.count(k)) / block for k in range(count)]
        for k in range(current, min(current + blocks, count)):
            if k == current or (k - 1 in running and done[k - 1] >= add):
                running.add(k)
        if current > first:
            hidden, known = w.whole()
            places, first = torch.arange(w.n), current
        else:
            places = torch.arange(w.start + first * block - w.shifted, w.n)
            hidden = w.embed(places)
            for layer, (_, keys, values) in enumerate(known):
                q, keys[:, places], values[:, places] = w.rows(layer, hidden, places)
                hidden = hidden + w.attention(layer, q, keys, values)
                hidden = hidden + w.mlp(layer, hidden)
        for k in sorted(running):
            w.commit(hidden, places, [p for p, own in zip(left, number, strict=True) if own == k], 1)
    return w.written()


def sections(w: Writing, block: int, *, whole: bool) -> tuple[list[int], list[Rows]]:
    """LaViDa (A3.13) and Fast-dDrive (A3.14) without a cache, one token a step: the answer, and its last pass.

    whole: the answer is one section, else its blocks are. Every pass computes all rows under the mask.
    """
    kept: list[Rows] = []
    while left := w.masks():
        start = w.start + (left[0] - w.start) // block * block
        ends = [w.start, w.n] if whole else list(range(w.start, start + block + 1, block))
        ends = [*(x - w.shifted for x in ends[:-1]), ends[-1]]  # a section begins where its first token is predicted
        places = torch.arange(ends[-1])
        limit = torch.tensor([next(x for x in ends if x > p) for p in places.tolist()])
        hidden, kept = w.pass_under(places, places < limit[:, None])
        w.commit(hidden, places, w.masks(start + block), 1)
    return w.written(), kept


def wedlm(w: Writing, *, window: int, entropy: float | None, penalty: float) -> tuple[list[int], int]:
    """WeDLM (card 1.11) without a cache: decoded tokens, then masks, under a causal mask. The answer and its passes."""
    passes = 0
    while left := w.masks():
        passes += 1
        masks = [p for p in left if p < left[0] + window]
        order = torch.tensor([p for p in range(min(left[0] + window, w.n)) if p not in left] + masks)
        hidden, _ = w.pass_under(order, torch.ones(len(order), len(order)).tril().bool())
        chances = w.chances(hidden, order)
        unsure = {p: float(torch.special.entr(chances[p]).sum()) + penalty * (p - left[0]) for p in masks}
        taken = [p for p, x in unsure.items() if entropy is not None and x < entropy]
        for p in taken or [min(unsure, key=lambda p: unsure[p])]:
            w.ids[p] = chances[p].argmax()
    return w.written(), passes
