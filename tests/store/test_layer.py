"""Stores against plain lists of rows, and evicted caches against full ones behind a mask."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import BudgetKind, Card, Method, Moment, Step
from kvbench.store import LayerKV
from kvbench.store.coded import CodedKV
from kvbench.store.coders import GroupCoder
from kvbench.store.int8 import Int8KV

HEADS, WIDTH = 2, 3
CARD = Card(
    name="chosen", title="Chosen rows", idea="For a test.", arxiv=None, year=None, family="test", stages=(),
    budget=BudgetKind.STORED, heads="indexed", upstream=None,
)


def rows_of(tokens, batch, offset=0.0):
    """A row for each token, different in every sequence and head. [B, H_kv, T, D]"""
    head = torch.arange(batch * HEADS).view(batch, HEADS, 1, 1) / 16
    return (torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1) + head + offset).expand(-1, -1, -1, WIDTH)


def step_of(tokens, seen, batch=2, window=None, moment=Moment.CONTEXT_END):
    """The forward pass that brings these tokens."""
    key = rows_of(tokens, batch)
    return Step(
        layer=0, moment=moment,
        positions=torch.tensor(tokens).expand(batch, -1), seen=seen, query=key.repeat(1, 2, 1, 1), key=key,
        value=rows_of(tokens, batch, 0.5), scale=1.0, window=window, softcap=None, sinks=None, causal=True,
        rope=NO_ROPE,
    )


def add(kv, tokens, **options):
    """Append tokens to a store, one forward pass."""
    kv.append(step_of(tokens, tokens[-1] + 1, **options))


def storage_sum(tensors):
    """Bytes of distinct storages."""
    found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(size for pointer, size in found.items() if pointer)


@dataclass
class Lists:
    """The expected contents of a store: token numbers by (sequence, head), and the facts that it reports."""

    dense: list[list[int]]
    frozen: list[list[int]] | None = None
    seen: int = 0
    dropped: int = 0

    def copy(self):
        """An independent copy."""
        return Lists(
            [list(x) for x in self.dense], None if self.frozen is None else [list(x) for x in self.frozen], self.seen,
            self.dropped,
        )

    def check(self, kv, batch):
        """The store holds these rows, and its counts are true."""
        assert kv.seen == self.seen
        assert kv.dropped == self.dropped
        assert kv.nbytes() == storage_sum(kv.tensors())
        if kv._buffer is None:
            return
        for b in range(batch):
            for h in range(HEADS):
                i = b * HEADS + h
                head, tokens = i / 16, torch.tensor(self.dense[i], dtype=torch.float32)
                assert kv.keys[b, h, :, 0].equal(tokens + head)
                assert kv.values[b, h, :, -1].equal(tokens + head + 0.5)
                if kv.positions is not None:
                    assert kv.positions[b, h].tolist() == self.dense[i]
        assert kv.entries_kept() == [
            len(x) + (len(self.frozen[i]) if self.frozen is not None else 0) for i, x in enumerate(self.dense)
        ]
        if self.frozen is not None:
            wanted = torch.tensor([t + i / 16 for i, x in enumerate(self.frozen) for t in x])
            assert kv.frozen.key[:, 0].equal(wanted)
            assert kv.frozen.value[:, 0].equal(wanted + 0.5)
            assert kv.frozen.counts == [len(x) for x in self.frozen]
            assert kv.frozen.offsets.diff().tolist() == kv.frozen.counts
        block = list(kv._buffer.tensors.values())
        capacity = block[0].shape[2]
        each = sum(x[:, :, :1].numel() * x.element_size() for x in block)
        assert kv.spare_bytes() == (capacity - kv.n) * each


def pick(data, rows, count):
    """`count` indices of `rows` for every list. [lists][count], ascending"""
    return [
        sorted(data.draw(st.permutations(range(n)), label="rows")[:count]) for n in rows
    ]


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data(), batch=st.sampled_from([1, 2]), bounded=st.booleans(), track=st.booleans(),
       window=st.sampled_from([None, 5]), capacity=st.sampled_from([0, 12]))
def test_a_store_is_lists_of_rows(data, batch, bounded, track, window, capacity):
    """In any order of append, keep, drop, fork and close, every store holds the entries of plain lists."""
    first = LayerKV(bounded=bounded, track=track)
    first.capacity = capacity
    alive = [(first, Lists([[] for _ in range(batch * HEADS)]))]
    for _ in range(data.draw(st.integers(1, 14), label="operations")):
        kv, lists = alive[data.draw(st.integers(0, len(alive) - 1), label="store")]
        n = kv.n
        choices = ["append"]
        if kv._buffer is not None:
            choices += ["append", "keep_last", "reserve", "close"] + ["fork"] * (2 * (len(alive) < 4))
            choices += ["keep", "keep_where"] * (n > 0 or kv.frozen is not None) + ["drop"] * (bounded and n > 1)
        choice = data.draw(st.sampled_from(choices), label="operation")
        if kv.frozen is not None and choice in ("keep", "keep_where", "drop"):
            index = torch.zeros(batch, HEADS, 1, dtype=torch.long)
            mask = torch.ones(batch, HEADS, n, dtype=torch.bool)
            with pytest.raises(UserError, match="second time"):
                getattr(kv, choice)(mask if choice == "keep_where" else index)
        elif choice == "append":
            own = 100 * data.draw(st.integers(0, 3), label="fork") if window is None else 0  # forks differ from here on
            count = data.draw(st.integers(1, 4), label="tokens")
            tokens = [own + x for x in range(lists.seen, lists.seen + count)]
            lists.seen += count
            kv.append(step_of(tokens, lists.seen, batch, window))
            lists.dense = [x + tokens for x in lists.dense]
        elif choice == "keep":
            indices = pick(data, [n] * batch * HEADS, data.draw(st.integers(1, n), label="count"))
            kv.keep(torch.tensor(indices).view(batch, HEADS, -1))
            lists.dropped += batch * HEADS * (n - len(indices[0]))
            lists.dense = [[x[i] for i in index] for x, index in zip(lists.dense, indices, strict=True)]
        elif choice == "keep_where":
            masks = data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=batch * HEADS,
                                       max_size=batch * HEADS), label="mask")
            kv.keep_where(torch.tensor(masks).view(batch, HEADS, n))
            lists.frozen = [[t for t, m in zip(x, mask, strict=True) if m]
                            for x, mask in zip(lists.dense, masks, strict=True)]
            lists.dropped += sum(map(len, lists.dense)) - sum(map(len, lists.frozen))
            lists.dense = [[] for _ in lists.dense]
        elif choice == "keep_last":
            rows = data.draw(st.integers(1, n + 2), label="rows")
            kv.keep_last(rows)
            if lists.frozen is None:
                lists.dense = [x[-rows:] for x in lists.dense]
        elif choice == "drop":
            indices = pick(data, [n] * batch * HEADS, data.draw(st.integers(1, n - 1), label="count"))
            kv.drop(torch.tensor(indices).view(batch, HEADS, -1))
            lists.dropped += batch * HEADS * len(indices[0])
            left = [[t for i, t in enumerate(x) if i not in index]
                    for x, index in zip(lists.dense, indices, strict=True)]
            found = [(kv.keys[b, h, :, 0] - (b * HEADS + h) / 16).round().int().tolist()
                     for b in range(batch) for h in range(HEADS)]
            assert [sorted(x) for x in found] == [sorted(x) for x in left]
            lists.dense = found  # the order may change, the rows may not
        elif choice == "reserve":
            kv.reserve(data.draw(st.integers(1, 9), label="tokens"), 1)
        elif choice == "fork":
            alive.append((kv.fork(), lists.copy()))
        elif len(alive) > 1:
            kv.close()
            assert kv.nbytes() == 0
            alive = [x for x in alive if x[0] is not kv]
        for other, wanted in alive:
            wanted.check(other, batch)


# Forks


def pointers(kv):
    """Where a store's dense block is."""
    return [x.data_ptr() for x in kv._buffer.tensors.values()]


