"""The width over which a method pools scores, compared with the values that a task asks for."""

from __future__ import annotations

from kvbench.runs.spec import RunSpec
from kvbench.task import Encoded, Example
from kvbench.text.scorers import find_form


def is_narrow(kernel: object, tokens: float) -> bool:
    """Whether a kernel pools scores, and over no more tokens than a value has."""
    return isinstance(kernel, int) and 1 < kernel <= tokens


def warn_of_pooling(spec: RunSpec, example: Example, encoded: Encoded) -> str | None:
    """The warning that a method pools scores over no more tokens than a value has; None if it does not.

    A peak of the scores inside a value keeps as many tokens around it as the kernel has. The kernel is the setting of
    that name. An answer of several values has equal tokens for each of them: they lie at places of their own.
    """
    kernel = spec.method.settings.get("kernel")
    values = [
        -(-len(ids.answer) // max(1, sum(x in turn.answer for x in turn.references)))
        for turn, ids in zip(example.turns, encoded.turns, strict=True)
        if all(find_form(x) is not None for x in turn.references)
    ]
    longest = max(values, default=0)
    if not is_narrow(kernel, longest):
        return None
    return (
        f"{spec.method.name} pools scores over {kernel} tokens, and a value of {spec.task.name} has {longest} under "
        f"this tokenizer: only part of it may be kept. Use --set kernel={2 * longest - 1} to span it from any token."
    )
