"""8-bit attention against entries brought back to float64, and the codes against what they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.kernels.dense_attention import naive as dense_naive
from kvbench.kernels.int8_attention import int8_attention, naive, quantize_rows
from kvbench.kernels.int8_attention import torch as plain

SIZES = [(1, 1), (1, 7), (1, 8), (1, 9), (5, 5), (4, 16), (9, 9), (9, 30)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 queries and 8 entries, so that small sizes cross their edges."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 4)
    monkeypatch.setattr(plain, "ENTRY_BLOCK", 8)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_reference(heads, size, options, attention, error):
    """Every head layout, size and option gives attention over the dequantized entries within 1e-5."""
    query, keys, values = attention(heads, *size)
    codes = quantize_rows(keys, values)
    options = {"scale": 0.3, **options}
    assert error(int8_attention(query, **codes, **options), naive.int8_attention(query, **codes, **options)) < 1e-5


@pytest.mark.parametrize("n_query", [1, 5])
def test_a_length_on_the_device_cuts_the_block(heads, n_query, options, attention, error):
    """Reading a whole preallocated block up to `length` equals reading its slice."""
    query, keys, values = attention(heads, n_query, 20)
    codes = quantize_rows(keys, values)
    options = {"scale": 0.3, **options}
    found = int8_attention(query, **codes, length=torch.tensor(13), **options)
    cut = {name: x[:, :, :13] for name, x in codes.items()}
    assert error(found, naive.int8_attention(query, **cut, **options)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the output is off by no more than a few roundings."""
    query, keys, values = attention((6, 2), 9, 30, dtype=dtype)
    codes = quantize_rows(keys, values)
    found = int8_attention(query, **codes, scale=0.3)
    assert found.dtype == dtype
    assert error(found, naive.int8_attention(query.double(), **codes, scale=0.3)) < allowed[dtype]


def test_large_queries_do_not_overflow_in_float16(attention, error):
    """A logit within float16's range stays so although its codes are 127 times larger."""
    query, keys, values = attention((6, 2), 3, 30, dtype=torch.float16)
    query, keys = query.abs() * 120, keys.abs() * 4
    codes = quantize_rows(keys, values)
    found = int8_attention(query, **codes, scale=0.001)
    assert error(found, naive.int8_attention(query.double(), **codes, scale=0.001)) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_small_weights_of_many_entries_are_not_lost(dtype, error, monkeypatch):
    """Half of the mass on 65,535 entries, each with less of it than float16's least number."""
    monkeypatch.setattr(plain, "ENTRY_BLOCK", 2048)
    count = 65_536
    query, keys, values = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, count, 16), torch.full((1, 1, count, 16), 0.05)
    query[..., 0], keys[:, :, 0, 0], values[:, :, 0] = 4.0, math.log(count), 0.0
    codes = quantize_rows(keys.to(dtype), values.to(dtype))
    found = int8_attention(query.to(dtype), **codes, scale=0.25)
    assert error(found, naive.int8_attention(query.double(), **codes, scale=0.25)) < 5e-3


def test_is_near_attention_over_exact_entries(heads, attention, error):
    """Eight bits cost less than one part in a hundred of the output, and something."""
    query, keys, values = attention(heads, 5, 40)
    found = int8_attention(query, **quantize_rows(keys, values), scale=0.2)
    cost = error(found, dense_naive.dense_attention(query, keys, values, scale=0.2, seen=40))
    assert 1e-5 < cost < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1e-2, 1.0, 300.0])
def test_codes_are_within_half_a_step_of_their_entries(dtype, size, attention):
    """The error of an element is at most half its entry's scale, and codes use the range of +-127."""
    _, keys, values = attention((6, 2), 1, 50, dtype=dtype)
    keys, values = keys * size, values * size
    codes = quantize_rows(keys, values)
    for name, x in (("key", keys), ("value", values)):
        code, scale = codes[name], codes[f"{name}_scale"]
        assert code.dtype == torch.int8
        assert scale.dtype == torch.float16
        assert code.abs().amax() <= 127
        assert (code.abs().amax(-1) >= 126).all()
        step = scale.double()[..., None]
        assert ((code.double() * step - x.double()).abs() <= 0.57 * step).all()  # the scale itself is rounded


