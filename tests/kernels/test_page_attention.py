"""Attention over gathered pages, compared with a softmax over their entries and with dense attention over all."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.dense_attention import naive as dense_naive
from kvbench.kernels.page_attention import naive, page_attention
from kvbench.kernels.page_attention import torch as plain

PAGE = 4
PAGES = 8


@pytest.fixture(params=[1, 1 << 20], ids=["one query at a time", "all at once"])
def gathered(request, monkeypatch):
    """Blocks of one query and of all."""
    monkeypatch.setattr(plain, "GATHERED", request.param)


def chosen(heads, n_query, before, count, batch=2):
    """Random distinct pages for every query, its own among them. [B, H_q, T, k]"""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(batch, heads, n_query, PAGES + 1, generator=generator)
    own = (before + torch.arange(n_query)) // PAGE
    scores.scatter_(3, own.view(1, 1, -1, 1).expand(batch, heads, -1, 1), 2.0)
    return scores.topk(count).indices


@pytest.mark.parametrize("count", [1, 3, PAGES + 1])
@pytest.mark.parametrize(("before", "n_query"), [(0, 1), (27, 1), (31, 1), (14, 7)])
@pytest.mark.usefixtures("gathered")
def test_equals_the_reference(heads, before, n_query, count, options, attention, error):
    """Any pages, also beyond the entries, give attention over the visible entries, to 1e-5."""
    _, keys, values = attention(heads, 1, PAGES * PAGE)
    query = attention(heads, n_query, 1, seed=2)[0]
    pages = chosen(heads[0], n_query, before, count)
    options = {"page": PAGE, "before": before, "scale": 0.3, **options}
    found = page_attention(query, keys, values, pages, **options)
    assert error(found, naive.page_attention(query, keys, values, pages, **options)) < 1e-5


def test_every_page_is_dense_attention(heads, attention, error):
    """With all pages selected, in any order, it is causal attention over all entries."""
    query, keys, values = attention(heads, 5, PAGES * PAGE)
    pages = torch.arange(PAGES).flip(0).expand(2, heads[0], 5, -1)
    found = page_attention(query, keys, values, pages, page=PAGE, before=PAGES * PAGE - 5, scale=0.3)
    assert error(found, dense_naive.dense_attention(query, keys, values, scale=0.3, seen=PAGES * PAGE)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the output is off by no more than a few roundings."""
    query, keys, values = attention((6, 2), 3, PAGES * PAGE, dtype=dtype)
    pages = chosen(6, 3, 20, 4)
    found = page_attention(query, keys, values, pages, page=PAGE, before=20, scale=0.3)
    wanted = naive.page_attention(query.double(), keys, values, pages, page=PAGE, before=20, scale=0.3)
    assert found.dtype == dtype
    assert error(found, wanted) < allowed[dtype]


def test_entries_that_are_not_selected_are_not_read(attention):
    """NaN in every other page changes nothing: pages are gathered, not masked."""
    query, keys, values = attention((4, 2), 1, PAGES * PAGE, batch=1)
    pages = torch.tensor([5, 7, 2]).expand(1, 4, 1, -1)
    options = {"page": PAGE, "before": PAGES * PAGE - 1, "scale": 0.3}
    wanted = page_attention(query, keys, values, pages, **options)
    for x in (keys, values):
        x.unflatten(2, (PAGES, PAGE))[:, :, [0, 1, 3, 4, 6]] = torch.nan
    assert page_attention(query, keys, values, pages, **options).equal(wanted)


@pytest.fixture
def small_parts(monkeypatch):
    """Triton's parts are two pages, the second of the last part missing."""
    fast = pytest.importorskip("kvbench.kernels.page_attention.triton")
    monkeypatch.setattr(fast, "tile_entries", lambda *_: 2 * PAGE)
    monkeypatch.setattr(fast, "ENTRIES", 8)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("before", "n_query"), [(0, 1), (27, 1), (14, 2)])
def test_triton_equals_the_reference(before, n_query, count, options, triton, attention, error):
    """Pages in several parts, some beyond the entries or outside the window, give the reference output to 1e-5."""
    _, keys, values = attention((6, 2), 1, PAGES * PAGE, batch=1)
    query = attention((6, 2), n_query, 1, batch=1, seed=2)[0]
    pages = chosen(6, n_query, before, count, batch=1)
    options = {"page": PAGE, "before": before, "scale": 0.3, **options}
    found = page_attention(*triton([query, keys, values, pages]), **triton(options))
    assert error(found, naive.page_attention(query, keys, values, pages, **options)) < 1e-5


