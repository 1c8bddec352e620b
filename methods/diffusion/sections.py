"""Attention that is full within a section and causal from one section to the next, so that finished entries stay exact.

The prompt is the first section. Its entries depend on nothing behind it, are computed once, and are stored once for
all sequences of a batch that have the same prompt. With a shifted head a section begins one position early, at the one
that predicts its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvbench.diffusion.policy import Denoising, PassPlan, Policy
from kvbench.kernels.blocks import float_products
from kvbench.method import Step
from kvbench.store.entries import storage_bytes
from kvbench.store.positions import PositionKV


@dataclass
class SectionKV(PositionKV):
    """The prompt's entries, and those of the answer by position after it."""

    prefix: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    """Keys and values of the prompt [B, H_kv, P, D]; of one sequence if all have the same prompt."""
    final: int = field(default=0, init=False)
    """Positions whose entries never change."""

    def attend_sections(self, step: Step, ends: Sequence[tuple[int, int]]) -> Tensor:
        """Attention of sections over the prompt, earlier sections and themselves. [B, H_q, m, D_v]

        ends: of each section, the number of rows of the step, and of the answer's positions that they read.
        """
        assert self.keys is not None and self.values is not None
        outputs, start = [], 0
        for rows, count in ends:
            query = step.query[:, :, start : start + rows]
            grouped = query.unflatten(1, (self.keys.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * m, D]
            parts = [(self.keys[:, :, :count], self.values[:, :, :count])]
            if self.prefix is not None:
                parts.insert(0, self.prefix)  # not concatenated, which would copy it for every sequence
            logits = torch.cat([float_products(grouped, keys) for keys, _ in parts], dim=-1) * step.scale
            weights = logits.softmax(-1).to(query.dtype).split([keys.shape[2] for keys, _ in parts], dim=-1)
            output = sum(w @ values for w, (_, values) in zip(weights, parts, strict=True))
            assert isinstance(output, Tensor)
            outputs.append(output.unflatten(2, (-1, rows)).flatten(1, 2))
            self.read_bytes += sum(keys.nbytes + values.nbytes for keys, values in parts)
            start += rows
        return torch.cat(outputs, dim=2)

    def nbytes(self) -> int:
        """Bytes of the storages."""
        return super().nbytes() + (storage_bytes(self.prefix) if self.prefix is not None else 0)


@dataclass(frozen=True)
class Sections(Policy):
    """Computes the prompt once, each section until it is complete, and its final tokens once more."""

    def store(self, length: int) -> PositionKV:
        """A store with a prompt."""
        return SectionKV(length)

    def section(self, d: Denoising) -> tuple[int, int]:
        """The section that is decoded: its first position and its end. The current block, unless overridden."""
        return d.start - d.masking.shifted, d.end

    def begin(self, d: Denoising) -> None:
        """Run the prompt alone when the first block begins, in a pass of its own."""
        if d.start > d.prompt:
            return
        count = d.prompt - d.masking.shifted
        for kv in d.stores:
            assert isinstance(kv, SectionKV)
            kv.length, kv.final = d.ids.shape[1] - count, count
        if count == 0:
            return
        prompts = d.ids[:, :count]
        if bool((prompts == prompts[:1]).all()):
            prompts = prompts[:1]

        def look(step: Step) -> Tensor:
            kv = d.stores[step.layer]
            assert isinstance(kv, SectionKV)
            kv.prefix = step.key, step.value
            return kv.attend_over(step, step.key, step.value)

        d.blocks.run(d.blocks.embed(prompts), d.positions[:count].expand(len(prompts), -1), look)
        d.nfe += 1

    def plan(self, d: Denoising) -> PassPlan:
        """The section, and before it what has not been computed with its final tokens."""
        kv = d.stores[0]
        assert isinstance(kv, SectionKV)
        return PassPlan(compute=d.within(kv.final, self.section(d)[1]).expand_as(d.ids))

    def look(self, d: Denoising, kv: PositionKV, plan: PassPlan, step: Step) -> Tensor:
        """Each section attends to all before it and to itself."""
        del plan
        assert isinstance(kv, SectionKV)
        before = d.ids.shape[1] - kv.length
        kv.write(replace(step, positions=step.positions - before))
        start, end = self.section(d)
        earlier = [x - d.masking.shifted for x in range(d.prompt, d.start + 1, d.sampling.block)]
        ends = [x for x in earlier if kv.final < x <= start] + [end]
        return kv.attend_sections(step, [(b - a, b - before) for a, b in pairwise([kv.final, *ends])])

    def commit(self, d: Denoising, accepted: Tensor) -> None:
        """The text before the section has been computed with its final tokens."""
        del accepted
        for kv in d.stores:
            assert isinstance(kv, SectionKV)
            kv.final = max(kv.final, self.section(d)[0])
