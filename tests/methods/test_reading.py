"""Methods that choose entries one token at a time: they read what they count, and everything is the full cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.baseline.full import Full
from kvbench.registry import find_method, list_entries
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.clustering import cluster, cluster_segments, count_clusters, sort_by_label
from kvbench.techniques.reading import ReadingMethod, mark_ends_and_best, mark_units, unit_of_entries

READING = sorted(
    x.name for x in list_entries("method") if x.models == "autoregressive" and issubclass(x.load(), ReadingMethod)
)
LENGTH, ROWS = 140, 80


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=READING)
def method(request):
    """Every method of this kind, on the tiny model, with a budget below the context."""
    model = tiny_model()
    return find_method(request.param)().bind(model).fit(Budget("rows", ROWS), model.shape(LENGTH))


@pytest.mark.few(4)
def test_a_question_reads_as_its_tokens_would_one_by_one(method):
    """Twenty tokens at once give the logits, counters and bytes of twenty steps: each chooses for itself."""
    model = tiny_model()
    with Session(model, method, capacity=200) as once, Session(model, method, capacity=200) as singly:
        once.prefill(ids(LENGTH)), singly.prefill(ids(LENGTH))
        together = once.forward(torch.tensor([ids(20, 2)]), Moment.TURN_END, keep=20)
        apart = torch.cat([singly.forward(torch.tensor([[x]]), Moment.TURN_END) for x in ids(20, 2)], dim=1)
        assert once.effect().facts == singly.effect().facts
        assert once.memory().read_bytes_per_step == singly.memory().read_bytes_per_step
    assert (together - apart).abs().max() < 1e-4


def test_entries_that_are_not_marked_do_not_matter(method, monkeypatch):
    """With NaN in every entry that is not marked the logits are the same: nothing else is read."""
    original = ChosenKV.read

    def poisoned(self, step, mask, bias=None):
        marked = mask.unflatten(1, (self.keys.shape[1], -1)).any(2)[..., None]
        held = [x[:, :, : mask.shape[2]] for x in (self.keys, self.values)]
        before = [x.clone() for x in held]
        for x in held:
            x.masked_fill_(~marked, torch.nan)
        found = original(self, step, mask, bias)
        for x, y in zip(held, before, strict=True):
            x.copy_(y)
        return found

    model, logits, method = tiny_model(), [], replace(method, tier="device")
    for read in (original, poisoned):
        monkeypatch.setattr(ChosenKV, "read", read)
        with Session(model, method, capacity=200) as session:
            session.prefill(ids(LENGTH))
            logits.append(session.force(ids(4, 2)))
            assert session.effect().facts["entries_skipped"] > 0
    assert logits[1].isfinite().all()
    assert logits[0].equal(logits[1])


def test_the_first_step_reads_the_declared_bytes(method):
    """Counted from what was gathered and scanned: at least the least, at most the declared bytes and one new entry."""
    model = tiny_model()
    shape = model.shape(LENGTH)
    with Session(model, method, capacity=200) as session:
        session.prefill(ids(LENGTH))
        session.force(ids(1, 2))
        read = session.memory().read_bytes_per_step
    declared, least = method.declared_read_bytes(shape), method.least_read_bytes(shape)
    assert least <= read <= declared + replace(shape, length=1).full_bytes
    assert least <= declared


def test_sliding_layers_alone_are_refused(method):
    """A model with sliding windows only has nothing to choose from."""
    with pytest.raises(UserError, match="would have no effect"):
        replace(method, rows=None).fit(Budget("rows", ROWS), tiny_model(4, 2, 48).shape(LENGTH))


def read_everything(name, **settings):
    """Logits of a method whose tokens may read more entries than there are, and the full cache's."""
    model = tiny_model()
    method = find_method(name)(**settings).bind(model).fit(Budget("rows", ROWS), model.shape(LENGTH))
    with Session(model, method, capacity=200) as ours, Session(model, Full(), capacity=200) as full:
        ours.prefill(ids(LENGTH)), full.prefill(ids(LENGTH))
        ours.method = replace(method, rows=1000)
        logits = [x.forward(torch.tensor([ids(9, 2)]), Moment.TURN_END, keep=9) for x in (ours, full)]
        facts = ours.effect().facts
    return (logits[0] - logits[1]).abs().max().item(), facts


