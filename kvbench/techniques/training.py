"""One loop that trains parts of methods; the model that they belong to stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class TrainingProgress:
    """The step that a training continues from, and a function that is called after every step."""

    start: int = 0
    """Steps that a checkpoint has done."""
    resume: Callable[[nn.Module, Optimizer], None] | None = None
    """Restores the checkpoint."""
    keep: Callable[[nn.Module, Optimizer, int, float], None] | None = None
    """Called after every step with its number and the quantity that it reports."""


WHOLE = TrainingProgress()
"""From the first step to the last, without reports."""


def train_part(
    part: nn.Module, optimizer: Optimizer, steps: int, rate: Callable[[int], float],
    measure: Callable[[int], tuple[Tensor, Tensor | float]], clip: Callable[[Iterable[Tensor]], object],
    progress: TrainingProgress = WHOLE,
) -> dict[str, Tensor]:
    """Train a part, and return its weights.

    rate: the learning rate of a step. measure: the loss of a step, and the quantity that it reports. clip: bounds the
    gradients of parameters.
    """
    with torch.enable_grad():
        if progress.resume is not None:
            progress.resume(part, optimizer)
        for step in range(progress.start, steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            loss, reported = measure(step)
            optimizer.zero_grad()
            loss.backward()
            clip(part.parameters())
            optimizer.step()
            if progress.keep is not None:
                progress.keep(part, optimizer, step, float(reported))
    return {name: x.detach() for name, x in part.state_dict().items()}


def draw_halves(ids: Tensor, size: int, step: int) -> tuple[Tensor, Tensor, int]:
    """The step's text, of which the second half is the answer: ids, labels, tokens before the answer. [1, size] each

    ids: [1, T]. A label is the next token; -100: none.
    """
    start = step * size % max(1, ids.shape[1] - size)
    text = ids[:, start : start + size]
    labels = torch.full_like(text, -100)
    labels[:, size // 2 : -1] = text[:, size // 2 + 1 :]
    return text, labels, size // 2
