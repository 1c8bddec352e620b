"""ShadowKV: what it stores where, what it brings back, and that at full rank with every chunk it is exact."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, LayerShape, Moment, Shape
from kvbench.methods.baseline.full import Full
from kvbench.methods.retrieval.shadowkv import ShadowKV, find_outliers, select_chunks
from kvbench.store.host import HostEntries
from kvbench.store.lowrank import Factoring


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fitted(model, rows, length, **settings):
    """ShadowKV with chunks of 4 entries and a budget in entries."""
    given = {"chunk": 4, "local_chunks": 2, "outlier_chunks": 2, **settings}
    return ShadowKV(**given).bind(model).fit(Budget("rows", rows), model.shape(length))


@dataclass(frozen=True)
class EveryChunk(ShadowKV):
    """Stores every chunk apart although the budget reaches all of them."""

    def factoring(self, length):
        """All but the local ones."""
        chunks = length // self.chunk - self.local_chunks
        return Factoring(self.chunk, chunks, self.outliers, self.rows // self.chunk, self.key_rank)


@pytest.mark.few
@pytest.mark.parametrize("shape", [(4, 2), (2, 2), (4, 1)], ids=["GQA", "MHA", "MQA"])
@pytest.mark.parametrize("outliers", [0, 3])
def test_full_rank_and_every_chunk_are_the_full_cache(shape, outliers):
    """With nothing cut off and all selected, logits equal the full cache's to 1e-4 through factors and fetched values.

    The context is no multiple of the chunk, and 200 later tokens come, more than the 128 slots of the authors' code.
    """
    model = tiny_model(*shape)
    chunks = 90 // 4 - 2 - outliers
    method = EveryChunk(
        chunk=4, local_chunks=2, rows=chunks * 4, length=90, outliers=outliers, key_rank=shape[1] * 16
    )
    with Session(model, method, capacity=320) as ours, Session(model, Full(), capacity=320) as dense:
        for session in (ours, dense):
            session.prefill(ids(90))
        assert ours.effect().acted
        for count in (7, 200):
            question = torch.tensor([ids(count, 2)])
            found, wanted = (x.forward(question, Moment.TURN_END, keep=count) for x in (ours, dense))
            assert (found - wanted).abs().max() < 1e-4
        found, wanted = (x.forward(torch.tensor([[3]]), Moment.DECODE) for x in (ours, dense))
        assert (found - wanted).abs().max() < 1e-4


def test_a_low_rank_costs_something():
    """A rank below the width changes the logits: the keys that are read are the factors' and no exact copy."""
    model, logits = tiny_model(), []
    for rank in (32, 8):
        with Session(model, fitted(model, 40, 90, rank=rank), capacity=100) as session:
            session.prefill(ids(90))
            logits.append(session.forward(torch.tensor([[3]]), Moment.DECODE))
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_a_step_that_fetches_nothing_reads_the_least_declared_bytes(monkeypatch):
    """With the same chunks as before, a step needs neither factors nor numbers of chunks; later entries come on top."""
    def first(query, landmarks, scale, count):
        del scale
        return torch.arange(count).expand(len(query), landmarks.shape[1], query.shape[2], -1)

    monkeypatch.setattr("kvbench.methods.retrieval.shadowkv.select_chunks", first)
    model = tiny_model()
    method, token = fitted(model, 16, 90), torch.tensor([[3]])
    with Session(model, method, capacity=100) as session:
        session.prefill(ids(90))
        session.forward(token, Moment.DECODE)
        for kv in session.layers:
            kv.reads.clear()
        session.forward(token, Moment.DECODE)
        read = session.memory().read_bytes_per_step
    assert read == method.least_read_bytes(model.shape(90)) + 2 * model.shape(1).full_bytes


def test_a_planted_chunk_is_found(make_step):
    """The chunk whose keys answer the query is selected and its values are what comes out, wherever it stands."""
    method = ShadowKV(rows=16, length=96, outliers=0, key_rank=8)
    for at in (0, 5, 7):
        torch.manual_seed(at)
        keys, values = 0.1 * torch.randn(1, 1, 96, 8), torch.randn(1, 1, 96, 8)
        keys[0, 0, at * 8 : at * 8 + 8] = 6.0
        kv = method.layer(0)
        step = make_step(keys, keys, values)
        kv.append(step)
        method.evict(kv, step)
        later = make_step(torch.ones(1, 2, 1, 8), torch.zeros(1, 1, 1, 8), before=96, moment=Moment.DECODE)
        kv.append(later)
        assert (select_chunks(later.query, kv.landmarks, 1.0, 2) == at).any(-1).all()
        wanted = values[0, 0, at * 8 : at * 8 + 8].mean(0).expand(1, 2, 1, -1)
        assert torch.allclose(method.attend(kv, later), wanted, atol=1e-4)


