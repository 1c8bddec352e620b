"""Training of parts: a run that was stopped continues as if it had not been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kvbench.techniques.training import train_part

SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS = 30


@pytest.fixture
def script(monkeypatch):
    """scripts/train_part.py as a module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import train_part  # found in the folder of scripts

    return train_part


def train(run, last=STEPS):
    """A linear part, on batches that are functions of the step, up to a step that fails."""
    torch.manual_seed(0)
    part = nn.Linear(4, 1)

    def measure(step):
        if step == last:
            raise KeyboardInterrupt
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (part(x)[:, 0] - x.sum(1)).square().mean()
        return loss, loss.detach()

    rate = lambda step: 0.1 * (1 - step / STEPS)  # noqa: E731
    return train_part(part, torch.optim.AdamW(part.parameters()), STEPS, rate, measure, lambda x: None, run.progress)


def test_a_stopped_training_continues_from_its_checkpoint(script, tmp_path):
    """Stopped after 27 steps it continues at 25, and its weights equal those of an uninterrupted training."""
    (tmp_path / "whole").mkdir()
    wanted = train(script.Run(tmp_path / "whole", STEPS, "loss"))
    with pytest.raises(KeyboardInterrupt):
        train(script.Run(tmp_path, STEPS, "loss"), last=27)
    again = script.Run(tmp_path, STEPS, "loss")
    assert again.done == 25
    found = train(again)
    assert all(torch.equal(found[name], x) for name, x in wanted.items())


def test_gradients_are_bounded_before_they_are_used():
    """Bounded to nothing, they change no weight."""
    part = nn.Linear(4, 1)
    before = {name: x.clone() for name, x in part.state_dict().items()}

    def clip(parameters):
        for x in parameters:
            x.grad.zero_()

    def measure(step):
        loss = part(torch.ones(2, 4)).square().mean()
        return loss, loss.detach()

    found = train_part(part, torch.optim.SGD(part.parameters()), 2, lambda step: 0.1, measure, clip)
    assert all(torch.equal(found[name], x) for name, x in before.items())
