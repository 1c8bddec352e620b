"""MInference: three patterns, and the search for the best one of each head."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.methods.prefill.minference import CANDIDATES, MInference, Search
from kvbench.store import LayerKV

LENGTH = 32_768
"""Of a context in which sizes are the published ones; the tests' tensors are shorter."""


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def visible(method, number, query, key, scale=0.5):
    """Entries that the pattern computes, as a matrix. [T, T] bool"""
    blocks, columns = method.place(number, query, key, scale)
    at = torch.arange(len(query))
    read = blocks[at // method.block_size][:, at // method.block_size] | columns
    return read & (at <= at[:, None])


def test_a_shape_is_the_first_and_the_last_entries():
    """Sizes shrunk to 3 and 24 entries; the last ones are widened to blocks of 4 tokens."""
    method = MInference(block_size=4, length=LENGTH * 3 // 100)
    found = visible(method, 0, draw(64, 4), draw(64, 4))
    at = torch.arange(64)
    distance = at[:, None] - at
    assert method.scaled(800, LENGTH) == 24
    wanted = (at < 3) | (distance < 24)
    assert (found & wanted).equal(wanted & (distance >= 0))
    assert not (found & ~wanted & (distance > 24 + 4 + 2)).any()


def test_columns_and_diagonals_are_those_of_the_last_queries():
    """One heavy column, and the diagonal of queries that find their key 21 entries back."""
    method = MInference(block_size=4, length=LENGTH // 100, window=16, sinks=0, recent=1)
    query, key = torch.zeros(96, 97), torch.zeros(96, 97)
    query[:, :96] = torch.eye(96)
    key[:75] = 10 * query[21:]
    query[:, 96], key[41, 96] = 1.0, 12.0
    number = CANDIDATES.index(("vertical-slash", 100, 750))  # 1 column, 8 diagonals
    blocks, columns = method.place(number, query, key, 1.0)
    assert columns.nonzero()[:, 0].tolist() == [41]
    assert visible(method, number, query, key, 1.0)[torch.arange(21, 96), torch.arange(75)].all()
    assert blocks.tril().float().mean() < 0.5


def test_first_columns_are_among_the_chosen():
    """Of 10 columns, 3 are the first entries, whatever the queries attend to; without sinks they are not chosen."""
    query, key = draw(96, 8), draw(96, 8, seed=1)
    key[:8] = -10 * query[-16:].mean(0)
    number = CANDIDATES.index(("vertical-slash", 100, 750))
    found = []
    for sinks in (30, 0):
        method = MInference(block_size=4, length=LENGTH // 10, window=16, sinks=sinks)
        found.append(method.place(number, query, key, 1.0)[1].nonzero()[:, 0].tolist())
    assert [len(x) for x in found] == [10, 10]
    assert found[0][:3] == [0, 1, 2]
    assert found[1][0] >= 8


def test_every_touched_block_of_a_diagonal_is_computed():
    """Against all pairs: a block is computed if any of its pairs is on a diagonal, and the own one is."""
    method = MInference(block_size=4, length=LENGTH)
    diagonals = torch.zeros(22, dtype=torch.bool)
    diagonals[[6, 13]] = True
    found = method.widen(diagonals)
    at = torch.arange(22)
    distance = (at[:, None] - at).clamp_min(0)
    wanted = torch.zeros(6, 6, dtype=torch.bool)
    for i in range(22):
        for j in range(i + 1):
            wanted[i // 4, j // 4] |= diagonals[distance[i, j]] | (i // 4 == j // 4)
    full = torch.ones(5, 5, dtype=torch.bool).tril()  # whole blocks; the last one is cut, and may touch less
    assert (found[:5, :5] & full).equal(wanted[:5, :5] & full)
    assert (found[5] | ~wanted[5]).all()


def test_block_sparse_is_a_share_of_every_row():
    """One of eight blocks by pooled products, the first and the own one."""
    method = MInference(block_size=4, length=LENGTH)
    query, key = draw(64, 8), draw(64, 8, seed=1)
    blocks, columns = method.place(len(CANDIDATES) - 1, query, key, 0.5)
    assert not columns.any()
    pooled = query.unflatten(0, (16, 4)).mean(1) @ key.unflatten(0, (16, 4)).mean(1).T
    for row in range(16):
        best = pooled[row, : row + 1].topk(min(2, row + 1)).indices.tolist()
        assert set(blocks[row, : row + 1].nonzero()[:, 0].tolist()) == {0, row, *best}


def test_the_search_finds_the_pattern_that_a_head_has(make_step):
    """Blocks that look for other blocks, here and there, are block-sparse; a column far away is vertical-slash."""
    method = MInference(window=8, sinks=1, recent=2).fit(None, tiny_model().shape(512))
    assert method.block_size == 16
    number = torch.arange(512) // 16
    wanted, held = torch.eye(16)[number * 7 % 16] * 10, torch.eye(16)[number % 16] * (number < 16)[:, None]
    column, query = torch.zeros(512, 16), torch.full((512, 16), 3.0)
    column[200] = 1.0
    step = make_step(torch.stack([wanted, query])[None], torch.stack([held, column])[None], scale=1.0)
    kv = LayerKV()
    kv.append(step)
    Search(method=method).attend(kv, step)
    assert [CANDIDATES[x][0] for x in kv.state["best"].tolist()] == ["block-sparse", "vertical-slash"]


def test_patterns_are_found_once_and_may_be_restricted():
    """A pattern for every query head, the same when asked again; a setting leaves one kind."""
    model = tiny_model()
    method = MInference(tokens=300).bind(model)
    assert [len(x) for x in method.patterns] == [4, 4]
    assert MInference(tokens=300).bind(model).patterns is method.patterns
    only = MInference(tokens=300, pattern="block-sparse").bind(model).patterns
    assert {y for x in only for y in x} == {len(CANDIDATES) - 1}


def test_patterns_of_another_model_are_refused():
    """As many numbers as query heads, all of known patterns."""
    shape = tiny_model().shape(100)
    assert MInference().rebind({"patterns": [[0, 1, 2, 3]] * 2}, shape).patterns == ((0, 1, 2, 3),) * 2
    for wrong in ([[0, 1, 2, 3]], [[0, 1, 2]] * 2, [[0, 1, 2, 9]] * 2):
        with pytest.raises(UserError, match="do not name one of every query head"):
            MInference().rebind({"patterns": wrong}, shape)
