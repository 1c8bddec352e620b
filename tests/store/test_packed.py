"""The packed store against exact rows kept aside: what is packed when, what attention reads, forks and bytes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE
from kvbench.kernels.dense_attention.naive import dense_attention
from kvbench.kernels.pack import dequantize, naive, quantize
from kvbench.method import Moment, Step
from kvbench.store import storage_bytes
from kvbench.store.blocks import Residual
from kvbench.store.packed import PackedKV, Packing

GROUP, RESIDUAL = 4, 8
KEY_WIDTH, VALUE_WIDTH = 12, 8
LENGTHS = (1, RESIDUAL - 1, RESIDUAL, RESIDUAL + 1, 3 * RESIDUAL)
PACKING = Packing(2, 3, GROUP, RESIDUAL, later=True)


def rows(count, seed=0, heads=2):
    """Keys and values. [1, heads, count, D]"""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, heads, count, width, generator=generator) for width in (KEY_WIDTH, VALUE_WIDTH))


def step_of(key, value, seen, *, moment=Moment.CONTEXT_END, **options):
    """The forward pass that brings these rows."""
    count = key.shape[2]
    query = torch.randn(1, 4, count, KEY_WIDTH, generator=torch.Generator().manual_seed(seen))
    return Step(
        layer=0, moment=moment,
        positions=torch.arange(seen - count, seen).expand(1, -1), seen=seen, query=query, key=key, value=value,
        scale=0.3, causal=True, rope=NO_ROPE,
        **{"window": None, "softcap": None, "sinks": None, **options},
    )


def packed_store(key, value, packing=PACKING, capacity=0, **options):
    """A store whose context these rows are."""
    kv = PackedKV(packing=packing, **options)
    kv.capacity = capacity
    kv.append(step_of(key, value, key.shape[2]))
    kv.pack()
    return kv


def stored(kv):
    """Decoded contents of the store: keys and values of all entries, in float64."""
    return tuple(
        torch.cat([
            naive.dequantize(x.packed, x.scale, x.minimum, x.bits, x.width, tokens=x.tokens, channels=x.channels),
            last.entries.double(),
        ], dim=2)
        for x, last in zip(kv.packed.codes(), (kv.packed.last_keys, kv.packed.last_values), strict=True)
    )


def add(kv, key, value, seen, **options):
    """A later forward, and what its end packs."""
    step = step_of(key, value, seen, moment=Moment.DECODE, **options)
    kv.append(step)
    output = kv.attend(step)
    kv.flush()
    return step, output


def same(a, b):
    """Two stores hold the same codes and the same exact rows."""
    codes = zip(a.packed.codes(), b.packed.codes(), strict=True)
    return all(
        x.packed.equal(y.packed) and x.scale.equal(y.scale) and x.minimum.equal(y.minimum) for x, y in codes
    ) and all(
        x.entries.equal(y.entries) for x, y in ((a.packed.last_keys, b.packed.last_keys),
                                          (a.packed.last_values, b.packed.last_values))
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_the_context_is_packed_but_for_the_residual(length):
    """Keys but for the remainder of whole blocks, none where it is none; values but for the last ones."""
    key, value = rows(length)
    kv = packed_store(key, value)
    whole, old = length - length % RESIDUAL, max(0, length - RESIDUAL)
    keys, values = kv.packed.codes()
    assert keys.packed.equal(quantize(key[:, :, :whole], 2, tokens=GROUP).packed)
    assert values.packed.equal(quantize(value[:, :, :old], 3, channels=GROUP).packed)
    assert kv.packed.last_keys.entries.equal(key[:, :, whole:])
    assert kv.packed.last_values.entries.equal(value[:, :, old:])
    assert kv.entries_kept() == [length, length]
    assert kv.facts()["entries_quantized"].value == 2 * whole


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("start", [1, RESIDUAL, 11])
def test_one_by_one_equals_bulk(start, length):
    """Rows that come one by one, in turns of three, or all with the context leave the same codes and residual."""
    key, value = rows(start + length)
    bulk = packed_store(key, value)
    for size in (1, 3, length):
        kv = packed_store(key[:, :, :start], value[:, :, :start])
        for low in range(start, start + length, size):
            high = min(low + size, start + length)
            add(kv, key[:, :, low:high], value[:, :, low:high], high)
        assert same(kv, bulk)
        assert kv.n == start + length


@pytest.mark.few(9)
@pytest.mark.parametrize("size", [1, 5, 20])
@pytest.mark.parametrize(
    "options", [{}, {"window": 9}, {"window": 40}, {"softcap": 1.5}, {"sinks": torch.linspace(-2, 3, 4)}],
    ids=["plain", "window", "wide window", "softcap", "sinks"],
)
@pytest.mark.parametrize("length", [*LENGTHS, 37])
def test_attention_is_over_what_is_stored(length, options, size):
    """One query and turns of several, causal among themselves, over codes and exact rows, in one softmax."""
    key, value = rows(length + size)
    kv = packed_store(key[:, :, :length], value[:, :, :length])
    before = stored(kv)
    step, output = add(kv, key[:, :, length:], value[:, :, length:], length + size, **options)
    held = [torch.cat([x, new[:, :, length:].double()], dim=2) for x, new in zip(before, (key, value), strict=True)]
    wanted = dense_attention(step.query.double(), *held, scale=0.3, seen=length + size, **options)
    assert torch.allclose(output.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("size", [1, 6])
def test_a_sliding_layer_s_rows_begin_later(size):
    """Rows that a sliding window left of a longer context are counted from where they stand."""
    key, value = rows(60 + size)
    kv = PackedKV(packing=PACKING)
    kv.append(step_of(key[:, :, :60], value[:, :, :60], 60, window=30))
    kv.keep_last(30)
    kv.pack()
    held = stored(kv)
    step, output = add(kv, key[:, :, 60:], value[:, :, 60:], 60 + size, window=25)
    held = [torch.cat([x, new[:, :, 60:].double()], dim=2) for x, new in zip(held, (key, value), strict=True)]
    wanted = dense_attention(step.query.double(), *held, scale=0.3, seen=60 + size, window=25)
    assert torch.allclose(output.double(), wanted, atol=1e-5)


def test_a_window_counts_tokens_across_holes():
    """Rows that another method dropped leave holes, and a window over what is packed goes by positions."""
    key, value = rows(41)
    kv = PackedKV(packing=PACKING)
    kv.append(step_of(key[:, :, :40], value[:, :, :40], 40, window=30))
    kept = torch.stack([torch.arange(0, 40, 2), torch.arange(20, 40)])[None]
    kv.keep(kept)
    kv.pack()
    assert kv.positions.equal(kept.int())
    held = stored(kv)
    step, output = add(kv, key[:, :, 40:], value[:, :, 40:], 41, window=30)
    held = [torch.cat([x, new[:, :, 40:].double()], dim=2) for x, new in zip(held, (key, value), strict=True)]
    positions = torch.cat([kept, torch.full((1, 2, 1), 40)], dim=2)
    wanted = dense_attention(step.query.double(), *held, scale=0.3, seen=41, window=30, positions=positions)
    assert torch.allclose(output.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_output_is_within_its_bound(bits):
    """Rounding moves a logit by at most half a scale per channel, and so the output by no more than the bound."""
    key, value = rows(49)
    kv = packed_store(key[:, :, :48], value[:, :, :48], Packing(bits, bits, GROUP, RESIDUAL, later=True))
    keys, values = kv.packed.codes()
    step, output = add(kv, key[:, :, 48:], value[:, :, 48:], 49)
    query = step.query.abs().unflatten(1, (2, 2))  # [1, H_kv, G, 1, D]
    logit = 0.3 * (query * keys.scale.float().amax(2)[:, :, None, None] / 2).sum(-1).amax()
    bound = values.scale.float().amax() / 2 + ((2 * logit).exp() - 1) * value.abs().amax()
    exact = dense_attention(step.query, key, value, scale=0.3, seen=49)
    error = (output - exact).abs().amax()
    assert 1e-6 < error <= bound


def test_later_rows_stay_exact_where_only_the_context_is_packed():
    """As SCBench's port: what comes after the context is never packed, and is read exactly."""
    key, value = rows(60)
    kv = packed_store(key[:, :, :20], value[:, :, :20], Packing(2, 2, GROUP, RESIDUAL, later=False), capacity=60)
    blocks = kv.tensors()
    codes = [x.packed.shape[2] for x in kv.packed.codes()]
    for seen in range(21, 61):
        add(kv, key[:, :, seen - 1 : seen], value[:, :, seen - 1 : seen], seen)
    assert [x.packed.shape[2] for x in kv.packed.codes()] == codes == [16, 12]
    assert kv.packed.last_keys.entries.equal(key[:, :, 16:])
    assert kv.packed.last_values.entries.equal(value[:, :, 12:])
    assert [x.data_ptr() for x in kv.tensors()] == [x.data_ptr() for x in blocks]


