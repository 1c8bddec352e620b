"""Attention over codes of uneven levels, merged with an exact tail, against the same numbers in float64."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.choice import using
from kvbench.kernels.level_attention import Levels, decode_levels, level_partial, naive
from kvbench.kernels.pack import pack, packed_width
from kvbench.kernels.ragged_attention import dense_partial, merge_partials

GQA, ENTRIES, SEEN = (6, 2), 37, 50
PARTS = {
    "one factor": ([(24, 3, 24)], [(20, 3, 20)]),
    "factors of blocks": ([(32, 4, 16)], [(64, 4, 16)]),
    "two parts": ([(8, 4, 8), (24, 3, 24)], [(16, 2, 16), (48, 1, 48)]),
    "two parts of keys": ([(32, 1, 32), (32, 2, 8)], [(32, 2, 32)]),
}
"""Keys and values: width, bits and channels of a factor, of every part."""


def random_parts(parts, entries, generator, *, e4m3=False):
    """Codes of random levels, which are every second entry of a buffer that has NaN and largest codes elsewhere."""
    made = []
    for width, bits, channels in parts:
        codes = torch.randint(2**bits, (2, GQA[1], entries, width), generator=generator, dtype=torch.uint8)
        factor = torch.rand(2, GQA[1], entries, width // channels, generator=generator).half() * 2
        if e4m3:
            factor = factor.to(torch.float8_e4m3fn).view(torch.uint8)
        packed = torch.full((2, GQA[1], 2 * entries, packed_width(width, bits)), 255, dtype=torch.uint8)
        factors = torch.full((2, GQA[1], 2 * entries, width // channels), 0x7F if e4m3 else torch.nan).to(factor.dtype)
        packed[:, :, :entries], factors[:, :, :entries] = pack(codes, bits), factor
        table = torch.randn(2**bits, generator=generator)
        made.append(Levels(packed[:, :, :entries], factors[:, :, :entries], table, bits, width))
    return tuple(made)


@pytest.fixture
def entries():
    """A query, codes of 37 entries, and an exact tail."""

    def make(n_query, tail, parts, dtype=torch.float32, *, e4m3=False):
        generator = torch.Generator().manual_seed(0)
        keys, values = (random_parts(x, ENTRIES, generator, e4m3=e4m3) for x in parts)
        widths = [sum(x.width for x in found) for found in (keys, values)]
        query = torch.randn(2, GQA[0], n_query, widths[0], generator=generator).to(dtype)
        exact = (torch.randn(2, GQA[1], tail, width, generator=generator).to(dtype) for width in widths)
        return query, keys, values, *exact

    return make


def both(query, keys, values, tail_keys, tail_values, *, sinks=None, **options):
    """Our output: partial attentions over codes and over the tail, merged."""
    parts = [
        level_partial(query, keys, values, start=SEEN - ENTRIES - tail_keys.shape[2], **options),
        dense_partial(query, tail_keys, tail_values, **options),
    ]
    return merge_partials(parts, sinks)


def reference(query, keys, values, tail_keys, tail_values, *, sinks=None, **options):
    """Partial attentions in float64, merged by the definition."""
    part = naive.level_partial(query, keys, values, start=SEEN - ENTRIES - tail_keys.shape[2], **options)
    tail = dense_partial(query.double(), tail_keys.double(), tail_values.double(), **options)
    return merge_partials([part, tail], sinks)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("size", [(1, 1), (3, 5)], ids=str)
def test_equals_the_reference(size, parts, e4m3, options, entries, error):
    """One and several queries, under every option, with one and two parts of keys and of values."""
    given = entries(*size, parts, e4m3=e4m3)
    options = {"scale": 0.3, "seen": SEEN, **options}
    assert error(both(*given, **options), reference(*given, **options)) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("n_query", [1, 5])
def test_triton_equals_the_reference(n_query, parts, e4m3, options, precision, entries, triton, error, allowed):
    """In every precision, under every option, with tiles smaller than the entries."""
    given = entries(n_query, 7, parts, precision, e4m3=e4m3)
    options = {"scale": 0.3, "seen": SEEN, **options}
    found = both(*move(given, triton), **triton(options))
    assert error(found.cpu(), reference(*given, **options)) < allowed[precision]


def move(given, to_device):
    """A query, codes and a tail on the device: a buffer's tensors are moved with the entries that it does not hold."""

    def moved(part):
        entries = part.packed.shape[2]
        wide = (x.as_strided((*x.shape[:2], 2 * entries, x.shape[3]), x.stride()) for x in (part.packed, part.factor))
        packed, factor = (to_device(x)[:, :, :entries] for x in wide)
        return Levels(packed, factor, to_device(part.table), part.bits, part.width)

    return [tuple(moved(x) for x in y) if isinstance(y, tuple) else to_device(y) for y in given]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_length_on_the_device_leaves_out_later_entries(implementation, window, entries, triton, error):
    """As a block of as many entries, the last of them the query's own; the entries after them do not count."""
    query, keys, values, *_ = move(entries(1, 1, PARTS["two parts"]), triton)
    options = {"scale": 0.3, "window": window}
    first = (slice(None), slice(None), slice(20))
    with using(implementation):
        short = level_partial(query, *(tuple(x[first] for x in y) for y in (keys, values)), seen=20, **options)
        found = level_partial(query, keys, values, seen=999, length=torch.tensor(20, device=query.device), **options)
    assert error(found.output, short.output) < 1e-5
    assert error(found.lse, short.lse) < 1e-5


def test_by_hand():
    """Two parts: the code 1 of the levels 5 and 7, times a factor of 0.5, and one of -1 and 2, by blocks of two."""
    one, other = torch.tensor([[[[1, 0]]]], dtype=torch.uint8), torch.tensor([[[[0, 1, 1, 0]]]], dtype=torch.uint8)
    parts = (
        Levels(pack(one, 1), torch.tensor([[[[0.5]]]]).half(), torch.tensor([5.0, 7.0]), 1, 2),
        Levels(pack(other, 1), torch.tensor([[[[1.0, 4.0]]]]).half(), torch.tensor([-1.0, 2.0]), 1, 4),
    )
    wanted = torch.tensor([3.5, 2.5, -1.0, 2.0, 8.0, -4.0])
    assert torch.equal(decode_levels(parts).flatten(), wanted)
    assert torch.equal(naive.decode(parts).flatten().float(), wanted)


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """Heads of 128 channels and thousands of entries: a quarter of the channels in 4 bits, the others in 3."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 16, 1, 128, generator=generator).to(precision)
    keys, values = (random_parts([(32, 4, 32), (96, 3, 96)], 6000, generator) for _ in range(2))
    options = {"scale": 128**-0.5, "seen": 6001}
    found = level_partial(*move((query, keys, values), triton), **options)
    wanted = naive.level_partial(query, keys, values, **options)
    assert error(found.output.cpu(), wanted.output) < allowed[precision]
