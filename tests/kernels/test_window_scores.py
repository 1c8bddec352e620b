"""Window scores against the whole attention matrix of the window in float64."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.window_scores import naive, window_scores
from kvbench.kernels.window_scores import torch as plain


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 entries, so that small sizes cross their edges."""
    monkeypatch.setattr(plain, "ENTRY_BLOCK", 8)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (1, 8), (1, 9), (4, 4), (4, 16), (4, 25), (8, 8), (11, 30)], ids=str)
def test_equals_the_reference(heads, size, options, attention, error):
    """Every head layout, size and option gives the reference's scores within 1e-5."""
    query, keys, _ = attention(heads, *size)
    options = {"scale": 0.3, "seen": size[1], **options}
    assert error(window_scores(query, keys, **options), naive.window_scores(query, keys, **options)) < 1e-5


@pytest.mark.parametrize("size", [(1, 12), (5, 20)], ids=str)
def test_a_window_counts_tokens_across_holes(heads, size, attention, holes, error):
    """With positions, entries are seen by their distance in the text."""
    query, keys, _ = attention(heads, *size)
    options = {"scale": 0.3, "seen": 60, "window": 11, "positions": holes(2, heads[1], size[1], 60, size[0])}
    assert error(window_scores(query, keys, **options), naive.window_scores(query, keys, **options)) < 1e-5


def test_entries_that_no_query_sees_have_no_mass(heads, attention):
    """Entries outside every query's window score exactly zero, and the others share the whole mass."""
    query, keys, _ = attention(heads, 3, 30)
    scores = window_scores(query, keys, scale=0.3, seen=30, window=5)
    assert (scores[..., : 30 - 3 - 5 + 1] == 0).all()
    assert torch.allclose(scores.sum(-1), torch.tensor(3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the scores are float32 and off by no more than a few roundings of a logit."""
    query, keys, _ = attention((6, 2), 8, 50, dtype=dtype)
    found = window_scores(query, keys, scale=0.3, seen=50)
    assert found.dtype == torch.float32
    assert error(found, naive.window_scores(query, keys, scale=0.3, seen=50)) < allowed[dtype]


@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 2.0}], ids=["plain", "everything"])
def test_memory_is_linear(options, attention, largest, monkeypatch):
    """The largest temporary is a block of logits, not a logit for every entry: it does not grow past a block."""
    monkeypatch.setattr(plain, "ENTRY_BLOCK", 512)
    peaks = {}
    for n in (2048, 4096):
        query, keys, _ = attention((4, 2), 32, n, batch=1)
        peaks[n] = largest(lambda q=query, k=keys, n=n: window_scores(q, k, scale=0.3, seen=n, **options))
    assert peaks[4096] <= 2.1 * peaks[2048]
    assert peaks[4096] <= max(4 * 32 * 512, 4 * 4096 * 24)  # a block of logits, or the keys themselves


def test_windows_that_are_a_prompt_long_stay_linear(attention, largest):
    """As many queries as entries still hold no T x N tensor."""
    query, keys, _ = attention((2, 1), 1024, 1024, batch=1)
    assert largest(lambda: window_scores(query, keys, scale=0.3, seen=1024)) < 1024 * 1024


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [(1, 15), (4, 16), (18, 33)], ids=str)
def test_triton_equals_the_reference(size, options, triton, attention, error):
    """One entry less than a block of 16, one block, several; one block of queries and two: within 1e-5."""
    query, keys, _ = attention((6, 2), *size, batch=1)
    options = {"scale": 0.3, "seen": size[1], **options}
    found = window_scores(*triton([query, keys]), **triton(options))
    assert error(found, naive.window_scores(query, keys, **options)) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_in_every_precision(heads, precision, triton, attention, error, allowed):
    """Every head layout, for a batch; the scores are float32."""
    query, keys, _ = attention(heads, 3, 35, dtype=precision)
    found = window_scores(*triton([query, keys]), scale=0.3, seen=35)
    assert found.dtype == torch.float32
    assert error(found, naive.window_scores(query, keys, scale=0.3, seen=35)) < allowed[precision]


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_triton_counts_a_window_in_tokens_across_holes(triton, attention, holes, error):
    """With positions, entries are seen by their distance in the text."""
    query, keys, _ = attention((6, 2), 5, 40)
    options = {"scale": 0.3, "seen": 90, "window": 33, "positions": holes(2, 2, 40, 90, 5)}
    found = window_scores(*triton([query, keys]), **triton(options))
    assert error(found, naive.window_scores(query, keys, **options)) < 1e-5


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """A window of 32 queries over thousands of entries of 128 channels."""
    generator = torch.Generator().manual_seed(0)
    query, keys = (
        torch.randn(2, heads, n, 128, generator=generator).to(precision) for heads, n in ((8, 32), (2, 9000))
    )
    options = {"scale": 128**-0.5, "seen": 9000}
    found = window_scores(*triton([query, keys]), **options)
    assert error(found, naive.window_scores(query, keys, **options)) < allowed[precision]