@pytest.mark.parametrize(("name", "settings"), [
    ("instinfer", {}), ("sentencekv", {}), ("pqcache", {}), ("retroinfer", {}),
])
def test_reading_everything_is_the_full_cache(name, settings):
    """Through the index and the choice, with a budget that covers all entries."""
    distance, facts = read_everything(name, **settings)
    assert facts["queries"] > 0
    assert facts["entries_skipped"] == 0
    assert distance < 1e-4


def test_units_are_taken_whole_from_the_best_on():
    """By hand: units of 3, 2, 4 and no entries. The last one that fits in part gives its first entries."""
    offsets = torch.tensor([[[0, 3, 5, 9, 9]]])
    scores = torch.tensor([[[0.1, 0.9, 0.5, 2.0]]])
    assert unit_of_entries(offsets, 9).tolist() == [[[0, 0, 0, 1, 1, 2, 2, 2, 2]]]
    for count, wanted in ((2, "000110000"), (4, "000111100"), (6, "000111111"), (7, "100111111"), (20, "111111111")):
        mask = mark_units(scores, offsets, 9, count)
        assert "".join(str(int(x)) for x in mask.flatten()) == wanted


def test_the_first_and_last_entries_are_marked_before_the_best():
    """By hand: one first and two last entries of six, and the best of the others."""
    mask = mark_ends_and_best(torch.tensor([[[0.0, 1.0, 3.0, 2.0, -9.0, -8.0]]]), 4, 1, 2)
    assert mask.int().tolist() == [[[1, 0, 1, 0, 1, 1]]]


@pytest.mark.parametrize("spherical", [False, True])
def test_clusters_are_those_of_lloyd_one_point_at_a_time(spherical):
    """Four rounds on 37 points: the same labels as a loop over points and centers, and means to float32."""
    points = torch.randn(2, 37, 5, generator=torch.Generator().manual_seed(0))
    centers, labels = cluster(points, 6, 4, spherical=spherical)
    for x, found, own in zip(points.double(), centers, labels, strict=True):
        unit = x / x.norm(dim=-1, keepdim=True) if spherical else x
        middle = [unit[i * 37 // 6] for i in range(6)]
        for _ in range(5):
            wanted = [min(range(6), key=lambda c: (p - middle[c]).square().sum().item()) for p in unit]
            groups = [[p for p, c in zip(unit, wanted, strict=True) if c == i] for i in range(6)]
            middle = [torch.stack(g).mean(0) if g else m for g, m in zip(groups, middle, strict=True)]
            middle = [m / m.norm() for m in middle] if spherical else middle
        assert own.tolist() == wanted
        for i in range(6):
            members = x[torch.tensor(wanted) == i]
            assert torch.allclose(found[i].double(), members.mean(0), atol=1e-6)


def test_segments_are_clustered_apart():
    """Of 25 entries in segments of 10, clusters of 4: three, three and two, and none has entries of two segments."""
    keys = torch.randn(1, 2, 25, 4, generator=torch.Generator().manual_seed(0))
    centers, labels = cluster_segments(keys, 4, 10, 5)
    assert centers.shape[2] == count_clusters(25, 4, 10) == 8
    for start, stop, low, high in ((0, 10, 0, 3), (10, 20, 3, 6), (20, 25, 6, 8)):
        assert ((labels[:, :, start:stop] >= low) & (labels[:, :, start:stop] < high)).all()
    order, offsets = sort_by_label(labels, 8)
    assert labels.gather(2, order).diff(dim=-1).ge(0).all()
    assert unit_of_entries(offsets, 25).equal(labels.gather(2, order))
