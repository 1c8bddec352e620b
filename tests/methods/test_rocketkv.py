"""RocketKV: how much each stage keeps, and the bounds by which chunks are chosen."""

from __future__ import annotations

import torch

from kvbench.method import Moment
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.retrieval.rocketkv import RocketKV


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(make_step, rows=10, length=144):
    """A layer of two KV heads after the first stage."""
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


def test_the_first_stage_takes_more_of_a_high_ratio():
    """Powers of 0.26, 0.44, 0.56 and, above a ratio of 1,024, at most 0.8."""
    for ratio, power in ((2, 0.26), (16, 0.44), (64, 0.56), (1024, 0.8), (4096, 0.8)):
        length = 64 * ratio
        assert RocketKV(rows=64, length=length).kept(length) == int(length / ratio**power)
    assert RocketKV(rows=999, length=1000).kept(1000) == 999


def test_the_second_stage_shares_what_is_left_between_chunks_and_channels(make_step):
    """144 entries, 10 read: 45 kept, a ratio of 4.5, in chunks of 3, chosen by two thirds of the channels."""
    method, kv, _ = started(make_step)
    assert kv.n == 45
    assert (method.kept(144), method.chunk(144), method.channels(3, 45, 8)) == (45, 3, 5)
    assert RocketKV(rows=100, length=200).chunk(200) == 1  # ratio 1.67: chunks of two would exceed it


def test_the_first_stage_is_snapkv_with_a_wider_pooling(make_step):
    """The same entries stay as with SnapKV at this budget and these settings."""
    _, kv, step = started(make_step)
    other = SnapKV(window=4, kernel=3, rows=45, length=144)
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
        channels = sorted(range(8), key=lambda c: -size[c])[:5]
        shares = torch.zeros(15)
        for q in queries:
            logits = []
            for chunk in range(15):
                keys = kv.keys[0, head, 3 * chunk : 3 * chunk + 3]
                extreme = [keys[:, c].max() if queries[:, c].sum() > 0 else keys[:, c].min() for c in channels]
                logits.append(sum(q[c] * x for c, x in zip(channels, extreme, strict=True)))
            covered = q[channels].abs().sum() / q.abs().sum()
            shares += (torch.stack(logits) / covered.sqrt()).softmax(0) / 2
        best = shares.argsort(descending=True)[:4].tolist()
        wanted = [x for c in best[:3] for x in range(3 * c, 3 * c + 3)] + [3 * best[3]]
        assert mask[0, head].nonzero().flatten().tolist() == [*sorted(wanted), 45]


def test_bounds_hold_in_all_channels(make_step):
    """The score of a chunk is at least that of its best key, and tight where its keys are equal."""
    _, kv, _ = started(make_step)
    low, high = kv.index["bounds"].unbind(2)
    for seed in range(5):
        query = draw(8, seed=seed)
        bound = torch.where(query > 0, high, low) @ query
        best = (kv.keys @ query).unflatten(2, (15, 3)).amax(3)
        assert (bound >= best - 1e-6).all()


def test_a_token_reads_a_bound_per_chunk_in_a_few_channels(make_step):
    """15 chunks in 5 channels, their offsets once, and 10 entries with its own, per KV head."""
    method, kv, _ = started(make_step)
    ask(method, kv, make_step)
    assert kv.reads["bytes"] == 2 * (15 * 5 * 4 + 11 * 2 * 8 * 4) + 16 * 4


def test_every_chunk_is_full_attention_over_what_is_kept(make_step):
    """With a budget of all kept entries nothing is left out."""
    _, kv, _ = started(make_step)
    later = make_step(draw(1, 4, 1, 8, seed=3), draw(1, 2, 1, 8, seed=4), before=144, moment=Moment.DECODE)
    kv.append(later)
    found = RocketKV(window=4, kernel=3, rows=1000, length=144).attend(kv, later)
    assert torch.allclose(found, kv.attend(later), atol=1e-5)
