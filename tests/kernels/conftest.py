"""Shared by the kernels' tests: random entries, an error measure, and a scale for temporary memory."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from kvbench.kernels.choice import using
from tests.kernels.accesses import checked

HEADS = {"MHA": (3, 3), "GQA": (6, 2), "MQA": (4, 1)}
WIDTHS = (24, 20)
"""Of keys and of values; not powers of two, and not equal."""
OPTIONS = {
    "plain": {}, "window": {"window": 6}, "softcap": {"softcap": 1.5}, "sinks": {"sinks": True},
    "everything": {"window": 6, "softcap": 1.5, "sinks": True},
}
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative RMS error, by element type: float32 as the issue says, the others about two of their roundings."""


def pytest_generate_tests(metafunc):
    """Cases of `heads` and `options`, where a test does not list its own, and of `precision`.

    Every option is tried with GQA in torch. Other layouts, and Triton, which is slow to interpret, are tried with none
    and with all options.
    """
    marks = [x.args[0] for x in metafunc.definition.iter_markers("parametrize")]
    names = set(metafunc.fixturenames) - {x for names in marks for x in ([names] if isinstance(names, str) else names)}
    ends = ["plain", "everything"]
    options = ends if "triton" in metafunc.fixturenames else list(OPTIONS)
    if {"heads", "options"} <= names:
        cases = [*((x, y) for x in ("MHA", "MQA") for y in ends), *(("GQA", y) for y in options)]
        metafunc.parametrize(
            ("heads", "options"), [(HEADS[x], OPTIONS[y]) for x, y in cases], ids=["-".join(x) for x in cases],
            indirect=["options"],
        )
    elif "heads" in names:
        metafunc.parametrize("heads", HEADS.values(), ids=HEADS)
    elif "options" in names:
        metafunc.parametrize("options", [OPTIONS[x] for x in options], ids=options, indirect=True)
    if "precision" in names:
        bfloat16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # Triton's interpreter multiplies it wrongly
        metafunc.parametrize("precision", [torch.float32, torch.float16, bfloat16], ids=str)


def pytest_itemcollected(item):
    """Every test here has many cases, and the interpreter takes up to seconds for one: `make test` runs one of each."""
    item.add_marker(pytest.mark.few)


@pytest.fixture(scope="module", autouse=True)
def _checked_accesses():
    """Interpreted kernels stay within their tensors, and none depends on the order of its programs."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
    else:
        with checked():
            yield


@pytest.fixture
def options(request):
    """Options of attention, one by one and together; `sinks: True` stands for a logit per query head."""
    heads = request.getfixturevalue("heads") if "heads" in request.fixturenames else HEADS["GQA"]
    return request.param | ({"sinks": torch.linspace(-2, 3, heads[0])} if "sinks" in request.param else {})


@pytest.fixture
def allowed():
    """Allowed relative RMS error by element type."""
    return ALLOWED


@pytest.fixture
def triton(monkeypatch):
    """Operations run as Triton's, and what they leave unwritten is NaN; it moves every tensor within to the device.

    That is a GPU; where there is none, kernels are interpreted.
    """
    pytest.importorskip("triton", reason="Triton is for Linux")

    def filled(make):
        return lambda *args, **kwargs: x.fill_(torch.nan) if (x := make(*args, **kwargs)).is_floating_point() else x

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with using("triton"):
        yield lambda x: tree_map_only(torch.Tensor, lambda y: y.to(device), x)


@pytest.fixture
def small_code_tiles(monkeypatch):
    """Of attention over codes: Triton's blocks are 8 queries and 16 entries, and tiles 32 entries."""
    for operation, blocks in (("packed", (8, 16, 4, 2)), ("level", (8, 16, 4))):
        fast = pytest.importorskip(f"kvbench.kernels.{operation}_attention.triton")
        monkeypatch.setattr(fast, "tile_entries", lambda *_: 32)
        monkeypatch.setattr(fast, "_blocks", lambda *_, blocks=blocks: blocks)


@pytest.fixture
def small_tiles(monkeypatch):
    """Triton's tiles and blocks are 16 entries, the fewest that a matrix product takes."""
    attention = pytest.importorskip("kvbench.kernels.dense_attention.triton")
    monkeypatch.setattr(attention, "tile_entries", lambda *_: 16)
    monkeypatch.setattr(attention, "_blocks", lambda *_: (16, 16, 2, 4))
    monkeypatch.setattr("kvbench.kernels.column_sums.triton._blocks", lambda *_: (16, 16, 4))


@pytest.fixture
def attention():
    """Query, keys and values of an attention by shape: (heads, queries, entries, batch) -> three tensors."""

    def make(heads, n_query, n_key, batch=2, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        query_heads, kv_heads = heads
        return tuple(
            torch.randn(batch, h, n, d, generator=generator).to(dtype)
            for h, n, d in (
                (query_heads, n_query, WIDTHS[0]), (kv_heads, n_key, WIDTHS[0]), (kv_heads, n_key, WIDTHS[1])
            )
        )

    return make


@pytest.fixture
def holes():
    """Ascending positions, another choice for every head, with the queries' own at the end. [B, H_kv, N] int32"""

    def make(batch, kv_heads, n_key, seen, n_query, seed=0):
        generator = torch.Generator().manual_seed(seed)
        kept = n_key - n_query
        old = torch.stack([
            torch.randperm(seen - n_query, generator=generator)[:kept].sort().values for _ in range(batch * kv_heads)
        ])
        new = torch.arange(seen - n_query, seen).expand(batch * kv_heads, -1)
        return torch.cat([old, new], dim=1).unflatten(0, (batch, kv_heads)).to(torch.int32)

    return make


@pytest.fixture
def error():
    """Relative RMS error of a result against its reference; shapes must agree and no element may be NaN."""

    def measure(found, wanted):
        found = found.cpu()
        assert found.shape == wanted.shape
        assert found.isfinite().all()
        difference = found.double() - wanted.double()
        return (difference.square().mean().sqrt() / wanted.double().square().mean().sqrt()).item()

    return measure


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes, views of others included."""

    elements = 0
    shape = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, torch.Tensor) and x.numel() > self.elements:
                self.elements, self.shape = x.numel(), tuple(x.shape)
        return out


@pytest.fixture
def largest():
    """The largest tensor made by a call, in elements."""

    def measure(call):
        with Largest() as watch:
            call()
        return watch.elements

    return measure
