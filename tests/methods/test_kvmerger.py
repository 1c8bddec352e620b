"""KVMerger against sets made by hand, the full cache on equal entries, and its declared bytes."""

from __future__ import annotations

import pytest
import torch

from kvbench.check import INVARIANTS, NotApplicableError
from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, LayerShape, Moment, Shape
from kvbench.methods.merging.kvmerger import KVMerger, MergingKV
from kvbench.store import Fact

CLOSE = torch.tensor([0.0, 0.1, 0.2, 3.0, 3.1, 0.0, 2.0, 2.05, 2.1, 5.0])
"""Angles of ten keys, five of whose nine pairs of neighbors differ by a tenth or less."""


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def store_of(make_step, keys, values, mass=None):
    """A store of one head that stores these entries, with this attention received. keys: [n, D]"""
    kv = MergingKV(column_sums=True)
    step = make_step(keys[None, None], keys[None, None], values[None, None])
    kv.append(step)
    if mass is not None:
        kv.scores.copy_(mass)
    return kv, step


def angles(x):
    """Keys of length one at these angles. [n, 2]"""
    return torch.stack([x.cos(), x.sin()], dim=-1)


def unprotected(**settings):
    """KVMerger that may merge any entry."""
    return KVMerger(recent=0.0, heavy=0.0, **settings)


def session_of(method, model, budget, length=120):
    """A session under a method whose budget is fitted."""
    return Session(model, method.fit(budget, model.shape(length)), capacity=length + 60)


def test_a_threshold_above_one_is_the_full_cache_bit_for_bit():
    """No cosine reaches it: nothing is merged, every logit over two turns is equal, and the run is declared so."""
    model = tiny_model()
    with session_of(KVMerger(mode="eps", eps=1.01), model, None) as ours, Session(model, FullCache()) as dense:
        assert ours.prefill(ids(120)).equal(dense.prefill(ids(120)))
        assert ours.score(ids(9, 2)).equal(dense.score(ids(9, 2)))
        assert ours.effect().identity


def test_neighbors_above_the_threshold_are_joined(make_step):
    """Sets are the runs of close keys, whichever way one scans; #sets = entries - #joins."""
    kv, step = store_of(make_step, angles(CLOSE), torch.zeros(10, 2))
    joins = unprotected(mode="eps", eps=0.98).join(kv, None)
    assert joins.int().tolist() == [[[1, 1, 0, 1, 0, 0, 1, 1, 0]]]
    unprotected(mode="eps", eps=0.98).evict(kv, step)
    assert kv.frozen.counts == [10 - 5]
    assert kv.facts() == {"entries_dropped": Fact(5, changed=True), "entries_merged": Fact(5)}


@pytest.mark.parametrize("rows", range(1, 10))
def test_a_budget_joins_the_most_similar_neighbors(rows, make_step):
    """Of nine neighbors exactly as many are joined as leave the budget, in the order of their cosines."""
    kv, step = store_of(make_step, angles(CLOSE), torch.zeros(10, 2))
    method = unprotected(rows=rows, merged_rows=rows)
    cosines = CLOSE.diff().cos()
    joined = method.join(kv, rows)[0, 0]
    assert joined.sum() == 10 - rows
    assert rows == 1 or cosines[joined].min() >= cosines[~joined].max()
    method.evict(kv, step)
    assert kv.entries_kept() == [rows]


def test_protected_entries_keep_every_bit(make_step):
    """The last entries and the most attended of the others are in no set, equal though all keys are."""
    mass = torch.tensor([0.0, 0, 9, 0, 0, 0, 8, 0, 0, 99])  # the last entry is protected as one of the last
    values = torch.arange(20.0).view(10, 2)
    kv, step = store_of(make_step, torch.ones(10, 2), values, mass)
    KVMerger(mode="eps", recent=0.2, heavy=0.2).evict(kv, step)
    assert kv.frozen.counts == [7]  # 0-1, 2, 3-5, 6, 7, 8, 9
    assert kv.frozen.value[[1, 3, 5, 6]].equal(values[[2, 6, 8, 9]])


