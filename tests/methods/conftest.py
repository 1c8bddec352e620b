"""Shared by the methods' tests: steps made by hand, and the bundled model."""

from __future__ import annotations

import pytest
import torch

from kvbench.hf import load_model
from kvbench.hf.rope import NO_ROPE
from kvbench.method import Moment, Step
from kvbench.registry import list_entries

AUTOREGRESSIVE = [x.name for x in list_entries("method") if x.models == "autoregressive"]
COMPOSED = ["snapkv+adakv", "snapkv+kivi", "razor-attention+kivi", "snapkv+vericache"]


def pytest_generate_tests(metafunc):
    """Every method of caches goes in for a test that asks for `method_name`: those registered, and compositions."""
    if "method_name" in metafunc.fixturenames:
        composed = [pytest.param(x, marks=pytest.mark.slow) for x in COMPOSED]
        metafunc.parametrize("method_name", AUTOREGRESSIVE + composed)


@pytest.fixture
def make_step():
    """One layer's forward pass from its tensors; `before` tokens came earlier."""

    def make(query, key, value=None, *, before=0, moment=Moment.CONTEXT_END, scale=1.0, **options):
        count = key.shape[2]
        return Step(
            layer=0, moment=moment, positions=torch.arange(before, before + count).expand(key.shape[0], -1),
            seen=before + count, query=query, key=key, value=key if value is None else value, scale=scale,
            causal=True, **{"rope": NO_ROPE, "window": None, "softcap": None, "sinks": None, **options},
        )

    return make


@pytest.fixture(scope="module")
def mini():
    """The bundled model in float32."""
    return load_model("mini", dtype="float32")


@pytest.fixture(scope="module")
def profile_cache(tmp_path_factory):
    """Head profiles of a module's own: `pytestmark = pytest.mark.usefixtures("profile_cache")`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
