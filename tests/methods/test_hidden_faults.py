"""Methods whose faults show only over several samples, outside of the stores, or in what they report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import pytest

from kvbench.check import INVARIANTS, check
from kvbench.errors import UserError
from kvbench.method import Moment
from kvbench.store import LayerKV

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


def test_a_store_that_counts_fewer_bytes_than_it_lists_is_caught():
    """Half of the bytes are counted, and half are declared."""

    class Half(LayerKV):
        def nbytes(self):
            return super().nbytes() // 2

        def spare_bytes(self):
            return super().spare_bytes() // 2

        def bytes_for(self, layer, shape, entries):
            return super().bytes_for(layer, shape, entries) // 2

    @dataclass(frozen=True)
    class HalfCounted(Honest):
        def layer(self, index):
            return Half()

    fails("measured bytes are declared", HalfCounted(), r"Half.nbytes\(\) is \d+, and its tensors\(\) hold \d+ bytes")


@pytest.mark.parametrize("hide", [lambda step: step, lambda step: deque([step.key])], ids=["a step", "a deque"])
def test_a_store_that_keeps_entries_out_of_sight_is_caught(hide):
    """A step has slots in place of a dictionary."""

    class Hiding(LayerKV):
        def append(self, step):
            super().append(step)
            if step.moment.in_context:
                self.hidden = hide(step)

    @dataclass(frozen=True)
    class Hides(Honest):
        def layer(self, index):
            return Hiding()

    fails("measured bytes are declared", Hides(), r"Hiding.hidden holds \d+ bytes that its tensors\(\) does not list")


def test_a_method_that_keeps_copies_of_dropped_entries_is_caught():
    """They are in a list of the module, where no store counts them."""

    @dataclass(frozen=True)
    class Hoards(Honest):
        def evict(self, kv, step):
            if step.moment.compresses:
                LEFT_BEHIND.append(kv.keys.clone())
            super().evict(kv, step)

    fails("evicted entries are freed", Hoards(), r"\d+ tensors are still allocated when their session is closed")


def test_a_method_that_ignores_its_budget_is_caught():
    """It keeps twice as many entries, and declares them."""

    @dataclass(frozen=True)
    class Twice(Honest):
        def entries_in(self, layer, window):
            entries = super().entries_in(layer, window)
            return None if entries is None else 2 * entries

    fails("acts at its budget", Twice(), "it kept 60 entries per KV head, and its budget is 30")


def test_a_question_that_attends_to_later_tokens_is_caught():
    """Only after the context was compressed, in a method whose decode steps are not static."""

    @dataclass(frozen=True)
    class Foresees(Honest):
        graphable = "its steps are not static"

        def attend(self, kv, step):
            later = step.moment is Moment.TURN_END and self.rows is not None
            return kv.attend(replace(step, causal=False) if later else step)

    fails("chunks do not matter", Foresees(), "a question in chunks of 4: logits differ")


def test_settings_that_keep_the_whole_context_are_refused():
    """No invariant fails for them, and none passes: the message says what to set."""

    @dataclass(frozen=True)
    class Wide(Honest):
        window: int = 32

        def minimum_entries(self):
            return self.window + 1

    with pytest.raises(UserError, match=r"at least 201 entries .* have 120\. Use smaller settings with --set"):
        check(Wide, {"window": 200})


def test_a_class_without_the_decorator_is_caught():
    """Its annotation makes no field, so `--set` would not find the setting."""

    class Undecorated(Honest):
        window: int = 32

    fails("settings are frozen", Undecorated(), "window cannot be set: decorate the class with @data")


def test_a_method_that_exits_fails():
    """The check goes on, and its exit code is not the method's."""

    @dataclass(frozen=True)
    class Exits(Honest):
        def score(self, kv, step):
            raise SystemExit(3)

    found = {x.name: x.detail for x in check(Exits) if not x.passed}
    assert found["acts at its budget"].startswith("SystemExit: 3 (test_hidden_faults.py, line ")
