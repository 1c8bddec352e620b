"""KIVI: what is rounded when, how near it is, what it takes, and what it goes around."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.pack import dequantize, quantize
from kvbench.method import Budget, LayerShape, Moment, Shape
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.kivi import Kivi
from kvbench.registry import find_method

WIDTH = 16
R = 32


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def shape_of(length, width=64, window=None):
    """One layer of two KV heads in 16 bits."""
    return Shape(length, (LayerShape(2, 4, width, width, window),), 2)


def relative(found, wanted):
    """Relative RMS error."""
    return ((found - wanted).square().mean() / wanted.square().mean()).sqrt().item()


@pytest.mark.parametrize("length", [1, R - 1, R, R + 1, 3 * R])
def test_whole_blocks_leave_no_key_behind(length):
    """At multiples of the block every key is packed, where SCBench's older path slices `[:-0]` and packs none."""
    with Session(tiny_model(), Kivi()) as session:
        session.prefill(ids(length))
        for store in session.layers:
            keys, values = store.packed.codes()
            assert keys.packed.shape[2] == length - length % R
            assert store.packed.last_keys.n == length % R
            assert values.packed.shape[2] == max(0, length - R)
            assert store.packed.last_values.n == min(length, R)
            assert store.entries_kept() == [length, length]


@pytest.mark.parametrize("later", [8, 64, 144])
@pytest.mark.parametrize("residual", [R, 128])
def test_room_for_later_tokens_is_within_its_bound(residual, later):
    """Exact keys and values have room for two blocks each, of which the context fills a part."""
    for length in (300, 319, 320):
        with Session(tiny_model(), Kivi(residual=residual), capacity=length + later) as session:
            session.prefill(ids(length))
            room = sum(x.nbytes() for x in session.layers) - session.method.declared_bytes(session.shape)
            assert room <= session.method.later_bytes(session.shape, later)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_element_is_within_half_a_scale(bits):
    """The first layer stores the entries with errors of at most half the group's scale, and the last ones exactly."""
    model = tiny_model()
    with Session(model, Kivi(key_bits=bits, value_bits=bits)) as ours, Session(model, Full()) as full:
        for session in (ours, full):
            session.prefill(ids(100))
        store, exact = ours.layers[0].packed, full.layers[0]
        keys, values = store.codes()
        assert store.last_keys.entries.equal(exact.keys[:, :, 96:])
        assert store.last_values.entries.equal(exact.values[:, :, 68:])
        steps = keys.scale.float().repeat_interleave(R, 2), values.scale.float().repeat_interleave(WIDTH, 3)
        for codes, rows, step in zip((keys, values), (exact.keys, exact.values), steps, strict=True):
            n = codes.packed.shape[2]
            error = (dequantize(codes) - rows[:, :, :n]).abs()
            assert (error <= 0.5001 * step).all()
            assert error.max() > 0.3 * step.max()


def test_an_outlier_channel_costs_the_other_key_channels_nothing(make_step):
    """Keys are rounded per channel: a channel a hundred times as large leaves the others' codes as they were."""
    key = torch.randn(1, 2, R, WIDTH, generator=torch.Generator().manual_seed(0))
    loud = key.clone()
    loud[..., 3] *= 100
    found = []
    for x in (key, loud):
        method = Kivi()
        kv = method.layer(0)
        step = make_step(torch.randn(1, 4, R, WIDTH), x)
        kv.append(step)
        method.evict(kv, step)
        found.append(dequantize(kv.packed.codes()[0]))
    others = [i for i in range(WIDTH) if i != 3]
    assert found[0][..., others].equal(found[1][..., others])
    by_token = dequantize(quantize(loud, 2, channels=WIDTH))
    by_channel = relative(found[1][..., others], key[..., others])
    assert by_channel < 0.5  # a range of four deviations in three steps: 0.4
    assert relative(by_token[..., others], key[..., others]) > 2 * by_channel


def test_a_context_within_the_residual_is_the_full_cache():
    """Nothing is packed yet: the same logits over turns, and an identity that the effect need not prove."""
    model = tiny_model()
    method = Kivi(residual=96)
    assert method.identity(model.shape(60))
    assert not method.identity(model.shape(96))
    with Session(model, method) as ours, Session(model, Full()) as full:
        assert ours.prefill(ids(60)).equal(full.prefill(ids(60)))
        found, wanted = (x.forward(ids(20, 2), Moment.TURN_END, keep=20) for x in (ours, full))
        assert torch.allclose(found, wanted, atol=1e-5)
        assert ours.effect().identity


def test_more_bits_are_nearer():
    """The error of later logits falls with every bit, and eight bits cost less than two parts in a hundred."""
    model, errors = tiny_model(), []
    for bits in (2, 3, 4, 8):
        with Session(model, Kivi(key_bits=bits, value_bits=bits)) as ours, Session(model, Full()) as full:
            assert ours.prefill(ids(100)).equal(full.prefill(ids(100)))
            found, wanted = (x.forward(ids(20, 2), Moment.TURN_END, keep=20) for x in (ours, full))
            errors.append(relative(found, wanted))
    assert errors == sorted(errors, reverse=True)
    assert 1e-5 < errors[-1] < 0.02


