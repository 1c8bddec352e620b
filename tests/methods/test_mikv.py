"""MiKV against a naive model of its store, plain rounding, the full cache, H2O, and the card's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.pack import dequantize, quantize
from kvbench.kernels.packed_attention import packed_partial
from kvbench.method import Budget, LayerShape, Moment, Shape
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.quantization.mikv import MiKV
from kvbench.registry import find_method
from kvbench.store import tiers

DIM, GROUP, HEADS, LONGEST = 8, 2, 2, 100
SHAPE = Shape(1000, (LayerShape(8, 32, 128, 128, None),) * 2, 2)
"""A model as large as the card's, in 16 bits."""


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def rounded(x, bits):
    """Entries as plain rounding to nearest brings them back: groups of half an entry."""
    return dequantize(quantize(x, bits, channels=x.shape[-1] // 2)).double()


class Reference:
    """MiKV's cache of one KV head, an entry at a time: dictionaries from position to entry, score and precision."""

    def __init__(self, method, balancer, window):
        self.method, self.balancer, self.window = method, balancer, window
        self.rows, self.scores, self.low, self.seen = {}, {}, set(), 0

    def stored(self, key, value, bits):
        """An entry as a tier stores it."""
        if bits == 16:
            return key.double(), value.double()
        return rounded((key * self.balancer)[None], bits)[0] / self.balancer.double(), rounded(value[None], bits)[0]

    def run(self, queries, keys, values):
        """Attention of new entries one after the other, then demotion. queries: [G, T, D]. Returns [G, T, D]"""
        first, output = self.seen, []
        for t in range(keys.shape[0]):
            self.rows[first + t] = self.stored(keys[t], values[t], self.method.high_bits)
            self.scores[first + t] = 0.0
            self.seen += 1
            sees = [p for p in self.rows if self.window is None or first + t - p < self.window]
            here = torch.stack([self.rows[p][0] for p in sees]), torch.stack([self.rows[p][1] for p in sees])
            weights = (queries[:, t].double() @ here[0].T).softmax(-1)  # [G, n]
            output.append(weights @ here[1])
            for p, mass in zip(sees, weights.sum(0).tolist(), strict=True):
                self.scores[p] += mass
        self.demote()
        return torch.stack(output, dim=1)

    def demote(self):
        """The least attended entries, unless they are recent; entries out of the window before all."""
        high = self.method.high_entries(self.seen if self.window is None else min(self.seen, self.window))
        recent = self.seen - round(high * self.method.recent)

        def worth(p):
            stale = self.window is not None and p <= self.seen - self.window
            return (0, 0) if stale else (2, 0) if p >= recent else (1, self.scores[p])

        exact = sorted((p for p in self.rows if p not in self.low), key=worth)
        for p in exact[: max(0, len(exact) - high)]:
            key, value = self.rows[p]
            self.rows[p] = self.stored(key.float(), value.float(), self.method.low_bits)
            self.low.add(p)


def conversation(make_step, method, window, turns, context=30):
    """Our outputs and the references' over a context, decode steps and turns of many tokens, and our store."""
    generator = torch.Generator().manual_seed(3)
    lengths = [context, *turns]
    total = sum(lengths)
    query = torch.randn(1, HEADS * GROUP, LONGEST, DIM, generator=generator)
    key, value = (torch.randn(1, HEADS, LONGEST, DIM, generator=generator) for _ in range(2))
    key[..., 3] *= 10  # an outlier channel, as keys have
    kv = method.layer(0)
    kv.capacity = total
    largest = query[0, :, :context].abs().unflatten(0, (HEADS, GROUP)).amax((1, 2)), key[0, :, :context].abs().amax(1)
    balancers = (largest[0] / largest[1]).sqrt() if method.balance else torch.ones(HEADS, DIM)
    references = [Reference(method, balancers[h], window) for h in range(HEADS)]
    start, pairs = 0, []
    for i, count in enumerate(lengths):
        now = slice(start, start + count)
        moment = Moment.CONTEXT_END if i == 0 else Moment.DECODE if count == 1 else Moment.TURN_END
        step = make_step(query[:, :, now], key[:, :, now], value[:, :, now], before=start, moment=moment, window=window)
        kv.append(step)
        ours = method.attend(kv, step)[0].unflatten(0, (HEADS, GROUP)).double()
        if moment is Moment.CONTEXT_END and window is not None:
            kv.keep_last(window)
        method.evict(kv, step)
        for h, reference in enumerate(references):
            if i == 0:  # the context is exact: the reference stores it exactly, then demotes
                exact = replace(method, high_bits=16)
                reference.method = exact
                theirs = reference.run(query[0, h * GROUP : (h + 1) * GROUP, now], key[0, h, now], value[0, h, now])
                reference.method = method
                for p in set(reference.rows) - reference.low:
                    reference.rows[p] = reference.stored(key[0, h, p], value[0, h, p], method.high_bits)
            else:
                theirs = reference.run(query[0, h * GROUP : (h + 1) * GROUP, now], key[0, h, now], value[0, h, now])
            pairs.append((ours[h], theirs))
        high = [set(x.tolist()) for x in kv.positions[0]]
        assert high == [set(t.rows) - t.low for t in references], f"pass {i}"
        start += count
    return pairs, kv


@pytest.mark.few(2)
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(
    "settings",
    [{}, {"low_bits": 4, "important": 0.5, "recent": 0.2}, {"low_bits": 3, "balance": False}, {"high_bits": 8},
     {"high_bits": 2}, {"high_bits": 4, "important": 0.4}, {"important": 0.0}],
    ids=str,
)
def test_equals_a_naive_model_of_the_store(make_step, settings, window):
    """Outputs and the tier of every entry over a context, 25 decode steps and two turns of many tokens."""
    method = replace(MiKV(**settings), length=30)
    pairs, _ = conversation(make_step, method, window, [*[1] * 20, 9, *[1] * 5, 14])
    for i, (ours, theirs) in enumerate(pairs):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), f"pass {i // HEADS}: {(ours - theirs).abs().max()}"


def run_two_passes(make_step, method, rows, context, moment):
    """The store after the context and one more pass over all other rows, and the output of that pass."""
    kv = method.layer(0)
    kv.capacity = rows[0].shape[2]
    for part, when in ((slice(0, context), Moment.CONTEXT_END), (slice(context, kv.capacity), moment)):
        step = make_step(*(x[:, :, part] for x in rows), before=part.start, moment=when)
        kv.append(step)
        output = method.attend(kv, step)
        method.evict(kv, step)
    return kv, output


def test_a_channel_that_the_prompt_does_not_use_is_not_balanced(make_step):
    """Nobody knows its range: in 16 bits, codes of the keys that use it later are as finite as any."""
    method = replace(MiKV(), length=30)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 40, DIM, generator=generator) for _ in range(3))
    key[:, :, :30, 3] = 0.0
    rows = tuple(x.half() for x in (query, key, value))
    kv, output = run_two_passes(make_step, method, rows, 30, Moment.TURN_END)
    last = make_step(query[:, :, :1].half(), key[:, :, :1].half(), before=40, moment=Moment.DECODE)
    kv.append(last)
    assert output.isfinite().all()
    assert method.attend(kv, last).isfinite().all()


