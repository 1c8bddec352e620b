"""The store of a prompt whose entries partly come from other prompts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.kernels.scattered_attention import scattered_attention
from kvbench.step import Step
from kvbench.store.facts import Fact
from kvbench.store.layer import LayerKV


@dataclass
class ReusedKV(LayerKV):
    """Every entry of a prompt: first those at hand, which the tokens that are run then overwrite by position."""

    reused: int = field(default=0, init=False)
    """Tokens of the prompt whose entries were taken over and not computed again."""
    computed: int = field(default=0, init=False)
    """Tokens of the prompt that this layer has run; those that it ran twice count twice."""
    _taken: Tensor | None = field(default=None, init=False)
    """True for entries that are taken over, while the prompt is run. [N]"""

    def load(self, step: Step, keys: Tensor, values: Tensor, at_hand: Tensor) -> None:
        """Hold these entries of the whole prompt, rotated; those that are not at hand are to be overwritten.

        step: of the first pass over the prompt. keys: [1, H_kv, N, D]. values: [1, H_kv, N, D_v]. at_hand: [N] bool.
        """
        places = torch.arange(keys.shape[2], device=keys.device)[None]
        self.append(replace(step, key=keys, value=values, positions=places, seen=keys.shape[2]))
        self._taken = at_hand.clone()

    def overwrite(self, step: Step, places: Tensor, chosen: Tensor | None = None) -> None:
        """Write the entries of a step at these places of the prompt. places: [m].

        chosen: which of the m tokens to write [w]; None: all.
        """
        assert self._taken is not None, "load first"
        key, value = step.key, step.value
        if chosen is not None:
            places, key, value = places[chosen], key[:, :, chosen], value[:, :, chosen]
        self.keys[:, :, places] = key
        self.values[:, :, places] = value
        self._taken[places] = False

    def finish(self, apart: Tensor) -> None:
        """The prompt is complete. apart: True for tokens that were run for it outside of its passes [N]."""
        assert self._taken is not None, "load first"
        self.reused, self._taken = int((self._taken & ~apart).sum()), None
        self.computed += int(apart.sum())
        self.settle()

    def attend_at(self, step: Step, places: Tensor) -> Tensor:
        """Attention of the step's tokens at these places, each over the entries up to its own. [1, H_q, m, D_v]"""
        self.computed += len(places)
        return scattered_attention(
            step.query, self.keys, self.values, places, scale=step.scale, softcap=step.softcap, sinks=step.sinks
        )

    def facts(self) -> dict[str, Fact]:
        """Entries taken over, and tokens run."""
        return {
            **super().facts(), "entries_reused": Fact(self.reused, changed=True), "tokens_computed": Fact(self.computed)
        }
