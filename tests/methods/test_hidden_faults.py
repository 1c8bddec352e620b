"""Methods whose faults show only over several samples, outside of the stores, or in what they report."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvbench.check import INVARIANTS

from .test_conformance import Honest

LEFT_BEHIND = []


@pytest.fixture(autouse=True)
def clean():
    """Forget what the methods leave behind."""
    yield
    LEFT_BEHIND.clear()


def fails(claim, method, message):
    """Assert that the claim catches the method, and says why."""
    with pytest.raises(AssertionError, match=message):
        INVARIANTS[claim](method)


def test_a_method_that_compresses_the_first_sample_only_is_caught():
    """The object remembers that it has compressed, as in KVCache-Factory's issue 15."""

    @dataclass(frozen=True)
    class FirstOnly(Honest):
        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "done", set())

        def evict(self, kv, step):
            if step.moment.compresses and step.layer not in self.done:
                self.done.add(step.layer)
                super().evict(kv, step)

    fails("runs are repeatable", FirstOnly(), "a second run differs")
