"""ZipCache against a naive model of its store, exact column means, its error bounds, and the card's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.column_sums import naive as column_sums
from kvbench.kernels.pack import dequantize, quantize
from kvbench.method import Budget, LayerShape, Moment, Shape
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.zipcache import ZipCache

DIM, GROUP, HEADS, LONGEST = 8, 2, 2, 100
SHAPE = Shape(1000, (LayerShape(8, 32, 128, 128, None),) * 2, 2)
"""A model as large as the card's, in 16 bits."""


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def random_rows(seed=3):
    """Queries, keys and values of a conversation; one channel of keys and one of values is large."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS * GROUP, LONGEST, DIM, generator=generator)
    key, value = (torch.randn(1, HEADS, LONGEST, DIM, generator=generator) for _ in range(2))
    key[..., 3] *= 5
    value[..., 2] *= 20
    return query, key, value


def run(make_step, method, rows, lengths, window=None, context_chunks=1):
    """Our outputs pass by pass, and our store; the first length is the context."""
    query, key, value = rows
    kv = method.layer(0)
    kv.capacity = sum(lengths)
    size = lengths[0] // context_chunks
    lengths = [size] * (context_chunks - 1) + [lengths[0] - size * (context_chunks - 1), *lengths[1:]]
    outputs, start = [], 0
    for i, count in enumerate(lengths):
        now = slice(start, start + count)
        later = Moment.DECODE if count == 1 else Moment.TURN_END
        context = Moment.CONTEXT_CHUNK if i < context_chunks - 1 else Moment.CONTEXT_END
        moment = context if i < context_chunks else later
        step = make_step(query[:, :, now], key[:, :, now], value[:, :, now], before=start, moment=moment, window=window)
        kv.append(step)
        outputs.append(method.attend(kv, step)[0].double())
        if moment.in_context and window is not None:
            kv.keep_last(window)
        method.evict(kv, step)
        start += count
    return outputs, kv


class Reference:
    """ZipCache's cache, a token at a time: what every token is read as, and what its probes saw in it."""

    def __init__(self, method, rows, window):
        self.method, self.rows, self.window = method, [x[0] for x in rows], window
        self.stored = {}  # (head, token): key, value
        self.saliency = {}  # (head, token): mass, probes that saw it
        self.important = set()
        self.coded = self.seen = self.blocks = 0

    def run(self, count):
        """Attention of new tokens, one after the other, then coding. [H_q, T, D]"""
        query, key, value = self.rows
        output = torch.zeros(HEADS * GROUP, count, DIM, dtype=torch.float64)
        size, block = (count, 0) if self.blocks == 0 else (self.method.gap, None)
        for t in range(count):
            now = self.seen
            for head in range(HEADS):
                self.stored[head, now] = key[head, now].double(), value[head, now].double()
                self.saliency[head, now] = [0.0, 0]
            this = block if block is not None else self.blocks + (now - self.coded) // size
            first = self.coded + (now - self.coded) // size * size
            probe = (now - first) in self.method.probes(0, size, this).tolist()
            for head in range(HEADS):
                sees = [j for j in range(now + 1) if self.window is None or now - j < self.window]
                keys, values = (torch.stack([self.stored[head, j][k] for j in sees]) for k in range(2))
                weights = (query[head * GROUP : (head + 1) * GROUP, now].double() @ keys.T).softmax(-1)
                output[head * GROUP : (head + 1) * GROUP, t] = weights @ values
                for j, mass in zip(sees, weights.sum(0).tolist(), strict=True):
                    if probe and j >= first:
                        self.saliency[head, j][0] += mass
                        self.saliency[head, j][1] += 1
            self.seen += 1
        if self.blocks == 0:
            self.code(range(0 if self.window is None else max(0, count - self.window), count))
        else:
            while self.seen - self.coded >= size:
                self.code(range(self.coded, self.coded + size))
        return output

    def code(self, tokens):
        """Each head's salient tokens in more bits; the r-th entries of all heads share a scale for their values."""
        method, (_, key, value) = self.method, self.rows
        high = method.high_entries(len(tokens))
        classes = []
        for head in range(HEADS):
            mean = {j: self.saliency[head, j][0] / max(1, self.saliency[head, j][1]) for j in tokens}
            best = sorted(tokens, key=lambda j, m=mean: -m[j])[:high]
            self.important |= {(head, j) for j in best}
            classes.append((sorted(best), sorted(set(tokens) - set(best))))
        channel = [value[h, tokens].abs().amax(0).sqrt().half().float() for h in range(HEADS)]
        for c, bits in ((0, method.high_bits), (1, method.low_bits)):
            members = [classes[head][c] for head in range(HEADS)]
            for head in range(HEADS):
                keys = dequantize(quantize(key[head, members[head]], bits, tokens=len(members[head]))).double()
                for j, row in zip(members[head], keys, strict=True):
                    self.stored[head, j] = row, None
            for row in zip(*members, strict=True):
                joined = torch.cat([value[h, j] / channel[h] for h, j in enumerate(row)])
                back = dequantize(quantize(joined[None], bits, channels=HEADS * DIM))[0].view(HEADS, DIM).double()
                for h, j in enumerate(row):
                    self.stored[h, j] = self.stored[h, j][0], back[h] * channel[h].double()
        self.coded, self.blocks = tokens.stop, self.blocks + 1