def test_protection_gives_way_to_the_budget(make_step):
    """Shares that leave too few neighbors are lowered together, whatever entries the attention falls on."""
    for seed in range(20):
        mass = torch.rand(40, generator=torch.Generator().manual_seed(seed))
        kv, step = store_of(make_step, torch.randn(40, 4), torch.zeros(40, 2), mass)
        method = KVMerger(recent=0.5, heavy=0.5, rows=10, merged_rows=10)
        protected = method._protected(kv, 10)[0, 0]
        assert protected.sum() == 3 + 3  # 20 and 20 entries by 9 / 60
        assert protected[-3:].all()
        method.evict(kv, step)
        assert kv.entries_kept() == [10]


def joined_share(method, make_step, budget, rows=400):
    """Of the neighbors that may be joined, those that are, where keys and attention are random."""
    generator = torch.Generator().manual_seed(0)
    kv, _ = store_of(make_step, torch.randn(rows, 8, generator=generator), torch.zeros(rows, 2),
                     torch.rand(rows, generator=generator))
    fitted = method.fit(Budget.parse(budget), shape_of(5, length=rows))
    protected = fitted._protected(kv, fitted.merged_rows)
    allowed = ~(protected[..., :-1] | protected[..., 1:])
    return (fitted.join(kv, fitted.merged_rows).sum() / allowed.sum()).item()


def test_low_budgets_leave_neighbors_to_choose_from(make_step):
    """At 25 % the shares of 50 % leave nearly no choice of what to join; the paper's for low budgets leave a fifth."""
    assert joined_share(KVMerger(recent=0.17, heavy=0.12), make_step, "25%") > 0.95
    assert joined_share(KVMerger(), make_step, "25%") == pytest.approx(0.82, abs=0.01)
    assert joined_share(KVMerger(), make_step, "35%") == pytest.approx(0.74, abs=0.01)


@pytest.mark.parametrize("mode", ["eps", "exact"])
def test_runs_are_capped(mode, make_step):
    """With a cap of four no set crosses a multiple of four, equal though all keys are."""
    kv, step = store_of(make_step, torch.ones(10, 2), torch.arange(20.0).view(10, 2))
    method = unprotected(mode=mode, max_run=4, **({"rows": 3, "merged_rows": 3} if mode == "exact" else {}))
    method.evict(kv, step)
    assert kv.frozen.value[:, 0].tolist() == [3.0, 11.0, 17.0]  # means of entries 0-3, 4-7, 8-9


@pytest.mark.parametrize("settings", [{"mode": "eps"}, {"rows": 4, "merged_rows": 4}], ids=["eps", "exact"])
def test_equal_entries_with_a_bias_are_the_full_cache(settings, make_step):
    """Equal entries merged with the log of their number give the full cache's output; without it they do not."""
    generator = torch.Generator().manual_seed(1)
    rows, repeats = torch.randn(4, 6, generator=generator), torch.tensor([3, 1, 5, 2])
    keys, values = rows[:, :4].repeat_interleave(repeats, 0), rows[:, 2:].repeat_interleave(repeats, 0)
    question = make_step(torch.randn(1, 2, 3, 4, generator=generator), torch.randn(1, 1, 3, 4, generator=generator),
                         before=11, moment=Moment.TURN_END)
    outputs = {}
    for mode in ("dense", "bias", "mean", "sum"):
        kv, step = store_of(make_step, keys, values)
        if mode != "dense":
            unprotected(value_mode=mode, **settings).evict(kv, step)
            assert kv.entries_kept() == [4]
        kv.append(question)
        outputs[mode] = kv.attend(question)
    assert torch.allclose(outputs["bias"], outputs["dense"], atol=1e-6)
    for mode in ("mean", "sum"):
        assert (outputs[mode] - outputs["dense"]).abs().max() > 0.05


