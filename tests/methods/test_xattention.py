"""XAttention: antidiagonal sums, and the blocks that hold a share of them."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.methods.prefill.xattention import XAttention


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive(query, key, block, stride, scale):
    """Antidiagonal sums of every tile in plain loops; what is missing in the last tile counts zero."""
    tokens, tiles = len(query), -(-len(query) // stride)
    sums = torch.full((tiles, tiles), -torch.inf)
    for i in range(tiles):
        for j in range(i + 1):
            pairs = [(i * stride + stride - 1 - x, j * stride + x) for x in range(stride)]
            sums[i, j] = sum(
                (query[a] @ key[b] for a, b in pairs if a < tokens and b < tokens), start=torch.zeros(())
            ) * scale / stride
    shares, count = sums.softmax(-1), -(-tokens // block)
    mass = torch.zeros(count, count)
    for i in range(tiles):
        for j in range(i + 1):
            mass[i * stride // block, j * stride // block] += shares[i, j]
    return mass


@pytest.mark.parametrize("tokens", [32, 43])
def test_estimate_sums_antidiagonals(tokens, monkeypatch):
    """Against loops over tiles, also where the last tiles are missing, and with few rows at a time."""
    query, key = draw(tokens, 8), draw(tokens, 8, seed=1)
    wanted = naive(query, key, 8, 4, 0.4)
    for rows in (256, 3):
        monkeypatch.setattr("kvbench.methods.prefill.xattention.TILES", rows)
        found = XAttention(block=8, stride=4, block_size=8).estimate(query, key, 0.4)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_every_key_of_a_block_is_touched(make_step):
    """A key at any place of its block is found; sums along the diagonal would miss most of them."""
    for place in range(8):
        key, query = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4)
        key[..., 0], query[..., 1] = 0.1, 1.0
        key[0, 0, 16 + place, 1] = 60.0
        method = XAttention(block=8, stride=4, block_size=8, threshold=0.5)
        blocks = method.choose(query, key, make_step(query, key)).blocks[0, 0]
        assert blocks[3:, 2].all()
        assert not blocks[4:, 3].any()  # apart from the first and the own block only that of the key


def test_a_threshold_of_one_is_dense():
    """Every block is computed, and logits are the full cache's."""
    model, ids = tiny_model(), list(range(50))
    with Session(model, FullCache()) as full, Session(
        model, XAttention(threshold=1, block=8).fit(None, model.shape(50))
    ) as ours:
        assert torch.allclose(ours.prefill(ids), full.prefill(ids), atol=1e-5)
        assert not ours.effect().acted


def test_blocks_grow_with_the_threshold(make_step):
    """A larger threshold takes the same blocks and more."""
    query, key = 2 * draw(1, 4, 96, 8), draw(1, 2, 96, 8, seed=1)
    step, before = make_step(query, key), None
    for threshold in (0.3, 0.6, 0.9):
        found = XAttention(block=8, stride=4, block_size=8, threshold=threshold).choose(query, key, step).blocks
        assert before is None or (found & before).equal(before)
        assert before is None or found.sum() > before.sum()
        before = found


def test_tiles_that_do_not_fill_blocks_are_refused():
    """With both numbers, before the model runs."""
    with pytest.raises(UserError, match=r"blocks of 8 tokens .* stride=3"):
        XAttention(block=8, stride=3).fit(None, tiny_model().shape(30))