def test_decoding_writes_in_place():
    """Within the capacity, no storage is replaced over many blocks; what no longer holds a row counts as spare."""
    key, value = rows(100)
    kv = packed_store(key[:, :, :20], value[:, :, :20], capacity=100)
    blocks = kv.tensors()
    for seen in range(21, 101):
        add(kv, key[:, :, seen - 1 : seen], value[:, :, seen - 1 : seen], seen)
    assert [x.data_ptr() for x in kv.tensors()] == [x.data_ptr() for x in blocks]
    assert same(kv, packed_store(key, value))


def test_a_long_turn_makes_room_once():
    """With room reserved, a turn longer than the residual, in chunks, is held exactly and then packed in place."""
    key, value = rows(70)
    kv = packed_store(key[:, :, :20], value[:, :, :20])
    kv.reserve(50, 40)
    blocks = kv.tensors()
    for low, high in ((20, 30), (30, 60)):
        kv.append(step_of(key[:, :, low:high], value[:, :, low:high], high, moment=Moment.TURN_END))
    kv.flush()
    for seen in range(61, 71):
        add(kv, key[:, :, seen - 1 : seen], value[:, :, seen - 1 : seen], seen)
    assert [x.data_ptr() for x in kv.tensors()] == [x.data_ptr() for x in blocks]
    assert same(kv, packed_store(key, value))