def test_outliers_are_the_chunks_least_like_their_mean():
    """By hand: chunks of equal keys are no outliers, opposite keys are the greatest, a right angle comes next."""
    keys = torch.tensor([
        [1.0, 0.0], [1.0, 0.0],  # alike: cosine 1
        [1.0, 0.0], [0.0, 1.0],  # a right angle: 0.707 to the mean
        [0.0, 2.0], [0.0, 5.0],  # length does not count: cosine 1
        [3.0, 0.0], [-1.0, 0.0],  # opposite: -1
    ]).view(1, 1, 8, 2)
    landmarks, outliers = find_outliers(keys, 2, 2)
    assert landmarks[0, 0].tolist() == [[1, 0], [0.5, 0.5], [0, 3.5], [1, 0]]
    assert outliers[0, 0].tolist() == [1, 3]


def test_a_group_takes_the_greatest_share():
    """Shares are taken per query head before the greatest counts: a head with large logits does not outvote another."""
    landmarks = torch.eye(4).view(1, 1, 4, 4)
    loud, quiet = torch.tensor([100.0, 99.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 9.0, 0.0])
    query = torch.stack([loud, quiet]).view(1, 2, 1, 4)
    assert set(select_chunks(query, landmarks, 1.0, 2).flatten().tolist()) == {0, 2}


def test_slots_hold_what_a_fresh_fetch_would():
    """After many steps with hits and misses, every slot holds its chunk's values and rebuilt keys, each chunk once."""
    model = tiny_model()
    with Session(model, fitted(model, 24, 120), capacity=200) as session:
        session.prefill(torch.tensor([ids(120), ids(120, 4)]))
        for token in ids(30, 2):
            session.forward(torch.tensor([[token], [token]]), Moment.DECODE)
        facts = session.effect().facts
        assert 0 < facts["chunks_reused"] < facts["chunks_selected"] == 2 * 2 * 30 * 2 * 6
        for store in session.layers:
            chunks, slots = store._chunks, store._slots
            stored = slots.chunk.long()
            assert all(len(set(x.tolist())) == 6 for x in stored.flatten(0, 1))
            assert slots.value.equal(chunks.values.fetch(stored))
            old, kept = slots.key.clone(), [x.sort().values for x in stored.flatten(0, 1)]
            slots.chunk.fill_(chunks.number.shape[2])
            store._bring_back(model.ropes[0], stored, 0)
            assert [x.sort().values.tolist() for x in slots.chunk.flatten(0, 1)] == [x.tolist() for x in kept]
            fresh = slots.key.gather(2, slots.chunk.long().argsort(-1)[..., None].expand_as(slots.key))
            before = old.gather(2, stored.argsort(-1)[..., None].expand_as(old))
            assert torch.allclose(fresh, before, atol=1e-6)


def test_stored_apart_outliers_and_local_entries_are_disjoint():
    """Every entry of the context is in exactly one place, per KV head."""
    model = tiny_model()
    with Session(model, fitted(model, 24, 91), capacity=200, track=True) as session:
        session.prefill(ids(91))
        for store in session.layers:
            for head in range(2):
                apart = (store._chunks.number[0, head, :, None] * 4 + torch.arange(4)).flatten().tolist()
                dense = store.positions[0, head].tolist()
                assert len(dense) == 2 * 4 + 2 * 4 + 3
                assert sorted(apart + dense) == list(range(91))


def test_a_question_selects_as_its_tokens_would_one_by_one():
    """50 tokens at once give the logits, counters and bytes read of 50 steps."""
    model = tiny_model()
    method = fitted(model, 24, 90)
    with Session(model, method, capacity=300) as once, Session(model, method, capacity=300) as singly:
        once.prefill(ids(90)), singly.prefill(ids(90))
        together = once.forward(torch.tensor([ids(50, 2)]), Moment.TURN_END, keep=50)
        apart = torch.cat([singly.forward(torch.tensor([[x]]), Moment.TURN_END) for x in ids(50, 2)], dim=1)
        assert once.effect().facts == singly.effect().facts
        assert once.memory().read_bytes_per_step == singly.memory().read_bytes_per_step
    assert (together - apart).abs().max() < 1e-4


def test_bytes_by_tier_and_effect():
    """Values apart count on the host, all else on the device, and a step reads less than it stores."""
    model = tiny_model()
    with Session(model, fitted(model, 24, 120), capacity=200) as session:
        session.prefill(ids(120))
        session.method.generate(session, 6, frozenset())
        memory, proof, method = session.memory(), session.effect(), session.method
    shape = model.shape(120)
    layers, heads, width, size = 2, 2, 16, 4
    apart = 120 // 4 - 2 - 2
    assert memory.host_bytes == layers * heads * apart * 4 * width * size == method.declared_host_bytes(shape)
    dense, slots = (120 - apart * 4) * 2 * width * size, 6 * (4 * 2 * width * size + 4)
    head = dense + slots + apart * (width * size + 4) + 20 * width * size
    assert memory.stored_bytes == layers * (heads * head + 28 * 4 * 20 * size) == method.declared_bytes(shape)
    assert memory.read_bytes_per_step < memory.stored_bytes
    assert proof.entries_kept == (120, 120)
    assert proof.facts["entries_on_simulated_host"] == proof.facts["entries_factored"] == layers * heads * apart * 4


