"""Measures why methods score differently on models: `python scripts/explain_results.py mini smollm2-135m`.

On contexts of a task, questions and reference answers are run after the context. An entry of a requested value counts
as read by a KV head with the largest attention that a token of its question or answer gives to it, if that is at least
10 %. The tables show which heads read, where the entries that are read stand in the order of a score, and which of them
a method keeps at a quarter of the cache, in the heads that read them. `MODEL:TASK` takes another task than the needles.
`--write` puts the tables into docs/differences.md.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from pages import DOCS, table, write
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvbench.budget import Budget
from kvbench.check.trial import find_entries
from kvbench.engine.recording import Recording
from kvbench.engine.session import Session
from kvbench.engine.shared import record
from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.log import say
from kvbench.method import Method
from kvbench.methods.eviction.expected_attention import ExpectedAttention
from kvbench.methods.eviction.keydiff import KeyDiff
from kvbench.methods.eviction.knorm import Knorm
from kvbench.methods.eviction.kvzip import KVzip
from kvbench.methods.eviction.leverage import Leverage
from kvbench.methods.eviction.observed_attention import ObservedAttention
from kvbench.methods.eviction.pyramidkv import PyramidKV
from kvbench.methods.eviction.random import Random
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.heads.duo_attention import DuoAttention
from kvbench.methods.heads.groups import HeadMethod
from kvbench.methods.heads.profile import find_profile
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.registry import find_method, find_task
from kvbench.reproduce.findings.numbers import ranks
from kvbench.reproduce.findings.observe import Layer, observe
from kvbench.task import Encoded, Mode, Split, encode

PAGE, NEEDLES = DOCS / "differences.md", "niah_multikey_1"
CONTEXTS, LENGTH, TURNS, SEED = 4, 1024, 5, 3
BUDGET = Budget.parse("25%")
LEAST = 0.1
"""Least attention that counts as reading."""
AFTER = 2
"""Tokens after a value whose entries can carry it: the full stop, and the first token of the next sentence."""
METHODS: dict[str, Method] = {
    "random": Random(), "kvzip": KVzip(), "knorm": Knorm(), "keydiff": KeyDiff(), "leverage": Leverage(),
    "observed-attention": ObservedAttention(), "snapkv": SnapKV(), "snapkv, no pooling": SnapKV(kernel=1),
    "snapkv, pooling over 15": SnapKV(kernel=15), "snapkv+adakv": find_method("snapkv+adakv")(),
    "pyramidkv": PyramidKV(), "expected-attention": ExpectedAttention(),
    "expected-attention, mean only": ExpectedAttention(covariance=False),
    "expected-attention, no value norm": ExpectedAttention(value_norm=False),
}
HEAD_METHODS: dict[str, HeadMethod] = {"razor-attention": RazorAttention(), "duo-attention": DuoAttention()}


@dataclass(frozen=True)
class Turn:
    """A question with its answer: positions in the conversation, and those of the value in the context."""

    start: int
    answer: int
    """Position that predicts the first token of the answer."""
    stop: int
    copies: tuple[tuple[int, int], ...]
    """(position that predicts a token of the value, position of this token in the context)"""
    after: int = AFTER
    """Entries after the value that count as its own."""

    @property
    def entries(self) -> list[int]:
        """Positions of the value in the context, and the tokens after it."""
        first = self.copies[0][1]
        return list(range(first, first + len(self.copies) + self.after))


class Reading:
    """Attention of questions and answers to the entries of values, and the places of these in the order of scores."""

    def __init__(self, context: int, turns: Sequence[Turn]) -> None:
        self.context, self.turns = context, turns
        self.read: list[list[Tensor]] = []  # by layer and turn [H_kv, entries]
        self.by_question = self.by_answer = 0.0
        self.copied = 0.0
        self.places: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.norm_spread: list[float] = []

    def see(self, layer: Layer) -> None:
        """Add a layer."""
        n = self.context
        by_group = layer.attention.unflatten(0, (layer.key.shape[0], -1))  # [H_kv, G, T, T]
        keys = layer.key[:, :n]
        norms = keys.norm(dim=-1)
        self.norm_spread.append(float((norms.std(-1) / norms.mean(-1)).mean()))
        unit = torch.nn.functional.normalize(keys, dim=-1)
        scores = {
            "key norm": norms,
            "distance from the mean key": -torch.cosine_similarity(keys, unit.mean(1, keepdim=True), dim=-1),
            "mean attention of later tokens of the context":
                by_group[:, :, :n, :n].sum(2).mean(1) / torch.arange(n, 0, -1),
            "attention of the last 32 tokens of the context": by_group[:, :, n - 32 : n, :n].sum(2).mean(1),
        }
        places = {name: ranks(x) / (n - 1) for name, x in scores.items()}
        self.read.append([])
        for turn in self.turns:
            given = by_group[:, :, turn.start : turn.stop, turn.entries].amax(1)  # [H_kv, rows, entries]
            question, answer = (x.amax(1) for x in given.split([turn.answer - turn.start, turn.stop - turn.answer], 1))
            self.by_question += float(question[question >= LEAST].sum())
            self.by_answer += float(answer[answer >= LEAST].sum())
            rows, columns = (list(x) for x in zip(*turn.copies, strict=True))
            self.copied = max(self.copied, float(by_group[:, :, rows, columns].mean(-1).max()))
            read = torch.maximum(question, answer)
            read = read * (read >= LEAST)
            self.read[-1].append(read)
            for name, x in places.items():
                self.places[name].append((float((x[:, turn.entries] * read).sum()), float(read.sum())))


def find_turns(encoded: Encoded, values: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Turn]:
    """The turns whose value stands in the context token by token, or all but less than half of its tokens do."""
    context, at = list(encoded.context), len(encoded.context)
    for number, (turn, value) in enumerate(zip(encoded.turns, values, strict=True)):
        start = at
        at += len(turn.later if number else turn.first)
        answer = list(turn.answer)
        low, high = find_span(answer, value, tokenizer)
        for length in range(high - low, (high - low) // 2, -1):
            found = [
                (i, place) for i in range(low, high - length + 1) for part in [answer[i : i + length]]
                for place in range(len(context) - length + 1) if context[place : place + length] == part
            ]
            if found:
                i, place = found[len(found) // 2]
                copies = tuple((at + i + k - 1, place + k) for k in range(length))
                yield Turn(start, at - 1, at + len(answer), copies, min(AFTER, len(context) - place - length))
                break
        at += len(answer)


def find_span(answer: Sequence[int], value: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Where the fewest tokens of an answer that contain the value start and stop."""
    low, high = 0, len(answer)
    assert value in tokenizer.decode(answer), value
    while value in tokenizer.decode(answer[low + 1 : high]):
        low += 1
    while value in tokenizer.decode(answer[low : high - 1]):
        high -= 1
    return low, high