def context(tokens=6, capacity=40, **options):
    """A store that holds a short context."""
    kv = LayerKV(**options)
    kv.capacity = capacity
    add(kv, list(range(tokens)))
    return kv


def test_a_fork_shares_its_rows():
    """Forking copies nothing, and the first to append does so in place."""
    kv = context()
    with_fork = kv.fork()
    assert pointers(with_fork) == pointers(kv)
    add(with_fork, [6, 7])
    assert pointers(with_fork) == pointers(kv)


def test_one_fork_after_the_other_uses_the_same_rows():
    """Five questions to one context, each on a fork with forks of its own, copy no row of it."""
    kv = context()
    before = pointers(kv)
    for question in range(5):
        branch = kv.fork()
        add(branch, list(range(6, 9 + question)))
        answer = branch.fork()
        add(answer, [9 + question])
        assert pointers(answer) == before
        answer.close()
        add(branch, [9 + question, 10 + question])
        assert pointers(branch) == before
        branch.close()


def test_forks_that_continue_side_by_side_share_the_context():
    """Each sees its own entries after the common ones, which exist once; only own entries are copied."""
    kv = context()
    before = pointers(kv)
    one, two = kv.fork(), kv.fork()
    for store, tokens in ((one, [16, 17]), (two, [26, 27, 28]), (one, [18]), (kv, [36])):
        store.append(step_of(tokens, store.seen + len(tokens)))
    for _ in range(2):
        for store, own in ((one, [16, 17, 18]), (two, [26, 27, 28]), (kv, [36])):
            assert store.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, *own]
            assert pointers(store) == before
    aside = [x for _, rows in kv._buffer._aside.values() for x in rows.values()]
    assert sorted(x.shape[2] for x in aside) == [3, 3, 3, 3]


