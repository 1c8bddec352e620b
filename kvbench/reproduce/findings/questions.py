"""Findings about later questions: the entries that they read, and the queries that predict them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor

from kvbench.hf import Model
from kvbench.reproduce.findings.numbers import top_mask
from kvbench.reproduce.findings.observe import Layer, Values, observe

QUESTIONS = 4
LEAST_CHARS = 16
"""Of the lines that are asked for."""
OBSERVED = 32
"""SnapKV's observation window."""
READ, KEPT = 0.1, 0.3
"""Share of the context's entries that count as read by the questions, and that a score keeps."""
REPEAT = "\n\nRepeat the previous context exactly.\n\n"
"""KVzip's prompt."""


def ask_lines(model: Model, ids: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Questions with answers, each for the line after a line of the text, at even distances."""
    lines = [x.strip() for x in str(model.tokenizer.decode(list(ids))).splitlines()]
    pairs = [(a, b) for a, b in pairwise(x for x in lines[1:-1] if len(x) >= LEAST_CHARS)]
    chosen = pairs[:: max(1, len(pairs) // QUESTIONS)][:QUESTIONS]

    def encode(text: str) -> list[int]:
        return list(model.tokenizer(text, add_special_tokens=False).input_ids)

    return [(encode(f"\n\nQuestion: Which line follows `{a}`?\nAnswer: "), encode(b)) for a, b in chosen]


class Mass:
    """Attention that rows after a context give to its entries: the sum and the largest, by layer and KV head.

    rows: of the whole sequence.
    """

    def __init__(self, context: int, rows: slice) -> None:
        self.context, self.rows = context, rows
        self.sums: list[Tensor] = []
        self.largest: list[Tensor] = []

    def see(self, layer: Layer) -> None:
        given = layer.attention[:, self.rows, : self.context].unflatten(0, (layer.key.shape[0], -1))
        self.sums.append(given.sum((1, 2)))
        self.largest.append(given.amax((1, 2)))


def reconstruct(model: Model, ids: Sequence[int]) -> Values:
    """KVzip: scores by repeating the context, and by its last tokens, against the entries that later answers read."""
    context = list(ids[: len(ids) * 3 // 4])
    count = len(context)
    prompt = list(model.tokenizer(REPEAT, add_special_tokens=False).input_ids)
    repeated = Mass(count, slice(count + len(prompt), None))
    window = Mass(count, slice(count - OBSERVED, count))
    prefill = Mass(count, slice(0, count))
    observe(model, [*context, *prompt, *context], [repeated.see, window.see, prefill.see])
    scores = {"repeated": repeated.largest, "window": window.sums, "accumulated": prefill.sums}
    recalls: dict[str, list[float]] = {x: [] for x in scores}
    for question, answer in ask_lines(model, context):
        asked = Mass(count, slice(count + len(question) - 1, None))
        observe(model, [*context, *question, *answer], [asked.see])
        for name, found in scores.items():
            hits = [top_mask(a, KEPT) & top_mask(b, READ) for a, b in zip(found, asked.sums, strict=True)]
            recalls[name].append(fmean(float(x.sum() / x.shape[0]) for x in hits) / max(1, int(count * READ)))
    means = {name: fmean(x) for name, x in recalls.items()}
    return {
        **means, "repeated_less_window": means["repeated"] - means["window"],
        "repeated_less_accumulated": means["repeated"] - means["accumulated"],
    }


def compare_queries(model: Model, ids: Sequence[int], other: Sequence[int]) -> Values:
    """DapQ, table 1: cosine of queries with those of another text at the same positions, and of the same text moved.

    The second half of the text is compared: with the other text there, and with the half alone, from position 0 on.
    """
    half = len(ids) // 2

    def collect(tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Queries by layer, rotated and not."""
        found: list[tuple[Tensor, Tensor]] = []
        observe(model, tokens, [lambda layer: found.append((layer.query, layer.plain_query))])
        return found

    def likeness(a: Tensor, b: Tensor) -> float:
        return float(torch.cosine_similarity(a, b, dim=-1).mean())

    text, elsewhere, moved = (collect(x) for x in (ids, other, ids[half:]))
    position = [likeness(a[:, half:], b[:, half:]) for (a, _), (b, _) in zip(text, elsewhere, strict=True)]
    content = [likeness(a[:, half:], b) for (a, _), (b, _) in zip(text, moved, strict=True)]
    plain = [likeness(a[:, half:], b) for (_, a), (_, b) in zip(text, moved, strict=True)]
    return {
        "same_position": fmean(position), "same_content": fmean(content), "same_content_not_rotated": fmean(plain),
        "layers_by_position": fmean(float(a - b >= 0.1) for a, b in zip(position, content, strict=True)),
        "position_by_layer": position, "content_by_layer": content,
    }
