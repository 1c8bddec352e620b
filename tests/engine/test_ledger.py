"""Byte counts and counters of a session by hand, over stores whose numbers are set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.budget import LayerShape, Shape
from kvbench.engine.ledger import Ledger
from kvbench.methods.baseline.full import Full
from kvbench.store.facts import Fact

SHAPE = Shape(100, tuple(LayerShape(2, 4, 3, 5, window) for window in (None, 40)), itemsize=2)
"""A full layer, and one with a window of 40."""
ONE = Shape(100, SHAPE.layers[:1], itemsize=2)
WINDOW = Shape(100, SHAPE.layers[1:], itemsize=2)
ENTRY = 2 * (3 + 5) * 2


class Layer:
    """A store with the numbers that a test gives it."""

    def __init__(
        self, held, *, spare=0, host=0, host_spare=0, kept=(10, 20), seen=100, read=0, tiers=(0, 0), facts=None
    ):
        self.blocks = [torch.zeros(held + spare, dtype=torch.uint8)]
        self.host, self.host_spare = torch.zeros(host + host_spare, dtype=torch.uint8), host_spare
        self.spare, self.kept, self.seen, self.read, self.tiers = spare, list(kept), seen, read, tiers
        self.counted, self.credited = facts or {}, 0

    def nbytes(self):
        return sum(len(x) for x in self.blocks)

    def tensors(self):
        return self.blocks

    def spare_bytes(self):
        return self.spare

    def host_tensors(self):
        return [self.host]

    def host_spare_bytes(self):
        return self.host_spare

    def entries_kept(self):
        return self.kept

    def tier_read_bytes(self):
        return self.tiers

    def file_bytes(self):
        return 7

    def read_bytes(self):
        return self.read

    def distinct_read_bytes(self):
        return self.read - 1

    def full_read_tokens(self):
        return self.seen + 0.5 if self.seen else 0

    def facts(self):
        return self.counted

    def credit(self, fork):
        self.credited += fork.read


def test_bytes_of_a_batch_of_two():
    """The full cache counts both sequences, and a window's layer its last 40 entries and those added after them."""
    layers = [Layer(600, spare=50, host=30, host_spare=4, read=90, tiers=(8, 3)), Layer(200, read=10, tiers=(1, 2))]
    ledger = Ledger(layers)
    ledger.note_context(Full(), SHAPE, 2)
    layers[0].blocks.append(torch.zeros(25, dtype=torch.uint8))
    layers[0].seen = layers[1].seen = 103
    memory = ledger.memory()
    assert memory.model_dump() == {
        "full_bytes": 2 * 140 * ENTRY, "stored_bytes": 800, "spare_bytes": 50, "host_bytes": 30, "file_bytes": 14,
        "end_bytes": 875, "end_stored_bytes": 825, "peak_bytes": 875, "end_full_bytes": 2 * 146 * ENTRY,
        "read_bytes_per_step": 100, "distinct_read_bytes_per_step": 98, "host_read_bytes_per_step": 9,
        "file_read_bytes_per_step": 5, "full_read_bytes_per_step": 2 * 147 * ENTRY,
    }


def test_host_memory_that_grows_after_the_context_is_stored():
    """Bytes on the host at the end of the context are `host_bytes`; those added later count as stored."""
    layers = [Layer(100, host=30)]
    ledger = Ledger(layers)
    ledger.note_context(Full(), ONE, 1)
    layers[0].host = torch.zeros(41, dtype=torch.uint8)
    assert ledger.memory().end_stored_bytes == 111


def test_a_layer_that_read_nothing_has_no_full_reads():
    """Where no step ran, a full cache of the same steps reads nothing either."""
    layers = [Layer(1, seen=0), Layer(1)]
    ledger = Ledger(layers)
    ledger.note_context(Full(), SHAPE, 1)
    memory = ledger.memory()
    assert memory.full_read_bytes_per_step == 40.5 * ENTRY
    assert memory.end_full_bytes == 40 * ENTRY
    layers[1].seen = 0
    assert ledger.memory().full_read_bytes_per_step == 0


def test_bytes_of_a_part_of_a_token_are_rounded_for_the_whole_batch():
    """A mean of steps may have one: 100.01 tokens of two sequences are 6400.64 bytes."""
    ledger = Ledger([Layer(1, seen=100.01)])
    ledger.note_context(Full(), ONE, 2)
    assert ledger.memory().end_full_bytes == 6401


def test_the_peak_is_the_most_at_once():
    """Layers are read one after the other: what one frees before the next grows does not add to it."""
    layers = [Layer(500), Layer(100)]
    ledger = Ledger(layers)
    ledger.note_layers()
    layers[0].blocks = [torch.zeros(10, dtype=torch.uint8)]
    ledger.note_layer(0)
    layers[1].blocks = [torch.zeros(550, dtype=torch.uint8)]
    ledger.note_layer(1)
    ledger.note_context(Full(), SHAPE, 1)
    assert ledger.memory().peak_bytes == 600


def test_a_layer_that_was_not_read_yet_has_no_bytes():
    """The peak is that of the other one."""
    ledger = Ledger([Layer(100), Layer(100)])
    ledger.note_layer(0)
    assert ledger.to_json()["peak"] == 100


