"""Published statements and measured numbers on the public traces."""

from __future__ import annotations

import math

import pytest

from kvbench.trace.cache import simulate
from kvbench.trace.claims import KNOWN_MISMATCH, TraceClaim, evaluate, list_claims
from kvbench.trace.loaders import load
from kvbench.trace.measures import measure
from kvbench.trace.memory import measure_waste
from kvbench.trace.policies import LRU
from kvbench.trace.sources import SOURCES

pytestmark = pytest.mark.slow  # reading the public traces takes two seconds


@pytest.fixture(scope="module")
def traces(shared_traces):
    """Public traces by name, read once."""
    return {name: load(shared_traces / f"{x.file}.gz", x.kind) for name, x in SOURCES.items()}


@pytest.mark.parametrize(("name", "blocks", "block"), [
    ("mooncake-conversation", 1_000, 0.0445), ("mooncake-conversation", 30_000, 0.3257),
    ("mooncake-conversation", math.inf, 0.3664), ("mooncake-synthetic", 10_000, 0.4239),
    ("mooncake-synthetic", math.inf, 0.6396),
])
def test_lru_hit_rates_are_those_of_an_independent_script(traces, name, blocks, block):
    """Numbers that were computed by another program, to four digits."""
    assert measure(traces[name], simulate(traces[name], LRU(), blocks)).block == pytest.approx(block, abs=5e-5)


def test_unused_room_is_that_of_an_independent_script(traces):
    """Percent by scheme on the Azure chat trace."""
    found = [round(100 * x.share, 1) for x in measure_waste(traces["azure-2023-conv"])]
    assert found == [91.7, 34.6, 0.5, 1.1, 30.2]


@pytest.mark.parametrize("claim", [x for x in list_claims() if x.measure != KNOWN_MISMATCH], ids=lambda x: x.id)
def test_a_claim_is_judged(traces, claim):
    """No statement of the file differs from what its trace gives."""
    assert claim.judge(evaluate(claim, traces[claim.trace])) != "differs"


def test_a_false_claim_differs():
    """A number outside of the tolerance is not called reproduced."""
    claim = TraceClaim("x", "x", "x", "block", "infinite", "", value=0.5, within=0.05)
    assert [claim.judge(x) for x in (0.505, 0.53, 0.6)] == ["reproduced", "close", "differs"]


def test_a_bound_of_zero_is_a_bound():
    """A number below it differs, and one on it does not."""
    claim = TraceClaim("x", "x", "x", "block", "infinite", "", least=0.0, most=0.5)
    assert [claim.judge(x) for x in (-0.1, 0.0, 0.5, 0.6)] == ["differs", "shape holds", "shape holds", "differs"]
