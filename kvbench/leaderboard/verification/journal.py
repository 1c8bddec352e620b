"""Checks that the lines of a journal fit together: those of a sample, and the fields that only later code writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.runs.journal import Line
from kvbench.runs.spec import RunSpec

ADDED = (
    "end_stored_bytes", "end_full_bytes", "distinct_read_bytes_per_step", "full_read_bytes_per_step",
    "host_read_bytes_per_step", "file_read_bytes_per_step",
)
"""Bytes that no line of an early journal has."""
LATER: dict[str, Callable[[Line], object]] = {
    "question": lambda x: x.question, "reference tokens": lambda x: x.tokens and x.tokens.reference,
    "machine": lambda x: x.machine, "kernels": lambda x: x.kernels or None,
}
"""Other fields that early journals lack. The last two are on the line of a sample's first turn."""
ON_FIRST_TURN = ("machine", "kernels")


def check_lines(spec: RunSpec, lines: Sequence[Line]) -> None:
    """Check that lines of one sample agree, and that all lines come from the same code.

    Raises:
        RefusedError: they do not.
    """
    first = {x.index: x for x in lines if x.turn == 0}
    answers: dict[int, list[int]] = {}  # their tokens by sample
    for x in lines:
        answers.setdefault(x.index, []).append(len(x.ids))
    for x in lines:
        where, head = f"sample {x.index} turn {x.turn}", first.get(x.index)
        if head is None:
            raise RefusedError("journal", f"{where}: its sample has no turn 0")
        if x.turn and (x.machine is not None or x.kernels):
            raise RefusedError("journal", f"{where}: machine and kernels belong to a sample's first turn")
        for name in () if x.error is not None else ("started", "shared_prefill"):  # a failure is recorded apart
            if getattr(x, name) != getattr(head, name):
                raise RefusedError(
                    "journal", f"{where}: its {name} is {getattr(x, name)}, that of turn 0 {getattr(head, name)}"
                )
        if head is x and x.batch is not None and x.batch.tokens is not None:
            answered = answers[x.index]
            least, most = x.batch.tokens - (x.batch.different or 0), x.batch.tokens
            # Earlier versions compared all answers of the sample.
            if not any(least <= own <= most for own in (answered[0], sum(answered))):
                raise RefusedError(
                    "journal",
                    f"{where}: {most} tokens compared and {x.batch.different} different, of {answered[0]}",
                )
    for name, absent in _find_absent(spec, lines).items():
        if any(absent) and not all(absent):
            raise RefusedError("journal", f"{sum(absent)} of its {len(absent)} lines have no {name}")


def list_absent(spec: RunSpec, lines: Sequence[Line]) -> list[str]:
    """Names of the fields that no line has, although later code writes them."""
    return [name for name, absent in _find_absent(spec, lines).items() if absent and all(absent)]


def _find_absent(spec: RunSpec, lines: Sequence[Line]) -> dict[str, list[bool]]:
    """Whether each line lacks a field, by name."""
    answered = [x for x in lines if x.error is None]
    found = {
        name: [read(x) is None for x in answered if x.turn == 0 or name not in ON_FIRST_TURN]
        for name, read in LATER.items()
    }
    if spec.model.kind == "autoregressive":
        found |= {name: [getattr(x.bytes, name) is None for x in answered if x.bytes is not None] for name in ADDED}
    return found