def test_entries_set_aside_reach_back_to_the_earliest_fork():
    """A store that continues before the others forked: those entries were common, and are set aside as well."""
    kv = context()
    one = kv.fork()
    one.append(step_of([16, 17], 8))
    two = one.fork()
    one.append(step_of([18], 9))
    two.append(step_of([28], 9))
    kv.append(step_of([36, 37, 38, 39], 10))
    for store, own in ((two, [16, 17, 28]), (one, [16, 17, 18]), (kv, [36, 37, 38, 39])):
        assert store.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, *own]


def test_a_crop_below_the_fork_keeps_what_is_set_aside():
    """A common entry that one fork forgets and writes anew is set aside for the other, as its own ones are."""
    kv = context()
    one, two = kv.fork(), kv.fork()
    kv.close()
    one.append(step_of([16, 17], 8))
    two.append(step_of([26, 27], 8))
    assert one.keys.shape[2] == 8  # reading sets the entries of the other aside
    one.crop(3)
    one.append(step_of([35], 6))
    assert two.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 26, 27]
    assert one.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 35]


def test_a_fork_outlives_the_one_it_came_from():
    """Rows that a fork of a fork reads are not given away when the one between is closed."""
    kv = context()
    one = kv.fork()
    add(one, [6, 7])
    two = one.fork()
    one.close()
    add(kv, [8, 9])
    assert two.keys[0, 0, :, 0].tolist() == list(range(8))


def test_an_abandoned_fork_takes_no_memory():
    """A fork that is dropped without being closed is not set aside for the next."""
    kv = context()
    before = pointers(kv)
    one = kv.fork()
    add(one, [6, 7])
    del one
    two = kv.fork()
    add(two, [6])
    assert pointers(two) == before
    assert kv._buffer._aside == {}


def test_compressing_a_fork_leaves_the_parent_alone():
    """A fork's eviction in a sliding layer adds nothing to its parent's bytes and moves none of its rows."""
    kv = LayerKV()
    kv.capacity = 40
    add(kv, list(range(6)), window=5)
    before = kv.nbytes()
    branch = kv.fork()
    branch.keep(torch.tensor([0, 3]).expand(2, HEADS, -1))
    assert kv.nbytes() == before
    add(kv, [6], window=5)
    assert kv.keys[0, 0, :, 0].tolist() == list(range(7))


