"""Traces for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbench.trace.requests import PrefixTree, Trace, TraceRequest

SHARED = Path(__file__).parents[3] / "shared" / "traces"


@pytest.fixture(scope="session")
def make_trace():
    """Builds a trace from lists of block ids, one request per second."""

    def make(prompts, size=10, **fields):
        tree = PrefixTree()
        requests = tuple(
            TraceRequest(time=float(i), blocks=tree.add(x), input_tokens=len(x) * size, output_tokens=1, **{
                name: values[i] for name, values in fields.items()
            })
            for i, x in enumerate(prompts)
        )
        return Trace("test", requests, size, tuple(tree.parents))

    return make


@pytest.fixture(scope="session")
def shared_traces():
    """The folder with copies of public traces, where there is one."""
    if not SHARED.is_dir():
        pytest.skip(f"no copies of public traces in {SHARED}: `kvbench trace add` fetches them")
    return SHARED