def test_short_contexts_stay_exact_and_say_so():
    """Where a token could select every chunk nothing is stored apart, the settings count as no loss, and it is said."""
    model = tiny_model()
    for length, rows in ((1, 4), (31, 12), (33, 16)):
        method = fitted(model, rows, length)
        with Session(model, method, capacity=100) as session, Session(model, Full(), capacity=100) as dense:
            assert session.prefill(ids(length)).equal(dense.prefill(ids(length)))
            proof = session.effect()
            assert proof.identity
            assert proof.facts["layers_dense"] == 2
            assert not proof.acted
            found, wanted = (x.forward(torch.tensor([ids(9, 2)]), Moment.TURN_END, keep=9) for x in (session, dense))
            assert found.equal(wanted)
    assert not fitted(model, 12, 33).identity(model.shape(33))


def test_rank_and_outliers_are_the_paper_s_where_its_models_are():
    """160 for keys of 256 and wider, less below; 48 outlier chunks at 2,048 entries, in proportion elsewhere."""
    def shape(heads, width):
        return Shape(131072, (LayerShape(heads, 32, width, width, None),), 2)

    paper = Budget("paper", 0)
    assert [ShadowKV().fit(paper, shape(h, 128)).key_rank for h in (1, 2, 4, 8, 32)] == [80, 160, 160, 160, 160]
    assert ShadowKV().fit(paper, shape(2, 64)).key_rank == 80
    assert [ShadowKV().fit(Budget("rows", x), shape(8, 128)).outliers for x in (256, 1024, 2048)] == [6, 24, 48]
    assert ShadowKV(outlier_chunks=48).fit(Budget("rows", 256), shape(8, 128)).outliers == 48
    method = ShadowKV().fit(paper, shape(8, 128))
    ratio = method.declared_bytes(shape(8, 128)) / shape(8, 128).full_bytes
    assert 0.14 < ratio < 0.17  # the card: about one seventh, and what is brought back


def test_a_rank_above_the_width_is_refused():
    """With the width, what is allowed, and the default."""
    model = tiny_model()
    with pytest.raises(UserError, match=r"rank 33 is above the key width.*32.*rank=1 to 32.*leave it out for 20"):
        ShadowKV(rank=33).fit(None, model.shape(200))
    assert ShadowKV(rank=32).fit(None, model.shape(200)).key_rank == 32


@pytest.mark.parametrize(("settings", "message"), [
    ({"chunk": 0}, "chunk must be 1 or more, got 0"),
    ({"rank": 0}, "rank must be 1 or more, got 0"),
    ({"local_chunks": -1}, "local_chunks must be 0 or more"),
    ({"outlier_chunks": -1}, "outlier_chunks must be 0 or more"),
])
def test_settings_without_a_meaning_are_refused(settings, message):
    """Before anything runs, with the value and what is allowed."""
    with pytest.raises(UserError, match=message):
        ShadowKV(**settings)


def test_an_unknown_rotation_and_a_second_compression_are_refused():
    """Keys whose rotation is not understood cannot be factored, and later entries are not factored again."""
    model = tiny_model()
    with pytest.raises(UserError, match="not understood"):
        ShadowKV().bind(replace(model, ropes=(*model.ropes[:-1], replace(NO_ROPE, trusted=False))))
    with Session(model, fitted(model, 24, 120), capacity=200, recompress=True) as session:
        session.prefill(ids(120))
        with pytest.raises(UserError, match="Leave --recompress out"):
            session.question(ids(5, 2), 1)


def test_a_model_whose_layers_all_slide_is_refused():
    """No layer could hold factors: before anything runs, unless nothing is asked of them."""
    model = tiny_model(4, 2, 48)
    with pytest.raises(UserError, match="sliding-window layers exact, and this model has no others"):
        fitted(model, 24, 120)
    assert ShadowKV(chunk=4).fit(Budget("fraction", 1.0), model.shape(120)).identity(model.shape(120))


def test_host_entries_come_back_by_head():
    """Each head and sequence gets its own entries, and on a CPU the tier says that it is simulated."""
    rows = torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4)
    host = HostEntries(rows)
    index = torch.randint(5, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    assert host.fetch(index).equal(rows.gather(2, index[..., None].expand(-1, -1, -1, 4)))
    assert host.simulated
    assert host.entries.data_ptr() != rows.data_ptr()