def test_rows_are_dropped_in_place_only_where_forks_copy():
    """A store that shares rows with its forks refuses to overwrite them."""
    with pytest.raises(AssertionError, match=r"return LayerKV\(bounded=True\)"):
        context().drop(torch.tensor([0]).expand(2, HEADS, -1))


def test_dropping_in_a_sliding_layer_writes_positions_down():
    """Where a window counts tokens, a store that loses its order knows every row's position from then on."""
    kv = LayerKV(bounded=True)
    add(kv, list(range(6)), window=5)
    kv.drop(torch.tensor([1]).expand(2, HEADS, -1))
    add(kv, [6], window=5)
    assert kv.positions.sort(-1).values.tolist() == [[[0, 2, 3, 4, 5, 6]] * HEADS] * 2
    assert kv.keys[0, 0, :, 0].tolist() == kv.positions[0, 0].tolist()


# Room


def test_decoding_within_capacity_reallocates_nothing():
    """A store of known capacity never moves, and neither does a reserved one."""
    kv = context(capacity=20)
    before = pointers(kv)
    for token in range(6, 20):
        add(kv, [token], moment=Moment.DECODE)
    assert pointers(kv) == before
    kv.reserve(3, 1)
    before = pointers(kv)
    for token in range(20, 23):
        add(kv, [token], moment=Moment.DECODE)
    assert pointers(kv) == before


def test_a_static_fork_takes_no_room():
    """A store that leaves its block to a fork with static steps has as much capacity in the next one."""
    kv = context(capacity=20)
    branch = kv.fork()
    add(branch, [6])
    branch.make_static()
    add(kv, [6], moment=Moment.DECODE)
    before = pointers(kv)
    for token in range(7, 20):
        add(kv, [token], moment=Moment.DECODE)
    assert pointers(kv) == before


@pytest.mark.parametrize("kind", ["int8", "coded"])
def test_distinct_codes_are_counted_without_a_wider_copy(kind):
    """Every code of a context of thousands of entries is a byte, and stays one."""
    kv = Int8KV() if kind == "int8" else CodedKV(key_coder=GroupCoder(8, None), value_coder=GroupCoder(8, None))
    key = torch.randn(1, 2, 2000, 16, generator=torch.Generator().manual_seed(0))
    kv.append(replace(step_of(list(range(2000)), 2000, batch=1), query=key, key=key, value=key))
    (kv.quantize if kind == "int8" else kv.encode)()
    codes = kv.keys if kind == "int8" else next(iter(kv._parts("key", 0, kv.n).values()))
    with Widest() as watch:
        distinct = kv.facts()["distinct_codes"].value
    assert distinct == len(codes.contiguous().view(torch.uint8).unique()) > 200
    assert watch.bytes <= codes.nbytes


class Widest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.bytes = max([self.bytes, *(x.nbytes for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor))])
        return out


def test_a_full_store_grows():
    """Beyond its capacity a store goes on, with the rows that it had."""
    kv = context(capacity=7)
    for token in range(6, 12):
        add(kv, [token], moment=Moment.DECODE)
    assert kv.keys[1, 1, :, 0].tolist() == [t + 3 / 16 for t in range(12)]


@pytest.mark.parametrize("kind", ["keep", "keep_where", "keep_last", "quantize"])
def test_eviction_frees_the_old_rows(kind):
    """With the garbage collector off, no storage of the old rows is alive after eviction, and the bytes are fewer."""
    kv = Int8KV() if kind == "quantize" else LayerKV()
    kv.capacity = 40
    gc.disable()
    try:
        add(kv, list(range(32)))
        old = [StorageWeakRef(x.untyped_storage()) for x in kv.tensors()]
        before = kv.nbytes() - kv.spare_bytes()
        if kind == "keep":
            kv.keep(torch.arange(0, 32, 4).expand(2, HEADS, -1))
        elif kind == "keep_where":
            kv.keep_where(torch.arange(32).expand(2, HEADS, -1) < torch.tensor([[[3], [9]], [[0], [12]]]))
        elif kind == "keep_last":
            kv.keep_last(8)
        else:
            kv.quantize()
        assert all(x.expired() for x in old)
    finally:
        gc.enable()
    assert kv.nbytes() - kv.spare_bytes() < before / 2


