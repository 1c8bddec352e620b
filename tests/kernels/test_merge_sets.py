"""Merging of runs of entries against one set at a time in float64, and against sets made by hand."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.merge_sets import merge_sets, naive
from kvbench.kernels.merge_sets import torch as plain

GQA = (6, 2)


def some(attention, n=23, dtype=torch.float32, share=0.6):
    """Keys that are neighbors' relatives, values, masses with ties, and joins."""
    _, keys, values = attention(GQA, 1, n, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    mass = torch.randint(4, (2, 2, n), generator=generator).float()
    joins = torch.rand(2, 2, n - 1, generator=generator) < share
    return keys, values, mass, joins


@pytest.mark.parametrize("refine", [0, 2])
@pytest.mark.parametrize("sigma", [0.5, 5.0])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0], ids="{:.0%} joined".format)
def test_equals_the_reference(share, sigma, refine, attention, error):
    """Keys, values, pivots, sizes and counts are those of a loop over sets."""
    inputs = some(attention, share=share)
    found = merge_sets(*inputs, sigma=sigma, refine=refine)
    key, value, pivot, size, counts = naive.merge_sets(*inputs, sigma=sigma, refine=refine)
    assert error(found.key, key) < 1e-5
    assert error(found.value, value) < 1e-5
    assert found.pivot.tolist() == pivot.tolist()
    assert found.size.tolist() == size.tolist()
    assert found.counts.tolist() == counts.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the entries are rounded once, at the end."""
    inputs = some(attention, dtype=dtype)
    found = merge_sets(*inputs)
    assert found.key.dtype == dtype
    assert error(found.key, naive.merge_sets(*inputs)[0]) < allowed[dtype]


def test_a_set_by_hand():
    """Keys (1, 0) and (0.9, 0.1) under sigma 1: the pivot weighs 1 / (1 + exp(-0.01)) = 0.50250."""
    keys, values = torch.tensor([[[[1.0, 0.0], [0.9, 0.1]]]]), torch.eye(2)[None, None]
    merged = merge_sets(keys, values, torch.tensor([[[2.0, 1.0]]]), torch.tensor([[[True]]]), sigma=1.0)
    assert merged.value[0].tolist() == pytest.approx([0.50250, 0.49750], abs=5e-6)
    assert merged.key[0].tolist() == pytest.approx([0.950250, 0.049750], abs=5e-7)
    other = merge_sets(keys, values, torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[True]]]), sigma=1.0)
    assert other.value[0].tolist() == pytest.approx([0.49750, 0.50250], abs=5e-6)


def test_the_weights_of_a_set_sum_to_one(attention):
    """Values of one are still one, whatever the keys."""
    keys, values, mass, joins = some(attention)
    assert torch.allclose(merge_sets(keys, torch.ones_like(values), mass, joins, sigma=0.7).value, torch.ones(1))


def test_sets_are_entries_without_joins(attention):
    """A head has one set for every entry that is not joined to the previous one; sizes sum to all entries."""
    keys, values, mass, joins = some(attention)
    merged = merge_sets(keys, values, mass, joins)
    assert merged.counts.equal(23 - joins.sum(-1))
    assert [int(x.sum()) for x in merged.size.split(merged.counts.flatten().tolist())] == [23] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entries_without_a_neighbor_keep_every_bit(dtype, attention):
    """Without joins nothing changes, and a single entry is what it was."""
    keys, values, mass, joins = some(attention, dtype=dtype)
    merged = merge_sets(keys, values, mass, torch.zeros_like(joins))
    assert merged.key.equal(keys.flatten(0, 2))
    assert merged.value.equal(values.flatten(0, 2))
    assert merged.pivot.equal(torch.arange(23).repeat(4))


def test_heads_do_not_touch(attention):
    """The last entry of a head is in no set with the first entry of the next, though all entries are joined."""
    keys, values, mass, joins = some(attention, share=1.0)
    merged = merge_sets(keys, values, mass, joins)
    assert merged.counts.tolist() == [[1, 1], [1, 1]]
    one = merge_sets(keys[:1, 1:], values[:1, 1:], mass[:1, 1:], joins[:1, 1:])
    assert one.key.equal(merged.key[1:2])


def test_one_entry(attention):
    """A context of one token is one set."""
    keys, values, mass, joins = some(attention, n=1)
    assert merge_sets(keys, values, mass, joins).counts.tolist() == [[1, 1], [1, 1]]


@pytest.fixture
def triton_errors(triton, attention, error):
    """Errors of the keys and values of Triton's sets; all that is counted must agree."""

    def measure(n, share, dtype=torch.float32, **options):
        inputs = some(attention, n, dtype, share)
        found = merge_sets(*triton(inputs), **options)
        key, value, pivot, size, counts = naive.merge_sets(*inputs, **options)
        assert [x.tolist() for x in (found.pivot, found.size, found.counts)] == [
            x.tolist() for x in (pivot, size, counts)
        ]
        assert found.key.dtype == dtype
        return max(error(found.key, key), error(found.value, value))

    return measure


@pytest.mark.parametrize(("share", "options"), [
    (0.6, {}), (0.6, {"sigma": 0.5, "refine": 2}), (0.97, {}), (1.0, {"refine": 1}),
], ids=str)
def test_triton_equals_the_reference(share, options, triton_errors):
    """Sets of a few entries and of more than a program reads at a time, with widths given and found."""
    assert triton_errors(37, share, **options) < 1e-5


@pytest.mark.parametrize("n", [1, 16, 17])
def test_triton_about_a_block_in_every_precision(n, precision, triton_errors, allowed):
    """One set of every head, of an entry, of all entries of a block, and of one more."""
    assert triton_errors(n, 1.0, precision) < allowed[precision]


def test_triton_keeps_every_bit_of_entries_without_a_neighbor(triton, attention):
    """Without joins nothing changes."""
    keys, values, mass, joins = triton(some(attention, 9))
    merged = merge_sets(keys, values, mass, torch.zeros_like(joins))
    assert merged.key.equal(keys.flatten(0, 2))
    assert merged.value.equal(values.flatten(0, 2))


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """Heads of 128 channels and thousands of entries, against torch in float32."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 8, 5000, 128, generator=generator).to(precision) for _ in range(2))
    mass, joins = torch.rand(1, 8, 5000, generator=generator), torch.rand(1, 8, 4999, generator=generator) < 0.7
    found = merge_sets(*triton([keys, values, mass, joins]))
    wanted = plain.merge_sets(keys.float(), values.float(), mass, joins)
    assert found.pivot.cpu().equal(wanted.pivot)
    assert max(error(found.key, wanted.key), error(found.value, wanted.value)) < allowed[precision]