@pytest.mark.few(2)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    "settings",
    [{}, {"important": 0.3, "high_bits": 8, "low_bits": 3}, {"recent_probes": 0.3, "random_probes": 0.2},
     {"gap": 24, "random_probes": 0.1}],
    ids=str,
)
def test_equals_a_naive_model_of_the_store(make_step, settings, window):
    """Outputs over a context, 26 single tokens and turns of 23 and 9; a block may outlast the window."""
    method = replace(ZipCache(**{"gap": 10, **settings}), length=30)
    rows, lengths = random_rows(), [30, *[1] * 15, 23, *[1] * 10, 9, 1]
    outputs, kv = run(make_step, method, rows, lengths, window)
    reference = Reference(method, rows, window)
    for i, (ours, count) in enumerate(zip(outputs, lengths, strict=True)):
        theirs = reference.run(count)
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), f"pass {i}: {(ours - theirs).abs().max()}"
    assert len(kv.segments) == reference.blocks == 1 + 58 // method.gap
    assert kv.n == reference.seen - reference.coded == 58 % method.gap


@pytest.mark.parametrize("chunks", [1, 5])
@pytest.mark.parametrize("normalizer", ["visible", "length"])
def test_with_all_entries_as_probes_saliency_is_the_column_mean(make_step, monkeypatch, normalizer, chunks):
    """Summed attention over the number of queries that see an entry, exactly; then both normalizers are one."""
    rows, scores, encode = random_rows(), [], ZipCache._encode
    method = replace(ZipCache(recent_probes=1.0, normalizer=normalizer), length=40)
    assert method.probes(0, 40).tolist() == list(range(40))
    monkeypatch.setattr(ZipCache, "_encode", lambda *x: (scores.append(x[1].scores.clone()), encode(*x)))
    _, kv = run(make_step, method, rows, [40], context_chunks=chunks)
    sums = column_sums.column_sums(rows[0][:, :, :40], rows[1][:, :, :40], scale=1.0, seen=40)
    assert torch.allclose(scores[0].double(), sums, rtol=1e-4)
    best = (sums / torch.arange(40, 0, -1)).topk(24, dim=-1).indices.sort(-1).values
    keys = rows[1][:, :, :40].gather(2, best[..., None].expand(-1, -1, -1, DIM))
    assert dequantize(kv.segments[0].entries[0].key).equal(dequantize(quantize(keys, 4, tokens=24)))


@pytest.mark.parametrize(("normalizer", "wanted"), [("visible", {0, 1}), ("length", {1, 3})])
def test_normalizers_by_hand(make_step, monkeypatch, normalizer, wanted):
    """Probes 1 and 3 of 4 entries, equal weights: sums .75 .75 .25 .25 over 2 2 1 1 probes, or over 4 3 2 1 tokens."""
    monkeypatch.setattr(ZipCache, "probes", lambda *_: torch.tensor([1, 3]))
    method = replace(ZipCache(important=0.5, normalizer=normalizer), length=4)
    key = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 2) / 3
    _, kv = run(make_step, method, (torch.zeros(1, 1, 4, 2), key, key), [4])
    found = (dequantize(kv.segments[0].entries[0].key)[0, 0, :, 0] * 3).round().int().tolist()
    assert set(found) == wanted


def test_permuting_tokens_permutes_what_is_important(make_step):
    """With the last token as the only probe, keys in another order are important in that order."""
    query, key, value = random_rows()
    order = torch.cat([torch.randperm(39, generator=torch.Generator().manual_seed(5)), torch.tensor([39])])
    method = replace(ZipCache(recent_probes=0.0, random_probes=0.0, high_bits=8), length=40)
    kept = []
    for where in (torch.arange(40), order):
        rows = query[:, :, :40], key[:, :, where], value[:, :, where]
        _, kv = run(make_step, method, rows, [40])
        high = dequantize(kv.segments[0].entries[0].key)[0]
        kept.append([x[x[:, 0].argsort()] for x in high])
    for a, b in zip(*kept, strict=True):
        assert a.equal(b)


