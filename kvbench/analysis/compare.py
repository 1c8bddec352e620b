"""Compares finished runs, paired on the questions that both answered."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from kvbench.analysis.load import FinishedRun
from kvbench.analysis.metrics import share_scale
from kvbench.analysis.significance import ALPHA, adjust, compare_scores, find_least_p, flip_signs, group_ties
from kvbench.errors import UserError, unknown
from kvbench.runs.files import read_file
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec, shorten

SCORE_PROTOCOL = (
    "task.name", "model.sha256", "model.tokenizer_sha256", "model.dtype", "task.version", "task.code", "task.settings",
    "task.length", "task.prompt_id", "task.dataset_revision", "task.scorer", "task.chat_template_sha", "task.bos",
    "task.truncation", "task.stop", "mode", "visibility", "history", "spec.recompress", "spec.split", "spec.seed",
    "spec.samples", "spec.turns", "spec.parts", "spec.generation", "spec.device",
)
"""Fields of a result that must be equal for scores to be comparable."""
PROTOCOL = (
    *SCORE_PROTOCOL, "spec.chunk", "spec.kernels", "environment.cpu", "environment.gpu", "environment.threads",
    "environment.device_map", "latency.timing",
)
"""Fields of a result that must be equal for times to be comparable, too."""


@dataclass(frozen=True)
class Difference:
    """The score of a run minus the baseline's on their common questions.

    None if one failed, no question is common, or their metrics have no common scale.
    """

    run_id: str
    n: int
    """Questions."""
    contexts: int
    mean: float | None
    ci95: tuple[float, float] | None
    p: float | None
    p_adjusted: float | None
    """Holm-adjusted over all runs that are compared with the baseline."""
    least_p: float = 0.0
    """The smallest adjusted p-value that this many contexts can reach."""

    @property
    def too_few(self) -> bool:
        """Whether no result of these contexts could be significant, unless others that are compared with it are."""
        return self.p_adjusted is not None and min(self.p_adjusted, self.least_p) >= ALPHA

    @property
    def within_noise(self) -> bool | None:
        """True if the adjusted p-value is 5 % or more; None if there is none, or there are too few contexts."""
        return None if self.p_adjusted is None or self.too_few else self.p_adjusted >= ALPHA

    def judge(self, *, higher_is_better: bool) -> str:
        """`better`, `worse`, `not significant` or `too few to tell`; empty if there is nothing to judge."""
        if self.mean is None or self.p_adjusted is None:
            return ""
        if self.too_few:
            return "too few to tell"
        return "not significant" if self.within_noise else "better" if (self.mean > 0) == higher_is_better else "worse"


@dataclass(frozen=True)
class Regression:
    """A question with a worse score than with the full cache."""

    sample: str
    turn: int
    full: float
    score: float


@dataclass(frozen=True)
class Regressions:
    """The questions of a run with worse scores than with the full cache."""

    run_id: str
    full: str
    """Id of the run with the full cache."""
    n: int
    """Common questions."""
    count: int
    samples: tuple[Regression, ...]
    """Worst first."""


def find_conflicts(runs: Sequence[FinishedRun]) -> list[str]:
    """Reasons why the runs are not comparable, one line each: failures and differences of protocol.

    Raises:
        UserError: the runs belong to different tasks.
    """
    require_one_task(x.result.task.name for x in runs)
    found = [f"{x.result.run_id} failed: {x.result.error}" for x in runs if x.result.status == "failed"]
    documents = [x.result.model_dump(mode="json") for x in runs]
    for name in PROTOCOL:
        values = [get_field(x, name) for x in documents]
        if any(x != values[0] for x in values):
            found.append(f"{name} differs: {', '.join(map(str, values))}")
    return found


def require_one_task(names: Iterable[str]) -> None:
    """Refuse runs of different tasks.

    Raises:
        UserError: these names of their tasks differ.
    """
    tasks = sorted(set(names))
    if len(tasks) > 1:
        raise UserError(
            f"the runs belong to different tasks ({', '.join(tasks)}), so they cannot be compared. Give runs of one "
            "task."
        )


def describe_code(runs: Sequence[FinishedRun]) -> str | None:
    """Differences in source code and package versions, in one line; None if there are none.

    The source of methods and kernels is compared only between runs of the same method.
    """
    values: dict[str, set[str]] = {}
    for x in runs:
        spec = x.result.spec
        for name, value in spec.versions:
            values.setdefault(name, set()).add(value)
        for part, value in spec.sources:
            owner = f" of {spec.method.name}" if part in ("method", "kernels") else ""
            values.setdefault(f"source of the {part}{owner}", set()).add(value)
    found = [name for name, several in values.items() if len(several) > 1]
    return f"the runs used different code: {', '.join(found)}" if found else None


def name_questions(spec: RunSpec) -> str:
    """A key that is equal for runs with the same questions and protocol, whatever the method."""
    document = spec.model_dump(mode="json")
    return _join(document | {"spec": document}, SCORE_PROTOCOL)


def name_protocol(result: Result) -> str:
    """A key that is equal for runs that may share a ranking."""
    return _join(result.model_dump(mode="json"), PROTOCOL)


def _join(document: object, names: Sequence[str]) -> str:
    return json.dumps([get_field(document, x) for x in names], sort_keys=True)


def compare_runs(first: FinishedRun, others: Sequence[FinishedRun]) -> list[Difference]:
    """Paired differences to the baseline, p-values adjusted over all of them."""
    found = [compare_pair(first, x) for x in others]
    tested = [x.p for x in found if x.p is not None]
    adjusted = iter(adjust(tested))
    return [
        x if x.p is None else replace(x, p_adjusted=next(adjusted), least_p=find_least_p(x.contexts, len(tested)))
        for x in found
    ]


def compare_pair(first: FinishedRun, other: FinishedRun) -> Difference:
    """The paired difference of two runs' scores; n = 0 if one failed or their metrics have no common scale."""
    pairs = {} if "failed" in (first.result.status, other.result.status) else _pair(first, other)
    if not pairs:
        return Difference(other.result.run_id, 0, 0, None, None, None, None)
    found = compare_scores(_by_context(pairs))
    return Difference(
        other.result.run_id, found.n, found.contexts, found.mean, found.ci95, found.p, found.p,
        find_least_p(found.contexts),
    )


