"""LeoAM: bounds of chunks of every size, which chunks are halved, and what is read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvbench.errors import UserError
from kvbench.method import Moment
from kvbench.methods.retrieval.leoam import LeoAM


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(make_step, keys, **settings):
    """A layer of two KV heads with these keys, in a file."""
    length = keys.shape[2]
    method = LeoAM(**{"chunk": 16, "leaf": 4, "rows": 8, "length": length, **settings})
    kv = method.layer(0)
    step = make_step(draw(1, 4, length, 8), keys, draw(1, 2, length, 8, seed=2))
    kv.append(step)
    method.evict(kv, step)
    return method, kv


def ask(method, kv, make_step, query):
    """One token: the mask of the entries that it reads, and its output."""
    marked = []
    read = type(kv).read
    kv.read = lambda token, mask: marked.append(mask) or read(kv, token, mask)
    later = make_step(query, draw(1, 2, 1, 8, seed=4), before=kv.seen, moment=Moment.DECODE)
    kv.append(later)
    output = method.attend(kv, later)
    return marked[0], output


def bounds(keys, query, start, stop):
    """The sum over heads and channels of the largest product that a key between the two can have."""
    part = keys[0, :, start:stop]
    q = query[0, :, 0].view(2, 2, 1, 8)
    return torch.maximum(q * part.amin(1)[:, None, None], q * part.amax(1)[:, None, None]).sum().item()


def test_a_bound_holds_for_its_halves_and_for_every_key(make_step):
    """Parent, child, key: none is above the one before, on 61 keys, which no chunk divides."""
    keys = draw(1, 2, 61, 8, seed=1)
    method, kv = started(make_step, keys, heads="group")
    for seed in range(4):
        query = draw(1, 2, 8, seed=seed)
        levels = [method.bound(kv, query, 0, slice(1, 2), x, None) for x in range(3)]
        assert [len(x) for x in levels] == [4, 8, 16]
        for parents, children in pairwise(levels):
            assert all(x <= parents[i // 2] + 1e-5 for i, x in enumerate(children))
        products = (keys[0, 1] @ query[0].T).sum(1)
        assert all(x <= levels[2][i // 4] + 1e-5 for i, x in enumerate(products.tolist()))


def test_the_best_chunks_are_halved_until_they_are_smallest(make_step):
    """Against the tree written out: sort by bound, halve what is chosen, sort again."""
    keys, query = draw(1, 2, 61, 8, seed=1), draw(1, 4, 1, 8, seed=3)
    method, kv = started(make_step, keys, rows=10)
    mask, _ = ask(method, kv, make_step, query)
    chunks = [(x, min(x + 16, 61)) for x in range(0, 61, 16)]
    sizes = dict.fromkeys(chunks, 16)
    while True:
        ordered = sorted(chunks, key=lambda x: -bounds(keys, query, *x))
        chosen, total = [], 0
        for x in ordered:
            if total < 10:
                chosen.append(x)
                total += x[1] - x[0]
        large = [x for x in chosen if sizes[x] > 4]
        if not large:
            break
        for start, stop in large:
            half = sizes[start, stop] // 2
            chunks.remove((start, stop))
            for x in ((start, min(start + half, 61)), (start + half, stop)):
                if x[0] < x[1]:
                    chunks.append(x)
                    sizes[x] = half
    wanted = [i for start, stop in chosen for i in range(start, stop)][:10]
    assert mask[0, 0].nonzero().flatten().tolist() == [*sorted(wanted), 61]
    assert mask[0, 1].equal(mask[0, 0])


def test_the_last_key_of_a_chunk_can_be_chosen(make_step):
    """The authors' loop leaves it out; here the one key that answers the query is read, at every place of a chunk."""
    for place in (19, 23, 31, 60):
        keys = 0.1 * draw(1, 2, 61, 8, seed=1)
        keys[0, :, place] = 5.0
        method, kv = started(make_step, keys)
        mask, _ = ask(method, kv, make_step, torch.ones(1, 4, 1, 8))
        assert mask[0, :, place].all()


def test_few_bounds_are_read_where_there_is_a_desert(make_step):
    """One hot chunk of 4 in 256 keys: the bounds of 16 roots and of two halvings, and 4 entries with the new one."""
    keys = torch.zeros(1, 2, 256, 8)
    keys[0, :, 100:104] = 3.0
    method, kv = started(make_step, keys, rows=4)
    ask(method, kv, make_step, torch.ones(1, 4, 1, 8))
    visited = 16 + 2 + 2
    assert kv.reads["bytes"] == 2 * (visited * 2 * 8 * 4 + (4 + 1) * 2 * 8 * 4)
    assert kv.reads["file_bytes"] == 2 * 4 * 2 * 8 * 4


def test_heads_may_choose_for_themselves(make_step):
    """With `heads=group`, each KV head reads the chunk that answers its own queries."""
    keys = torch.zeros(1, 2, 64, 8)
    keys[0, 0, 8:12] = keys[0, 1, 40:44] = 3.0
    method, kv = started(make_step, keys, rows=4, heads="group")
    mask, _ = ask(method, kv, make_step, torch.ones(1, 4, 1, 8))
    assert mask[0, 0].nonzero().flatten().tolist() == [8, 9, 10, 11, 64]
    assert mask[0, 1].nonzero().flatten().tolist() == [40, 41, 42, 43, 64]


def test_everything_is_full_attention(make_step):
    """A budget of every entry gives the output of full attention, through the file."""
    keys, query = draw(1, 2, 61, 8, seed=1), draw(1, 4, 1, 8, seed=3)
    outputs = []
    for tier in ("file", "device"):
        method, kv = started(make_step, keys, tier=tier)
        _, output = ask(replace(method, rows=1000), kv, make_step, query)
        outputs.append(output)
    step = make_step(query, draw(1, 2, 1, 8, seed=4), before=61, moment=Moment.DECODE)
    assert outputs[0].equal(outputs[1])
    assert torch.allclose(outputs[1], kv.attend(step), atol=1e-5)


@pytest.mark.parametrize("settings", [{"chunk": 24}, {"chunk": 4, "leaf": 8}])
def test_sizes_that_halving_does_not_connect_are_refused(settings):
    """24 is no power of two times 8, and chunks are not smaller than their halves."""
    with pytest.raises(UserError, match="cannot be halved down to 8"):
        LeoAM(**settings)