# Rows that stand for several


def outputs_of(stores, tokens, window=None):
    """The stores' outputs for the same new tokens."""
    step = step_of(tokens, stores[0].seen + len(tokens), window=window)
    outputs = []
    for store in stores:
        store.append(step)
        outputs.append(store.attend(step))
    return outputs


def test_equal_rows_as_one_with_a_count_are_dense():
    """Frozen rows that stand for n equal ones, with a bias of log n, give the dense rows' output in later turns."""
    dense, merged = LayerKV(), LayerKV()
    for store in (dense, merged):
        store.append(step_of([0, 0, 0, 1, 2, 2, 3, 3, 3, 3], 10))
    rows = [x[:, :, [0, 3, 4, 6]].flatten(0, 2) for x in (merged.keys, merged.values)]
    counts = torch.tensor([3, 1, 2, 4]).repeat(2 * HEADS)
    merged.freeze(*rows, torch.full((2, HEADS), 4), bias=counts.log())
    for new in ([4, 1, 5], [2]):
        wanted, found, forked = outputs_of([dense, merged, merged.fork()], new)
        assert torch.allclose(found, wanted, atol=1e-5)
        assert forked.equal(found)


def test_given_rows_leave_a_window_by_their_positions():
    """A frozen row is seen from as far as its given position says, and the later rows from where they are."""
    dense, given = LayerKV(), LayerKV()
    for store in (dense, given):
        add(store, list(range(10)), window=7)
    rows = [x[:, :, 3:].flatten(0, 2) for x in (given.keys, given.values)]
    with pytest.raises(AssertionError, match="positions"):
        given.freeze(*rows, torch.full((2, HEADS), 7))
    given.freeze(*rows, torch.full((2, HEADS), 7), position=torch.arange(3, 10, dtype=torch.int32).repeat(2 * HEADS))
    for new in ([10, 11, 12], [13], list(range(14, 22))):
        wanted, found = outputs_of([dense, given], new, window=7)
        assert torch.allclose(found, wanted, atol=1e-5)


def test_a_bias_is_counted_and_shared():
    """A bias takes four bytes a row, counted once for a store and its fork, and the rows it replaced count as gone."""
    kv = context(tokens=6, capacity=6)
    before = kv.nbytes()
    rows = 2 * HEADS * 2
    kv.freeze(*(x[:, :, :2].flatten(0, 2) for x in (kv.keys, kv.values)), torch.full((2, HEADS), 2),
              bias=torch.zeros(rows))
    assert kv.nbytes() == before // 3 + 4 * rows + 4 * (2 * HEADS + 1)
    assert kv.dropped == 2 * HEADS * 4
    branch = kv.fork()
    assert storage_sum([*kv.tensors(), *branch.tensors()]) == kv.nbytes()
    with pytest.raises(UserError, match="second time"):
        kv.freeze(kv.frozen.key, kv.frozen.value, torch.full((2, HEADS), 2))


# Static steps


