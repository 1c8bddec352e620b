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


def exchange(scores, resident, count):
    """The resident pages after a token: its `count` best, and of those before it the ones that promise most."""
    best = sorted(scores, key=lambda x: -scores[x])
    chosen = best[:count]
    return {*chosen, *[x for x in best if x in resident and x not in chosen][: len(resident) - count]}


@pytest.mark.parametrize("box", ["mean", "tight"])
@pytest.mark.parametrize("chosen", [0.6, 0.9], ids=["one page", "two pages"])
@pytest.mark.parametrize(("tier", "heads"), [("device", "layer"), ("host", "layer"), ("device", "group")])
def test_outputs_are_those_of_the_definition(box, chosen, tier, heads, make_step):
    """Four tokens, two KV heads and a budget of two and a half pages between the first and last ones."""
    method = ArkVale(page=4, sinks=1, recent=2, box=box, tier=tier, heads=heads, chosen=chosen, rows=20, length=30)
    output, step, keys, values, kv = answer(method, make_step, tokens=4)
    last = draw(1, 4, 30, 8)[0, :, -1]

    def promise(query):
        alone = [naive(query[x * 2 : x * 2 + 2], keys[0, x], box) for x in range(2)]
        together = {page: alone[0][page] + alone[1][page] for page in alone[0]}
        return [together, together] if heads == "layer" else alone

    resident = [set(sorted(x, key=lambda page: -x[page])[:2]) for x in promise(last)]
    for t in range(4):
        scores = promise(step.query[0, :, t])
        for head in range(2):
            resident[head] = exchange(scores[head], resident[head], 1 if chosen == 0.6 else 2)
            read = [*range(4), *[page * 4 + i for page in sorted(resident[head]) for i in range(4)], *range(24, 31 + t)]
            query = step.query[0, head * 2 : head * 2 + 2, t]
            weights = (query @ keys[0, head, read].T * 0.35).softmax(-1)
            assert torch.allclose(output[0, head * 2 : head * 2 + 2, t], weights @ values[0, head, read], atol=1e-5)
    assert kv.reads["entries_read"] == 2 * sum(18 + 1 + t for t in range(4))


def test_a_page_stays_until_others_promise_more(make_step):
    """A query that chooses one page leaves the other resident one; the page that promises least goes."""
    method = ArkVale(page=4, sinks=1, recent=2, chosen=0.6, rows=20, length=30)
    key = torch.zeros(1, 2, 30, 8)
    for page in range(1, 6):
        key[:, :, page * 4 : page * 4 + 4, page] = 1.0
    kv, wants = method.layer(0), draw(1, 4, 30, 8) * 0
    wants[:, :, -1, 1], wants[:, :, -1, 2] = 2.0, 1.0
    step = make_step(wants, key, key)
    kv.append(step)
    method.evict(kv, step)
    found = [kv.state["resident"][0, 0].nonzero().flatten().tolist()]
    for page in (4, 4, 1, 5):
        query = torch.zeros(1, 4, 1, 8)
        query[..., page], query[..., 2] = 2.0, 1.0
        more = make_step(query, key[:, :, :1] * 0, key[:, :, :1], before=kv.total, moment=Moment.TURN_END)
        kv.append(more)
        method.attend(kv, more)
        found.append(kv.state["resident"][0, 0].nonzero().flatten().tolist())
    assert found == [[0, 1], [1, 3], [1, 3], [0, 1], [1, 4]]  # page 2 of the context is number 1 here


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
    """Five digests that may be chosen, two pages, ten entries of the ends and the token's own, per KV head."""
    *_, kv = answer(ArkVale(page=4, sinks=1, recent=2, heads=heads, rows=20, length=30), make_step, tokens=1)
    assert kv.read_bytes() == 2 * (5 * 2 * 8 * 4 + 19 * 2 * 8 * 4)
