"""Which implementation runs: the one that was chosen, or none."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvbench.kernels import choice
from kvbench.kernels.choice import comparing, note, operation, using


@pytest.fixture
def package(monkeypatch):
    """An operation `twice` with a function `half`, in torch and in triton, which takes `half` from torch."""
    modules = {name: ModuleType(name) for name in ("toy", "toy.twice", "toy.twice.torch", "toy.twice.triton")}
    for name, module in modules.items():
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(choice.importlib.util, "find_spec", modules.get)
    choice._find.cache_clear()
    plain, fast = modules["toy.twice.torch"], modules["toy.twice.triton"]
    plain.twice, plain.half = lambda x: 2 * x, lambda x: x // 2
    fast.twice, fast.half = lambda x: x + x + 1, plain.half  # one off, to be told apart
    for module, name in ((plain, "twice"), (plain, "half"), (fast, "twice")):
        function = getattr(module, name)
        function.__module__, function.__name__ = module.__name__, name
    yield operation(plain.twice), operation(plain.half)
    choice._find.cache_clear()


def test_torch_runs_where_nothing_is_chosen(package):
    """Without a choice it is torch's, and inside `using` the chosen one; afterwards it is as before."""
    twice, _ = package
    assert twice(3) == 6
    with using("triton"):
        assert twice(3) == 7
        with using("torch"):
            assert twice(3) == 6
        assert twice(3) == 7
    assert twice(3) == 6


def test_what_ran_is_noted_by_where_its_function_stands(package):
    """An operation's own function goes by its name; one that an implementation took from torch is torch's."""
    twice, half = package
    with using("triton") as ran:
        assert ran == {}
        twice(3)
        half(4)
        with using("torch") as inner:
            twice(3)
        note("twice.inner", "library")
    assert ran == {"twice": "triton", "twice.half": "torch", "twice.inner": "library"}
    assert inner == {"twice": "torch"}


def test_what_ran_on_some_calls_only_is_noted_too():
    """A model has layers with a window, which another kernel may take: a record of the last layer would hide it."""
    with using("torch") as ran:
        for name in ("sdpa_math", "sdpa_flash", "sdpa_flash", "sdpa_math", "torch"):
            note("twice.inner", name)
    assert ran == {"twice.inner": "sdpa_flash+sdpa_math+torch"}


def test_what_was_chosen_can_be_compared_with_torch(package):
    """Where another implementation runs, torch's runs on the same arguments; torch's alone runs once."""
    twice, half = package
    seen = []
    with using("triton"):
        with comparing(lambda *x: seen.append(x)):
            assert twice(3) == 7
            assert half(4) == 2
        twice(5)
    assert seen == [("twice", 7, 6)]


def test_an_implementation_made_for_some_operations_leaves_the_others_to_the_one_that_is_named(package, monkeypatch):
    """By REST, and noted as what it is; where it has a function of its own, that runs."""
    twice, half = package
    with using("flash") as ran:
        assert (twice(3), half(4)) == (6, 2)
    assert ran == {"twice": "torch", "twice.half": "torch"}
    choice._find.cache_clear()
    monkeypatch.setitem(sys.modules, "toy.twice.flash", sys.modules["toy.twice.triton"])
    monkeypatch.setattr(choice.importlib.util, "find_spec", sys.modules.get)
    with using("flash"):
        assert twice(3) == 7


def test_nothing_stands_in_for_an_implementation_that_is_missing(package, monkeypatch):
    """The error names the operation."""
    twice, _ = package
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None)
    with using("triton"), pytest.raises(NotImplementedError, match="twice has no triton implementation"):
        twice(3)
