"""Codes against bits set one by one, and what they stand for against the entries they were made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbench.kernels.pack import BITS, code_planes, dequantize, look_up, naive, pack, packed_width, quantize, unpack
from kvbench.kernels.pack import torch as plain

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = {"channels": (1, 8), "tokens": (4, 1), "whole rows": (1, 24), "all tokens": (12, 1), "blocks": (4, 8)}


def random_codes(shape, bits, seed=0):
    """Codes that use the whole range. uint8"""
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def brought_back(codes):
    """The codes by the reference, in float64."""
    return naive.dequantize(
        codes.packed, codes.scale, codes.minimum, codes.bits, codes.width, tokens=codes.tokens,
        channels=codes.channels,
    )


def by_row(x, codes):
    """A group's number for each of its elements. [..., n, D] float64"""
    return x.double().repeat_interleave(codes.tokens, -2).repeat_interleave(codes.channels, -1)


@given(bits=st.sampled_from((1, *BITS)), count=st.integers(1, 70), rows=st.integers(1, 3), seed=st.integers(0, 99))
def test_codes_come_back(bits, count, rows, seed):
    """Any number of codes of any width is packed as the reference packs it, comes back, and takes the bytes it must."""
    codes = random_codes((2, rows, count), bits, seed)
    packed = pack(codes, bits)
    assert packed.equal(naive.pack(codes, bits))
    assert unpack(packed, bits, count).equal(codes)
    assert naive.unpack(packed, bits, count).equal(codes)
    assert packed.shape[-1] == packed_width(count, bits)
    assert 0 <= 8 * packed_width(count, bits) - bits * count < 8 * (2 if bits == 3 else 1)  # less than a byte is idle
    levels = torch.randn(2**bits)
    assert look_up(levels, codes).equal(levels[codes.long()])


def test_bits_lie_where_they_are_said_to():
    """By hand: 8 codes of 2 bits in bytes of w = 2, and 8 codes of 3 bits in 3 bytes, high bits last."""
    assert pack(torch.tensor([1, 2, 3, 0, 1, 1, 2, 3], dtype=torch.uint8), 2).tolist() == [
        1 + (3 << 2) + (1 << 4) + (2 << 6), 2 + (0 << 2) + (1 << 4) + (3 << 6)
    ]
    assert pack(torch.arange(8, dtype=torch.uint8), 3).tolist() == [
        0 + (2 << 2) + (0 << 4) + (2 << 6), 1 + (3 << 2) + (1 << 4) + (3 << 6), 0b11110000
    ]


