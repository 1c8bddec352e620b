"""FlexPrefill: the choice between pooled blocks and lines, and how many of each."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.methods.prefill.flexprefill import FlexPrefill, root_divergence
from kvbench.methods.prefill.patterns import diagonal_sums, last_attention, pool_blocks


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_divergence_is_zero_for_equal_and_one_bit_for_disjoint_distributions():
    """In nats, and the root of it; zeros are allowed."""
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.25, 0.75])
    assert root_divergence(p, p) == 0
    assert root_divergence(p, q) == pytest.approx(math.sqrt(math.log(2)))


def test_last_queries_attend_causally():
    """Rows are those of the whole attention matrix."""
    query, key = draw(12, 4), draw(12, 4, seed=1)
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    wanted = (query @ key.T * 0.5).masked_fill(later, -torch.inf).softmax(-1)
    assert torch.allclose(last_attention(query, key, 5, 0.5), wanted[-5:])
    assert torch.allclose(last_attention(query, key, 50, 0.5), wanted)


def test_diagonals_are_counted_from_the_query():
    """By hand: two queries at places 2 and 3 of four."""
    shares = torch.tensor([[1.0, 2.0, 3.0, 0.0], [4.0, 5.0, 6.0, 7.0]])
    assert diagonal_sums(shares).tolist() == [3 + 7, 2 + 6, 1 + 5, 4]


def test_the_last_block_is_pooled_over_its_own_tokens():
    """Five tokens in blocks of two."""
    assert pool_blocks(torch.arange(5.0)[:, None], 2).flatten().tolist() == [0.5, 2.5, 4.0]


def test_pooling_is_used_where_it_predicts_attention():
    """Keys that are equal within blocks make the estimate exact; where the mean hides a key, lines are used."""
    used = []

    class Watched(FlexPrefill):
        def by_pooling(self, *args):
            used.append("pooling")
            return super().by_pooling(*args)

        def by_lines(self, shares):
            used.append("lines")
            return super().by_lines(shares)

    method = Watched(block=4, block_size=4)
    query = draw(1, 8).expand(32, 8)
    same = draw(8, 8, seed=1).repeat_interleave(4, dim=0)
    method.choose_head(query, same, 0.3)
    hidden = torch.zeros(32, 8)
    hidden[9], hidden[10] = 20 * query[0], -20 * query[0]  # together they vanish in the mean
    blocks = method.choose_head(query, hidden, 0.3)
    assert used == ["pooling", "lines"]
    assert blocks[3:, 2].all()


def test_lines_are_columns_and_diagonals_of_blocks():
    """0.6 of the attention is at distance 8, on entries 20 to 23, and 0.4 on entry 4.

    The columns of blocks 5 and 1 hold all of it; so do the diagonals two and six blocks away.
    """
    shares = torch.zeros(4, 32)
    for i in range(4):
        shares[i, 28 + i - 8] = 0.6
        shares[i, 4] = 0.4
    row, column = torch.arange(8)[:, None], torch.arange(8)
    for gamma, wanted in (
        (0.9, (column == 5) | (column == 1) | (row - column == 2) | (row - column == 6)),
        (0.5, (column == 5) | (row - column == 2)),
    ):
        found = FlexPrefill(block=4, block_size=4, gamma=gamma).by_lines(shares)
        assert found.tril().equal(wanted.tril())


def test_a_gamma_of_one_is_dense():
    """Every block is computed, and logits are the full cache's."""
    model, ids = tiny_model(), list(range(50))
    with Session(model, FullCache()) as full, Session(
        model, FlexPrefill(gamma=1, block=8).fit(None, model.shape(50))
    ) as ours:
        assert torch.allclose(ours.prefill(ids), full.prefill(ids), atol=1e-5)
