"""Measures the statistics of findings on texts, keeps them in a journal, and judges each finding by its checks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.config import quiet
from kvbench.registry import find_task
from kvbench.reproduce.findings import attention, compressed, entries, hybrid, passes, questions, steps
from kvbench.reproduce.findings.numbers import fit_line, spearman
from kvbench.reproduce.findings.observe import Observer, Values, observe
from kvbench.reproduce.findings.records import CheckResult, Decision, FindingResult, join_verdicts
from kvbench.reproduce.findings.statements import Statement, StatisticCheck, find_findings
from kvbench.runs.stats import DRAWS, bootstrap_interval
from kvbench.task import Split, encode
from kvbench.text.stdlib import library

TEXTS = 8
LENGTH = 2048
"""Tokens of a text."""
STATISTICS_VERSION = 1
"""Of the statistics and texts: raised when their numbers change."""
OBSERVERS: dict[str, Callable[[], Observer]] = {
    "sparsity": attention.Sparsity, "heavy-hitters": attention.HeavyHitters,
    "observation-window": attention.ObservationWindow, "consecutive": attention.Consecutive,
    "page-bounds": attention.PageBounds, "entropy": attention.Entropy,
    "expected-queries": attention.ExpectedQueries, "outlier-channels": entries.OutlierChannels,
    "singular-values": entries.SingularValues, "key-similarity": entries.KeySimilarity,
    "rotated-rounding": entries.RotatedRounding,
}
"""Statistics of one exact forward pass."""
REFERENCE = 1_000_000
"""Index of the text that others are compared with."""


@dataclass(frozen=True)
class Plan:
    """The texts and statistics of one command."""

    findings: tuple[Statement, ...]
    """All on texts of one kind."""
    texts: int
    length: int

    @property
    def task(self) -> str | None:
        """The task whose prompts are the texts; None: texts of the standard library."""
        return self.findings[0].task

    @property
    def statistics(self) -> list[str]:
        """Names of the statistics, each once."""
        return list(dict.fromkeys(x.statistic for x in self.findings))


def make_text(model: Model, index: int, length: int) -> list[int]:
    """Tokens of modules of the standard library, in an order drawn by the index.

    Raises:
        UserError: the library is shorter.
    """
    modules = list(library()[0])
    random.Random(f"findings {index}").shuffle(modules)
    ids: list[int] = []
    with quiet():  # a module may be longer than the model's positions; the text is not
        for module in modules:
            ids += model.tokenizer(f"# {module.name}\n{''.join(module.lines)}", add_special_tokens=False).input_ids
            if len(ids) >= length:
                return ids[:length]
    raise UserError(f"the standard library has {len(ids)} tokens for this model, and {length} are needed.")


def make_prompt(model: Model, name: str, index: int, length: int) -> list[int]:
    """Tokens of a task's context, question and reference answer."""
    task = find_task(name)()
    example = task.generate(index, seed=0, split=Split.TEST, length=length, turns=1, tokenizer=model.tokenizer)
    encoded = encode(task, example, model.tokenizer)
    return [*encoded.context, *encoded.turns[0].first, *encoded.turns[0].answer]


def choose_findings(name: str, model: Model) -> tuple[Statement, ...]:
    """The findings with this name that can be measured on a model; of `all`, those on texts of one kind.

    Raises:
        UserError: there is none.
    """
    plain = all(x.window is None for x in model.layers)
    kinds = {x.angles is not None for x in model.ropes}
    fit = {x: [y for y in find_findings(name) if (y.task is None) is x] for x in (True, False)}
    if plain and fit[True]:
        return tuple(fit[True])
    if len(kinds) == 2 and fit[False]:
        return tuple(fit[False])
    if not plain:
        raise UserError(
            f"{model.id} has sliding windows, and {name} is not measured on such models. Use a model without, or, "
            "where only some layers rotate keys, a finding about them (`kvbench reproduce --list`)."
        )
    raise UserError(f"{name} compares layers that rotate keys with layers that do not. Use a model with both kinds.")


