"""Attention over kept elements against entries with zeros in them, and what is kept against a sort of each entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.kernels.bitmap_attention import SparseEntries, bitmap_partial, compress, naive
from kvbench.kernels.bitmap_attention import torch as plain
from kvbench.kernels.dense_attention import naive as dense_naive

GQA = (6, 2)
OPTIONS = {"plain": {}, "window": {"window": 17}, "softcap": {"softcap": 1.5}, "later": {"start": 50, "seen": 90},
           "everything": {"window": 17, "softcap": 1.5}}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 entries of 2 x 2 heads, so that small sizes cross their edges."""
    monkeypatch.setattr(plain, "BLOCK", 8 * 2 * 2 * 24)


@pytest.fixture
def sparse(attention):
    """A query, and sparse keys and values of which 9 and 7 elements were kept."""

    def make(heads, n_query, n_key, batch=2, dtype=torch.float32):
        query, keys, values = attention(heads, n_query, n_key, batch=batch, dtype=dtype)
        return query, plain.compress(keys, 9), plain.compress(values, 7)

    return make


@settings(deadline=None, max_examples=50)
@given(rows=st.integers(1, 3), width=st.integers(1, 70), seed=st.integers(0, 99), data=st.data())
def test_the_largest_elements_are_kept(rows, width, seed, data):
    """Exactly that many of each entry, of equal magnitudes the first ones, and they come back where they were."""
    kept = data.draw(st.integers(1, width))
    x = torch.randint(-4, 5, (2, rows, width), generator=torch.Generator().manual_seed(seed)).float()
    found, wanted = compress(x, kept), naive.compress(x, kept)
    assert found.bitmap.equal(wanted.bitmap)
    assert found.values.equal(wanted.values)
    whole = naive.expand(found)
    assert plain.expand(found).double().equal(whole)
    assert ((whole == x) | (whole == 0)).all()
    left_out = (x - whole).abs().amax(-1)
    assert (left_out <= found.values.abs().amin(-1)).all()


def test_an_entry_by_hand():
    """Of 1, -3, 2, -2 and 0, three elements: -3, 2 and -2 at bits 1, 2 and 3."""
    rows = compress(torch.tensor([[1.0, -3.0, 2.0, -2.0, 0.0]]), 3)
    assert rows.bitmap.tolist() == [[0b01110]]
    assert rows.values.tolist() == [[-3.0, 2.0, -2.0]]


def test_bytes_are_the_bitmap_and_the_elements():
    """Half of 128 channels in 16 bits is 16 bytes of bits and 128 of elements: 56 % of the entry."""
    rows = compress(torch.randn(4, 128).half(), 64)
    assert rows.bitmap.nbytes + rows.values.nbytes == 4 * (16 + 2 * 64)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("size", [(1, 1), (1, 7), (1, 8), (1, 9), (5, 30)], ids=str)
def test_equals_the_reference(heads, size, options, sparse, error):
    """Every head layout, size and option gives attention over the entries with zeros in them."""
    rows = sparse(heads, *size)
    options = {"scale": 0.3, "seen": sum(size), **options}
    found, wanted = bitmap_partial(*rows, **options), naive.bitmap_partial(*rows, **options)
    assert torch.allclose(found.lse.double(), wanted.lse, atol=1e-5)
    assert (wanted.output == 0).all() or error(found.output, wanted.output) < 1e-5


def test_a_window_counts_tokens_across_holes(sparse, holes, error):
    """Where entries have gone missing the window goes by positions, head by head."""
    rows = sparse(GQA, 3, 27)
    options = {"scale": 0.3, "seen": 60, "window": 25, "positions": holes(2, 2, 30, 60, 3)[..., :27]}
    assert error(bitmap_partial(*rows, **options).output, naive.bitmap_partial(*rows, **options).output) < 1e-5


def test_entries_that_keep_everything_are_exact(attention, error):
    """With every element kept, attention is that over the entries themselves."""
    query, keys, values = attention(GQA, 3, 20)
    found = bitmap_partial(query, compress(keys, 24), compress(values, 20), scale=0.3, seen=23).output
    assert error(found, dense_naive.dense_attention(query, keys, values, scale=0.3, seen=20, causal=False)) < 1e-5


def test_queries_without_a_visible_entry_add_nothing(sparse):
    """Where the window has left all entries behind, or there are none, the partial is zero with weight zero."""
    query, keys, values = sparse(GQA, 3, 20)
    for part in (
        bitmap_partial(query, keys, values, scale=0.3, seen=90, window=4),
        bitmap_partial(query, keys.slice(0, 0), values.slice(0, 0), scale=0.3, seen=90),
    ):
        assert (part.output == 0).all()
        assert (part.lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, sparse, error, allowed):
    """In 16 bits the output is off by no more than a few roundings."""
    rows = sparse(GQA, 5, 30, dtype=dtype)
    found = bitmap_partial(*rows, scale=0.3, seen=35).output
    assert error(found, naive.bitmap_partial(*rows, scale=0.3, seen=35).output) < allowed[dtype]


