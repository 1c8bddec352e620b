"""ChunkKV: chunks by hand, the same entries in every head, and the exact budget."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.eviction.chunkkv import best_chunks
from kvbench.registry import find_method

INF = torch.inf


def test_chunks_are_ranked_by_their_mean_over_heads_and_tokens():
    """Means of chunks of two over both heads: 2, 4, 1 and 3. A single high token does not carry its chunk."""
    one = [5.0, 1, 4, 4, 1, 1, 3, 1]
    other = [1.0, 1, 4, 4, 1, 1, 5, 3]
    scores = torch.tensor([[one, other]])
    assert best_chunks(scores, 2, 4).tolist() == [[2, 3, 6, 7]]
    assert best_chunks(scores, 2, 6).tolist() == [[0, 1, 2, 3, 6, 7]]


def test_the_last_chunk_is_cut_to_the_budget():
    """Of the chunk that does not fit as a whole, the first tokens stay."""
    scores = torch.tensor([[[1.0, 1, 1, 5, 5, 5, 3, 3, 3]]])
    assert best_chunks(scores, 3, 5).tolist() == [[3, 4, 5, 6, 7]]


def test_protected_entries_come_first_and_do_not_raise_their_chunk():
    """The window's infinite scores leave the mean of their chunk to its other tokens; a short last chunk competes."""
    scores = torch.tensor([[[2.0, 2, 1, INF, 9, INF, INF]]])
    assert best_chunks(scores, 2, 4).tolist() == [[3, 4, 5, 6]]
    assert best_chunks(scores, 2, 5).tolist() == [[0, 3, 4, 5, 6]]
    assert best_chunks(torch.tensor([[[2.0, 2, 1, 1, 3]]]), 2, 1).tolist() == [[4]]


def test_a_chunk_of_one_token_is_the_scorer_with_heads_together():
    """With chunk=1 the best entries by the sum over heads stay."""
    scores = torch.rand(2, 3, 20, generator=torch.Generator().manual_seed(0))
    wanted = scores.sum(1).topk(7).indices.sort(-1).values
    assert best_chunks(scores, 1, 7).equal(wanted)


@pytest.mark.parametrize("name", ["chunkkv", "knorm+chunkkv"])
def test_every_head_keeps_the_same_whole_chunks(name):
    """Positions are equal over heads, and all but one run of them are whole chunks or the window."""
    model = tiny_model()
    method = find_method(name)(chunk=5).fit(Budget("rows", 48), model.shape(100))
    with Session(model, method, track=True) as session:
        session.prefill(torch.randint(64, (100,), generator=torch.Generator().manual_seed(0)).tolist())
        for store in session.layers:
            positions = store.positions[0]
            assert positions[0].equal(positions[1])
            counts = torch.bincount(positions[0] // 5, minlength=20)
            assert len(positions[0]) == 48
            assert ((counts > 0) & (counts < 5)).sum() <= 2  # the chunk that is cut, and the window's first


def test_it_goes_around_scorers_only():
    """A method that does not score, and ChunkKV itself, are refused."""
    for inner in ("h2o", "chunkkv"):
        with pytest.raises(UserError, match=rf"{inner}\+chunkkv makes no sense"):
            find_method(f"{inner}+chunkkv")