def test_later_turns_are_packed_when_they_end_and_not_before():
    """A turn of 50 tokens stays exact until its last chunk; SCBench's port never packs it."""
    for compat in (False, True):
        with Session(tiny_model(), Kivi(scbench_compat=compat)) as session:
            session.prefill(ids(40))
            session.forward(ids(30, 2), Moment.TURN_CHUNK)
            assert [x.packed.keys.n for x in session.layers] == [1, 1]  # groups of 32
            session.forward(ids(20, 3), Moment.TURN_END)
            assert [x.packed.keys.n for x in session.layers] == ([1, 1] if compat else [2, 2])
            assert [x.packed.values.n for x in session.layers] == ([8, 8] if compat else [58, 58])


def test_bytes_are_the_paper_s():
    """At 2 and 4 bits, groups of 32 and heads of 128, long contexts take 18.75 % and 31.25 %, and the residual."""
    for bits, share in ((2, 3 / 16), (4, 5 / 16)):
        declared = Kivi(key_bits=bits, value_bits=bits).declared_bytes(shape_of(1 << 20, 128))
        residual = 2 * 32 * 128 * 2  # the last values of two heads
        packed_values = (1 << 20) - 32
        assert declared == share * 2 * 128 * 2 * ((1 << 20) + packed_values) + residual


def test_only_its_own_budgets_can_be_asked_for():
    """The budget that is reached may be requested, also at lengths less than a block apart; others are refused."""
    for length in range(992, 1024):
        assert Kivi().fit(Budget.parse("20.3%"), shape_of(length)) == Kivi()
    for text in ("25%", "50%", "1024", "100%"):
        with pytest.raises(UserError, match=rf"{text}.*store 20.0%.*26.2% \(3 bits\), 32.3% \(4 bits\)"):
            Kivi().fit(Budget.parse(text), shape_of(1024))


def test_the_paper_s_budget_is_its_residual():
    """128 as in the authors' LongBench tables, shown as resolved; a residual of one's own contradicts it."""
    fitted = Kivi(key_bits=4).fit(Budget.parse("paper"), shape_of(1024))
    assert (fitted.residual, fitted.key_bits, fitted.resolution) == (128, 4, {"paper_residual": 128})
    with Session(tiny_model(), fitted) as session:
        session.prefill(ids(300))
        keys, values = session.layers[0].packed.codes()
        assert (keys.packed.shape[2], values.packed.shape[2]) == (256, 172)
    with pytest.raises(UserError, match="residual is set to 64, and --budget paper sets it to 128"):
        Kivi(residual=64).fit(Budget.parse("paper"), shape_of(1024))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_bits": 5}, "key_bits must be one of 2, 3, 4, 8, got 5"),
        ({"value_bits": 16}, "value_bits must be one of 2, 3, 4, 8, got 16"),
        ({"group": 0}, "group must be 1 or more, got 0"),
        ({"residual": 0}, "residual must be 1 or more, got 0"),
        ({"residual": 40}, "got 40.*Use 32"),
        ({"group": 24}, "multiple of the group of 24 tokens, got 32.*Use 24"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    """With the value, what is allowed and the next step, before a model runs."""
    with pytest.raises(UserError, match=message):
        Kivi(**settings)


def test_groups_that_do_not_divide_a_value_are_refused_by_name():
    """A head of 48 channels has no whole groups of 32; a narrower one than 32 is one group unless a group is set."""
    with pytest.raises(UserError, match=r"groups of 32 do not divide values of 48.*1, 2, 4, 8, 16"):
        Kivi().fit(None, shape_of(100, 48))
    with pytest.raises(UserError, match="groups of 32 do not divide values of 16"):
        Kivi(group=32).fit(None, shape_of(100, 16))
    assert Kivi().fit(None, shape_of(100, 16)) == Kivi()
    assert Kivi(group=16).fit(None, shape_of(100, 48)) == Kivi(group=16)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "knorm", "observed-attention"])
