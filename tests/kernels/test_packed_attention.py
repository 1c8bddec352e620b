"""Attention over packed entries, merged with an exact tail, against entries brought back to float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.kernels.choice import using
from kvbench.kernels.dense_attention import naive as dense_naive
from kvbench.kernels.pack import BITS, dequantize, quantize
from kvbench.kernels.packed_attention import naive, packed_partial
from kvbench.kernels.packed_attention import torch as plain
from kvbench.kernels.ragged_attention import dense_partial, merge_partials

GQA = (6, 2)
GROUPS = {  # of keys (tokens, channels), of values
    "KIVI": ((6, 1), 4), "by token": ((1, 12), 10), "whole rows": ((1, 24), 20), "all tokens": ((30, 1), 20),
    "each by itself": ((1, 1), 1),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 17},
    "narrow window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 3, GQA[0])},
    "everything": {"window": 17, "softcap": 1.5, "sinks": torch.linspace(-2, 3, GQA[0])},
}
PACKED, VALUES = 30, 27
"""Entries whose keys are packed, and whose values are: a block of keys is packed before the last of its values."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 queries and 8 entries of 2 x 2 heads, so that small sizes cross their edges."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 4)
    monkeypatch.setattr(plain, "BLOCK", 8 * 2 * 2 * 24)


@pytest.fixture
def packed(attention):
    """A query, packed keys and values, and the exact tail of both: 27 packed entries, then `tail` exact ones."""

    def make(heads, n_query, tail, bits, group, dtype=torch.float32):
        query, keys, values = attention(heads, n_query, PACKED + tail, dtype=dtype)
        (tokens, channels), value_channels = group
        key_codes = quantize(keys[:, :, :PACKED], bits, tokens=tokens, channels=channels)
        value_codes = quantize(values[:, :, :VALUES], bits, channels=value_channels)
        between = dequantize(key_codes)[:, :, VALUES:].to(dtype)  # keys packed, values not yet
        tail_keys = torch.cat([between, keys[:, :, PACKED:]], dim=2)
        return query, key_codes, value_codes, tail_keys, values[:, :, VALUES:]

    return make


def both(query, keys, values, tail_keys, tail_values, *, positions=None, sinks=None, **options):
    """Our output: partial attentions over packed entries and over the tail, merged."""
    rows = values.packed.shape[2]
    packed_positions, tail_positions = (None, None) if positions is None else positions.split(
        [rows, tail_keys.shape[2]], dim=2
    )
    parts = [
        packed_partial(query, keys, values, positions=packed_positions, **options),
        dense_partial(query, tail_keys, tail_values, positions=tail_positions, **options),
    ]
    return merge_partials(parts, sinks)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_equals_the_reference(bits, group, options, packed, error):
    """Every width, grouping and option gives attention over what the codes stand for, for one query and several."""
    for size in ((1, 1), (5, 9)):
        rows = packed(GQA, *size, bits, group)
        given = {"scale": 0.3, "seen": VALUES + rows[3].shape[2], **options}
        assert error(both(*rows, **given), naive.packed_attention(*rows, **given)) < 1e-5


def test_other_head_layouts(heads, packed, error):
    """Grouped queries, one query head per KV head, and all query heads on one."""
    for group in GROUPS.values():
        rows = packed(heads, 3, 7, 2, group)
        options = {"scale": 0.3, "seen": VALUES + rows[3].shape[2]}
        assert error(both(*rows, **options), naive.packed_attention(*rows, **options)) < 1e-5


@pytest.mark.parametrize("n_query", [1, 5])
def test_a_window_counts_tokens_across_holes(n_query, packed, holes, error):
    """Where entries have gone missing the window goes by positions, head by head."""
    rows = packed(GQA, n_query, 9, 3, GROUPS["KIVI"])
    positions = holes(2, 2, VALUES + rows[3].shape[2], 60, n_query)
    options = {"scale": 0.3, "seen": 60, "window": 25, "positions": positions}
    assert error(both(*rows, **options), naive.packed_attention(*rows, **options)) < 1e-5


