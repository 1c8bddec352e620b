"""Q-Filters: the main direction of the queries, its sign, and what a run records."""

from __future__ import annotations

import torch

from kvbench.hf.tiny import tiny_model
from kvbench.methods.eviction.qfilter import QFilter, QueryRecorder, main_directions
from kvbench.techniques import calibration
from kvbench.techniques.calibration import calibration_ids, measure


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def directions_of(queries, kv_heads):
    """From the queries of each query head. [H_q, T, D]"""
    grouped = queries.unflatten(0, (kv_heads, -1))
    return main_directions({"query": grouped.sum(2), "outer": grouped.mT @ grouped}, queries.shape[1])


def test_a_direction_is_the_first_singular_vector_towards_the_mean_query():
    """Against the decomposition of the stacked queries, with the sign that makes most products positive."""
    queries = draw(3, 200, 8) + 2 * draw(3, 1, 8, seed=1)
    found = directions_of(queries, 3)
    for head in range(3):
        first = torch.linalg.svd(queries[head]).Vh[0]
        first = first * (queries[head] @ first).sum().sign()
        assert torch.allclose(found[head].double(), first, atol=1e-5)
        assert (queries[head] @ first > 0).double().mean() > 0.5


def test_the_directions_of_a_group_are_averaged():
    """Two query heads along x and along y give the diagonal."""
    queries = torch.zeros(2, 5, 2, dtype=torch.float64)
    queries[0, :, 0], queries[1, :, 1] = 3, 1
    assert torch.allclose(directions_of(queries, 1), torch.full((1, 2), 0.5).sqrt())


def test_keys_along_the_queries_stay(make_step, monkeypatch):
    """Of keys with products 1, -2, 3 and 0 with the direction, the score keeps this order."""
    monkeypatch.setitem(calibration._FOUND, "some", (torch.tensor([[1.0, 0.0]]),))
    key = torch.tensor([[1.0, 9], [-2, 9], [3, -9], [0, 0]])[None, None]
    method, step = QFilter(filters="some", rows=2, length=4), make_step(key, key)
    kv = method.layer(0)
    kv.append(step)
    assert method.score(kv, step).tolist() == [[[1, -2, 3, 0]]]
    method.evict(kv, step)
    assert kv.keys[0, 0, :, 0].tolist() == [1, 3]


def test_a_model_is_measured_once_and_chunks_do_not_matter(monkeypatch):
    """The hash names the directions; a second bind measures nothing."""
    model = tiny_model()
    first = QFilter(tokens=64).bind(model)
    whole = measure(model, QueryRecorder(), 64, main_directions)
    monkeypatch.setattr(calibration, "CHUNK", 7)
    parts = measure(model, QueryRecorder(), 64, main_directions)
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(parts, whole, strict=True))
    monkeypatch.setattr(calibration, "measure", None)
    assert QFilter(tokens=64).bind(model).filters == first.filters
    assert first.resolution == {"filters": first.filters}


def test_the_text_is_as_long_as_asked_for():
    """As many tokens as wanted, all of this model."""
    ids = calibration_ids(tiny_model(), 100)
    assert ids.shape == (1, 100)
    assert ids.max() < 64