@pytest.mark.parametrize("high_bits", [16, 8])
def test_a_channel_with_a_large_mean_shifts_no_tier(make_step, monkeypatch, high_bits):
    """In bfloat16, where a divided query that is rounded moves all logits of codes by a good part of one."""
    found = []

    def spy(query, keys, values, **options):
        found.append((packed_partial(query, keys, values, **options), dequantize(keys)))
        return found[-1][0]

    monkeypatch.setattr(tiers, "packed_partial", spy)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 1, 41, DIM, generator=generator) for _ in range(3))
    key[..., 3] += 300
    query[..., 3] += 3
    method = replace(MiKV(important=0.5, low_bits=4, high_bits=high_bits), length=40)
    rows = tuple(x.bfloat16() for x in (query, key, value))
    kv, _ = run_two_passes(make_step, method, rows, 40, Moment.DECODE)
    assert len(found) == (1 if high_bits == 16 else 2)
    for partial, keys in found:
        logits = rows[0][:, :, 40:].double() @ (keys / kv.state["balancer"]).double().mT
        assert abs(float(partial.lse) - float(logits.logsumexp(-1))) < 0.01


@pytest.mark.slow
def test_entries_are_never_promoted(make_step):
    """The low tier only grows, and its entries and the high tier's are all entries, equally many for every head."""
    method = replace(MiKV(), length=30)
    before = set()
    for count in range(1, 12):
        _, kv = conversation(make_step, method, None, [1] * count)
        high = {(h, p) for h in range(HEADS) for p in kv.positions[0, h].tolist()}
        low = {(h, p) for h in range(HEADS) for p in range(30 + count)} - high
        assert before <= low
        assert kv.n + kv.demoted.n == 30 + count
        assert kv.n == round(0.2 * (30 + count))
        before = low


