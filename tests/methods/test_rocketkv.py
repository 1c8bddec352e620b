"""RocketKV: how much each stage keeps, and the bounds by which chunks are chosen."""

from __future__ import annotations

import torch

from kvbench.method import Moment
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.retrieval.rocketkv import RocketKV


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(make_step, rows=9, length=144):
    """A layer of two KV heads that kept the geometric mean of its entries and the budget."""
    method = RocketKV(window=4, kernel=3, rows=rows, length=length)
    kv = method.layer(0)
    step = make_step(draw(1, 4, length, 8), draw(1, 2, length, 8, seed=1), draw(1, 2, length, 8, seed=2))
    kv.append(step)
    method.evict(kv, step)
    return method, kv, step


def ask(method, kv, make_step, query=None):
    """One token: the mask of the entries that it reads."""
    marked = []
    read = type(kv).read
    kv.read = lambda token, mask: marked.append(mask) or read(kv, token, mask)
    later = make_step(
        draw(1, 4, 1, 8, seed=3) if query is None else query, draw(1, 2, 1, 8, seed=4), before=kv.seen,
        moment=Moment.DECODE,
    )
    kv.append(later)
    method.attend(kv, later)
    return later, marked[0]


def test_both_stages_have_the_same_ratio(make_step):
    """144 entries, 9 read: 36 kept, in chunks of 2, chosen by half of the channels."""
    method, kv, _ = started(make_step)
    assert kv.n == 36
    assert (method.kept(144), method.chunk(144), method.channels(2, 36, 8)) == (36, 2, 4)
    assert RocketKV(rows=100, length=300).chunk(300) == 1  # ratio 1.73: chunks of two would exceed it


def test_the_first_stage_is_snapkv_with_a_wider_pooling(make_step):
    """The same entries stay as with SnapKV at this budget and these settings."""
    _, kv, step = started(make_step)
    other = SnapKV(window=4, kernel=3, rows=36, length=144)
    snap = other.layer(0)
    snap.append(step)
    other.evict(snap, step)
    assert kv.keys.equal(snap.keys)


def test_chunks_are_chosen_by_extreme_keys_in_the_largest_channels(make_step):
    """Against a loop over chunks and channels: the sign of the group's sum chooses between minimum and maximum."""
    method, kv, _ = started(make_step)
    later, mask = ask(method, kv, make_step)
    for head in range(2):
        queries = later.query[0, 2 * head : 2 * head + 2, 0]
        size = queries.abs().mean(0)
        channels = sorted(range(8), key=lambda c: -size[c])[:4]
        shares = torch.zeros(18)
        for q in queries:
            logits = []
            for chunk in range(18):
                keys = kv.keys[0, head, 2 * chunk : 2 * chunk + 2]
                extreme = [keys[:, c].max() if queries[:, c].sum() > 0 else keys[:, c].min() for c in channels]
                logits.append(sum(q[c] * x for c, x in zip(channels, extreme, strict=True)))
            covered = q[channels].abs().sum() / q.abs().sum()
            shares += (torch.stack(logits) / covered.sqrt()).softmax(0) / 2
        best = shares.argsort(descending=True)[:5].tolist()
        wanted = [x for c in best[:4] for x in (2 * c, 2 * c + 1)] + [2 * best[4]]
        assert mask[0, head].nonzero().flatten().tolist() == [*sorted(wanted), 36]


def test_bounds_hold_in_all_channels(make_step):
    """The score of a chunk is at least that of its best key, and tight where its keys are equal."""
    _, kv, _ = started(make_step)
    low, high = kv.index["bounds"].unbind(2)
    for seed in range(5):
        query = draw(8, seed=seed)
        bound = torch.where(query > 0, high, low) @ query
        best = (kv.keys @ query).unflatten(2, (18, 2)).amax(3)
        assert (bound >= best - 1e-6).all()


def test_a_token_reads_a_bound_per_chunk_in_a_few_channels(make_step):
    """18 chunks in 4 channels, their offsets once, and 9 entries with its own, per KV head."""
    method, kv, _ = started(make_step)
    ask(method, kv, make_step)
    assert kv.reads["bytes"] == 2 * (18 * 4 * 4 + 10 * 2 * 8 * 4) + 19 * 4


def test_every_chunk_is_full_attention_over_what_is_kept(make_step):
    """With a budget of all kept entries nothing is left out."""
    _, kv, _ = started(make_step)
    later = make_step(draw(1, 4, 1, 8, seed=3), draw(1, 2, 1, 8, seed=4), before=144, moment=Moment.DECODE)
    kv.append(later)
    found = RocketKV(window=4, kernel=3, rows=1000, length=144).attend(kv, later)
    assert torch.allclose(found, kv.attend(later), atol=1e-5)
