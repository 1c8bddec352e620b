"""Measures why methods score differently on models: `python scripts/explain_results.py mini smollm2-135m`.

On contexts of niah_multikey_1, questions and reference answers are run after the context. An entry of a requested value
counts as read by a KV head with the largest attention that a token of its question or answer gives to it, if that is at
least 10 %. The table shows which heads read, where the entries that are read stand in the order of a score, and which
of them a method keeps at a quarter of the cache, in the heads that read
them. `--write` puts it into docs/differences.md.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from kvbench.budget import Budget
from kvbench.check.trial import find_entries
from kvbench.engine.recording import Recording
from kvbench.engine.session import Session
from kvbench.engine.shared import record
from kvbench.hf import Model, load_model
from kvbench.log import say
from kvbench.method import Method
from kvbench.methods.eviction.expected_attention import ExpectedAttention
from kvbench.methods.eviction.keydiff import KeyDiff
from kvbench.methods.eviction.knorm import Knorm
from kvbench.methods.eviction.kvzip import KVzip
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
from kvbench.reproduce.findings.observe import Layer, Observer, Values, observe
from kvbench.task import Encoded, Mode, Split, encode

PAGE = Path(__file__).parent.parent / "docs" / "differences.md"
CONTEXTS, LENGTH, TURNS, SEED = 4, 1024, 5, 3
BUDGET = Budget.parse("25%")
LEAST = 0.1
"""Least attention that counts as reading."""
AFTER = 2
"""Tokens after a value whose entries can carry it: the full stop, and the first token of the next sentence."""
METHODS: dict[str, Method] = {
    "random": Random(), "kvzip": KVzip(), "knorm": Knorm(), "keydiff": KeyDiff(),
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

    @property
    def entries(self) -> list[int]:
        """Positions of the value in the context, and the tokens after it."""
        first = self.copies[0][1]
        return list(range(first, first + len(self.copies) + AFTER))


class Reading(Observer):
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

    def result(self) -> Values:
        """Nothing: the fields are read."""
        return {}


def find_turns(encoded: Encoded) -> Iterator[Turn]:
    """The turns whose value stands in the context token by token."""
    context, at = list(encoded.context), len(encoded.context)
    for number, turn in enumerate(encoded.turns):
        start = at
        at += len(turn.later if number else turn.first)
        answer = list(turn.answer)
        for cut in range(2, len(answer)):  # at least without the space and the full stop around it
            found = [
                (i, place) for i in range(cut + 1) for part in [answer[i : len(answer) - cut + i]]
                for place in range(len(context) - len(part) - AFTER) if context[place : place + len(part)] == part
            ]
            if found:
                i, place = found[len(found) // 2]
                copies = tuple((at + i + k - 1, place + k) for k in range(len(answer) - cut))
                yield Turn(start, at - 1, at + len(answer), copies)
                break
        at += len(answer)


def keep(model: Model, method: Method, recording: Recording, context: Sequence[int]) -> list[list[Tensor]]:
    """Positions that a method keeps of a context, by layer and KV head."""
    fitted = method.bind(model).fit(BUDGET, model.shape(len(context)))
    with Session(model, fitted, capacity=2 * len(context), track=True, recording=recording) as session:
        session.prefill(context)
        found = find_entries(session)
    assert found is not None, method.card.name
    return found


def measure(name: str) -> dict[str, str]:
    """Every row of the table for one model."""
    model, task = load_model(name, dtype="float32"), find_task("niah_multikey_1")()
    kept: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    every: list[Reading] = []
    examples = task.examples(
        seed=SEED, split=Split.DEV, n=CONTEXTS, length=LENGTH, turns=TURNS, mode=Mode.MULTI_TURN,
        tokenizer=model.tokenizer,
    )
    for number, example in enumerate(examples):
        encoded = encode(task, example, model.tokenizer)
        turns = list(find_turns(encoded))
        whole = [*encoded.context]
        for i, turn in enumerate(encoded.turns):
            whole += [*(turn.later if i else turn.first), *turn.answer]
        seen = Reading(len(encoded.context), turns)
        observe(model, whole, [seen])
        every.append(seen)
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
    return {**describe(every, read), **rank(model, read), **write(every, kept)}


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
    depth = (read.sum(1) * torch.arange(len(read))).sum() / read.sum() / (len(read) - 1)
    question = sum(x.by_question for x in every)
    return {
        "tokens of a value": f"{fmean(len(y.copies) for x in every for y in x.turns):.1f}",
        "share of reading by tokens of the question, the rest by the answer":
            f"{question / (question + sum(x.by_answer for x in every)):.0%}",
        "highest attention of a KV head to the token that is copied next": f"{fmean(x.copied for x in every):.2f}",
        "KV heads that read": f"{int((ordered > 0).sum())} of {len(ordered)}",
        "share of all reading in the best quarter of KV heads": f"{float(quarter):.0%}",
        "mean depth of reading, 0 first layer, 1 last": f"{float(depth):.2f}",
        "share of reading by layer": " ".join(f"{float(x):.2f}" for x in read.sum(1) / read.sum()),
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


def write(every: list[Reading], kept: dict[tuple[str, str], list[tuple[float, float]]]) -> dict[str, str]:
    """Rows of places and of kept entries."""
    found = {}
    for name in every[0].places:
        weighted, weights = (sum(y) for y in zip(*(z for x in every for z in x.places[name]), strict=True))
        found[f"place of entries that are read by {name}, 1 is largest"] = f"{weighted / weights:.2f}"
    for label in METHODS:
        means = [fmean(x) for sight in ("hidden", "visible") for x in zip(*kept[label, sight], strict=True)]
        found[f"{label}: entries kept, values kept whole; the same with the question visible"] = (
            "{:.0%}, {:.0%}; {:.0%}, {:.0%}".format(*means)
        )
    return found


def main() -> None:
    """Print the table, a column per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/differences.md")
    given = parser.parse_args()
    columns = [measure(name) for name in given.models]
    lines = [f"| measured on {CONTEXTS} contexts | {' | '.join(given.models)} |", f"| --- |{' ---: |' * len(columns)}"]
    lines += [f"| {row} | {' | '.join(x[row] for x in columns)} |" for row in columns[0]]
    table = "\n".join(lines)
    print(table)
    if given.write:
        page, count = re.subn(
            r"(<!-- begin measured -->\n).*?(<!-- end measured -->)", lambda x: f"{x[1]}{table}\n{x[2]}",
            PAGE.read_text(encoding="utf-8"), flags=re.DOTALL,
        )
        assert count == 1, f"{PAGE} has the markers once"
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