@pytest.fixture
def poison():
    """Fill new memory with NaN and the largest integers, as torch does to find reads of unwritten memory."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.zeros(1).new_empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", [LayerKV, Int8KV])
@pytest.mark.usefixtures("poison")
def test_unwritten_rows_never_leak(kind):
    """Static steps read the whole block, and what was never written there does not reach the output; forks neither."""
    kv, plain = kind(), kind()
    for store in (kv, plain):
        store.capacity = 20
        add(store, list(range(6)))
        if kind is Int8KV:
            store.quantize()
    kv.make_static()
    for store in (kv, kv.fork()):
        branch = plain.fork()
        for token in (6, 7, 8):
            step = step_of([token], token + 1, moment=Moment.DECODE)
            store.append(step)
            branch.append(step)
            assert torch.allclose(store.attend(step), branch.attend(step), atol=1e-5)
        assert store.entries_kept() == branch.entries_kept()


def test_a_static_store_that_is_full_says_so():
    """A step beyond the capacity is an error and not a row written elsewhere; so is a wish for more room."""
    kv = context(capacity=8)
    kv.make_static()
    add(kv, [6], moment=Moment.DECODE)
    kv.reserve(1, 1)
    with pytest.raises(UserError, match="capacity"):
        kv.reserve(2, 1)
    add(kv, [7], moment=Moment.DECODE)
    before = kv.keys.clone()
    with pytest.raises(UserError, match="capacity"):
        add(kv, [8], moment=Moment.DECODE)
    assert kv.keys.equal(before)


def test_a_static_store_owns_its_rows():
    """Making a store static takes its rows away from forks that would append to them, and theirs from it."""
    kv = context()
    other = kv.fork()
    kv.make_static()
    add(other, [16])  # first: a recorded step moves no number that the host could look at
    add(kv, [6], moment=Moment.DECODE)
    assert kv.keys[0, 0, :7, 0].tolist() == list(range(7))
    assert other.keys[0, 0, :, 0].tolist() == [*range(6), 16]
    parent = context()
    branch = parent.fork()
    add(branch, [6, 7])
    parent.make_static()
    add(parent, [16], moment=Moment.DECODE)
    assert branch.keys[0, 0, :, 0].tolist() == list(range(8))


# Evicted caches against a full one behind a mask


def worth(positions, seen):
    """A number for each row that depends on its position, its head and the time, never the same for two rows."""
    heads = torch.arange(positions.shape[1]).view(1, -1, 1)
    return (positions.long() * 7919 + heads * 331 + seen * 13) % 1009


LIMITS = torch.tensor([0, 300, 700, 1009])
"""Of 1,009, by KV head: one keeps nothing, one everything."""


def chosen(kind, positions, seen):
    """Which of the rows stay after a context. [B, H_kv, n] bool"""
    value = worth(positions, 0)
    if kind == "ragged":
        return value < LIMITS[: positions.shape[1]].view(1, -1, 1)
    best = value.topk(min(ROWS, value.shape[-1]), largest=False).indices
    return torch.zeros_like(value, dtype=torch.bool).scatter(-1, best, True)


ROWS = 12


@dataclass(frozen=True)
class Chosen(Method):
    """Evicts with the store's own means."""

    kind: str = "ragged"
    card: ClassVar[Card] = CARD

    def layer(self, index):
        """Positions are what the choice is made by."""
        return LayerKV(track=True, bounded=self.kind == "drop")

    def evict(self, kv, step):
        """At the end of the context, and ever after where rows are dropped."""
        if step.moment.compresses:
            mask = chosen(self.kind, kv.positions, step.seen)
            if self.kind == "ragged":
                kv.keep_where(mask)
            else:
                kv.keep(mask.int().topk(ROWS, dim=-1).indices.sort(-1).values)
        elif self.kind == "drop" and not step.moment.in_context and step.moment.is_last and kv.n > ROWS:
            kv.drop(worth(kv.positions, step.seen).topk(kv.n - ROWS).indices)


class Whole(LayerKV):
    """Never loses a row, not even to a sliding window."""

    def keep_last(self, rows):
        """Keep all."""


