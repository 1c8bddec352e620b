"""RazorAttention: the compensation token, the choice of retrieval heads, and budgets."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.dense_attention.naive import dense_attention
from kvbench.kernels.ragged_attention.naive import ragged_attention
from kvbench.method import Budget, LayerShape, Moment, Shape
from kvbench.methods.baseline.full import Full
from kvbench.methods.heads.profile import HeadProfile
from kvbench.methods.heads.razor_attention import RazorAttention, choose
from kvbench.methods.heads.store import StreamingKV

SINKS, ROWS = 3, 11
PAPER = Budget.parse("paper")
pytestmark = pytest.mark.usefixtures("profile_cache")


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def fill(make_step, sizes, *, same=range(0), **options):
    """A trimmed store after forwards of these sizes, the last of them still whole, and all that it was given.

    same: entries with one and the same key and value. Returns the store, the last step, keys, values.
    """
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes)
    query, keys, values = (torch.randn(2, x, total, 8, generator=generator) for x in (4, 2, 2))
    keys[:, :, list(same)], values[:, :, list(same)] = keys[:, :, :1], values[:, :, :1]
    kv, before = StreamingKV(), 0
    for i, size in enumerate(sizes):
        if i:
            kv.trim(SINKS, ROWS, compensate=True)
        part = slice(before, before + size)
        step = make_step(query[:, :, part], keys[:, :, part], values[:, :, part], before=before, scale=0.4,
                         moment=Moment.TURN_END if i else Moment.CONTEXT_END, **options)
        kv.append(step)
        before += size
    return kv, step, keys, values


SIZES = [[40, 4], [40, 1, 1, 4], [30, 20, 6], [9, 1, 1, 1, 1, 1, 3]]
"""Forwards: one that is dropped from once, later ones, one larger than the ring, a context that fits."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equal_entries_are_replaced_without_a_loss(make_step, sizes):
    """The card's oracle: where all dropped entries are the same, attention is the full cache's, which needs log N."""
    dropped = range(SINKS, sum(sizes) - sizes[-1] - (ROWS - SINKS))
    kv, step, keys, values = fill(make_step, sizes, same=dropped)
    wanted = dense_attention(step.query, keys, values, scale=step.scale, seen=step.seen)

    assert torch.allclose(kv.attend(step), wanted, atol=1e-5)
    assert kv.merged == len(dropped) > 0
    kv.merged, merged = 1, kv.merged
    for name in ("key_sum", "value_sum"):
        kv.state[name] /= merged  # the mean as it was, standing for one entry
    assert not torch.allclose(kv.attend(step), wanted, atol=1e-3)


@pytest.mark.parametrize("window", [44, 4096])
def test_a_window_longer_than_the_context_hides_what_leaves_it_later(make_step, window):
    """Sinks and the mean's entries all count until the conversation outgrows the window, then only the visible ones."""
    sizes = [40, *[1] * 22, 4]
    kv, step, keys, values = fill(make_step, sizes, same=range(SINKS, sum(sizes) - 4 - (ROWS - SINKS)), window=window)
    wanted = dense_attention(step.query, keys, values, scale=step.scale, seen=step.seen, window=window)

    assert torch.allclose(kv.attend(step), wanted, atol=1e-5)


@pytest.mark.slow
def test_layers_whose_window_is_longer_than_the_context_are_full_ones():
    """They have the sinks and the mean, and their bytes are as declared."""
    model = tiny_model(4, 2, 4096)
    method = RazorAttention(induction=0.0, echo=0.0, buffer=8, compression=100).bind(model).fit(PAPER, model.shape(60))
    with Session(model, method, capacity=100) as session:
        session.prefill(ids(60))
        (_, store), = session.layers[0].groups
        assert sorted(store.positions[0, 0].tolist()) == [*range(4), *range(52, 60)]
        assert store.merged == 60 - 12
        assert session.memory().stored_bytes == method.declared_bytes(model.shape(60))


