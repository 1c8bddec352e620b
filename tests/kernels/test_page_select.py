"""Bounds of pages against every key in them, and the pages chosen against a sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels.choice import using
from kvbench.kernels.page_select import naive, page_bounds, page_scores, select_pages

PAGE = 4


@pytest.mark.parametrize("pages", [0, 1, 2, 7])
@pytest.mark.parametrize("n_query", [1, 3])
def test_scores_equal_the_reference(heads, pages, n_query, attention):
    """Every head layout gives each page's bound within 1e-5, also where there is no page yet."""
    query, keys, _ = attention(heads, n_query, pages * PAGE)
    found = page_scores(query, page_bounds(keys, PAGE))
    assert torch.allclose(found.double(), naive.page_scores(query, keys, page=PAGE), atol=1e-5)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**31), page=st.integers(1, 9), pages=st.integers(1, 5), dtype=st.sampled_from(
    [torch.float64, torch.float32, torch.bfloat16, torch.float16]
))
def test_a_bound_is_never_below_a_logit(seed, page, pages, dtype):
    """No key of a page has a larger product with a query than the page's bound, for bounds in any precision."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, 2, 6, generator=generator).to(dtype)
    keys = torch.randn(1, 2, pages * page, 6, generator=generator).to(dtype)
    bounds = page_bounds(keys, page)
    assert bounds.dtype == dtype
    products = query.double().unflatten(1, (2, 2)) @ keys.double()[:, :, None].mT  # [1, 2, 2, T, n]
    best = products.flatten(1, 2).unflatten(3, (pages, page)).amax(-1)
    found = page_scores(query.double(), bounds.double()).double()
    assert (found >= best - 1e-6 * best.abs()).all()  # scores are float32


def test_the_bound_of_equal_keys_is_their_logit(attention):
    """A page of one key, repeated, has exactly that key's product."""
    query, keys, _ = attention((4, 2), 2, 3)
    repeated = keys.double().repeat_interleave(PAGE, dim=2)
    found = page_scores(query.double(), page_bounds(repeated, PAGE))
    wanted = (query.double().unflatten(1, (2, 2)) @ keys.double()[:, :, None].mT).flatten(1, 2)
    assert torch.allclose(found.double(), wanted, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3, 9, 40])
@pytest.mark.parametrize("count", [1, 3, 50])
@pytest.mark.parametrize(("before", "n_query"), [(0, 1), (3, 1), (4, 1), (15, 1), (16, 1), (21, 6), (0, 9)])
def test_selection_equals_the_reference(before, n_query, count, window):
    """A query's own page is always chosen and none after it; the best bounds fill the rest."""
    complete = (before + n_query) // PAGE
    scores = torch.randn(2, 4, n_query, complete, generator=torch.Generator().manual_seed(0))
    found = select_pages(scores, count=count, page=PAGE, before=before, window=window)
    wanted = naive.select_pages(scores, count=count, page=PAGE, before=before, window=window)
    assert found.shape == (2, 4, n_query, min(count, complete + 1))
    for i, (row, pages) in enumerate(zip(found.flatten(0, 2).tolist(), wanted, strict=True)):
        at = before + i % n_query
        first = 0 if window is None else max(0, at - window + 1)
        assert len(set(row)) == len(row)
        assert {p for p in row if p <= at // PAGE and (p + 1) * PAGE > first} == pages


def test_a_length_on_the_device_selects_the_same():
    """With the whole block's bounds and the length on the device, the pages that hold entries are the same ones."""
    scores = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    eager = select_pages(scores[..., :5], count=3, page=PAGE, before=20)
    static = select_pages(scores, count=3, page=PAGE, before=torch.tensor(20))
    assert static.sort(-1).values.equal(eager.sort(-1).values)


@pytest.mark.parametrize("pages", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("n_query", [1, 3])
def test_triton_scores_equal_the_reference(pages, n_query, precision, triton, attention, error, allowed):
    """About a block of 64 pages, in every precision."""
    query, keys, _ = attention((6, 2), n_query, 2 * pages, dtype=precision)
    with using("triton") as ran:
        found = page_scores(triton(query), page_bounds(triton(keys), 2))
    wanted = naive.page_scores(query, keys, page=2)
    assert pages == 0 or error(found, wanted) < allowed[precision]
    assert found.shape == wanted.shape
    assert ran == {"page_select.page_bounds": "torch", "page_select.page_scores": "triton"}


def test_triton_scores_a_part_of_a_block(heads, triton, attention, error):
    """Bounds that are a slice of a larger block, as a store holds them, for every head layout."""
    query, keys, _ = attention(heads, 2, 40)
    found = page_scores(triton(query), triton(page_bounds(keys, PAGE))[:, :, :7])
    assert error(found, naive.page_scores(query, keys[:, :, : 7 * PAGE], page=PAGE)) < 1e-5