@pytest.mark.few
@pytest.mark.parametrize("length", [5, 20])
def test_bytes_are_counted_from_storages(length):
    """Codes, scales, minima and exact rows by hand, room apart; exact rows of the context are freed."""
    key, value = rows(length)
    kv = PackedKV(packing=PACKING)
    kv.capacity = 64
    kv.append(step_of(key, value, length))
    old = [StorageWeakRef(x.untyped_storage()) for x in kv.tensors()]
    kv.pack()
    gc.collect()
    assert all(x.expired() for x in old)
    whole, last = length - length % RESIDUAL, max(0, length - RESIDUAL)
    head = whole * 3 + whole // GROUP * KEY_WIDTH * 4 + (length - whole) * KEY_WIDTH * 4
    head += last * 3 + last * (VALUE_WIDTH // GROUP) * 4 + (length - last) * VALUE_WIDTH * 4
    assert kv.nbytes() == storage_bytes(kv.tensors())
    assert kv.nbytes() - kv.spare_bytes() == 2 * head


def test_forks_share_codes_and_go_their_own_ways():
    """Two forks and their parent append different rows and end as fresh stores do; codes are held once until then."""
    key, value = rows(20)
    parent = packed_store(key, value, capacity=64)
    forks = [parent.fork(), parent.fork()]
    shared = parent.packed.codes()[0].packed.data_ptr()
    assert all(x.packed.codes()[0].packed.data_ptr() == shared for x in forks)
    for seed, kv in enumerate((*forks, parent)):
        new = rows(30, seed=seed + 1)
        fresh = packed_store(key, value, capacity=64)
        for i in range(30):
            ours = add(kv, new[0][:, :, i : i + 1], new[1][:, :, i : i + 1], 21 + i)[1]
            assert ours.equal(add(fresh, new[0][:, :, i : i + 1], new[1][:, :, i : i + 1], 21 + i)[1])
        assert same(kv, fresh)
    for kv in (*forks, parent):
        kv.close()
        assert kv.tensors() == []


def test_a_fork_that_is_closed_leaves_room_to_append_in_place():
    """Codes that a closed fork appended to a shared block are overwritten, not copied."""
    key, value = rows(60)
    kv = packed_store(key[:, :, :20], value[:, :, :20], capacity=60)
    shared = [x.data_ptr() for x in kv.tensors()]
    other = kv.fork()
    add(other, *rows(40, seed=5), 60)
    other.close()
    add(kv, key[:, :, 20:], value[:, :, 20:], 60)
    assert [x.data_ptr() for x in kv.packed.keys.tensors()] == shared[:3]
    assert same(kv, packed_store(key, value))


def test_packed_rows_are_not_compressed_again_in_silence():
    """A second compression is refused with what to do."""
    with pytest.raises(UserError, match="Leave --recompress out"):
        packed_store(*rows(20)).refuse_frozen()


def test_distinct_codes_are_effect():
    """Random rows use every code of their width, and never more."""
    facts = packed_store(*rows(64)).facts()
    assert facts["distinct_key_codes"].value == 4
    assert facts["distinct_value_codes"].value == 8


def test_a_residual_moves_its_rows_to_the_front():
    """Rows come and go through a block of a fixed size, whose bytes without a row are spare."""
    x = torch.arange(40.0).view(1, 1, 40, 1)
    residual = Residual(x[:, :, :3], 6)
    block = residual.block
    for i in range(3, 40):
        residual.append(x[:, :, i : i + 1])
        assert residual.take(1).flatten().tolist() == [i - 3]
        assert residual.entries.flatten().tolist() == [i - 2, i - 1, i]
    assert residual.block is block
    assert residual.spare_bytes() == 3 * 4
    residual.append(x[:, :, :9])
    assert residual.entries.flatten().tolist() == [37, 38, 39, *range(9)]


def test_dequantized_keys_between_are_the_stored_ones():
    """Keys that are packed while their values are exact are read from their codes, in the middle of a group too."""
    key, value = rows(21)
    kv = packed_store(key, value)
    keys, values = kv.packed.codes()
    assert (keys.packed.shape[2], values.packed.shape[2]) == (16, 13)
    kv.packed.last_values.block.zero_()
    kv.packed.last_values.entries[:, :, :3] = 1.0  # only the rows between have a value
    step = step_of(*rows(1, seed=3), 22, moment=Moment.DECODE)
    kv.append(step)
    kv.packed.last_values.entries[:, :, -1] = 0.0
    exact = torch.cat([dequantize(keys), kv.packed.last_keys.entries], dim=2)
    query = step.query.unflatten(1, (2, 2))
    weights = (query @ exact[:, :, None].mT * 0.3).softmax(-1)
    some = torch.cat([dequantize(values), kv.packed.last_values.entries], dim=2)
    assert torch.allclose(kv.attend(step), (weights @ some[:, :, None]).flatten(1, 2), atol=1e-5)