@pytest.mark.usefixtures("small_parts")
def test_triton_takes_a_length_from_the_device(triton, attention):
    """A captured step has no host number of entries; it reads the same."""
    query, keys, values = attention((6, 2), 1, PAGES * PAGE, batch=1)
    tensors = triton([query, keys, values, chosen(6, 1, 14, 5, batch=1)])
    options = {"page": PAGE, "scale": 0.3}
    found = page_attention(*tensors, before=triton(torch.tensor(14)), **options)
    assert found.equal(page_attention(*tensors, before=14, **options))


@pytest.mark.usefixtures("small_parts")
def test_triton_in_every_precision(heads, precision, triton, attention, error, allowed):
    """Every head layout, for a batch; the output is of the queries' type."""
    query, keys, values = attention(heads, 1, PAGES * PAGE, dtype=precision)
    pages = chosen(heads[0], 1, 26, 4)
    found = page_attention(*triton([query, keys, values, pages]), page=PAGE, before=26, scale=0.3)
    wanted = naive.page_attention(query.double(), keys, values, pages, page=PAGE, before=26, scale=0.3)
    assert found.dtype == precision
    assert error(found, wanted) < allowed[precision]


@pytest.mark.parametrize("page", [1, 5, 16, 40])
def test_triton_serves_pages_of_any_size(page, triton, attention, error):
    """Pages smaller than what is read at a time, larger, and of an odd size."""
    query, keys, values = attention((2, 1), 1, 4 * page, batch=1)
    pages = torch.tensor([3, 0, 2]).expand(1, 2, 1, -1)
    options = {"page": page, "before": 4 * page - 1, "scale": 0.3}
    found = page_attention(*triton([query, keys, values, pages]), **options)
    assert error(found, naive.page_attention(query, keys, values, pages, **options)) < 1e-5


def test_triton_does_not_read_entries_that_are_not_selected(triton, attention):
    """NaN in every other page changes nothing."""
    query, keys, values = attention((4, 2), 1, PAGES * PAGE, batch=1)
    pages = torch.tensor([5, 7, 2]).expand(1, 4, 1, -1)
    for x in (keys, values):
        x.unflatten(2, (PAGES, PAGE))[:, :, [0, 1, 3, 4, 6]] = torch.nan
    found = page_attention(*triton([query, keys, values, pages]), page=PAGE, before=PAGES * PAGE - 1, scale=0.3)
    assert found.isfinite().all()


def test_triton_launches_as_many_sequences_as_fit_a_gpu(monkeypatch):
    """4,096 sequences of 32 heads: a grid's second and third dimensions end at 65,535 programs."""
    fast = pytest.importorskip("kvbench.kernels.page_attention.triton")
    grids = []
    for kind in {type(fast.attend_pages), type(fast.merge_tiles.__globals__["merge_parts"])}:
        monkeypatch.setattr(kind, "run", lambda *_, grid, **__: grids.append(grid))
    query, block = (torch.empty(4096, heads, n, 128, device="meta") for heads, n in ((32, 1), (8, 256)))
    pages = torch.empty(4096, 32, 1, 4, dtype=torch.int64, device="meta")
    fast.page_attention(query, block, block, pages, page=16, before=255, scale=1.0)
    assert len(grids) == 2
    assert all(max(x[1:], default=1) <= 65_535 for x in grids)


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """128 pages of 16 entries of 128 channels, of 4096 entries."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, n, 128, generator=generator).to(precision)
        for heads, n in ((8, 1), (2, 4096), (2, 4096))
    )
    pages = torch.rand(2, 8, 1, 255, generator=generator).topk(127).indices
    pages = torch.cat([pages, torch.full((2, 8, 1, 1), 255)], dim=-1)
    options = {"page": 16, "before": 4090, "scale": 128**-0.5}
    found = page_attention(*triton([query, keys, values, pages]), **options)
    wanted = naive.page_attention(query.double(), keys, values, pages, **options)
    assert error(found, wanted) < allowed[precision]