@dataclass(frozen=True)
class Masked(Method):
    """The oracle: all rows stay, a boolean mask per head says which of them exist, attention is written out."""

    kind: str = "ragged"
    masks: dict[int, torch.Tensor] = field(default_factory=dict)
    card: ClassVar[Card] = CARD

    def layer(self, index):
        """All rows."""
        return Whole()

    def attend(self, kv, step):
        """Softmax in float64 over what is visible and was not evicted."""
        kept = self.masks.get(step.layer, torch.zeros(*kv.keys.shape[:2], 0, dtype=torch.bool))
        new = torch.ones(*kv.keys.shape[:2], kv.n - kept.shape[-1], dtype=torch.bool)
        kept = self.masks[step.layer] = torch.cat([kept, new], -1)
        query = step.query.double().unflatten(1, (kv.keys.shape[1], -1))
        logits = query @ kv.keys.double()[:, :, None].mT * step.scale
        distance = torch.arange(kv.n - step.query.shape[2], kv.n)[:, None] - torch.arange(kv.n)
        mask = (distance >= 0) & (distance < (step.window or kv.n + 1)) & kept[:, :, None, None]
        weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights @ kv.values.double()[:, :, None]).flatten(1, 2).float()

    def evict(self, kv, step):
        """Mark rows as gone."""
        kept = self.masks[step.layer]
        positions = torch.arange(kv.n).expand_as(kept)
        if step.moment.compresses:
            held = positions >= kv.n - (step.window or kv.n)  # what a sliding window leaves of any cache
            places = positions[held].view(*kept.shape[:2], -1)
            self.masks[step.layer] = torch.zeros_like(kept).masked_scatter(held, chosen(self.kind, places, step.seen))
        elif self.kind == "drop" and not step.moment.in_context and step.moment.is_last and kept[0, 0].sum() > ROWS:
            value = worth(positions, step.seen).masked_fill(~kept, -1)
            gone = value.topk(int(kept[0, 0].sum()) - ROWS).indices
            self.masks[step.layer] = kept.scatter(-1, gone, False)


def close(found, wanted):
    """Whether logits agree to 1e-5 of the largest."""
    return (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def ids(count, seed, batch=2):
    """Random tokens. [B, T]"""
    return torch.randint(VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.few(8)
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("shape", [(4, 2, None), (4, 4, None), (4, 1, None), (8, 4, 16)], ids=str)
@pytest.mark.parametrize("kind", ["ragged", "uniform", "drop"])
def test_evicted_caches_equal_a_masked_full_one(kind, shape, chunk):
    """Prefill, a question of 5 tokens, one of 1 and 8 decode steps give the logits of a full cache behind a mask."""
    model = tiny_model(*shape)
    with Session(model, Chosen(kind=kind), capacity=90, chunk=chunk) as ours, Session(
        model, Masked(kind=kind), capacity=90
    ) as oracle:
        assert close(ours.prefill(ids(50, 1)), oracle.prefill(ids(50, 1)))
        counts = [store.entries_kept() for store in ours.layers]
        assert counts == [x.sum(-1).flatten().tolist() for x in oracle.method.masks.values()]
        for seed, length in ((2, 5), (3, 1)):
            question = ids(length, seed)
            found, wanted = (x.forward(question, Moment.TURN_END, keep=length) for x in (ours, oracle))
            assert close(found, wanted)
        for token in range(8):
            found, wanted = (x.forward(ids(1, 10 + token), Moment.DECODE) for x in (ours, oracle))
            assert close(found, wanted)


def test_ragged_rows_are_refused_a_second_compression():
    """Rows frozen in unequal numbers cannot be compressed again, and the message says what to leave out."""
    with Session(tiny_model(), Chosen(), recompress=True) as session:
        session.prefill(ids(30, 1))
        with pytest.raises(UserError, match="--recompress"):
            session.ask(ids(5, 2), 2)


def test_ragged_bytes_are_the_entries_kept():
    """A ragged context takes the bytes of its rows, its offsets and nothing else."""
    with Session(tiny_model(), Chosen(), capacity=90) as session:
        session.prefill(ids(50, 1))
        rows = sum(sum(store.entries_kept()) for store in session.layers)
        offsets = len(session.layers) * (2 * 2 + 1) * 4
        positions = rows * 4
        assert session.memory().stored_bytes == rows * 2 * 16 * 4 + positions + offsets