def test_everything_important_is_the_full_cache():
    """At 100 % every entry is exact from then on: tokens and logits are the full cache's, with a window too."""
    for shape in ((4, 2, None), (4, 2, 48)):
        model = tiny_model(*shape)
        method = MiKV().fit(Budget.parse("100%"), model.shape(60))
        assert method.identity(model.shape(60))
        with Session(model, method, capacity=120) as ours, Session(model, Full(), capacity=120) as full:
            assert torch.allclose(ours.prefill(ids(60)), full.prefill(ids(60)), atol=1e-5)
            for turn in range(3):
                question = ids(4 + 3 * turn, turn)[0].tolist()
                a, b = (x.ask(question, 5, stop=frozenset()) for x in (ours, full))
                assert a.ids == b.ids
            assert torch.allclose(ours.score(ids(9, 7)), full.score(ids(9, 7)), atol=1e-5)
            assert ours.effect().identity


def test_nothing_important_is_plain_rounding(make_step):
    """With no entry in the high tier a question reads the context rounded to nearest, and its own entries exactly."""
    method = replace(MiKV(important=0.0, balance=False), length=30)
    pairs, kv = conversation(make_step, method, None, [5])
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(1, HEADS * GROUP, LONGEST, DIM, generator=generator)[0, :GROUP, 30:35].double()
    key, value = (torch.randn(1, HEADS, LONGEST, DIM, generator=generator)[0, 0, :35] for _ in range(2))
    key[:, 3] *= 10
    keys, values = (torch.cat([rounded(x[:30], 2), x[30:].double()]) for x in (key, value))
    later = torch.arange(35) > torch.arange(30, 35)[:, None]
    wanted = (query @ keys.T).masked_fill(later, -torch.inf).softmax(-1) @ values
    assert torch.allclose(pairs[HEADS][0], wanted, rtol=1e-4, atol=1e-4)
    assert kv.n == 0
    assert kv.demoted.n == 35


def test_the_balancer_is_an_identity_without_rounding(make_step):
    """Queries divided by it meet keys multiplied by it as if nothing had happened; both ranges are equal then."""
    query, key = torch.randn(1, 4, 20, DIM), torch.randn(1, 2, 20, DIM)
    key[..., 2] *= 30
    key[:, 1, :, 5] = 0  # a channel that keys do not use
    method = replace(MiKV(), length=20)
    kv = method.layer(0)
    for low in (0, 8):  # in two chunks
        step = make_step(query[:, :, low : low + 12], key[:, :, low : low + 12], before=low,
                         moment=Moment.CONTEXT_END if low == 8 else Moment.CONTEXT_CHUNK)
        kv.append(step)
        method.attend(kv, step)
        kv.n -= 4 * (low == 0)
    method.evict(kv, step)
    balancer = kv.state["balancer"]
    assert set(kv.state) == {"balancer"}
    assert balancer.isfinite().all()
    assert balancer[0, 1, 0, 5] == 1
    grouped = query.unflatten(1, (2, 2)).flatten(2, 3)
    exact, balanced = grouped @ key.mT, (grouped / balancer) @ (key * balancer).mT
    assert torch.allclose(exact, balanced, rtol=1e-4, atol=1e-4)
    ranges = (grouped / balancer).abs().amax(2), (key * balancer).abs().amax(2)
    used = torch.ones(1, 2, DIM, dtype=torch.bool)
    used[0, 1, 5] = False
    assert torch.allclose(ranges[0][used], ranges[1][used], rtol=1e-5)


def test_the_balancer_helps_two_bits(make_step):
    """Where keys have an outlier channel, balanced 2-bit keys give outputs nearer to the exact ones."""
    errors = {}
    for balance in (True, False):
        method = replace(MiKV(important=0.0, balance=balance), length=30)
        exact = replace(MiKV(important=1.0), length=30)
        ours, dense = (conversation(make_step, x, None, [20])[0][HEADS][0] for x in (method, exact))
        errors[balance] = (ours - dense).square().mean()
    assert errors[True] < 0.8 * errors[False]


def test_the_high_tier_is_what_h2o_keeps():
    """After the context the exact entries are H2O's entries at the same share."""
    model = tiny_model()
    with Session(model, MiKV().fit(None, model.shape(50))) as ours, Session(
        model, H2O().fit(Budget("rows", 10), model.shape(50))
    ) as h2o:
        for session in (ours, h2o):
            session.prefill(ids(50))
        for a, b in zip(ours.layers, h2o.layers, strict=True):
            assert a.positions.sort(-1).values.equal(b.positions.sort(-1).values)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [None, 4, 16])