def rank_runs(runs: Sequence[FinishedRun]) -> list[int | None]:
    """Ranks of runs of one protocol; runs that do not differ significantly share a rank (`group_ties`).

    None for a run that failed, has no score, was trained on the tasks, or has other questions than most of the runs;
    None for all runs if there are too few contexts to tell any two of them apart.
    """
    whole = [
        x for x in runs
        if x.result.status == "ok" and x.result.score.mean is not None and not x.result.budget.trained
    ]
    questions = {id(x): frozenset((key, line.prompt_hash) for key, line in x.lines.items()) for x in whole}
    if not whole:
        return [None] * len(runs)
    same = Counter(questions.values()).most_common(1)[0][0]
    whole = [x for x in whole if questions[id(x)] == same]
    if is_too_few(whole):
        return [None] * len(runs)
    sign = -1 if whole[0].result.score.higher_is_better else 1
    whole.sort(key=lambda x: sign * (x.result.score.mean or 0.0))
    ranks: dict[int, int] = {}
    for group in group_ties(whole, _p_value):
        rank = len(ranks) + 1
        ranks |= dict.fromkeys(map(id, group), rank)
    return [ranks.get(id(x)) for x in runs]


def is_too_few(runs: Sequence[FinishedRun]) -> bool:
    """Whether runs on the same questions have too few contexts for ranks: no difference could be significant.

    Contexts without a score are not tested.
    """
    contexts = len({x.index for x in runs[0].lines.values() if x.score is not None})
    return find_least_p(contexts, len(runs) - 1) >= ALPHA


def _p_value(first: FinishedRun, other: FinishedRun) -> float:
    return flip_signs([sum(b - a for a, b in x) for x in _by_context(_pair(first, other))])


def _by_context(pairs: dict[tuple[str, int], tuple[float, float]]) -> list[list[tuple[float, float]]]:
    return [[pairs[key] for key in keys] for _, keys in groupby(pairs, key=lambda key: key[0])]