def test_all_heads_with_every_entry_are_a_declared_identity():
    """Where the shares are all heads, nothing is lost, and no run has to act."""
    model = tiny_model()
    method = RazorAttention(induction=1.0, buffer=8, compression=100).bind(model).fit(PAPER, model.shape(60))
    assert method.identity(model.shape(60))


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}], ids=["plain", "softcap", "sinks"]
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention_is_the_formula_s(make_step, sizes, options):
    """Stored entries and the mean of the others with log N added to its logit, by the reference implementation."""
    kv, step, keys, values = fill(make_step, sizes, **options)
    new = sizes[-1]
    before = step.seen - new
    gone = slice(SINKS, before - (ROWS - SINKS))
    stored = [*range(SINKS), *range(before - (ROWS - SINKS), step.seen)]
    count = gone.stop - gone.start
    mean_keys, mean_values = (x[:, :, gone].double().mean(2).flatten(0, 1).float() for x in (keys, values))

    wanted = ragged_attention(
        step.query, mean_keys, mean_values, [1] * 4, keys[:, :, stored], values[:, :, stored], scale=step.scale,
        seen=step.seen, flat_bias=torch.full((4,), math.log(count)), **options,
    )

    assert torch.allclose(kv.attend(step), wanted, atol=1e-5)


def test_the_running_mean_is_the_mean(make_step):
    """Dropped in one go or entry by entry, the mean is the same to 1e-6."""
    at_once, *_ = fill(make_step, [60, 1])
    one_by_one, *_ = fill(make_step, [20, *[1] * 41])

    for name in ("key_sum", "value_sum"):
        means = [kv.state[name] / kv.merged for kv in (at_once, one_by_one)]
        assert torch.allclose(*means, atol=1e-6)
    assert at_once.merged == one_by_one.merged == 60 - ROWS


def test_the_mean_moves_in_sixteen_bits(make_step):
    """After 5,000 entries of zeros, 5,000 of ones make it one half, though a bfloat16 mean would not move."""
    kv = StreamingKV()
    ones = torch.ones(1, 1, 5000, 8, dtype=torch.bfloat16)
    kv.append(make_step(ones * 0, ones * 0))
    kv.trim(0, 1, compensate=True)
    for i in range(50):
        part = ones[:, :, :100]
        kv.append(make_step(part, part, before=5000 + 100 * i, moment=Moment.TURN_END))
        kv.trim(0, 1, compensate=True)

    assert torch.allclose(kv.state["key_sum"] / kv.merged, torch.tensor(0.5), atol=1e-4)


def conversation(model, method, length):
    """Logits of a context, a question, and 12 decode steps."""
    with Session(model, method, capacity=length + 40) as session:
        found = [session.prefill(ids(length)), session.forward(ids(5, 2), Moment.TURN_END, keep=5)[0]]
        found += [session.forward(ids(1, 10 + i), Moment.DECODE)[0] for i in range(12)]
    return torch.cat(found)


@pytest.mark.parametrize("values", [{"induction": 1.0}, {"buffer": 60}], ids=["every head", "wide windows"])
def test_nothing_is_lost_where_nothing_is_dropped(values):
    """If every head is a retrieval head, or the window holds the conversation, it is the full cache bit for bit."""
    model = tiny_model()
    method = RazorAttention(**{"buffer": 8, **values}).bind(model).fit(PAPER, model.shape(40))

    found = conversation(model, method, 40)

    assert torch.allclose(found, conversation(model, Full(), 40), atol=2e-6)
    lossy = RazorAttention(buffer=8).bind(model).fit(PAPER, model.shape(40))
    assert not torch.allclose(found, conversation(model, lossy, 40), atol=1e-3)


