"""FlexPrefill: the choice between pooled blocks and lines, and how many of each."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.check import INVARIANTS, NotApplicableError
from kvbench.check.trial import random_ids
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

        def by_lines(self, shares, share):
            used.append(share)
            return super().by_lines(shares, share)

    method = Watched(block=4, block_size=4, least=1)
    query = draw(1, 8).expand(32, 8)
    same = draw(8, 8, seed=1).repeat_interleave(4, dim=0)
    method.choose_head(query, same, 0.3)
    hidden = torch.zeros(32, 8)
    hidden[9], hidden[10] = 20 * query[0], -20 * query[0]  # together they vanish in the mean
    blocks = method.choose_head(query, hidden, 0.3)
    assert used == ["pooling", 0, 0.9]
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
        found = FlexPrefill(block=4, block_size=4, least=1).by_lines(shares, gamma)
        assert found.tril().equal((wanted | (column == 0) | (row == column)).tril())


def choose_as_released(query, key, block, gamma, tau, least, scale):
    """The authors' `get_active_blocks` for one head, in loops, with whole blocks that cover `gamma`. [c, c] bool"""
    tokens, count = len(query), -(-len(query) // block)
    weights = torch.full((block, tokens), -torch.inf)
    for i in range(block):
        own = tokens - block + i
        weights[i, : own + 1] = query[own] @ key[: own + 1].T * scale
    weights = weights.softmax(-1)
    vertical, slash = [0.0] * count, [0.0] * count
    for i in range(block):
        for j in range(tokens - block + i + 1):
            vertical[j // block] += float(weights[i, j]) / block
            slash[(tokens - block + i - j) // block] += float(weights[i, j]) / block
    pooled = [torch.stack([x[i : i + block].mean(0) for i in range(0, tokens, block)]) for x in (query, key)]
    estimate = (query[-block:].mean(0) @ pooled[1].T * scale).softmax(-1)
    uses_pooling = root_divergence(estimate, torch.tensor(vertical)) < tau
    chosen = torch.zeros(count, count, dtype=torch.bool)
    lines = []
    for line in (vertical, slash):
        best = sorted(range(count), key=lambda x: -line[x])
        cover, mass = set(), 0.0
        while not uses_pooling and mass < gamma:
            cover.add(best[len(cover)])
            mass = sum(line[x] for x in cover)
        lines.append(cover | {0, *[x for x in best if x][: least // block - 1]})
    for row in range(count):
        for column in range(row + 1):
            chosen[row, column] = column in lines[0] or row - column in lines[1]
    if uses_pooling:
        mass = (pooled[0] @ pooled[1].T * scale).masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        flat, total = mass.softmax(-1).flatten(), 0.0
        for place in flat.argsort(descending=True).tolist():
            if total >= gamma * count:
                break
            chosen.view(-1)[place] = True
            total += float(flat[place])
    return chosen, uses_pooling


@pytest.mark.parametrize("least", [4, 16])
def test_blocks_are_those_of_the_released_code(least):
    """Of heads with lines and of pooled ones: four columns and four diagonals at least where the minimum is 16."""
    method, kinds = FlexPrefill(block=4, block_size=4, tau=0.2, least=least, gamma=0.6), set()
    for seed in range(6):
        query = draw(1, 8, seed=seed).expand(48, 8) if seed % 2 else 4 * draw(48, 8, seed=seed)
        key = draw(12, 8, seed=9 + seed).repeat_interleave(4, dim=0) if seed % 2 else draw(48, 8, seed=9 + seed)
        found = method.choose_head(query, key, 0.3)
        wanted, uses_pooling = choose_as_released(query, key, 4, 0.6, 0.2, least, 0.3)
        kinds.add(uses_pooling)
        assert found.tril().equal(wanted)
    assert kinds == {True, False}


@pytest.mark.parametrize("pooled", [True, False])
def test_every_head_computes_the_least_columns_and_diagonals(pooled):
    """1,024 tokens are 8 blocks of 128, of 20; almost no attention would do with fewer."""
    query, key = draw(1, 16).expand(2560, 16), draw(20, 16, seed=1).repeat_interleave(128, dim=0)
    method = FlexPrefill(block_size=128, gamma=0.01, tau=1.0 if pooled else 0.0)
    blocks = method.choose_head(query, key, 0.1)
    assert blocks[-1].sum() >= 8
    whole_columns = [x for x in range(20) if blocks[x:, x].all()]
    whole_diagonals = [x for x in range(20) if blocks.diagonal(-x).all()]
    assert 0 in whole_columns
    assert 0 in whole_diagonals
    assert len(whole_columns) >= 8
    assert len(whole_diagonals) >= 8
    assert not blocks.tril().equal(torch.ones_like(blocks).tril())


@pytest.mark.parametrize("length", [96, 97, 150])
def test_a_context_within_the_least_is_declared_whole(length):
    """Up to 96 tokens nothing is left out and the result says so; from 97 on it is no identity."""
    model, ids = tiny_model(), random_ids(length)
    method = FlexPrefill(block=8, least=96).fit(None, model.shape(length))
    with Session(model, FullCache()) as full, Session(model, method) as ours:
        logits = ours.prefill(ids)
        effect = ours.effect()
        assert effect.identity == (length <= 96)
        if length <= 96:
            assert not effect.acted
            assert torch.allclose(logits, full.prefill(ids), atol=1e-5)
        elif length == 150:
            assert effect.acted


def test_the_default_has_no_effect_on_the_contexts_of_checks():
    """`kvbench check` says so, where it would otherwise pass a method that does nothing."""
    with pytest.raises(NotApplicableError, match="compute a context of 120 tokens whole"):
        INVARIANTS["acts at its budget"](FlexPrefill())


@pytest.mark.parametrize("claim", [
    pytest.param(x, marks=() if x == "acts at its budget" else pytest.mark.slow) for x in INVARIANTS
])
def test_claims_hold_where_it_acts(claim):
    """The conformance suite with a least of 16 tokens: with 1,024 it computes everything."""
    try:
        assert INVARIANTS[claim](FlexPrefill(least=16))
    except NotApplicableError as reason:
        assert claim != "acts at its budget", reason  # noqa: PT017  # a reason is right for others


def test_a_gamma_of_one_is_dense():
    """Every block is computed, and logits are the full cache's."""
    model, ids = tiny_model(), list(range(50))
    with Session(model, FullCache()) as full, Session(
        model, FlexPrefill(gamma=1, block=8, least=8).fit(None, model.shape(50))
    ) as ours:
        assert torch.allclose(ours.prefill(ids), full.prefill(ids), atol=1e-5)
