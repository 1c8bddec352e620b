"""Compares everything that a rerun measures, other than tokens, with the submitted journal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from kvbench.leaderboard.submission.outcome import RefusedError, quote
from kvbench.leaderboard.verification.journal import ADDED
from kvbench.leaderboard.verification.result import differences
from kvbench.runs.journal import Line

TOLERANCE = 0.02
"""Relative difference of bytes, entries and steps: a method may select slightly other entries on another machine."""
FACT_TOLERANCE = (0.05, 2.0)
"""Relative and absolute difference of the stores' counters, some of which are small numbers."""
COUNTS = ("effect.facts.", "lossless.", "reuse.")
"""Names of numbers that this applies to."""
MEAN_TOLERANCE = (0.1, 0.02)
"""Relative and absolute difference of means over answers: agreement, and the baselines of a diffusion run."""
AT_COMPRESSION = {
    "bytes": {"full_bytes", "stored_bytes", "host_bytes", "file_bytes"},
    "effect": {"identity", "acted", "entries_seen", "entries_kept"},
}
"""Measured before the first answer token, and so comparable whatever the answer is."""
AFTER_ANSWER: dict[str, Any] = {
    "tokens": True, "bytes": True, "effect": {"identity", "acted", "entries_seen", "entries_kept", "facts"},
    "denoising": {"response_length", "steps", "block", "nfe", "computed_tokens", "sequence_length", "committed_tokens"},
    "lossless": {"rounds", "drafted", "accepted", "reloaded_bytes"},
    "reuse": {
        "tokens", "computed", "reused", "hits", "misses", "mismatched", "refused", "loaded", "chunk_bytes",
        "moved_bytes",
    },
}
"""Comparable where the answers of the sample are equal up to this turn."""
LATER = {
    "bytes": ADDED,
    "tokens": ("reference",),
    "effect.facts": ("entries_on_host", "entries_on_simulated_host"),
}
"""Fields that were added after kvbench 0.1, by the part that they belong to."""


def check_measurements(pairs: Sequence[tuple[Line, Line]], equal: Sequence[bool]) -> None:
    """Compare bytes, kept entries, counters, denoising steps, baselines and agreement of submitted and rerun lines.

    pairs: (submitted, rerun), by sample and turn. equal: whether the answers of a pair are equal.

    Raises:
        RefusedError: a number differs by more than its tolerance; the reason states both.
    """
    diverged: set[int] = set()
    comparable = []
    for (x, y), same in zip(pairs, equal, strict=True):
        if not same:
            diverged.add(x.index)
        whole = x.index not in diverged
        if whole:
            comparable.append((x, y))
        if whole or x.turn == 0:
            names = AFTER_ANSWER if whole else AT_COMPRESSION
            documents = [line.model_dump(mode="json", include=names) for line in (x, y)]
            _leave_out_later(documents[0], documents[1])
            for name, stated, found in differences(documents[0], documents[1], _allow_variation):
                where = f"sample {x.index} turn {x.turn}"
                raise RefusedError("rerun", f"{where}: its {name} is {quote(stated)}, the rerun has {quote(found)}")
    _check_means(comparable)


def _leave_out_later(stated: dict[str, Any], found: dict[str, Any]) -> None:
    """Remove the fields that a journal of an earlier kvbench does not have."""
    for part, names in LATER.items():
        ours, theirs = (_find_part(document, part) for document in (found, stated))
        if all(theirs.get(name) is None for name in names):
            for name in names:
                for document in (ours, theirs):
                    document.pop(name, None)


def _find_part(document: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.split("."):
        document = document.get(name) or {}
    return document


def _check_means(pairs: Sequence[tuple[Line, Line]]) -> None:
    """Compare means over answers: agreement with the full cache, and each baseline of a diffusion run."""
    relative, absolute = MEAN_TOLERANCE
    found: dict[str, list[tuple[float, float]]] = {}
    for x, y in pairs:
        ours = dict(_list_measured(y))
        for name, value in _list_measured(x):
            found.setdefault(name, []).append((value, ours.get(name, math.nan)))
    for name, values in found.items():
        stated, here = (fmean(x) for x in zip(*values, strict=True))
        if not math.isclose(stated, here, rel_tol=relative, abs_tol=absolute):
            raise RefusedError("rerun", f"its mean {name} is {stated:.4g}, the rerun has {here:.4g}")


def _list_measured(line: Line) -> Iterator[tuple[str, float]]:
    """Numbers of a line that rounding may change, by name."""
    if line.agreement is not None:
        yield from (("top-1 agreement", line.agreement.top1), ("KL divergence", line.agreement.kl))
    for name, x in line.denoising.baselines.items() if line.denoising is not None else ():
        yield f"NFE of baseline {name}", x.nfe
        yield f"share of equal tokens of baseline {name}", x.same_tokens
        if x.score is not None:
            yield f"score of baseline {name}", x.score


def _allow_variation(name: str) -> tuple[float, float]:
    """The differences that a rerun's numbers may have: `differences`."""
    return FACT_TOLERANCE if name.startswith(COUNTS) else (TOLERANCE, 0.0)