def test_retrieval_heads_hold_all_and_the_others_a_bounded_number():
    """While the conversation goes on, only retrieval heads grow; the mean counts as an entry."""
    model = tiny_model()
    method = RazorAttention(buffer=8, compression=100).bind(model).fit(PAPER, model.shape(60))
    retrieval = method.order[: method.retrieval]

    with Session(model, method, capacity=100) as session:
        session.prefill(ids(60))
        for _ in range(20):
            session.forward(ids(1), Moment.DECODE)
        kept = [store.entries_kept() for store in session.layers]

    assert len(retrieval) == 2
    assert kept == [[80 if (layer, head) in retrieval else 4 + 8 + 1 for head in range(2)] for layer in range(2)]


def profile(echo, induction):
    """A profile with these scores, one layer."""
    return HeadProfile(
        model_sha256="", tokenizer_sha256="", dtype="", tokens=2, code_sha256="", echo=(tuple(echo),),
        induction=(tuple(induction),),
    )


def test_shares_of_heads_are_chosen_by_their_scores():
    """20 % by induction, 10 % by echo of those that are left, at least one of each where their share is not 0."""
    scores = profile(echo=[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], induction=[5, 9, 1, 2, 8, 3, 4, 0, 6, 7])

    assert [head for _, head in choose(scores, 0.2, 0.1)] == [1, 4, 0, 9, 8, 6, 5, 3, 2, 7]
    assert [head for _, head in choose(scores, 0.01, 0.01)][:2] == [1, 0]
    assert [head for _, head in choose(scores, 0.01, 0.0)][:2] == [1, 4]
    assert [head for _, head in choose(scores, 0.0, 0.3)][:3] == [0, 1, 2]


def shape_of(length, layers=32, heads=8):
    """The full cache of an 8B model."""
    layer = LayerShape(kv_heads=heads, query_heads=32, key_dim=128, value_dim=128, window=None)
    return Shape(length=length, layers=(layer,) * layers, itemsize=2)


def test_the_paper_s_budget_is_its_formula():
    """Of 256 heads 36 and 3 keep all; the others 4 sinks and max(4000, N / 5) entries, about a third of the bytes."""
    long, short = (RazorAttention().fit(PAPER, shape_of(n)) for n in (80_000, 10_000))

    assert (long.retrieval, long.streaming) == (39, 4 + 16_000)
    assert (short.retrieval, short.streaming) == (39, 4 + 4000)
    share = 39 / 256
    ratio = long.declared_bytes(shape_of(80_000)) / shape_of(80_000).full_bytes
    assert math.isclose(ratio, share + (1 - share) * (16_004 + 2) / 80_000)  # the mean takes two entries of 16 bits


@pytest.mark.parametrize("percent", [5, 12.5, 18, 25, 50, 90])
@pytest.mark.parametrize("length", [300, 4096, 65_536])
def test_a_budget_is_the_paper_s_heads_and_what_is_left_for_windows(percent, length):
    """Bytes meet the budget within an entry per head; from 25 % on the paper's share of heads keeps every entry."""
    shape = shape_of(length)
    made = RazorAttention().fit(Budget("fraction", percent / 100), shape)

    spent, target = made.declared_bytes(shape), shape.full_bytes * made.rows / length
    assert target - shape.full_bytes / length <= spent <= target
    assert made.streaming >= max(5, made.rows // 5)
    assert made.retrieval <= 39
    assert percent < 20 or made.retrieval == 39


def test_budgets_below_the_least_are_refused():
    """The message says what would do, and it does."""
    with pytest.raises(UserError, match="razor-attention needs at least 7"):
        RazorAttention().fit(Budget("rows", 6), shape_of(1000))
    assert RazorAttention().fit(Budget("rows", 7), shape_of(1000)).retrieval == 0


@pytest.mark.parametrize("values", [{"induction": 1.5}, {"echo": -0.1}, {"buffer": 0}, {"compression": 0.5},
                                    {"compression": math.nan}, {"sinks": -1}])
def test_settings_without_a_meaning_are_refused(values):
    """The message names the method and the value."""
    (value,) = values.values()
    with pytest.raises(UserError, match=f"razor-attention: .*got .*{value}"):
        RazorAttention(**values)