def keep(model: Model, method: Method, recording: Recording, context: Sequence[int]) -> list[list[Tensor]]:
    """Positions that a method keeps of a context, by layer and KV head."""
    fitted = method.bind(model).fit(BUDGET, model.shape(len(context)))
    with Session(model, fitted, capacity=2 * len(context), track=True, recording=recording) as session:
        session.prefill(context)
        found = find_entries(session)
    assert found is not None, method.card.name
    return found


@dataclass(frozen=True)
class Measured:
    """One column of the tables."""

    title: str
    facts: dict[str, str]
    kept: dict[tuple[str, str], str]
    """By method and visibility."""


def measure(name: str) -> Measured:
    """The attention of a model, and the entries that methods keep. name: MODEL or MODEL:TASK."""
    model_name, _, task_name = name.partition(":")
    model, task = load_model(model_name), find_task(task_name or NEEDLES)()
    kept: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    every: list[Reading] = []
    examples = task.examples(
        seed=SEED, split=Split.DEV, n=CONTEXTS, length=LENGTH, turns=TURNS, mode=Mode.MULTI_TURN,
        tokenizer=model.tokenizer,
    )
    for number, example in enumerate(examples):
        encoded = encode(task, example, model.tokenizer)
        turns = list(find_turns(encoded, [x.references[0] for x in example.turns], model.tokenizer))
        whole = [*encoded.context]
        for i, turn in enumerate(encoded.turns):
            whole += [*(turn.later if i else turn.first), *turn.answer]
        seen = Reading(len(encoded.context), turns)
        observe(model, whole, [seen.see])
        every.append(seen)
        if not any(float(layer[0].sum()) for layer in seen.read):
            raise SystemExit(f"{name}: no head reads the first value of context {number + 1}. Take another task.")
        for sight, question, asked in (("hidden", (), turns), ("visible", encoded.turns[0].first, turns[:1])):
            context = [*encoded.context, *question]
            recording = record(model, context, None, "torch", outputs=False)
            for label, method in METHODS.items():
                found = keep(model, method, recording, context)
                kept[label, sight].append(judge(found, seen.read, asked))
        say(f"{name}: context {number + 1} of {CONTEXTS}")
    read = torch.stack([
        torch.stack([torch.stack([y.sum(-1) for y in layer]).mean(0) for layer in x.read]) for x in every
    ]).mean(0)  # [L, H_kv]
    facts = {"element type": model.dtype, **describe(every, read), **rank(model, read), **describe_places(every)}
    return Measured(name.replace(":", ", "), facts, {x: describe_kept(shares) for x, shares in kept.items()})