def test_entries_may_begin_later(packed, error):
    """With `start`, the first packed entry is that token, and a window counts from there."""
    rows = packed(GQA, 2, 5, 2, GROUPS["KIVI"])
    tail = rows[3].shape[2]
    options = {"scale": 0.3, "window": 14}
    parts = [
        packed_partial(*rows[:3], seen=100 + VALUES + tail, start=100, **options),
        dense_partial(rows[0], *rows[3:], seen=100 + VALUES + tail, **options),
    ]
    assert error(merge_partials(parts), naive.packed_attention(*rows, seen=VALUES + tail, **options)) < 1e-5


def test_queries_without_a_visible_entry_add_nothing(packed):
    """Where the window has left all packed entries behind, or there are none, the partial is zero with weight zero."""
    query, keys, values, *_ = packed(GQA, 3, 7, 2, GROUPS["KIVI"])
    positions = torch.arange(VALUES).expand(2, 2, -1)
    for part in (
        packed_partial(query, keys, values, scale=0.3, seen=90, window=4),
        packed_partial(query, keys, values, scale=0.3, seen=90, window=4, positions=positions),
        packed_partial(query, keys.slice(0, 0), values.slice(0, 0), scale=0.3, seen=90),
    ):
        assert (part.output == 0).all()
        assert (part.lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, packed, error, allowed):
    """Queries of 16 bits are computed with in float32: what is left is the tail's rounding."""
    rows = packed(GQA, 5, 9, 4, GROUPS["KIVI"], dtype)
    options = {"scale": 0.3, "seen": VALUES + rows[3].shape[2]}
    found = both(*rows, **options)
    assert error(found, naive.packed_attention(rows[0].double(), *rows[1:], **options)) < allowed[dtype]


def test_large_values_cost_no_more(packed, error):
    """Keys and values far from zero, where codes are small next to their minimum, lose nothing but float32's digits."""
    query, keys, values, tail_keys, tail_values = packed(GQA, 2, 4, 2, GROUPS["KIVI"])
    far = quantize(dequantize(keys) + 100, 2, tokens=6), quantize(dequantize(values) + 100, 2, channels=4)
    rows = (query, *far, tail_keys + 100, tail_values + 100)
    options = {"scale": 0.3, "seen": VALUES + tail_keys.shape[2]}
    assert error(both(*rows, **options), naive.packed_attention(*rows, **options)) < 1e-5


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_is_near_attention_over_exact_entries(bits, attention, error):
    """More bits cost less, and all cost something: the error halves about b times."""
    query, keys, values = attention(GQA, 5, 60)
    codes = quantize(keys, bits, tokens=6), quantize(values, bits, channels=4)
    found = packed_partial(query, *codes, scale=0.2, seen=65).output
    exact = dense_naive.dense_attention(query, keys, values, scale=0.2, seen=60, causal=False)
    cost = error(found, exact) * (2**bits - 1)
    assert 0.1 < cost < 1.5


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [GROUPS["KIVI"], GROUPS["by token"]], ids=["KIVI", "by token"])
def test_memory_does_not_grow_with_entries(bits, group, attention, largest, monkeypatch):
    """Eight times the entries need no larger temporary, for one query and for many: nothing is dequantized whole."""
    monkeypatch.setattr(plain, "BLOCK", 96 * 24)
    for n_query in (1, 9):
        peaks = []
        for n in (192, 1536):
            query, keys, values = attention((2, 1), n_query, n, batch=1)
            (tokens, channels), value_channels = group
            codes = (quantize(keys, bits, tokens=tokens, channels=channels),
                     quantize(values, bits, channels=value_channels))
            peaks.append(largest(lambda q=query, c=codes, n=n: packed_partial(q, *c, scale=0.3, seen=n + q.shape[2])))
        assert peaks[0] == peaks[1]


