"""MPCache: dropped entries and chosen clusters against loops, what is always read, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval.mpcache import MPCache
from kvbench.store.paged import PagedKV

PAGE = 4


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(count, seed=1):
    """Random tokens. [T]"""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def open_with(model, *, length=100, rows=20, **settings):
    """A session at a budget of entries read."""
    method = MPCache(page=PAGE, **settings).fit(Budget("rows", rows), model.shape(length))
    return Session(model, method, capacity=length + 40, track=True)


def naive_static(query, keys, late, scale):
    """The largest of the late queries' mean weights over heads, from the whole matrix. [N]"""
    weights = attention_weights(query, keys, scale=scale, seen=keys.shape[2])[0]  # [H_kv, G, T, N]
    return weights.flatten(0, 1).mean(0)[-late:].amax(0)


@pytest.mark.parametrize("late", [0.2, 0.7])
def test_the_dropped_entries_follow_the_matrix(late):
    """In every layer the stored entries are the best of the whole matrix, the same in all heads; several blocks."""
    model, found = tiny_model(), {}
    with open_with(model, static=0.4, observed=late) as session:
        attend = session.method.attend

        def spy(kv, step):
            found[step.layer] = naive_static(step.query, kv.keys, int(late * 100), step.scale)
            return attend(kv, step)

        object.__setattr__(session.method, "attend", spy)
        session.prefill(ids(100))
        for index, store in enumerate(session.layers):
            wanted = found[index].topk(40).indices.sort().values
            assert store.positions.eq(wanted).all()


def test_the_matrix_catches_planted_faults():
    """The maximum over heads, without the causal mask, or the sum over queries keeps other entries."""
    query, keys = draw(1, 4, 50, 8), draw(1, 2, 50, 8, seed=1)
    wanted = set(naive_static(query, keys, 10, 0.5).topk(12).indices.tolist())
    weights = attention_weights(query, keys, scale=0.5, seen=50)[0].flatten(0, 1)[:, -10:]
    logits = query[0] @ keys[0].repeat_interleave(2, 0).mT * 0.5
    faults = {
        "maximum over heads": weights.amax((0, 1)), "sum over queries": weights.mean(0).sum(0),
        "no causal mask": logits.softmax(-1).mean(0)[-10:].amax(0), "no scale": naive_static(query, keys, 10, 1.0),
    }
    for name, fault in faults.items():
        assert set(fault.topk(12).indices.tolist()) != wanted, name