def test_the_low_tier_is_packed(bits, group):
    """An entry of the low tier takes N + 32 / g bits per element, and no exact entry of it is left."""
    model = tiny_model()
    with Session(model, MiKV(low_bits=bits, group=group, important=0.1).fit(None, model.shape(50))) as session:
        session.prefill(ids(50))
        for store in session.layers:
            codes = store.demoted.held()
            assert store.demoted.n == 45
            assert sum(x.nbytes for x in codes.values()) == 2 * 45 * 32 * (bits + 32 / (group or 8)) / 8
            assert store.keys.shape[2] == 5
        proof = session.effect()
        assert proof.acted
        assert proof.facts["entries_quantized"] == 2 * 2 * 45
        assert proof.facts["entries_dropped"] == 0


def test_a_draft_is_scored_by_the_tokens_that_the_full_cache_reads():
    """In mikv+vericache: by those of the question, and by accepted ones."""
    model = tiny_model()
    method = find_method("mikv+vericache")().bind(model).fit(None, model.shape(60))
    with Session(model, method, capacity=90) as session:
        session.prefill(ids(60))
        before = [x.draft.scores.sum() for x in session.layers]
        session.ask(ids(9, seed=2)[0].tolist(), 8, stop=frozenset())
        for store, mass in zip(session.layers, before, strict=True):
            assert store.draft.scores.sum() > mass
            later = (store.draft.positions >= 60) & (store.draft.positions < 75)
            assert later.any() and (store.draft.scores[later] > 0).all()


def test_the_card_s_sizes():
    """At r = 0.2 and 2 bits in groups of 64: 32.5, 23.1, 18.1, 15.6 % for 16, 8, 4, 2 bits, and what scores take."""
    for bits, share in ((16, 0.325), (8, 0.23125), (4, 0.18125), (2, 0.15625)):
        method = MiKV(high_bits=bits).fit(None, SHAPE)
        extra = 2 * 8 * (200 * (4 + 4) + 128 * 4)  # scores and positions of the high tier, balancers
        assert method.declared_bytes(SHAPE) == round(share * SHAPE.full_bytes) + extra


@pytest.mark.parametrize("text", ["20%", "25%", "50%", "400"])
def test_a_budget_is_met_by_important_entries(text):
    """As many important entries as the bytes allow: one more would exceed the budget."""
    method = MiKV().fit(Budget.parse(text), SHAPE)
    asked = Budget.parse(text).value * (1 if text.endswith("%") else 1 / 1000) * SHAPE.full_bytes
    assert method.declared_bytes(SHAPE) <= asked
    assert replace(method, share=method.share + 0.001).declared_bytes(SHAPE) > asked
    assert method.settings["important"] == 0.2


def test_budgets_out_of_reach_are_refused():
    """The message says what can be reached; a share that is set and a budget that is asked for must agree."""
    with pytest.raises(UserError, match=r"budget of 10%: .* from 15.7% \(no important entry\) to 101.7%"):
        MiKV().fit(Budget.parse("10%"), SHAPE)
    with pytest.raises(UserError, match=r"important entries is set to 0.5, which takes 58.7%"):
        MiKV(important=0.5).fit(Budget.parse("25%"), SHAPE)
    assert MiKV(important=0.5).fit(Budget.parse("58.7%"), SHAPE).share is None
    with pytest.raises(UserError, match="no paper budget"):
        MiKV().fit(Budget.parse("paper"), SHAPE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low_bits": 5}, "low_bits must be one of 2, 3, 4, got 5"),
        ({"high_bits": 3}, "high_bits must be one of 16, 8, 4, 2, got 3"),
        ({"high_bits": 2, "low_bits": 4}, "high_bits must be low_bits or more, got 2 and 4"),
        ({"important": 1.5}, "important must be between 0 and 1, got 1.5"),
        ({"recent": -1}, "recent must be between 0 and 1, got -1"),
        ({"group": 0}, "group must be 1 or more, got 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    """The message names the method, the setting, the value and what is allowed."""
    with pytest.raises(UserError, match=f"mikv: {message}"):
        MiKV(**settings)


def test_groups_must_divide_the_head():
    """A group size is checked against the model before it runs."""
    with pytest.raises(UserError, match="groups of 48 channels do not divide heads of 128 channels"):
        MiKV(group=48).fit(None, SHAPE)