def test_errors_are_within_their_bounds(make_step):
    """A key is within half of its channel's scale, a value within half of its entry's scale times its channel."""
    rows = random_rows()
    method = replace(ZipCache(), length=50)
    _, kv = run(make_step, method, rows, [50])
    (segment,) = kv.segments
    assert segment.n == 50
    assert [x.key.packed.shape[2] for x in segment.entries] == [30, 20]
    for part in segment.entries:
        keys, values = dequantize(part.key)[0], dequantize(replace(
            part.value, scale=part.value.scale.expand(-1, HEADS, -1, -1),
            minimum=part.value.minimum.expand(-1, HEADS, -1, -1),
        ))[0] * segment.channel[0].float()
        for head in range(HEADS):
            distance = (keys[head][:, None] - rows[1][0, head, :50]).abs()  # [n, 50, D]
            at = (distance / part.key.scale[0, head].float()).amax(-1).argmin(-1)
            assert at.unique().numel() == len(at)  # each code is of an entry of its own
            assert (distance[range(len(at)), at] <= 0.5001 * part.key.scale[0, head].float()).all()
            allowed = 0.5001 * segment.channel[0, head].float() * part.value.scale[0, 0].float()
            assert ((values[head] - rows[2][0, head, at]).abs() <= allowed).all()


def test_probes_are_last_and_random_ones():
    """Five per cent of each, distinct, the same in every run, others in another layer or block; at least the last."""
    method = ZipCache()
    probes = method.probes(0, 1000).tolist()
    assert len(set(probes)) == 100
    assert probes == sorted(probes)
    assert probes[50:] == list(range(950, 1000))
    assert probes == method.probes(0, 1000).tolist()
    assert probes != method.probes(1, 1000).tolist() != method.probes(0, 1000, 1).tolist()
    assert method.probes(0, 1).tolist() == [0]


def test_codes_are_all_that_is_stored():
    """No exact entry outlives the context; forks share what is coded; the effect counts it."""
    model = tiny_model()
    with Session(model, ZipCache().fit(None, model.shape(50)), capacity=300) as session:
        session.prefill(ids(50))
        assert all(store.n == 0 and store.entries_kept() == [50, 50] for store in session.layers)
        proof = session.effect()
        assert proof.acted
        assert proof.facts["entries_quantized"] == 2 * 2 * 50
        assert proof.facts["entries_dropped"] == 0
        with session.fork() as branch:
            branch.ask(ids(130, 2)[0].tolist(), 3, stop=frozenset())
            for mine, theirs in zip(session.layers, branch.layers, strict=True):
                assert len(mine.segments) == 1
                assert len(theirs.segments) == 2
                assert theirs.segments[0] is mine.segments[0]
                assert theirs.n == 32


def test_many_bits_are_near_the_full_cache():
    """In 8 bits later logits are off by less than 2 %, and by something; in 4 and 2 by more."""
    model = tiny_model()
    errors = []
    for bits in ((8, 8), (4, 2)):
        method = ZipCache(high_bits=bits[0], low_bits=bits[1]).fit(None, model.shape(40))
        with Session(model, method) as ours, Session(model, Full()) as full:
            assert torch.allclose(ours.prefill(ids(40)), full.prefill(ids(40)), atol=1e-5)
            found, wanted = (x.forward(ids(20, 2), Moment.TURN_END, keep=20) for x in (ours, full))
        errors.append(((found - wanted).square().mean() / wanted.square().mean()).sqrt().item())
    assert 1e-5 < errors[0] < 0.02 < errors[1]


def test_the_card_s_sizes():
    """3.2 bits on average, 4 bytes per entry for values, and a constant per channel: 824 bytes less the bitmap."""
    constant = 8 * (2 * 128 * 4 + 128 * 2)
    assert ZipCache().fit(None, SHAPE).declared_bytes(SHAPE) == 2 * (1000 * (819.2 + 4) + constant)
    assert ZipCache(important=0.0).declared_bytes(SHAPE) == 2 * (1000 * (512 + 4) + constant - 8 * 128 * 4)
    assert [ZipCache().high_entries(x) for x in (0, 1, 2, 3, 5, 100)] == [0, 1, 2, 2, 3, 60]


def test_a_budget_is_met_by_important_entries():
    """As many important entries as the bytes allow; an unreachable budget is refused with the reachable range."""
    method = ZipCache().fit(Budget.parse("18%"), SHAPE)
    assert method.declared_bytes(SHAPE) <= 0.18 * SHAPE.full_bytes
    assert replace(method, share=method.share + 0.001).declared_bytes(SHAPE) > 0.18 * SHAPE.full_bytes
    assert ZipCache().fit(Budget.parse("20.3%"), SHAPE).share is None
    with pytest.raises(UserError, match=r"budget of 50%: .* from 12.7% \(no important entry\) to 25.2%"):
        ZipCache().fit(Budget.parse("50%"), SHAPE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"high_bits": 16}, "high_bits must be one of 2, 3, 4, 8, got 16"),
        ({"low_bits": 1}, "low_bits must be one of 2, 3, 4, 8, got 1"),
        ({"low_bits": 8}, "low_bits of 8 is above high_bits of 4"),
        ({"important": -0.1}, "important must be between 0 and 1, got -0.1"),
        ({"recent_probes": 2}, "recent_probes must be between 0 and 1, got 2"),
        ({"gap": 0}, "gap must be 1 or more, got 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    """The message names the method, the setting, the value and what is allowed."""
    with pytest.raises(UserError, match=f"zipcache: {message}"):
        ZipCache(**settings)