def test_memory_does_not_grow_with_entries(attention, largest, monkeypatch):
    """Eight times the entries make no larger temporary: no copy of all of them exists."""
    monkeypatch.setattr(plain, "BLOCK", 96 * 24)
    peaks = []
    for n in (192, 1536):
        query, keys, values = attention((2, 1), 1, n, batch=1)
        rows = compress(keys, 9), compress(values, 7)
        peaks.append(largest(lambda q=query, r=rows, n=n: bitmap_partial(q, *r, scale=0.3, seen=n + 1)))
    assert peaks[0] == peaks[1]


@pytest.fixture
def small_tiles(monkeypatch):
    """Triton's blocks are 8 queries and 16 entries, and tiles 32 entries."""
    fast = pytest.importorskip("kvbench.kernels.bitmap_attention.triton")
    monkeypatch.setattr(fast, "tile_entries", lambda *_: 32)
    monkeypatch.setattr(fast, "_blocks", lambda *_: (8, 16, 4))


@pytest.fixture
def triton_error(triton, error):
    """Error of Triton's output for that many entries, of which it also keeps the largest elements itself."""

    def measure(n_query, n_key, *, widths=(64, 32), kept=(33, 8), heads=(4, 2), batch=1, dtype=torch.float32,
                **options):
        generator = torch.Generator().manual_seed(0)
        query, keys, values = (
            torch.randn(batch, h, n, d, generator=generator).to(dtype)
            for h, n, d in ((heads[0], n_query, widths[0]), (heads[1], n_key, widths[0]), (heads[1], n_key, widths[1]))
        )
        rows = plain.compress(keys, kept[0]), plain.compress(values, kept[1])
        device = [SparseEntries(triton(x.bitmap), triton(x.values), x.width) for x in rows]
        options = {"scale": 0.3, "seen": n_key + n_query, **options}
        found = bitmap_partial(triton(query), *device, **triton(options))
        wanted = naive.bitmap_partial(query, *rows, **options)
        assert torch.allclose(found.lse.cpu().double(), wanted.lse, atol=1e-5 if dtype is torch.float32 else 0.02)
        return error(found.output, wanted.output)

    return measure


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_triton_equals_the_reference(rows, triton_error):
    """About a block of 16 entries and a tile of 32."""
    assert triton_error(1, rows) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "options", [{"window": 9}, {"softcap": 1.5}, {"start": 70, "seen": 120, "window": 40}], ids=str
)
def test_triton_under_every_option(options, triton_error):
    """Windows that leave tiles out or cut them, soft caps, and entries that begin later."""
    assert triton_error(2, 48, **options) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_counts_a_window_across_holes(holes, triton_error):
    """Where entries have gone missing the window goes by positions, head by head."""
    positions = holes(1, 2, 51, 90, 3)[..., :48]
    assert triton_error(3, 48, seen=90, window=33, positions=positions) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_serves_batches_head_layouts_and_widths(heads, precision, triton_error, allowed):
    """Two sequences, entries that are no whole words, and every precision."""
    error = triton_error(3, 20, heads=heads, batch=2, widths=(24, 20), kept=(9, 20), dtype=precision)
    assert error < allowed[precision]


def test_triton_adds_nothing_for_queries_without_a_visible_entry(triton, sparse):
    """Where the window has left all entries behind, or there are none, the partial is zero with weight zero."""
    query, *rows = sparse(GQA, 3, 20)
    keys, values = (SparseEntries(triton(x.bitmap), triton(x.values), x.width) for x in rows)
    for part in (
        bitmap_partial(triton(query), keys, values, scale=0.3, seen=90, window=4),
        bitmap_partial(triton(query), keys.slice(0, 0), values.slice(0, 0), scale=0.3, seen=90),
    ):
        assert (part.output == 0).all()
        assert (part.lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "kept"), [(64, 33), (20, 20), (33, 1)])
def test_triton_keeps_the_same_elements(width, kept, dtype, triton):
    """Bit for bit, with many elements of equal magnitude."""
    x = torch.randint(-4, 5, (2, 17, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    found, wanted = compress(triton(x), kept), plain.compress(x, kept)
    assert found.bitmap.cpu().equal(wanted.bitmap)
    assert found.values.cpu().equal(wanted.values)


@pytest.mark.gpu
@pytest.mark.parametrize("n_query", [1, 70])
def test_triton_at_full_size(n_query, precision, triton_error, allowed):
    """Heads of 128 channels and thousands of entries."""
    error = triton_error(n_query, 6000, widths=(128, 128), kept=(64, 40), heads=(32, 8), dtype=precision, scale=0.1)
    assert error < allowed[precision]