def test_a_session_that_waits_counts_the_bytes_of_both():
    """Storages that both hold count once, and so do those of a third session that waits for the second."""
    outer, middle, inner = ([Layer(100)] for _ in range(3))
    inner[0].blocks = [*middle[0].blocks, torch.zeros(5, dtype=torch.uint8)]
    middle[0].blocks = [*middle[0].blocks, torch.zeros(3, dtype=torch.uint8)]
    first = Ledger(outer)
    second = Ledger(middle, first)
    third = Ledger(inner, second)
    for ledger in (first, second, third):
        ledger.note_context(Full(), ONE, 1)
    assert third.memory().peak_bytes == 105
    assert second.memory().peak_bytes == 108
    assert first.memory().peak_bytes == 208
    second.fork([Layer(300)]).note_layers()
    assert first.memory().peak_bytes == 400


def test_facts_are_added_over_layers():
    """Sums, maxima, and whether one of them proves an effect."""
    layers = [
        Layer(1, kept=(10, 30), facts={"rows_dropped": Fact(3, changed=True), "distinct_codes": Fact(9, maximum=True)}),
        Layer(1, kept=(7,), facts={"rows_dropped": Fact(4, changed=True), "distinct_codes": Fact(8, maximum=True)}),
    ]
    ledger = Ledger(layers)
    ledger.note_context(Full(), SHAPE, 1)
    effect = ledger.effect()
    assert effect.facts == {"rows_dropped": 7, "distinct_codes": 9}
    assert (effect.acted, effect.identity, effect.maxima) == (True, True, ("distinct_codes",))
    assert (effect.entries_seen, effect.entries_kept) == (100, (20, 7))


@pytest.mark.parametrize("lossless", [True, False])
def test_the_effect_is_that_of_the_methods_settings_and_the_models_windows(lossless):
    """Settings that lose entries need an effect, and a model of windows alone holds no more than these."""
    ledger = Ledger([Layer(1)])
    method = SimpleNamespace(identity=lambda shape: lossless and shape == WINDOW)
    ledger.note_context(method, WINDOW, 1)
    assert (ledger.effect().identity, ledger.effect().entries_seen) == (lossless, 40)


@pytest.mark.parametrize("fact", [Fact(0, changed=True), Fact(5)])
def test_a_count_of_zero_or_of_no_change_proves_nothing(fact):
    """A store that dropped nothing, and one that counts what changes nothing."""
    ledger = Ledger([Layer(1, facts={"counted": fact})])
    ledger.note_context(Full(), ONE, 1, exact=False)
    assert not ledger.effect().acted
    assert not ledger.effect().identity


def test_a_fork_goes_on_and_credits_its_reads_and_its_peak():
    """The counts of the parent are the fork's start; those of the fork are not the parent's until they are credited."""
    layers = [Layer(100), Layer(100)]
    ledger = Ledger(layers)
    ledger.note_context(Full(), SHAPE, 1)
    branch = ledger.fork([Layer(300, read=6), Layer(100, read=2)])
    assert branch.memory().stored_bytes == 200
    ledger.note_layer(1)
    assert ledger.memory().peak_bytes == 200
    ledger.credit(branch)
    assert ledger.memory().peak_bytes == 400
    assert [x.credited for x in layers] == [6, 2]


def test_a_fork_has_the_peak_and_the_batch_of_its_parent():
    """And a parent that grew beyond its fork keeps its own peak."""
    layers = [Layer(100)]
    ledger = Ledger(layers)
    ledger.note_context(Full(), ONE, 2)
    branch = ledger.fork([Layer(60)])
    assert (branch.memory().peak_bytes, branch.memory().full_bytes) == (100, 2 * 100 * ENTRY)
    for held in (500, 50):
        layers[0].blocks = [torch.zeros(held, dtype=torch.uint8)]
        ledger.note_layers()
    ledger.credit(branch)
    assert ledger.memory().peak_bytes == 500


def test_a_file_of_counts_comes_back():
    """With the peak and the context of the session that wrote it, where one layer keeps nothing and one all."""
    ledger = Ledger([Layer(90, spare=10, kept=(0, 0)), Layer(40, kept=(40, 40))])
    ledger.note_context(Full(), SHAPE, 2)
    other = Ledger([Layer(0), Layer(0)])
    other.load_json(ledger.to_json(), SHAPE, 2)
    assert other.to_json() == ledger.to_json()
    assert (other.memory().stored_bytes, other.memory().peak_bytes) == (130, 140)
    assert other.memory().full_bytes == 2 * 140 * ENTRY


@pytest.mark.parametrize(("counts", "effect", "message"), [
    ({"stored": [-1, 3]}, {}, "peak"), ({"context": [-1, 0, 0]}, {}, "peak"), ({"context": [1, -1, 0]}, {}, "peak"),
    ({"context": [1, 0, -1]}, {}, "peak"), ({"peak": 139}, {}, "peak"), ({"stored": [100, 41]}, {}, "peak"),
    ({"stored": [0, 0], "context": [131, 10, 0]}, {}, "peak"), ({}, {"entries_seen": 99}, "entries of 99"),
    ({}, {"entries_kept": [101, 20]}, "101"), ({}, {"entries_kept": [20, 41]}, "41"),
    ({}, {"entries_kept": [-1, 20]}, "-1"),
])
def test_counts_that_contradict_each_other_are_refused(counts, effect, message):
    """Negative bytes, a peak below what was stored, and more entries than the context has in a layer."""
    ledger = Ledger([Layer(90, spare=10), Layer(40)])
    ledger.note_context(Full(), SHAPE, 1)
    saved = ledger.to_json()
    with pytest.raises(ValueError, match=message):
        Ledger([Layer(0), Layer(0)]).load_json({**saved, **counts, "effect": {**saved["effect"], **effect}}, SHAPE, 1)
