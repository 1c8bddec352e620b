"""Elastic Cache on text: buckets by hand, exact means, and what a merged entry loses."""

from __future__ import annotations

import torch

from kvbench.methods.merging.elastic_cache_text import ElasticCacheText, bucket_means, nearest, share_out


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def evicted(method, rows, step):
    """The store after a context, compressed to this many entries."""
    kv = ElasticCacheText(**method.settings, rows=rows, length=step.seen).layer(0)
    kv.track = True
    kv.append(step)
    ElasticCacheText(**method.settings, rows=rows, length=step.seen).evict(kv, step)
    return kv


def test_buckets_end_halfway_between_anchors():
    """Anchors 0, 4 and 9 of ten tokens: {0, 1, 2}, {3 to 6}, {7, 8, 9}; token 2 is halfway and goes left."""
    assert nearest(torch.tensor([[0, 4, 9]]), 10).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2, 2]]


def test_the_outermost_tokens_take_no_entries():
    """Of anchors 0, 4, 6 and 9 the inner two share the rest: {1 to 5} but for the ends, and {6, 7, 8}."""
    outermost = torch.tensor([True, False, False, True])
    assert share_out(torch.tensor([[0, 4, 6, 9]]), outermost, 10).tolist() == [[0, 1, 1, 1, 1, 1, 2, 2, 2, 3]]


def test_an_anchor_becomes_the_mean_of_its_bucket(make_step):
    """Naive loops over heads and buckets, with anchors by attention summed over all heads; the ends stay exact."""
    step = make_step(draw(2, 4, 30, 8), draw(2, 2, 30, 8, seed=1), draw(2, 2, 30, 8, seed=2))
    kv = evicted(ElasticCacheText(), 7, step)
    for batch in range(2):
        anchors = kv.positions[batch, 0].tolist()
        assert kv.positions[batch, 1].tolist() == anchors
        assert (anchors[0], anchors[-1]) == (0, 29)
        owners = [0, *(min(range(1, 6), key=lambda i: (abs(anchors[i] - j), i)) for j in range(1, 29)), 6]
        for head in range(2):
            for i in range(7):
                members = [j for j in range(30) if owners[j] == i]
                for rows, found in ((step.key, kv.keys), (step.value, kv.values)):
                    wanted = rows[batch, head, members].mean(0)
                    assert torch.allclose(found[batch, head, i], wanted, atol=1e-6)


def test_anchors_are_the_most_attended_tokens(make_step):
    """The column sums of the causal matrix over all heads, but for the first and last token."""
    step = make_step(draw(1, 4, 30, 8), draw(1, 2, 30, 8, seed=1))
    keys = step.key.repeat_interleave(2, dim=1)
    future = torch.ones(30, 30, dtype=torch.bool).triu(1)
    sums = (step.query @ keys.mT).masked_fill(future, -torch.inf).softmax(-1).sum((1, 2))[0]
    wanted = {0, 29, *(1 + sums[1:29].topk(5).indices).tolist()}
    assert set(evicted(ElasticCacheText(), 7, step).positions[0, 0].tolist()) == wanted


def test_three_equal_entries_count_as_one(make_step):
    """Three tokens of (k1, v1) between two others become one entry with an equal weight: no bias makes up for it."""
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    key = torch.stack([other, one, one, one, other])[None, None]
    kv = evicted(ElasticCacheText(), 3, make_step(torch.zeros(1, 1, 5, 2), key))
    assert torch.allclose(kv.keys[0, 0], torch.stack([other, one, other]))


def test_means_are_taken_in_float32():
    """A thousand ones in bfloat16 have the mean one."""
    rows = torch.ones(1, 1, 1000, 2, dtype=torch.bfloat16)
    assert bucket_means(rows, torch.zeros(1, 1, 1000, dtype=torch.long), 1).tolist() == [[[[1.0, 1.0]]]]