def test_the_pivot_has_the_most_attention_and_the_weights_are_the_papers(make_step):
    """Keys (1, 0) and (0.9, 0.1), sigma 1: the pivot weighs 0.50250; as a sum, twice that."""
    keys, values = torch.tensor([[1.0, 0.0], [0.9, 0.1]]), torch.eye(2)
    for mode, factor in (("mean", 1), ("sum", 2)):
        kv, step = store_of(make_step, keys, values, torch.tensor([1.0, 0.5]))
        unprotected(mode="eps", sigma=1.0, value_mode=mode).evict(kv, step)
        assert kv.frozen.value[0].tolist() == pytest.approx([factor * 0.50250, factor * 0.49750], abs=1e-5)


def test_later_turns_are_exact():
    """After the context every entry is stored as it came, and none of them is merged."""
    model = tiny_model()
    with session_of(KVMerger(), model, Budget("rows", 30)) as session:
        session.prefill(ids(120))
        for turn in range(2):
            session.ask(ids(7, turn), 4, stop=frozenset())
        assert {store.n for store in session.layers} == {7 + 4 + 7 + 3}
        assert {tuple(store.frozen.counts) for store in session.layers} == {(30, 30)}


@pytest.mark.parametrize("value_mode", ["mean", "bias"])
def test_a_threshold_holds_the_bytes_of_its_entries(value_mode):
    """Under a threshold the bytes are those of the entries that are left, and of nothing else."""
    model = tiny_model()
    with session_of(KVMerger(mode="eps", eps=0.3, value_mode=value_mode), model, None) as session:
        session.prefill(ids(120))
        rows = [sum(store.entries_kept()) for store in session.layers]
        assert max(rows) < 240
        row = 2 * 16 * 4 + (4 if value_mode == "bias" else 0)
        assert session.memory().stored_bytes == sum(rows) * row + len(rows) * 3 * 4
        assert session.effect().acted