def test_a_long_group_is_read_in_parts(attention, largest, monkeypatch):
    """Where all tokens share a channel's scale, blocks are no larger than where few do."""
    monkeypatch.setattr(plain, "BLOCK", 96 * 24)
    query, keys, values = attention((2, 1), 1, 1536, batch=1)
    value_codes = quantize(values, 2, channels=20)
    peaks = []
    for tokens in (96, 1536):
        codes = quantize(keys, 2, tokens=tokens)
        peaks.append(largest(lambda k=codes: packed_partial(query, k, value_codes, scale=0.3, seen=1537)))
    assert peaks[0] == peaks[1]


LAYOUTS = {"words": (64, 32), "bytes": (24, 20)}
"""Widths of keys and of values: powers of two, which are read as words, and others."""
KINDS = {  # tokens and channels of a group of keys, and channels of one of values, by entries and widths
    "KIVI": lambda n, d, v: ((8, 1), v // 4),
    "MiKV": lambda n, d, v: ((1, d // 2), v // 2),
    "ZipCache": lambda n, d, v: ((n, 1), v),
    "groups across blocks": lambda n, d, v: ((12, 1), v // 2),
    "groups of several blocks": lambda n, d, v: ((48, 1), v),
    "each by itself": lambda n, d, v: ((1, 1), 1),
}
BIAS = 0.3
"""Added to all elements, so that minima are not all alike."""


@pytest.fixture
def triton_error(triton, error):
    """Error of Triton's output for that many packed entries; its log-sum-exp must agree as well."""

    def moved(codes):
        return replace(codes, packed=triton(codes.packed), scale=triton(codes.scale), minimum=triton(codes.minimum))

    def measure(kind, bits, rows, *, widths=LAYOUTS["words"], heads=(4, 2), n_query=1, batch=1, dtype=torch.float32,
                **options):
        generator = torch.Generator().manual_seed(0)
        query, keys, values = (
            torch.randn(batch, h, n, d, generator=generator) + BIAS
            for h, n, d in ((heads[0], n_query, widths[0]), (heads[1], rows, widths[0]), (heads[1], rows, widths[1]))
        )
        (tokens, channels), value_channels = KINDS[kind](rows, *widths)
        with using("torch"):
            codes = (quantize(keys, bits, tokens=tokens, channels=channels),
                     quantize(values, bits, channels=value_channels))
        options = {"scale": 0.3, "seen": rows + n_query, **options}
        found = packed_partial(triton(query.to(dtype)), *map(moved, codes), **triton(options))
        wanted = naive.packed_partial(query.to(dtype), *codes, **options)
        assert torch.allclose(found.lse.cpu().double(), wanted.lse, atol=1e-5 if dtype is torch.float32 else 0.02)
        return error(found.output, wanted.output)

    return measure


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize("widths", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("kind", "bits"), [*((kind, 3) for kind in KINDS), *(("MiKV", bits) for bits in (2, 4, 8))])
def test_triton_equals_the_reference(kind, bits, widths, triton_error):
    """Every grouping and every width of codes, over two tiles, gives attention over what the codes stand for."""
    assert triton_error(kind, bits, 48, widths=widths) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize(("kind", "bits"), [("KIVI", 2), ("MiKV", 3), ("ZipCache", 4)])
def test_triton_computes_in_every_precision(kind, bits, precision, triton_error, allowed):
    """The products of 16 bits are float16's, whatever the queries are."""
    assert triton_error(kind, bits, 40, dtype=precision) < allowed[precision]


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize(
    "options", [{"window": 9}, {"window": 30}, {"softcap": 1.5}, {"start": 70, "seen": 125, "window": 40}], ids=str
)
def test_triton_under_every_option(options, triton_error):
    """Windows that leave tiles out or cut them, soft caps, and entries that begin later."""
    assert triton_error("KIVI", 2, 48, n_query=2, **options) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
def test_triton_counts_a_window_across_holes(holes, triton_error):
    """Where entries have gone missing the window goes by positions, head by head."""
    positions = holes(1, 2, 51, 90, 3)[..., :48]
    assert triton_error("MiKV", 2, 48, n_query=3, seen=90, window=33, positions=positions) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33])
def test_triton_ends_where_entries_do(rows, triton_error):
    """About a block of 16 entries and a tile of 32."""
    assert triton_error("MiKV", 4, rows) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
def test_triton_serves_batches_and_head_layouts(heads, triton_error):
    """Two sequences, and more columns of queries than a block has."""
    assert triton_error("MiKV", 2, 20, heads=heads, batch=2, n_query=3) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
def test_triton_takes_parameters_that_heads_share(triton, attention, error):
    """As in ZipCache, values have one scale per entry over all heads; keys and values are slices of a larger block."""
    query, keys, values = attention(GQA, 2, 40)
    with using("torch"):
        key_codes, rows = quantize(keys, 4, tokens=40), quantize(values.transpose(1, 2), 4, tokens=2, channels=20)
    value_codes = replace(rows, packed=rows.packed.transpose(1, 2).contiguous(), scale=rows.scale.transpose(1, 2),
                          minimum=rows.minimum.transpose(1, 2)).slice(0, 37)
    codes = [replace(x, **triton({"packed": x.packed, "scale": x.scale, "minimum": x.minimum}))
             for x in (key_codes, value_codes)]
    found = packed_partial(triton(query), *codes, scale=0.3, seen=39)
    exact = replace(value_codes, scale=value_codes.scale.expand(-1, 2, -1, -1),
                    minimum=value_codes.minimum.expand(-1, 2, -1, -1))
    assert error(found.output, naive.packed_partial(query, key_codes, exact, scale=0.3, seen=39).output) < 1e-5


def test_triton_rounds_no_query_of_16_bits(triton):
    """A channel of large keys, as Qwen2.5 has, would move all logits against those of exact entries."""
    query, keys = torch.ones(1, 1, 1, 64).half(), torch.zeros(1, 1, 32, 64)
    query[..., 0], query[..., 1], keys[..., 0] = 11.9, 12.0, 354.0
    with using("torch"):
        codes = quantize(keys, 2, tokens=8), quantize(keys, 2, channels=32)
    moved = [replace(x, **triton({"packed": x.packed, "scale": x.scale, "minimum": x.minimum})) for x in codes]
    found = packed_partial(triton(query), *moved, scale=0.18, seen=33)
    wanted = naive.packed_partial(query, *codes, scale=0.18, seen=33)
    assert torch.allclose(found.lse.cpu().double(), wanted.lse, atol=1e-3)


def test_triton_adds_nothing_for_queries_without_a_visible_entry(triton, packed):
    """Where the window has left all packed entries behind, or there are none, the partial is zero with weight zero."""
    with using("torch"):
        query, keys, values, *_ = packed(GQA, 3, 7, 2, GROUPS["KIVI"])
    codes = [replace(x, **triton({"packed": x.packed, "scale": x.scale, "minimum": x.minimum})) for x in (keys, values)]
    positions = triton(torch.arange(VALUES).expand(2, 2, -1))
    for part in (
        packed_partial(triton(query), *codes, scale=0.3, seen=90, window=4),
        packed_partial(triton(query), *codes, scale=0.3, seen=90, window=4, positions=positions),
        packed_partial(triton(query), *(x.slice(0, 0) for x in codes), scale=0.3, seen=90),
    ):
        assert (part.output == 0).all()
        assert (part.lse == -torch.inf).all()


def test_triton_in_the_blocks_that_a_gpu_has(precision, triton_error, allowed):
    """One block of entries and one more entry, and fewer, as they are launched."""
    for rows in (1, 129):
        assert triton_error("MiKV", 2, rows, dtype=precision, heads=(2, 1)) < allowed[precision]


@pytest.mark.gpu
@pytest.mark.parametrize("n_query", [1, 70])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["KIVI", "MiKV", "ZipCache"])
def test_triton_at_full_size(kind, bits, n_query, precision, triton_error, allowed):
    """Heads of 128 channels and thousands of entries."""
    error = triton_error(kind, bits, 6000, widths=(128, 128), heads=(32, 8), n_query=n_query, dtype=precision,
                         scale=128**-0.5)
    assert error < allowed[precision]
