"""MagicPIG: hash tables, the chance of a sample, and the estimate that divides by it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvbench.method import Moment
from kvbench.methods.retrieval.magicpig import LEAST_CHANCE, MagicPIG


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def answer(method, make_step, length=40, **given):
    """A context and one new token: output, step, keys, values, store."""
    key, value = draw(1, 2, length, 8, seed=1), draw(1, 2, length, 8, seed=2)
    kv, step = method.layer(0), make_step(draw(1, 4, length, 8), key, value, scale=0.35)
    kv.append(step)
    method.evict(kv, step)
    more = make_step(
        given.get("query", draw(1, 4, 1, 8, seed=3)), draw(1, 2, 1, 8, seed=4), draw(1, 2, 1, 8, seed=5),
        before=length, moment=Moment.TURN_END, scale=0.35,
    )
    kv.append(more)
    return method.attend(kv, more), more, torch.cat([key, more.key], 2), torch.cat([value, more.value], 2), kv


def naive(method, query, keys, values, planes, scale):
    """One query head in plain loops: its output and the places of its samples. query: [D]. keys: [n + 1, D]"""
    last = len(keys) - 1 - method.recent
    center = keys[method.sinks : last].mean(0)

    def code(x, table):
        return [bool(x @ planes[:, table * method.bits + i] > 0) for i in range(method.bits)]

    logits, chosen, samples = [], [], []
    for i in range(len(keys)):
        log = 0.0
        if method.sinks <= i < last:
            k = keys[i] - center
            hits = sum(code(query, t) == code(k, t) for t in range(method.tables))
            if hits < 2:
                continue
            samples.append(i)
            angle = math.acos(max(-1, min(1, float(query @ k / query.norm() / k.norm()))))
            p = (1 - angle / math.pi) ** method.bits
            two = 1 - (1 - p) ** method.tables - method.tables * p * (1 - p) ** (method.tables - 1)
            log = math.log(two + LEAST_CHANCE)
        logits.append(float(query @ keys[i]) * scale - log)
        chosen.append(i)
    return torch.tensor(logits).softmax(0) @ values[chosen], samples


@pytest.mark.parametrize("tier", ["device", "host"])
def test_outputs_are_those_of_the_definition(tier, make_step):
    """Samples by tables in plain loops, with weights of 1 / chance; the budget leaves none out."""
    method = MagicPIG(bits=3, tables=6, sinks=2, recent=5, rows=39, length=40, tier=tier)
    output, step, keys, values, kv = answer(method, make_step)
    planes, sampled = kv.index["planes"][0, 0], 0
    for head in range(4):
        wanted, samples = naive(method, step.query[0, head, 0], keys[0, head // 2], values[0, head // 2], planes, 0.35)
        assert torch.allclose(output[0, head, 0], wanted, atol=1e-5)
        sampled += len(samples)
    assert kv.reads["entries_read"] == sampled + 4 * (2 + 5 + 1)
    assert 0 < sampled < 4 * 33


def test_the_chance_is_that_of_random_planes():
    """Against the share of many draws of planes, at four angles."""
    method = MagicPIG(bits=3, tables=4)
    generator = torch.Generator().manual_seed(0)
    for angle in (0.2, 0.8, 1.5, 2.5):
        pair = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])
        planes = torch.randn(20_000, 4, 3, 2, generator=generator)
        signs = planes @ pair.T > 0
        hits = (signs[..., 0] == signs[..., 1]).all(-1).sum(-1)
        share = float((hits >= 2).float().mean())
        assert float(method.chance(torch.tensor(math.cos(angle)))) == pytest.approx(share, abs=0.01)


def test_the_estimate_is_unbiased_over_seeds(make_step):
    """Normalizer and weighted values, averaged over hash seeds, are full attention's; unweighted samples are not.

    A planted fault, the weight left out, misses more than three times as much.
    """
    def mean_of(weighted):
        total, seeds = 0, 60
        for seed in range(seeds):
            method = MagicPIG(bits=2, tables=4, sinks=2, recent=5, rows=39, length=40, seed=seed)
            kv, step, values = None, None, None
            _, step, _, values, kv = answer(method, make_step, query=2 * draw(1, 4, 1, 8, seed=3))
            chance = MagicPIG.chance
            if not weighted:
                MagicPIG.chance = lambda _, cosine: torch.ones_like(cosine)
            try:
                part = method.read(kv, step, 41)
            finally:
                MagicPIG.chance = chance
            total = total + part.output * part.lse.exp()[..., None] / seeds
        return total, step, kv, values

    found, step, kv, values = mean_of(weighted=True)
    keys = kv.keys.repeat_interleave(2, 1)
    weights = (step.query @ keys.mT * 0.35).exp()
    wanted = weights @ values.repeat_interleave(2, 1)
    plain, *_ = mean_of(weighted=False)
    error, fault = ((x - wanted).norm() / wanted.norm() for x in (found, plain))
    assert error < 0.1
    assert fault > 3 * error


def test_samples_beyond_the_budget_are_left_out_and_weighed(make_step):
    """Equal vectors are always sampled: of 33, 10 are read, each for 3.3."""
    method = MagicPIG(bits=1, tables=60, sinks=2, recent=5, rows=17, length=40)
    step = make_step(draw(1, 4, 1, 8), draw(1, 2, 1, 8), before=40)
    kept, share = method.thin(torch.ones(1, 3, 33, dtype=torch.bool), step)
    assert kept.sum(-1).tolist() == [[10, 10, 10]]
    assert share.tolist() == [[pytest.approx(10 / 33)] * 3]
    few = torch.zeros(1, 1, 33, dtype=torch.bool)
    few[..., :4] = True
    kept, share = method.thin(few, step)
    assert kept.equal(few)
    assert share.item() == 1
    *_, kv = answer(method, make_step)
    assert kv.reads["entries_read"] <= 4 * (17 + 1)


def place_step(make_step, positions, layer=0):
    """A token at a position of its own in every sequence of a batch."""
    vectors = draw(len(positions), 2, 1, 8)
    return replace(make_step(vectors, vectors), layer=layer, positions=torch.tensor(positions)[:, None])


def test_every_head_layer_and_token_leaves_out_others(make_step):
    """The order depends on nothing else: a token of a batch leaves out what it leaves out alone, and does so again."""
    method, all_sampled = MagicPIG(sinks=2, recent=5, rows=17, length=40), torch.ones(1, 3, 33, dtype=torch.bool)

    def keep(positions, layer=0):
        step = place_step(make_step, positions, layer)
        return method.thin(all_sampled.expand(len(positions), -1, -1), step)[0]

    first = keep([40])
    sets = [*first[0], *keep([41])[0], *keep([40], layer=1)[0], *replace(method, seed=1).thin(
        all_sampled, place_step(make_step, [40]))[0][0]]
    assert len({tuple(x.tolist()) for x in sets}) == 12
    assert keep([40, 41, 40]).equal(torch.cat([first, keep([41]), first]))


def test_no_entry_is_left_out_more_often_than_others(make_step):
    """Of 33 samples 10 are read: over 400 tokens each of them about 121 times."""
    method = MagicPIG(sinks=2, recent=5, rows=17, length=40)
    step = place_step(make_step, list(range(40, 440)))
    counts = method.thin(torch.ones(400, 1, 33, dtype=torch.bool), step)[0].sum(0)
    assert 80 < counts.min() <= counts.max() < 165


def test_the_reads_of_a_question_do_not_depend_on_chunks(make_step):
    """Four tokens at once, in two parts, and one of two in a batch: the same outputs, with samples left out."""
    method = MagicPIG(bits=1, tables=60, sinks=2, recent=5, rows=17, length=40)
    asked = [draw(2, heads, 4, 8, seed=3 + heads) for heads in (4, 2)]

    def run(rows, parts):
        key = draw(2, 2, 40, 8, seed=1)[rows]
        kv, step = method.layer(0), make_step(draw(2, 4, 40, 8)[rows], key, scale=0.35)
        kv.append(step)
        method.evict(kv, step)
        outputs = []
        for part in parts:
            query, key = (x[rows][:, :, part] for x in asked)
            more = make_step(query, key, before=40 + part.start, moment=Moment.TURN_END, scale=0.35)
            kv.append(more)
            outputs.append(method.attend(kv, more))
        assert kv.reads["entries_skipped"]
        return torch.cat(outputs, 2)

    whole = run(slice(0, 2), [slice(0, 4)])
    assert torch.allclose(run(slice(0, 2), [slice(0, 1), slice(1, 4)]), whole, atol=1e-5)
    assert torch.allclose(run(slice(1, 2), [slice(0, 4)]), whole[1:], atol=1e-5)


def test_samples_stand_for_those_that_were_left_out(make_step):
    """33 equal entries, of which 10 are read: the normalizer is that of all of them."""
    method = MagicPIG(bits=1, tables=60, sinks=2, recent=5, rows=17, length=40)
    kv, key = method.layer(0), torch.full((1, 2, 40, 8), 0.5)
    step = make_step(draw(1, 4, 40, 8), key, scale=0.35)
    kv.append(step)
    method.evict(kv, step)
    token = make_step(draw(1, 4, 1, 8, seed=3), draw(1, 2, 1, 8, seed=4), before=40, moment=Moment.DECODE, scale=0.35)
    kv.append(token)
    found = method.read(kv, token, 41)
    assert kv.reads["entries_read"] == 4 * (17 + 1)
    wanted = (token.query @ kv.keys.repeat_interleave(2, 1).mT * 0.35).logsumexp(-1)
    assert torch.allclose(found.lse, wanted, atol=1e-3)


def test_bytes_read_are_buckets_and_entries(make_step):
    """Places in the buckets of the query's codes, probes of the sorted codes, parameters, and entries."""
    method = MagicPIG(bits=3, tables=6, sinks=2, recent=5, rows=39, length=40)
    _, step, keys, _, kv = answer(method, make_step)
    planes, center = kv.index["planes"][0, 0], keys[:, :, 2:35].mean(2, keepdim=True)
    codes = method.hash(keys[:, :, 2:35] - center, planes).repeat_interleave(2, 1)  # [1, H_q, L, n]
    hits = int((codes == method.hash(step.query, planes)).sum())
    probes = 4 * 6 * 2 * 6 * 2  # two searches of ceil(log2(34)) codes of 2 bytes, for each table and query head
    parameters = (2 * 8 + 8 * 18) * 4
    assert kv.read_bytes() == hits * 4 + probes + parameters + kv.reads["entries_read"] * 64