class Reference:
    """The text that others are compared with; each property is measured where a statistic needs it."""

    def __init__(self, model: Model, length: int) -> None:
        self.model = model
        self.ids = make_text(model, REFERENCE, length)

    @cached_property
    def subspaces(self) -> dict[int, torch.Tensor]:
        """Subspaces of its keys by layer."""
        found = entries.SingularValues()
        observe(self.model, self.ids, [found.see])
        return found.reference

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """KV heads, those that retrieve best first."""
        return compressed.rank_heads(self.model, _first_half(self.ids))


def _first_half(ids: Sequence[int]) -> Sequence[int]:
    return ids[: len(ids) // 2]


PASSES: dict[str, Callable[[Model, Sequence[int], Reference], Values]] = {
    "stream": lambda model, ids, _: passes.stream(
        model, ids, model.tokenizer("\n", add_special_tokens=False).input_ids[-1]
    ),
    "edit": lambda model, ids, _: passes.edit(model, _first_half(ids)),
    "reuse": lambda model, ids, _: passes.reuse(model, _first_half(ids)),
    "recompute": lambda model, ids, _: passes.recompute(model, _first_half(ids)),
    "prune": lambda model, ids, _: passes.prune(model, _first_half(ids)),
    "retrieval-heads": lambda model, ids, other: compressed.retrieve(model, _first_half(ids), other.heads),
    "divergence": lambda model, ids, _: compressed.diverge(model, _first_half(ids)),
    "divergence-by-step": lambda model, ids, _: steps.follow(model, _first_half(ids)),
    "dropped-layers": lambda model, ids, _: compressed.drop_layers(model, _first_half(_first_half(ids))),
    "pruned-cache": lambda model, ids, _: compressed.prune_cache(model, _first_half(ids)),
    "reconstruction": lambda model, ids, _: questions.reconstruct(model, _first_half(ids)),
    "layer-kinds": lambda model, ids, _: hybrid.compare_layers(model, ids),
    "query-positions": lambda model, ids, other: questions.compare_queries(
        model, _first_half(ids), _first_half(other.ids)
    ),
}
"""Other statistics. Those of several forward passes are, but for `stream`, of a half or a quarter of each text."""


def measure(model: Model, plan: Plan, journal: Path) -> Iterator[tuple[int, str]]:
    """Measure what the journal lacks; yield text and statistic after each is written.

    A damaged last line, as a killed process leaves it, is measured again.
    """
    have = read_journal(journal)
    missing = [(i, x) for i in range(plan.texts) for x in plan.statistics if x not in have.get(i, {})]
    reference = Reference(model, plan.length)
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        for i in sorted({i for i, _ in missing}):
            wanted = [x for j, x in missing if j == i]
            ids = (
                make_text(model, i, plan.length) if plan.task is None
                else make_prompt(model, plan.task, i, plan.length)
            )
            for name, values in _measure_text(model, ids, wanted, reference):
                file.write(json.dumps({"text": i, "statistic": name, "values": values}) + "\n")
                file.flush()
                yield i, name


def _measure_text(
    model: Model, ids: Sequence[int], wanted: Sequence[str], reference: Reference
) -> Iterator[tuple[str, Values]]:
    def make(name: str) -> Observer:
        return entries.SingularValues(reference.subspaces) if name == "singular-values" else OBSERVERS[name]()

    observers = {x: make(x) for x in wanted if x in OBSERVERS}
    if observers:
        observe(model, ids, [x.see for x in observers.values()])
        yield from ((x, observer.result()) for x, observer in observers.items())
    for name in (x for x in wanted if x in PASSES):
        yield name, PASSES[name](model, ids, reference)


def read_journal(path: Path) -> dict[int, dict[str, Values]]:
    """Statistics by text and name. Lines after a damaged one are left out, and the file is cut there."""
    found: dict[int, dict[str, Values]] = {}
    if not path.exists():
        return found
    data, good = path.read_bytes(), 0
    for line in data.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n"):
                break
            record = json.loads(line)
            found.setdefault(int(record["text"]), {})[str(record["statistic"])] = dict(record["values"])
        except (ValueError, TypeError, KeyError):
            break
        good += len(line)
    if good < len(data):
        with path.open("r+b") as file:
            file.truncate(good)
    return found


def judge(plan: Plan, measured: dict[int, dict[str, Values]]) -> tuple[FindingResult, ...]:
    """Judge every finding by the texts of the plan, all of which were measured."""
    found = []
    for finding in plan.findings:
        values = [measured[i][finding.statistic] for i in range(plan.texts)]
        checks = tuple(_judge_check(x, values) for x in finding.checks)
        found.append(FindingResult(
            name=finding.name, source=finding.source, arxiv=finding.arxiv, statement=finding.statement,
            printed=finding.printed, verdict=join_verdicts([x.verdict for x in checks]), checks=checks,
            means=_average(values),
        ))
    return tuple(found)


def _judge_check(check: StatisticCheck, values: Sequence[Values]) -> CheckResult:
    """The check holds if the whole interval over texts satisfies it, and does not hold if none of it does.

    One text has no interval and decides nothing; its layers cannot agree with those of another one either.
    """
    numbers = _numbers(check, values)
    if check.linear is None:
        mean, (low, high) = fmean(numbers), bootstrap_interval([[x] for x in numbers])
    else:
        mean, (low, high) = _fit_mean([x[check.value] for x in values])
    least = next((x for x in (check.agreement, check.linear, check.least) if x is not None), None)
    if check.above is not None:
        good, bad = low > 0, high <= 0
    elif least is not None:
        good, bad = low >= least, high < least
    else:
        assert check.most is not None
        good, bad = high <= check.most, low > check.most
    decided: Decision = "holds" if good else "does not hold" if bad else "undecided"
    verdict: Decision = "undecided" if len(values) == 1 else decided
    return CheckResult(rule=check.rule, mean=mean, ci95=(low, high), texts=tuple(numbers), verdict=verdict)


def _numbers(check: StatisticCheck, values: Sequence[Values]) -> list[float]:
    """One number per text; for `agreement`, the rank correlation of a text's layers with the next text's."""
    if check.linear is not None:
        return [float(fit_line(torch.tensor(x[check.value], dtype=torch.float64))) for x in values]
    if check.agreement is not None:
        rows = [torch.tensor(x[check.value], dtype=torch.float64) for x in values]
        return [float(spearman(a, b)) for a, b in zip(rows, rows[1:] + rows[:1], strict=True)]
    found = [_scalar(x[check.value]) for x in values]
    if check.above is not None:
        found = [a - _scalar(x[check.above]) for a, x in zip(found, values, strict=True)]
    return found


def _fit_mean(curves: Sequence[float | list[float]]) -> tuple[float, tuple[float, float]]:
    """Fit of a line to the mean curve, with a percentile bootstrap 95 % interval over texts."""
    rows = torch.tensor(curves, dtype=torch.float64)
    drawn = torch.from_numpy(np.random.default_rng(0).integers(0, len(rows), size=(DRAWS, len(rows))))
    low, high = np.percentile(fit_line(rows[drawn].mean(1)).numpy(), [2.5, 97.5])
    return float(fit_line(rows.mean(0))), (float(low), float(high))


def _scalar(x: float | list[float]) -> float:
    assert not isinstance(x, list), "a check is of one number per text"
    if not math.isfinite(x):
        raise UserError("a statistic is not a finite number. Remove its journal, then run the same command.")
    return x


def _average(values: Sequence[Values]) -> dict[str, float | tuple[float, ...]]:
    found: dict[str, float | tuple[float, ...]] = {}
    for name, first in values[0].items():
        if isinstance(first, list):
            rows = torch.tensor([x[name] for x in values], dtype=torch.float64)
            found[name] = tuple(rows.mean(0).tolist())
        else:
            found[name] = fmean([_scalar(x[name]) for x in values])
    return found