def judge(found: list[list[Tensor]], read: list[list[Tensor]], turns: Sequence[Turn]) -> tuple[float, float]:
    """Share of the entries that are read which a method keeps, and of values of which it keeps every token.

    Entries are weighted by the attention with which they are read, values by that of all their entries in a head.
    """
    kept = whole = total = 0.0
    for entries, weights in zip(found, read, strict=True):
        for turn, weight in zip(turns, weights, strict=False):  # a visible question is the first turn
            there = torch.stack([torch.isin(torch.tensor(turn.entries), x) for x in entries])
            kept += float((there * weight).sum())
            whole += float((there[:, : len(turn.copies)].all(-1) * weight.sum(-1)).sum())
            total += float(weight.sum())
    return kept / total, whole / total


def describe(every: list[Reading], read: Tensor) -> dict[str, str]:
    """The heads that read, and the tokens for which they do."""
    ordered = read.flatten().sort(descending=True).values
    quarter = ordered[: max(1, len(ordered) // 4)].sum() / ordered.sum()
    question, layers = sum(x.by_question for x in every), read.sum(1)
    depth = (layers * torch.arange(len(read))).sum() / layers.sum() / (len(read) - 1)
    return {
        "tokens of a value": f"{fmean(len(y.copies) for x in every for y in x.turns):.1f}",
        "share of reading by tokens of the question, the rest by the answer":
            f"{question / (question + sum(x.by_answer for x in every)):.0%}",
        "highest attention of a KV head to the token that is copied next": f"{fmean(x.copied for x in every):.2f}",
        "KV heads that read": f"{int((ordered > 0).sum())} of {len(ordered)}",
        "share of all reading in the best quarter of KV heads": f"{float(quarter):.0%}",
        "mean depth of reading, 0 first layer, 1 last": f"{float(depth):.2f}",
        "layer with the most reading; its share":
            f"{int(layers.argmax()) + 1} of {len(read)}; {float(layers.max() / layers.sum()):.0%}",
        "spread of key norms in a head, standard deviation over mean":
            f"{fmean(y for x in every for y in x.norm_spread):.0%}",
    }


def rank(model: Model, read: Tensor) -> dict[str, str]:
    """How well the probes of head methods find the heads that read."""
    found = {}
    for name, method in HEAD_METHODS.items():
        fitted = method.bind(model).fit(BUDGET, model.shape(LENGTH))
        assert fitted.order is not None
        chosen = fitted.order[: fitted.retrieval]
        share = sum(float(read[x]) for x in chosen) / float(read.sum())
        found[f"{name} at 25 %: heads that keep everything; their share of all reading"] = (
            f"{len(chosen)} of {read.numel()}; {share:.0%}"
        )
    profile = find_profile(model, RazorAttention().probe)
    found["highest induction score in the probe of random tokens"] = f"{max(map(max, profile.induction)):.2f}"
    return found


def describe_places(every: list[Reading]) -> dict[str, str]:
    """Where the entries that are read stand in the order of each score."""
    found = {}
    for name in every[0].places:
        weighted, weights = (sum(y) for y in zip(*(z for x in every for z in x.places[name]), strict=True))
        found[f"place of entries that are read by {name}, 1 is largest"] = f"{weighted / weights:.2f}"
    return found


def describe_kept(shares: list[tuple[float, float]]) -> str:
    """Means over contexts of the entries and of the whole values that are kept."""
    return ", ".join(f"{fmean(x):.0%}" for x in zip(*shares, strict=True))


def make_texts(columns: Sequence[Measured]) -> dict[str, str]:
    """The tables, a column per model and task."""
    titles = [x.title for x in columns]
    facts = [(row, *(x.facts[row] for x in columns)) for row in columns[0].facts]
    kept = {
        sight: [(label, *(x.kept[label, sight] for x in columns)) for label in METHODS]
        for sight in ("hidden", "visible")
    }
    return {
        "measured": table((f"measured on {CONTEXTS} contexts", *titles), facts),
        **{f"kept {sight}": table((f"question {sight}", *titles), rows) for sight, rows in kept.items()},
    }


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[:TASK]")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/differences.md")
    given = parser.parse_args()
    try:
        texts = make_texts([measure(name) for name in given.models])
    except UserError as error:
        parser.error(str(error))
    print("\n".join(texts.values()))
    if given.write:
        write({PAGE: texts})


if __name__ == "__main__":
    main()