CLAIMED = ("first token is exact", "evicted entries are freed", "chunks do not matter", "forks equal fresh runs")
VARIANTS = {
    "eps": {"mode": "eps", "eps": 0.3}, "bias": {"value_mode": "bias"},
    "others": {"value_mode": "sum", "sigma": "fixed_point", "max_run": 8},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("claim", [*CLAIMED, "measured bytes are declared"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_keep_the_claims(variant, claim):
    """The invariants hold under the other settings; a threshold declares no bytes and says so."""
    method = KVMerger(**VARIANTS[variant])
    if variant == "eps" and claim not in CLAIMED:
        with pytest.raises(NotApplicableError, match="the text decides"):
            INVARIANTS[claim](method)
    else:
        INVARIANTS[claim](method)


# Budgets over layers


def shape_of(layers, length=1000, window=None):
    """Equal layers; every other one slides if there is a window."""
    return Shape(length=length, itemsize=2, layers=tuple(
        LayerShape(8, 32, 128, 128, window if i % 2 else None) for i in range(layers)
    ))


@pytest.mark.parametrize("length", [1000, 1023])
def test_the_papers_budgets_have_its_shares(length):
    """17 % and 12 % at half, 8 % and 2 % at 35 %, to the digit; in proportion elsewhere, and what is set stays."""
    def protected(budget, **settings):
        return KVMerger(**settings).fit(Budget.parse(budget), shape_of(5, length)).protected

    assert protected("50%") == protected("paper") == (0.17, 0.12)
    assert protected("35%") == (0.08, 0.02)
    assert protected("25%") == pytest.approx((0.08 * 25 / 35, 0.02 * 25 / 35), rel=2 / length)
    assert protected("75%") == pytest.approx((0.17 * 1.5, 0.12 * 1.5), rel=2 / length)
    assert protected("35%", recent=0.3) == (0.3, 0.02)
    assert protected("35%", recent=0.3, heavy=0.1) is None
    assert KVMerger(mode="eps").fit(None, shape_of(5, length)).protected == (0.17, 0.12)


@pytest.mark.parametrize("budget", ["50%", "25%", "300", "paper"])
def test_what_skipped_layers_hold_comes_off_the_others(budget):
    """Layers 0, 1 and 31 of 32 are whole, and the mean over layers is the budget."""
    method = KVMerger().fit(Budget.parse(budget), shape_of(32))
    rows = [method.entries_in(i, None) for i in range(32)]
    assert method.resolution["skipped"] == (0, 1, 31)
    assert [i for i, x in enumerate(rows) if x is None] == [0, 1, 31]
    assert sum(1000 if x is None else x for x in rows) / 32 == pytest.approx(method.rows, abs=1)


def test_sliding_layers_count_as_what_they_hold():
    """Where layers slide the declared bytes are the budget's share all the same."""
    shape = shape_of(32, window=200)
    method = KVMerger().fit(Budget.parse("50%"), shape)
    assert method.declared_bytes(shape) / shape.full_bytes == pytest.approx(0.5, abs=0.01)


def test_shallow_models_skip_nothing_unless_told():
    """On 5 layers three would be most of the model: none by default, and those that are named otherwise."""
    assert KVMerger().fit(Budget.parse("25%"), shape_of(5)).skipped == ()
    assert KVMerger(skip=(0, -1)).fit(Budget.parse("80%"), shape_of(5)).skipped == (0, 4)


@pytest.mark.parametrize("settings", [{}, {"max_run": 4}])
def test_a_budget_below_the_skipped_layers_is_refused_with_what_can_be_reached(settings):
    """Three of five layers are more than a quarter; the message's budget can be had and one entry less cannot."""
    method, shape = KVMerger(skip=(0, 1, -1), **settings), shape_of(5)
    with pytest.raises(UserError, match="Use --budget") as refusal:
        method.fit(Budget.parse("25%"), shape)
    reachable = int(str(refusal.value).split("--budget ")[1].split()[0])
    assert method.fit(Budget("rows", reachable), shape).merged_rows >= (250 if settings else 1)
    with pytest.raises(UserError, match="needs at least"):
        method.fit(Budget("rows", reachable - 1), shape)


def test_skipping_every_layer_is_refused():
    """A method that merges nothing is no method."""
    with pytest.raises(UserError, match="needs at least"):
        KVMerger(skip=(0, 1)).fit(Budget.parse("50%"), shape_of(2))
    with pytest.raises(UserError, match="every layer"):
        KVMerger(skip=(0, 1), mode="eps").fit(None, shape_of(2))


def test_a_threshold_takes_no_budget():
    """The bytes under a threshold cannot be declared, so a budget is refused and none is assumed."""
    method = KVMerger(mode="eps")
    assert method.budget_kind == "bits"
    assert method.fit(None, shape_of(32)).rows is None
    with pytest.raises(UserError, match="takes no budget with mode=eps, got 25%"):
        method.fit(Budget.parse("25%"), shape_of(32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recent": 1.5}, "recent must be between 0 and 1"), ({"heavy": -0.1}, "heavy must be between 0 and 1"),
        ({"sigma": 0.0}, "above 0"),
        ({"eps": 0.0}, "above 0"), ({"eps": float("nan")}, "above 0"), ({"max_run": 1}, "max_run must be 2 or more"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    """Before the model runs, with the value and what is allowed."""
    with pytest.raises(UserError, match=message):
        KVMerger(**settings)


def test_layers_that_do_not_exist_are_refused():
    """Layer 5 of 5."""
    with pytest.raises(UserError, match="layer 5 of a model of 5"):
        KVMerger(skip=(5,)).fit(Budget.parse("50%"), shape_of(5))
