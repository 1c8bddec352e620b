"""Entropy coding: symbols come back, and the bytes are near the entropy."""

from __future__ import annotations

import pytest
import torch

from kvbench.store.entropy import boundaries, count_tables, decode, encode


def draw_symbols(streams, count, size, seed=0):
    """Symbols of a peaked distribution of each stream's own width. [S, T] uint8"""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.05, 1.0, streams)[:, None] * size / 4
    x = torch.randn(streams, count, generator=generator) * spread + size / 2
    return x.round().clamp(0, size - 1).to(torch.uint8)


@pytest.mark.few(8)
@pytest.mark.parametrize("count", [1, 7, 256, 1000])
@pytest.mark.parametrize("size", [12, 16, 32, 2, 256])
def test_symbols_come_back(count, size):
    """Of every stream, whatever its distribution."""
    symbols = draw_symbols(9, count, size, seed=count)
    cuts = boundaries(count_tables(symbols, size))
    counts = torch.full((9,), count)
    assert decode(encode(symbols, counts, cuts), counts, cuts).equal(symbols)


def test_streams_of_other_lengths_come_back():
    """Places after a stream's own symbols are neither coded nor read."""
    symbols, counts = draw_symbols(6, 50, 16), torch.tensor([50, 1, 0, 33, 50, 2])
    cuts = boundaries(count_tables(symbols, 16))
    streams = encode(symbols, counts, cuts)
    found = decode(streams, counts, cuts)
    inside = torch.arange(50) < counts[:, None]
    assert found.equal(symbols * inside)
    assert encode(symbols * inside, counts, cuts).words.equal(streams.words)


def test_boundaries_rise():
    """Every symbol has a frequency, also those that do not occur, and they add up to 2 ** 16."""
    symbols = torch.zeros(3, 4000, dtype=torch.uint8)
    symbols[1] = 31
    cuts = boundaries(count_tables(symbols, 32))
    assert (cuts.diff(dim=1) >= 1).all()
    assert cuts[:, [0, -1]].tolist() == [[0, 65536]] * 3
    assert cuts.diff(dim=1)[0, 0] > 65000


@pytest.mark.parametrize("size", [12, 32])
def test_the_length_is_the_entropy(size):
    """Per stream at most the cost of its symbols under the tables, rounded up, and 48 bits; at least that cost."""
    symbols = draw_symbols(20, 1000, size)
    cuts = boundaries(count_tables(symbols, size))
    streams = encode(symbols, torch.full((20,), 1000), cuts)
    share = cuts.diff(dim=1).gather(1, symbols.long()) / 65536
    cost = -share.log2().sum(1)
    stored = streams.lengths.long() * 16 + 32
    assert (stored <= cost + 48).all()
    assert (stored >= cost).all()
    occurs = torch.stack([(symbols == x).float().mean(1) for x in range(size)], dim=1)
    entropy = -torch.where(occurs > 0, occurs * occurs.log2(), 0.0).sum(1) * 1000
    assert (cost <= 1.01 * entropy + 20).all()


def test_equal_symbols_cost_nothing():
    """A thousand of them make no more than a word."""
    symbols = torch.full((1, 1000), 5, dtype=torch.uint8)
    streams = encode(symbols, torch.tensor([1000]), boundaries(count_tables(symbols, 16)))
    assert len(streams.words) <= 1