def naive_pages(query, keys, before, *, count, alpha, parents, page=PAGE):
    """The clusters of each KV head and query, by loops over clusters and parents. Sets by [head][query]"""
    heads, width = keys.shape[1], keys.shape[3]
    pages = keys.shape[2] // page

    def similarity(vector, block):
        parts = [alpha * vector[d] * block[:, d].max() + (1 - alpha) * vector[d] * block[:, d].min()
                 for d in range(width)]
        return sum(parts).item()

    found = []
    for head in range(heads):
        group = query[0].unflatten(0, (heads, -1))[head]
        found.append([])
        for at in range(query.shape[2]):
            vector, own = group[:, at].mean(0), (before + at) // page
            score = lambda low, high: similarity(vector, keys[0, head, low * page : high * page])  # noqa: B023, E731
            total = own // 2 + 1
            most = max(math.ceil(parents * total), math.ceil(count / 2) + 2)
            ranked = sorted(range(total), reverse=True, key=lambda i: (
                math.inf if i in (0, own // 2) else score(2 * i, min(2 * i + 2, pages))))
            allowed = [p for i in ranked[:most] for p in (2 * i, 2 * i + 1) if p < min(pages, own)]
            first = sorted(allowed, reverse=True, key=lambda p: math.inf if p == 0 else score(p, p + 1))
            found[-1].append({own, *first[: count - 1]})
    return found


def chosen_pages(method, query, keys, before, monkeypatch):
    """The clusters that `attend` reads. Sets by [head][query]"""
    taken = []
    store = PagedKV(page=PAGE)
    monkeypatch.setattr(PagedKV, "attend_pages", lambda self, step, pages: taken.append(pages) or step.query)
    step = _step(keys[:, :, :before], draw(*query.shape[:2], before, query.shape[3]), before, Moment.CONTEXT_END)
    store.append(step)
    store.index()
    step = _step(keys[:, :, before:], query, keys.shape[2], Moment.TURN_END)
    store.append(step)
    method.attend(store, step)
    by_head = taken[0][0].unflatten(0, (keys.shape[1], -1))
    assert by_head.eq(by_head[:, :1]).all()  # a group reads one set
    return [[set(x.tolist()) for x in head[0]] for head in by_head]


def _step(keys, query, seen, moment):
    from kvbench.hf.rope import NO_ROPE
    from kvbench.method import Step

    new = keys.shape[2]
    return Step(layer=0, moment=moment, positions=torch.arange(seen - new, seen)[None], seen=seen, query=query,
                key=keys, value=keys, scale=1.0, window=None, softcap=None, sinks=None, causal=True, rope=NO_ROPE)


@pytest.mark.parametrize("length", [80, 78])
def test_two_levels_of_clusters_follow_the_loops(length, monkeypatch):
    """Nineteen or twenty clusters, three queries after them; a last parent with one cluster."""
    keys, query = draw(1, 2, length + 3, 8), draw(1, 4, 3, 8, seed=1)
    method = replace(MPCache(page=PAGE, parents=0.3), rows=5 * PAGE, length=100, stored=80)
    found = chosen_pages(method, query, keys, length, monkeypatch)
    options = {"count": 5, "alpha": 0.6, "parents": 0.3}
    assert found == naive_pages(query, keys, length, **options)
    assert found != naive_pages(query, keys, length, **{**options, "parents": 1.0})
    assert found != naive_pages(query, keys, length, **{**options, "alpha": 0.4})


def test_clusters_do_not_depend_on_the_tokens_of_a_pass(monkeypatch):
    """One at a time they choose what they choose together: later ones may complete a cluster of a shared parent."""
    keys, query = draw(1, 2, 96, 8), draw(1, 4, 16, 8, seed=1)
    method = replace(MPCache(page=PAGE, parents=0.3), rows=5 * PAGE, length=100, stored=80)
    together = chosen_pages(method, query, keys, 80, monkeypatch)
    for t in range(16):
        alone = chosen_pages(method, query[:, :, t : t + 1], keys[:, :, : 81 + t], 80 + t, monkeypatch)
        assert [x[0] for x in alone] == [x[t] for x in together]


def test_a_cluster_of_equal_keys_scores_as_its_key():
    """Minimum and maximum are the key itself, so the similarity is the dot product, mean over the group."""
    key, query = draw(1, 1, 1, 8), draw(1, 2, 1, 8, seed=1)
    bounds = torch.cat([key, key], dim=-1)
    found = MPCache().similarities(query, bounds)
    assert torch.allclose(found, (query @ key.mT).mean(1, keepdim=True))


def test_the_first_and_the_last_cluster_are_always_read(monkeypatch):
    """Keys that point away from every query in the first cluster do not keep it from being read."""
    keys, query = draw(1, 1, 61, 8).abs(), draw(1, 2, 1, 8, seed=1).abs()
    keys[:, :, :PAGE] *= -5
    method = replace(MPCache(page=PAGE), rows=3 * PAGE, length=80, stored=60)
    (head,) = chosen_pages(method, query, keys, 60, monkeypatch)
    assert {0, 60 // PAGE} <= head[0]
    assert len(head[0]) == 3


def test_all_clusters_read_are_full_attention():
    """Nothing dropped and every cluster chosen: the answers' logits are those of the full cache."""
    model = tiny_model()
    method = replace(MPCache(page=PAGE, parents=1.0), rows=200, length=201, stored=201)
    logits = []
    for chosen in (method, replace(method, rows=None, stored=None)):
        with Session(model, chosen, capacity=140) as session:
            session.prefill(ids(100))
            logits.append(session.force(ids(12, seed=2)))
    assert torch.allclose(*logits, atol=1e-5)


def test_both_stages_keep_the_same_share_by_default():
    """A budget of 4 % stores a fifth of the context and reads a fifth of that."""
    shape = tiny_model().shape(1000)
    fitted = MPCache(page=PAGE).fit(Budget.parse("4%"), shape)
    assert (fitted.rows, fitted.stored) == (40, 200)


def test_more_read_than_stored_is_refused():
    """The message names both numbers and the least share."""
    with pytest.raises(UserError, match=r"static=0\.3 stores 300 of 1000 .* reads 500\. Use --set static=0\.5 or more"):
        MPCache(static=0.3).fit(Budget.parse("50%"), tiny_model().shape(1000))


def test_a_sliding_layer_drops_nothing():
    """Its entries are those of its window, of which clusters are read."""
    with open_with(tiny_model(4, 2, 48)) as session:
        session.prefill(ids(100))
        session.ask(ids(5, seed=2), 3, stop=frozenset())
        assert {x.n for x in session.layers} == {48 + 5 + 2}
        assert all(x.reads["pages_skipped"] > 0 for x in session.layers)


def test_a_step_of_static_shapes_reads_the_same():
    """With lengths on the device a step has the logits of an ordinary one."""
    model, logits = tiny_model(), []
    for static in (False, True):
        with open_with(model) as session:
            session.prefill(ids(100))
            if static:
                session.make_static()
            logits.append(session.forward(torch.tensor([[3]]), Moment.DECODE))
    assert torch.allclose(*logits, atol=1e-5)
