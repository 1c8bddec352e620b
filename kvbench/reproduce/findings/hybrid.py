"""Findings about models of which some layers rotate queries and keys and others do not."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from kvbench.hf import Model
from kvbench.reproduce.findings.entries import RANK_SHARE, flatten
from kvbench.reproduce.findings.observe import Layer, Observer, Values, observe

NEAR = 64
"""Entries up to a query's own that layers are compared on, since a sliding layer may see no others."""
RECENT = 8
"""The last of them."""
BEHIND = 16
"""Tokens behind the needle, into which lower layers may have carried it."""


class LayerKinds(Observer):
    """Attention to the needle and to the last entries, and keys as they are stored, by layer.

    Args:
        answer: place of the first token that repeats the needle, at the end of the text.
        needle: places of the needle.
    """

    def __init__(self, answer: int, needle: slice) -> None:
        self.answer, self.needle = answer, needle
        self.rotated: list[bool] = []
        self.rows: dict[str, list[float]] = {x: [] for x in ("needle", "behind", "recent", "energy", "outlier")}

    def see(self, layer: Layer) -> None:
        self.rotated.append(layer.rotated)
        asked = layer.attention[:, self.answer - 1 : -1]
        behind = slice(self.needle.stop, self.needle.stop + BEHIND)
        place = torch.arange(layer.length)
        distance = place[:, None] - place
        near, recent = (
            (layer.attention * (distance < x))[:, layer.length // 2 :].sum(-1).mean() for x in (NEAR, RECENT)
        )
        rank = max(1, round(layer.key.shape[0] * layer.key.shape[2] * RANK_SHARE))
        energy = torch.linalg.svdvals(flatten(layer.key)).square()
        size = layer.key.abs().mean(1)  # [H_kv, D]
        for name, x in (
            ("needle", asked[:, :, self.needle].sum(-1).mean()), ("behind", asked[:, :, behind].sum(-1).mean()),
            ("recent", recent / near), ("energy", energy[:rank].sum() / energy.sum()),
            ("outlier", (size.amax(-1) / size.mean(-1)).mean()),
        ):
            self.rows[name].append(float(x))

    def result(self) -> Values:
        found: Values = {}
        for name, numbers in self.rows.items():
            for kind, rotated in (("rotated", True), ("unrotated", False)):
                found[f"{name}_{kind}"] = median(
                    x for x, turned in zip(numbers, self.rotated, strict=True) if turned is rotated
                )
            found[f"{name}_by_layer"] = numbers
        return found


def find_needle(ids: Sequence[int]) -> tuple[int, slice]:
    """The place of the answer at the end of a text, and the places of the longest piece before it that it repeats."""
    answer, needle = len(ids), slice(0, 0)
    for start in range(len(ids) - 1, len(ids) // 2, -1):
        wanted = list(ids[start:])
        places = [i for i in range(start - len(wanted) + 1) if list(ids[i : i + len(wanted)]) == wanted]
        if not places:
            break
        answer, needle = start, slice(places[-1], places[-1] + len(wanted))
    return answer, needle


def compare_layers(model: Model, ids: Sequence[int]) -> Values:
    """Layers with rotation and layers without, on a text that ends with the answer to a question."""
    kinds = LayerKinds(*find_needle(ids))
    observe(model, ids, [kinds.see])
    return kinds.result()