def test_entries_of_zeros_stay_zeros(attention):
    """An entry of zeros, or of what float16 takes for it, has scale 0 and codes 0, and attention over it is finite."""
    query, keys, values = attention((6, 2), 3, 10)
    keys[:, :, 4], values[:, :, 4], keys[:, :, 5] = 0, 0, 1e-9
    codes = quantize_rows(keys, values)
    assert (codes["key"][:, :, 4:6] == 0).all()
    assert (codes["value_scale"][:, :, 4] == 0).all()
    assert int8_attention(query, **codes, scale=0.3).isfinite().all()


def test_memory_is_linear(attention, largest, monkeypatch):
    """Twice the entries make no larger temporary than one block: no exact copy of the codes exists."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 256)
    monkeypatch.setattr(plain, "ENTRY_BLOCK", 512)
    peaks = {}
    for n in (2048, 4096):
        query, keys, values = attention((2, 1), n // 2, n, batch=1)
        codes = quantize_rows(keys, values)
        peaks[n] = largest(lambda q=query, c=codes: int8_attention(q, **c, scale=0.3))
    assert peaks[4096] <= 2.1 * peaks[2048]
    assert peaks[4096] <= 2 * 256 * 512


@pytest.fixture
def triton_error(triton, error):
    """Error of Triton's output for that many entries, the last of which are the queries' own."""

    def measure(n_query, n_key, *, widths=(64, 32), heads=(4, 2), batch=1, dtype=torch.float32, **options):
        generator = torch.Generator().manual_seed(0)
        query, keys, values = (
            torch.randn(batch, h, n, d, generator=generator).to(dtype)
            for h, n, d in ((heads[0], n_query, widths[0]), (heads[1], n_key, widths[0]), (heads[1], n_key, widths[1]))
        )
        codes = plain.quantize_rows(keys, values)
        options = {"scale": 0.3, **options}
        found = int8_attention(triton(query), **triton(codes), **triton(options))
        assert found.dtype == dtype
        if (length := options.pop("length", None)) is not None:
            codes = {name: x[:, :, :length] for name, x in codes.items()}
        return error(found, naive.int8_attention(query.double(), **codes, **options))

    return measure


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize("size", [(1, 1), (1, 15), (1, 16), (1, 17), (3, 33), (20, 20)], ids=str)
def test_triton_equals_the_reference(size, triton_error):
    """About a block of 16 entries and a tile of 32, for one query, several, and a whole prompt."""
    assert triton_error(*size) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
@pytest.mark.parametrize("options", [{"window": 6}, {"window": 30}, {"softcap": 1.5}, {"length": torch.tensor(29)},
                                     {"sinks": torch.linspace(-2, 3, 4), "window": 9, "softcap": 1.5}], ids=str)
def test_triton_under_every_option(options, triton_error):
    """Windows, soft caps, sinks, and a length on the device that cuts the block."""
    assert triton_error(3, 48, **options) < 1e-5


@pytest.mark.usefixtures("small_code_tiles")
def test_triton_serves_batches_head_layouts_and_widths(heads, precision, triton_error, allowed):
    """Two sequences, entries that are no whole words, and every precision."""
    assert triton_error(2, 20, heads=heads, batch=2, widths=(24, 20), dtype=precision) < allowed[precision]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_triton_makes_the_same_codes(dtype, triton, attention):
    """Bit for bit, entries of zeros and of next to nothing included."""
    _, keys, values = attention((6, 2), 1, 19, dtype=dtype)
    keys[:, :, 4], keys[:, :, 5], values[:, :, 6] = 0, 1e-9, 300
    found, wanted = quantize_rows(*triton([keys, values])), plain.quantize_rows(keys, values)
    assert {name: x.cpu().tolist() for name, x in found.items()} == {name: x.tolist() for name, x in wanted.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 6000), (70, 6000), (3000, 3000)], ids=str)
def test_triton_at_full_size(size, precision, triton_error, allowed):
    """Heads of 128 channels and thousands of entries."""
    assert triton_error(*size, widths=(128, 128), heads=(32, 8), dtype=precision, scale=0.1) < allowed[precision]