@pytest.mark.parametrize("bits", BITS)
def test_planes_are_the_codes(bits):
    """Element i of an entry is in plane i // w at i % w, and the parts add up to the codes."""
    codes = random_codes((2, 5, 20), bits)
    total = torch.zeros_like(codes)
    for below, planes in code_planes(pack(codes, bits), bits, 20):
        width = planes.shape[-1]
        for i in range(20):
            total[..., i] += planes[i // width, ..., i % width] << below
    assert total.equal(codes)


@given(
    dtype=st.sampled_from(DTYPES), group=st.sampled_from(list(GROUPS.values())), bits=st.sampled_from(BITS),
    size=st.sampled_from([1e-6, 1e-2, 1.0, 300.0]), offset=st.sampled_from([0.0, 1.0, -100.03, 5e3]),
    seed=st.integers(0, 99),
)
def test_elements_are_within_half_a_scale(dtype, group, bits, size, offset, seed):
    """For all entries: an element comes back within half its group's scale, and float32's own rounding."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, 12, 24, generator=generator) * size + offset).to(dtype)
    codes = quantize(x, bits, tokens=group[0], channels=group[1])
    assert codes.scale.dtype == codes.minimum.dtype == torch.float16
    assert codes.scale.shape == (2, 12 // group[0], 24 // group[1])
    assert (codes.tokens, codes.channels) == group
    step, low = by_row(codes.scale, codes), by_row(codes.minimum, codes)
    assert ((brought_back(codes) - x.double()).abs() <= step * 0.50002).all()
    assert (low <= x.double()).all()
    # The scale is the range's, rounded up: a float16 more than the paper's at most, and one of the minimum's.
    top = by_row(x.double().unflatten(-1, (-1, group[1])).unflatten(-3, (-1, group[0])).amax((-3, -1)), codes)
    paper = (top - low) / (2**bits - 1)
    assert (step <= paper * (1 + 2**-10) + 2**-24).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 2048.0, -65504.0])
def test_groups_of_one_value_come_back_exactly(dtype, bits, value):
    """A group without a range has scale 0 and gives its value back, where a division by the range gives NaN."""
    if dtype == torch.bfloat16 and abs(value) > 60000:
        value = -65280.0
    x = torch.full((1, 4, 8), value, dtype=dtype)
    codes = quantize(x, bits, tokens=4)
    assert (codes.scale == 0).all()
    assert brought_back(codes).equal(x.double())
    assert dequantize(codes).equal(x.float())


def test_a_value_that_float16_lacks_is_covered_by_its_group():
    """One value between two float16s comes back far nearer than either: the scale spans the minimum's rounding."""
    x = torch.full((1, 1, 8), 100.03)
    codes = quantize(x, 2, channels=8)
    assert codes.minimum.item() == 100.0
    assert (brought_back(codes) - x.double()).abs().max() < 1e-4
    assert (x - x.half().float()).abs().max() > 0.02


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
def test_equals_the_reference(bits, group):
    """Decoded values equal the reference's, in float32."""
    codes = quantize(torch.randn(2, 3, 12, 24, generator=torch.Generator().manual_seed(1)), bits, tokens=group[0],
                     channels=group[1])
    assert torch.allclose(dequantize(codes).double(), brought_back(codes), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_odd_numbers_of_groups(rows):
    """Three, five and seven groups of three tokens, in entries of 15 elements: nothing needs to be a power of two."""
    x = torch.randn(1, rows * 3, 15, generator=torch.Generator().manual_seed(rows))
    for codes in (quantize(x, 3, tokens=3), quantize(x, 3, channels=5)):
        assert ((brought_back(codes) - x.double()).abs() <= by_row(codes.scale, codes) * 0.50002).all()


def test_no_entries_make_no_codes():
    """An empty block is quantized to an empty one."""
    codes = quantize(torch.zeros(2, 0, 8), 2, channels=4)
    assert codes.packed.shape == (2, 0, 2)
    assert codes.scale.shape == (2, 0, 2)
    assert dequantize(codes).shape == (2, 0, 8)


def test_entries_are_views():
    """A slice by whole groups, or inside one, stands for the same entries and copies nothing."""
    codes = quantize(torch.randn(1, 12, 24, generator=torch.Generator().manual_seed(1)), 4, tokens=4)
    for start, stop in ((0, 12), (4, 8), (4, 12), (5, 7)):
        part = codes.slice(start, stop)
        assert dequantize(part).equal(dequantize(codes)[:, start:stop])
        assert part.packed.untyped_storage().data_ptr() == codes.packed.untyped_storage().data_ptr()
    with pytest.raises(AssertionError):
        codes.slice(2, 6)


@pytest.mark.parametrize("value", [-7e4, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_beyond_float16_are_refused(dtype, value):
    """bfloat16 reaches further than float16: what no scale and minimum can hold is said, never made infinite."""
    x = torch.zeros(1, 2, 8, dtype=dtype)
    x[0, 1, 3] = value
    with pytest.raises(ValueError, match=r"65504.*cannot be stored in 2 bits"):
        quantize(x, 2, channels=8)


def moved(codes, triton):
    """The codes where Triton runs."""
    return replace(codes, packed=triton(codes.packed), scale=triton(codes.scale), minimum=triton(codes.minimum))


def same(found, wanted):
    """Whether codes agree in every bit, scales and minima included."""
    pairs = ((getattr(found, x).cpu(), getattr(wanted, x)) for x in ("packed", "scale", "minimum"))
    return all(x.equal(y) for x, y in pairs) and (found.bits, found.width) == (wanted.bits, wanted.width)


TRITON_GROUPS = {**GROUPS, "each by itself": (1, 1), "odd": (3, 6)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", TRITON_GROUPS.values(), ids=TRITON_GROUPS)
def test_triton_makes_the_same_codes(group, dtype, triton):
    """Bit for bit, in every width, whatever the groups; brought back they are torch's as well."""
    x = (torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(1)) * 3 + 1).to(dtype)
    for bits in BITS if dtype is torch.float32 else (2,):
        codes = quantize(triton(x), bits, tokens=group[0], channels=group[1])
        wanted = plain.quantize(x, bits, tokens=group[0], channels=group[1])
        assert same(codes, wanted)
        assert torch.allclose(dequantize(codes).cpu(), plain.dequantize(wanted), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_triton_reads_whole_words(bits, triton):
    """Entries of 64 elements, read as words: more than one program's, from heads that are not adjacent."""
    x = torch.randn(2, 67, 3, 64, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    codes = quantize(triton(x), bits, channels=32)
    assert same(codes, plain.quantize(x, bits, channels=32))
    assert torch.allclose(dequantize(codes).cpu(), plain.dequantize(moved(codes, torch.Tensor.cpu)), atol=1e-6)


def test_triton_codes_groups_too_long_for_a_program(triton, monkeypatch):
    """All tokens of a context in one group: torch finds its parameters, and the codes are the same."""
    monkeypatch.setattr(pytest.importorskip("kvbench.kernels.pack.triton"), "LONGEST", 200)
    x = torch.randn(1, 2, 150, 24, generator=torch.Generator().manual_seed(3))
    assert same(quantize(triton(x), 3, tokens=150), plain.quantize(x, 3, tokens=150))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 2048.0, -65504.0, 3e-8, -3e-8, 1e-4])
def test_triton_rounds_the_edges_of_float16_as_torch_does(value, triton):
    """Groups of one value and next to one, zeros of both signs, subnormal numbers and the largest."""
    x = torch.full((1, 4, 8), value)
    x[0, 1, 1:] = torch.tensor([0.0, -0.0, 6e-8, -6e-8, 100.03, -100.03, 5e-5])
    assert same(quantize(triton(x), 2, tokens=1, channels=8), plain.quantize(x, 2, tokens=1, channels=8))
    assert same(quantize(triton(x), 2, tokens=4), plain.quantize(x, 2, tokens=4))


def test_triton_makes_no_codes_of_no_entries(triton):
    """An empty block is quantized to an empty one."""
    codes = quantize(triton(torch.zeros(2, 0, 8)), 2, channels=4)
    assert same(codes, plain.quantize(torch.zeros(2, 0, 8), 2, channels=4))
    assert dequantize(codes).shape == (2, 0, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a GPU asserts ends its process")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about what the interpreter multiplies
@pytest.mark.parametrize("value", [-7e4, 3e38, float("inf"), float("nan")])
def test_triton_refuses_values_beyond_float16(value, triton):
    """Values that no scale and minimum can represent are found on the device, and never become infinite."""
    x = torch.zeros(1, 2, 8)
    x[0, 1, 3] = value
    with pytest.raises(RuntimeError, match=r"65504.*cannot be stored in 2 bits"):
        quantize(triton(x), 2, channels=8)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(32, 1), (1, 32), (1, 64), (6016, 1)], ids=str)
def test_triton_makes_the_same_codes_at_full_size(group, bits, triton):
    """Heads of 128 channels and thousands of entries in bfloat16."""
    x = torch.randn(2, 8, 6016, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes = quantize(triton(x), bits, tokens=group[0], channels=group[1])
    wanted = plain.quantize(x, bits, tokens=group[0], channels=group[1])
    assert same(codes, wanted)
    assert torch.allclose(dequantize(codes).cpu(), plain.dequantize(wanted), rtol=1e-6, atol=1e-6)