def find_regressions(runs: Sequence[FinishedRun]) -> list[Regressions]:
    """Regressions of each run against a run of the full cache that shares questions with it, of its protocol first."""
    whole = [x for x in runs if x.result.status == "ok"]
    full = [x for x in whole if is_full(x.result)]
    found = []
    for other in (x for x in whole if not is_full(x.result)):
        if sharing := [x for x in full if _pair(x, other)]:
            base = find_alike(other, sharing)
            found.append(_regress(base, other, _pair(base, other)))
    return found


def find_alike(run: FinishedRun, others: Sequence[FinishedRun]) -> FinishedRun:
    """The first of other runs with the run's questions and protocol; the first of all if none has."""
    if len(others) == 1:
        return others[0]
    wanted = name_questions(run.result.spec)
    return next((x for x in others if name_questions(x.result.spec) == wanted), others[0])


def _regress(full: FinishedRun, other: FinishedRun, common: dict[tuple[str, int], tuple[float, float]]) -> Regressions:
    sign = 1 if full.result.score.higher_is_better else -1
    worse = [Regression(*key, a, b) for key, (a, b) in common.items() if sign * (b - a) < 0]
    worse.sort(key=lambda x: (sign * (x.score - x.full), other.lines[x.sample, x.turn].index, x.turn))
    return Regressions(other.result.run_id, full.result.run_id, len(common), len(worse), tuple(worse))


def find_baseline(runs: Sequence[FinishedRun], asked: str | None = None) -> int:
    """Index of the run that the others are compared with.

    asked: the name of its method, or its id or the end of it; None: the first run of the full cache, else the first
        run.

    Raises:
        UserError: no run, or runs of several settings, have the name.
    """
    if asked is None:
        return next((i for i, x in enumerate(runs) if x.result.status == "ok" and is_full(x.result)), 0)
    found = [i for i, x in enumerate(runs) if is_called(x.result, asked)]
    if not found:
        names = {name for x in runs for name in (x.result.method.name, x.result.run_id)}
        raise unknown("baseline", asked, names, "Give the method or the id of one of the runs.")
    if len(found) > 1:
        ids = ", ".join(runs[i].result.run_id for i in found)
        raise UserError(f"baseline '{asked}' is the name of {len(found)} runs. Give the id of one of them: {ids}.")
    return found[0]


def is_called(result: Result, name: str) -> bool:
    """Whether this is the name of the run's method, or the run's id, or the hash at its end."""
    return name in (result.method.name, result.run_id, shorten(result.run_id))


def find_full(spec: RunSpec, out: Path) -> Result | None:
    """A finished run of the full cache in `out` with the same questions and protocol; None if there is none."""
    wanted = name_questions(spec)
    for path in sorted(out.glob("*/result.json")):
        with contextlib.suppress(UserError):  # skip damaged runs
            result = read_file(path, Result)
            if is_full(result) and result.score.mean is not None and name_questions(result.spec) == wanted:
                return result
    return None


def is_full(result: Result) -> bool:
    """True for a method without a budget or an effect on the entries that neither drafts tokens nor reuses entries."""
    without_effect = result.budget.kind == "none" and result.effect is not None and result.effect.n == 0
    return without_effect and result.lossless is None and result.reuse is None


def _pair(first: FinishedRun, other: FinishedRun) -> dict[tuple[str, int], tuple[float, float]]:
    """Both scores of each common question (equal prompt hash), by sample and turn in sorted order.

    Empty if their metrics have no common scale.
    """
    pairs: dict[tuple[str, int], tuple[float, float]] = {}
    if not share_scale(first.result.score, other.result.score):
        return pairs
    for key in sorted(first.lines.keys() & other.lines.keys()):
        a, b = first.lines[key], other.lines[key]
        if a.score is not None and b.score is not None and a.prompt_hash == b.prompt_hash:
            pairs[key] = a.score, b.score
    return pairs


def get_field(document: object, name: str) -> object:
    """A field of a document by its dotted name; None if it is missing."""
    for part in name.split("."):
        document = document[part] if isinstance(document, dict) else None
    return document