def test_what_another_method_keeps_is_packed(name):
    """The kept entries are those of the method alone, packed: the budget counts entries, and bytes are as declared."""
    model = tiny_model()
    kinds = find_method(name), find_method(f"{name}+kivi")
    alone, packed = (kind().fit(Budget("rows", 64), model.shape(200)) for kind in kinds)
    with Session(model, alone, track=True) as exact, Session(model, packed, track=True) as ours:
        assert exact.prefill(ids(200)).equal(ours.prefill(ids(200)))
        assert ours.layers[0].positions.equal(exact.layers[0].positions)
        assert [x.entries_kept() for x in ours.layers] == [x.entries_kept() for x in exact.layers]
        keys, _ = ours.layers[0].packed.codes()
        rows = keys.packed.shape[2]
        assert dequantize(keys).equal(dequantize(quantize(exact.layers[0].keys[:, :, :rows], 2, tokens=32)))
        assert ours.effect().facts["entries_quantized"] == sum(
            n - n % R for store in exact.layers for n in store.entries_kept()
        )
    with Session(model, packed) as ours:
        ours.prefill(ids(200))
        assert ours.memory().stored_bytes == packed.declared_bytes(model.shape(200))
        assert ours.memory().stored_bytes < 0.6 * alone.declared_bytes(model.shape(200))


def test_heads_that_keep_every_entry_are_packed_and_streaming_heads_are_not():
    """Around RazorAttention a retrieval head's entries are codes; a streaming head's ring stays exact and as it was."""
    model = tiny_model()
    kinds = find_method("razor-attention"), find_method("razor-attention+kivi")
    alone, packed = (kind(induction=0.5).bind(model).fit(Budget.parse("60%"), model.shape(200)) for kind in kinds)
    assert alone.retrieval == packed.retrieval > 0
    assert alone.streaming == packed.streaming
    with Session(model, alone) as exact, Session(model, packed) as ours:
        assert exact.prefill(ids(200)).equal(ours.prefill(ids(200)))
        assert ours.memory().stored_bytes == packed.declared_bytes(model.shape(200))
        assert ours.effect().facts["entries_quantized"] == packed.retrieval * (200 - 200 % R)
        for a, b in zip(exact.layers, ours.layers, strict=True):
            for (heads, x), (others, y) in zip(a.groups, b.groups, strict=True):
                assert heads.equal(others)
                if hasattr(y, "packed"):
                    assert y.packed.last_values.entries.equal(x.values[:, :, -R:])
                else:
                    assert y.keys.equal(x.keys)


@pytest.mark.parametrize(("name", "budget", "length", "least"), [
    ("snapkv+kivi", "31", 100, 32), ("knorm+kivi", "20%", 100, 32), ("razor-attention+kivi", "25%", 120, 36),
    ("duo-attention+kivi", "25%", 120, 36), ("razor-attention+kivi", "75%", 30, 30),
])
def test_a_budget_that_leaves_nothing_to_pack_is_refused(name, budget, length, least):
    """Too few entries, or no head that keeps all of them: the result would be that of the other method alone."""
    settings = {"window": 8} if name.startswith("snapkv") else {}
    said = rf"{name.replace('+', '.')}: .*kivi has nothing to pack.*Use --budget {least} or"
    with pytest.raises(UserError, match=said):
        find_method(name)(**settings).fit(Budget.parse(budget), tiny_model().shape(length))


def test_what_keeps_everything_may_be_too_short_to_pack():
    """A context within the budget and shorter than a block is a declared identity, as it is for both methods alone."""
    shape = tiny_model().shape(20)
    assert find_method("snapkv+kivi")().fit(Budget("rows", 40), shape).identity(shape)
    assert find_method("razor-attention+kivi")().fit(Budget("fraction", 1.0), shape).identity(shape)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("kivi+kivi", "quantizes"), ("snapkv+kivi+kivi", "quantizes"), ("full-int8+kivi", "quantizes"),
        ("mikv+kivi", "quantizes"), ("full+kivi", "as kivi alone does"), ("h2o+kivi", "cannot change"),
        ("tova+kivi", "cannot change"), ("streaming-llm+kivi", "cannot change"), ("adakv+kivi", "unequal numbers"),
        ("snapkv+adakv+kivi", "unequal numbers"), ("kivi+adakv", "unequal numbers"),
        ("snapkv+kivi+adakv", "unequal numbers"),
        ("kvzap+kivi", "decides later"), ("cake+kivi", "decides later"), ("dms+kivi", "decides later"),
        ("snapkv+h2o", r"no other method\. Use snapkv or h2o alone\."),
        ("kivi+snapkv", r"no other method\. The outer method stands last: snapkv\+kivi\."),
    ],
)
def test_nonsense_is_refused_by_name(name, reason):
    """Entries that cannot be packed in fixed blocks, or are quantized already, are refused with the reason."""
    inner, _, outer = name.rpartition("+")
    with pytest.raises(UserError, match=rf"{inner.replace('+', '.')}\+{outer} makes no sense.*{reason}"):
        find_method(name)


def test_packed_entries_cannot_be_compressed_again():
    """A composition says so at the next question instead of scoring entries that it no longer has."""
    model = tiny_model()
    method = find_method("snapkv+kivi")().fit(Budget("rows", 64), model.shape(200))
    with Session(model, method, recompress=True) as session:
        session.prefill(ids(200))
        with pytest.raises(UserError, match="Leave --recompress out"):
            session.ask([1, 2, 3], 2, history=[4])
