"""Attention over e4m3 numbers, merged with an exact tail, against the same numbers in float64."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.cast_attention import cast_partial, naive
from kvbench.kernels.choice import using
from kvbench.kernels.ragged_attention import dense_partial, merge_partials

GQA, ENTRIES, SEEN = (6, 2), 37, 50
FACTORS = {"plain": (None, None), "one": ([0.3], [2.5]), "by head": ([0.3, 1.7], [2.5, 0.2])}


@pytest.fixture
def entries(attention):
    """A query, e4m3 numbers of 37 entries, which are every second one of a buffer, and an exact tail."""

    def make(n_query, tail, dtype=torch.float32, heads=GQA, widths=None):
        query, keys, values = attention(heads, n_query, 2 * ENTRIES + tail, dtype=dtype)
        casts = [x[:, :, :ENTRIES].float().to(torch.float8_e4m3fn).view(torch.uint8) for x in (keys, values)]
        buffers = [torch.full((*x.shape[:2], 2 * ENTRIES, x.shape[3]), 0x7F, dtype=torch.uint8) for x in casts]
        for buffer, cast in zip(buffers, casts, strict=True):
            buffer[:, :, :ENTRIES] = cast  # entries of a growing buffer, of which the others are not numbers
        return query, *(x[:, :, :ENTRIES] for x in buffers), keys[:, :, 2 * ENTRIES :], values[:, :, 2 * ENTRIES :]

    return make


def both(query, keys, values, tail_keys, tail_values, *, factors, sinks=None, **options):
    """Our output: partial attentions over e4m3 numbers and over the tail, merged."""
    parts = [
        cast_partial(query, keys, values, *factors, start=SEEN - ENTRIES - tail_keys.shape[2], **options),
        dense_partial(query, tail_keys, tail_values, **options),
    ]
    return merge_partials(parts, sinks)


def reference(query, keys, values, tail_keys, tail_values, *, factors, seen, **options):
    """The reference implementation of `both`."""
    del seen  # positions count from the first entry
    return naive.cast_attention(query, keys, values, *factors, tail_keys, tail_values, **options)


def as_tensors(factors):
    """Factors of keys and values."""
    return [None if x is None else torch.tensor(x) for x in factors]


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("size", [(1, 1), (3, 5)], ids=str)
def test_equals_the_reference(size, factors, options, entries, error):
    """One and several queries, under every option, with and without factors."""
    given = entries(*size)
    options = {"scale": 0.3, "seen": SEEN, "factors": as_tensors(factors), **options}
    assert error(both(*given, **options), reference(*given, **options)) < 1e-5


@pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("n_query", [1, 5])
def test_triton_equals_the_reference(n_query, factors, options, precision, entries, triton, error, allowed):
    """In every precision, under every option."""
    given = entries(n_query, 7, precision)
    options = {"scale": 0.3, "seen": SEEN, "factors": as_tensors(factors), **options}
    found = both(*triton(list(given)), **triton(options))
    assert error(found.cpu(), reference(*given, **options)) < allowed[precision]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_length_on_the_device_leaves_out_later_entries(implementation, window, entries, triton, error):
    """As a block of as many entries, the last of them the query's own; the entries after them do not count."""
    query, keys, values, *_ = triton(list(entries(1, 1)))
    options = {"scale": 0.3, "window": window}
    with using(implementation):
        short = cast_partial(query, keys[:, :, :20], values[:, :, :20], None, None, seen=20, **options)
        found = cast_partial(
            query, keys, values, None, None, seen=999, length=torch.tensor(20, device=query.device), **options
        )
    assert error(found.output, short.output) < 1e-5
    assert error(found.lse, short.lse) < 1e-5


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_every_number_is_read(implementation, triton):
    """Each byte as a value of the only entry: zeros, subnormal numbers, both signs, and not a number."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    keys, values = torch.zeros(1, 1, 1, 16, dtype=torch.uint8), bytes_.view(1, 1, 1, 256)
    with using(implementation):
        found = cast_partial(*triton([torch.ones(1, 1, 1, 16), keys, values]), None, None, scale=1.0, seen=2)
    wanted = naive.read(bytes_).float()
    torch.testing.assert_close(wanted, bytes_.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.output.cpu().flatten(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """Heads of 128 channels and thousands of entries."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 32, 1, 128, generator=generator).to(precision)
    keys, values = (
        torch.randn(1, 8, 6000, 128, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8) for _ in range(2)
    )
    options = {"scale": 128**-0.5, "seen": 6001}
    found = cast_partial(*triton([query, keys, values]), None, None, **options).output
    none = torch.zeros(1, 8, 0, 128)
    wanted = naive.cast_attention(query, keys, values, None, None, none, none, scale=128**-0.5)
    assert error(found.cpu(), wanted) < allowed[precision]
