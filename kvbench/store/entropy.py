"""Entropy coding of symbols: the range variant of asymmetric numeral systems, many streams at once.

A stream's state is a number of 32 bits. A symbol of frequency f of 2 ** 16 multiplies it by 2 ** 16 / f; where it would
not fit, its low 16 bits become a word of the stream. A stream is encoded from its last symbol to its first, and decoded
from the first. The rate is that of a range coder: the entropy, and at most 48 bits per stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BITS = 16
TOTAL = 1 << BITS
"""The sum of frequencies."""
MOST_WORDS = 2**15 - 1
"""Symbols of a stream, of which each makes at most one word: lengths are stored in 16 bits."""


@dataclass(frozen=True)
class Streams:
    """Encoded symbols; the words of all streams one after the other."""

    words: Tensor  # [W] int16
    lengths: Tensor  # [S] int16, in words
    states: Tensor  # [S] int32

    def tensors(self) -> list[Tensor]:
        """Everything that is stored."""
        return [self.words, self.lengths, self.states]


def count_tables(symbols: Tensor, size: int) -> Tensor:
    """The inner boundaries of symbols, by their frequencies, as they are stored. symbols: [C, T]. [C, size - 1] int16

    Every symbol below `size` keeps a frequency of at least one.
    """
    counts = torch.zeros(len(symbols), size, dtype=torch.int64, device=symbols.device)
    counts.scatter_add_(1, symbols.long(), torch.ones_like(symbols, dtype=torch.int64))
    below = counts.cumsum(1)[:, :-1] * (TOTAL - 1 - size) // symbols.shape[1]
    return (below + torch.arange(1, size, device=symbols.device)).to(torch.uint16).view(torch.int16)


def boundaries(tables: Tensor) -> Tensor:
    """The boundaries of all symbols, from 0 to TOTAL. tables: [C, size - 1] int16. [C, size + 1] int64"""
    inner = tables.long() & (TOTAL - 1)
    ends = inner.new_tensor([0, TOTAL]).expand(len(inner), 2)
    return torch.cat([ends[:, :1], inner, ends[:, 1:]], dim=1)


def encode(symbols: Tensor, counts: Tensor, cuts: Tensor) -> Streams:
    """Encode streams. symbols: [S, T], of which the first counts[s] are the stream's; cuts: [S, size + 1]"""
    assert symbols.shape[1] <= MOST_WORDS, "a stream's length is stored in 16 bits"
    low = cuts.gather(1, symbols.long()).mT.contiguous()  # [T, S]
    frequency = cuts.gather(1, symbols.long() + 1).mT - low
    state = torch.full((len(symbols),), TOTAL, dtype=torch.int64, device=symbols.device)
    words, made = torch.zeros_like(low), torch.zeros_like(low, dtype=torch.bool)
    for t in reversed(range(len(low))):
        inside = counts > t
        made[t] = inside & (state >= frequency[t] << BITS)
        words[t] = state & (TOTAL - 1)
        shifted = torch.where(made[t], state >> BITS, state)
        quotient = shifted.div(frequency[t], rounding_mode="trunc")  # `//` rounds down, which is slower
        remainder = shifted - quotient * frequency[t]
        state = torch.where(inside, (quotient << BITS) + remainder + low[t], state)
    return Streams(
        words.mT[made.mT].to(torch.uint16).view(torch.int16), made.sum(0).to(torch.int16),
        state.to(torch.uint32).view(torch.int32),
    )


def decode(streams: Streams, counts: Tensor, cuts: Tensor) -> Tensor:
    """The symbols of every stream, zero after its own. [S, T] uint8"""
    state = streams.states.long() & 0xFFFFFFFF
    words = torch.cat([streams.words.long() & (TOTAL - 1), state.new_zeros(1)])
    place = streams.lengths.long().cumsum(0) - streams.lengths.long()
    found = torch.zeros(int(counts.max()), len(state), dtype=torch.uint8, device=state.device)
    upper = cuts[:, 1:].contiguous()
    for t in range(len(found)):
        slot = state & (TOTAL - 1)
        symbol = torch.searchsorted(upper, slot[:, None], right=True)
        low = cuts.gather(1, symbol)[:, 0]
        left = (cuts.gather(1, symbol + 1)[:, 0] - low) * (state >> BITS) + slot - low
        inside = counts > t
        short = inside & (left < TOTAL)
        left = torch.where(short, (left << BITS) | words[place.clamp_max(len(words) - 1)], left)
        state, place = torch.where(inside, left, state), place + short
        found[t] = torch.where(inside, symbol[:, 0], 0).to(torch.uint8)
    return found.mT
