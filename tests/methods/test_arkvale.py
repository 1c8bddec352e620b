"""ArkVale: digests of pages, and the pages that are read by them."""

from __future__ import annotations

import pytest
import torch

from kvbench.method import Moment
from kvbench.methods.retrieval.arkvale import ArkVale


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def answer(method, make_step, key=None, tokens=2, **tier):
    """A context of 30 entries in pages of 4, and new tokens: output, step, keys, values, store."""
    key, value = draw(1, 2, 30, 8, seed=1) if key is None else key, draw(1, 2, 30, 8, seed=2)
    kv, step = method.layer(0), make_step(draw(1, 4, 30, 8), key, value, scale=0.35)
    kv.append(step)
    method.evict(kv, step)
    more = make_step(
        2 * draw(1, 4, tokens, 8, seed=3), draw(1, 2, tokens, 8, seed=4), draw(1, 2, tokens, 8, seed=5), before=30,
        moment=Moment.TURN_END, scale=0.35,
    )
    kv.append(more)
    return method.attend(kv, more), more, torch.cat([key, more.key], 2), torch.cat([value, more.value], 2), kv


def naive(query, keys, box):
    """The promise of every page to a group of query heads, in plain loops. query: [G, D]. keys: [n, D]"""
    scores = {}
    for page in range(1, 6):  # pages 0, 6 and 7 are always read; page 7 is partial
        part = keys[page * 4 : page * 4 + 4]
        center = (part.max(0).values + part.min(0).values) / 2
        distance = (part - center).abs()
        half = distance.mean(0) if box == "mean" else distance.max(0).values
        scores[page] = sum(
            float(max(q[c] * (center - half)[c], q[c] * (center + half)[c])) for q in query for c in range(len(center))
        )
    return scores


def choose(scores, rows, t):
    """Entries that are read for the t-th new token."""
    chosen = [*range(4), *range(24, 30), *range(30, 31 + t)]
    left = rows - 10
    for page in sorted(scores, key=lambda x: -scores[x]):
        chosen += range(page * 4, page * 4 + min(4, max(0, left)))
        left -= 4
    return sorted(chosen)


@pytest.mark.parametrize("box", ["mean", "tight"])
@pytest.mark.parametrize(("tier", "heads"), [("device", "layer"), ("host", "layer"), ("device", "group")])
def test_outputs_are_those_of_the_definition(box, tier, heads, make_step):
    """Two tokens, two KV heads, a budget that ends inside a page; heads choose together and alone, from both tiers."""
    method = ArkVale(page=4, sinks=1, recent=2, box=box, tier=tier, heads=heads, rows=16, length=30)
    output, step, keys, values, kv = answer(method, make_step)
    for t in range(2):
        alone = [naive(step.query[0, x * 2 : x * 2 + 2, t], keys[0, x], box) for x in range(2)]
        together = {page: alone[0][page] + alone[1][page] for page in alone[0]}
        for head in range(2):
            query = step.query[0, head * 2 : head * 2 + 2, t]
            chosen = choose(together if heads == "layer" else alone[head], 16, t)
            weights = (query @ keys[0, head, chosen].T * 0.35).softmax(-1)
            assert torch.allclose(output[0, head * 2 : head * 2 + 2, t], weights @ values[0, head, chosen], atol=1e-5)
    assert kv.reads["entries_read"] == 2 * (17 + 18)


def test_a_tight_box_bounds_every_key():
    """The score is at least the largest product with a key; of a page of equal keys it is that product."""
    method, query, keys = ArkVale(box="tight"), draw(1, 2, 3, 8), draw(1, 2, 5, 4, 8, seed=1)
    digest = torch.stack([keys.amin(3), keys.amax(3)], 3)
    best = (query[:, :, :, None, None] * keys[:, :, None]).sum(-1).amax(-1)
    assert (method.score(query, digest) >= best - 1e-5).all()
    same = keys[:, :, :, :1].expand_as(keys)
    exact = (query[:, :, :, None] * same[:, :, None, :, 0]).sum(-1)
    assert torch.allclose(method.score(query, torch.stack([same.amin(3), same.amax(3)], 3)), exact, atol=1e-5)


def test_a_mean_box_may_miss_a_single_key(make_step):
    """The trap of the release's digest: one far key among many near ones counts a quarter."""
    key = torch.zeros(1, 2, 30, 8)
    key[:, :, 8:12] = 0.1
    key[:, :, 9, 0], key[:, :, 16:20, 0] = 8.0, 5.0
    digests = {}
    for box in ("mean", "tight"):
        *_, kv = answer(ArkVale(page=4, sinks=1, recent=2, box=box, rows=16, length=30), make_step, key)
        query = torch.zeros(1, 2, 2, 8)
        query[..., 0] = 1.0
        digests[box] = ArkVale().score(query, kv.index["digest"])[0, 0, 0]
    assert digests["tight"][2] > digests["tight"][4]
    assert digests["tight"][2] == pytest.approx(8.0)


@pytest.mark.parametrize("heads", ["layer", "group"])
def test_bytes_read_are_digests_and_entries(heads, make_step):
    """Five digests that may be chosen, and 16 entries and the token's own, per KV head in float32."""
    *_, kv = answer(ArkVale(page=4, sinks=1, recent=2, heads=heads, rows=16, length=30), make_step, tokens=1)
    assert kv.read_bytes() == 2 * (5 * 2 * 8 * 4 + 17 * 2 * 8 * 4)
