"""Lossless decoding: tokens of greedy decoding with the cache that verifies, and both caches in step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.check.trial import CONTEXT, LENGTH, NEVER_STOP, choose_budget, open_session, random_ids
from kvbench.engine.session import Session
from kvbench.engine.speculation import draft_with, find_stores
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.pack import quantize, unpack
from kvbench.method import Budget, BudgetKind, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.lossless.triforce import RetrievedKV
from kvbench.methods.quantization.cachegen import CacheGenStream
from kvbench.registry import find_method
from kvbench.store import LayerKV
from kvbench.store.entries import storage_bytes
from kvbench.store.hierarchical import HierarchicalKV, lower_half
from tests.methods.conftest import AUTOREGRESSIVE

STORE_ALL = [x for x in AUTOREGRESSIVE if find_method(x).card.budget in (BudgetKind.NONE, BudgetKind.PROMPT)]
ALONE = [*STORE_ALL, "epicache", "ftp", "longspec", "magicdec", "prompt-lookup", "quantspec", "triforce", "vericache"]
DRAFTERS = [x for x in AUTOREGRESSIVE if x not in ALONE]
FAST = ("snapkv", "random")
QUESTIONS = [random_ids(5, seed=21), random_ids(9, seed=22)]
ANSWER = 14


def ask_all(method, budget, model, *, stop=NEVER_STOP, questions=QUESTIONS):
    """The answers to two questions, each after the answers before it, and the session."""
    with open_session(method, model, budget) as session:
        session.prefill(CONTEXT)
        return [session.ask(x, ANSWER, stop=stop) for x in questions], session.seen


def require_full_answers(method, *, stop=NEVER_STOP):
    """The answers equal those of the full cache, and so do the tokens that the session has seen."""
    model = tiny_model()
    found, seen = ask_all(method, choose_budget(method), model, stop=stop)
    wanted, tokens = ask_all(Full(), None, model, stop=stop)
    assert [x.ids for x in found] == [x.ids for x in wanted]
    assert [x.stop_reasons for x in found] == [x.stop_reasons for x in wanted]
    assert seen == tokens
    return found


def test_every_method_can_draft_but_those_that_store_all_or_verify():
    """No method is left out of the test below but for a reason that its error states."""
    for name in ALONE:
        with pytest.raises(UserError, match="makes no sense"):
            find_method(f"{name}+vericache")
    with pytest.raises(UserError, match="diffusion models"):
        find_method("dllm-cache+vericache")


@pytest.mark.parametrize(
    "name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in [*DRAFTERS, "snapkv+adakv"]]
)
def test_any_draft_gives_the_answers_of_the_full_cache(name):
    """Over two questions, with every method's cache as the draft, random eviction included."""
    require_full_answers(find_method(f"{name}+vericache")(draft_length=4))


@pytest.mark.parametrize("settings", [{"draft": "snapkv"}, {"draft": "streaming-llm"}])
def test_magicdec_gives_the_answers_of_the_full_cache(settings):
    """With both of its drafts."""
    require_full_answers(find_method("magicdec")(**settings))


@pytest.mark.few
@pytest.mark.parametrize("budget", [24, 60])
def test_triforce_gives_the_answers_of_the_full_cache(budget):
    """With a window smaller than the retrieved chunks, and a larger one."""
    require_full_answers(find_method("triforce")(window_budget=budget, sinks=4))


@pytest.mark.parametrize("budget", [Budget("fraction", 1.0), Budget("rows", 119), Budget("rows", 40)], ids=str)
def test_triforce_declares_the_positions_of_sliding_layers(budget):
    """A window needs them in the retrieved chunks, also where these are all entries."""
    model = tiny_model(4, 2, 48)
    with open_session(find_method("triforce")(), model, budget) as session:
        session.prefill(CONTEXT)
        assert session.memory().stored_bytes == session.method.declared_bytes(model.shape(len(CONTEXT)))


@pytest.mark.few
@pytest.mark.parametrize("length", [1, 8, 3])
def test_an_answer_ends_at_its_stop_token_inside_a_draft(length):
    """No token after it is given, and neither cache holds it."""
    answer = ask_all(Full(), None, tiny_model())[0][0].ids[0]
    for place in (0, 2, 5):
        require_full_answers(find_method("knorm+vericache")(draft_length=length), stop=frozenset(answer[place:][:1]))


@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_draft_of_every_entry_is_accepted_whole(length):
    """With the full cache as the draft a round gives its draft and one more token."""
    model = tiny_model()
    found, _ = ask_all(find_method("snapkv+vericache")(draft_length=length), Budget("fraction", 1.0), model)
    for answer in found:
        rounds = -(-(ANSWER - 1) // (length + 1))
        assert (answer.speculation.rounds, answer.speculation.accepted) == (rounds, answer.speculation.drafted)
        assert answer.speculation.drafted == ANSWER - 1 - rounds


def hold(session):
    """Keys and values of every layer's caches: of the target, and of the draft."""
    return [(x.target.keys, x.target.values, x.draft.keys, x.draft.values) for x in find_stores(session)]


def test_both_caches_hold_the_same_tokens_after_every_answer():
    """The target's entries are those of a prefill of all tokens but the newest, and a whole draft's equal them."""
    model = tiny_model()
    method = find_method("snapkv+vericache")(draft_length=3)
    with open_session(method, model, Budget("fraction", 1.0)) as session:
        session.prefill(CONTEXT)
        answer = session.ask(QUESTIONS[0], ANSWER, stop=NEVER_STOP).ids[0]
        with open_session(Full(), model, None) as full:
            full.prefill([*CONTEXT, *QUESTIONS[0], *answer[:-1]])
            assert session.seen == full.seen
            for (keys, values, *draft), store in zip(hold(session), full.layers, strict=True):
                assert torch.allclose(keys, store.keys, atol=1e-5)
                assert torch.allclose(values, store.values, atol=1e-5)
                assert draft[0].equal(keys) and draft[1].equal(values)


def test_a_draft_that_evicts_takes_the_verified_entries():
    """After an answer the last entries of SnapKV's cache are the target's, as many as tokens followed the context."""
    with open_session(find_method("snapkv+vericache")(draft_length=3), tiny_model(), Budget("rows", 40)) as session:
        session.prefill(CONTEXT)
        session.ask(QUESTIONS[0], ANSWER, stop=NEVER_STOP)
        later = session.seen - LENGTH
        for keys, _, draft, _ in hold(session):
            assert draft.shape[2] == 40 + later
            assert draft[:, :, 40:].equal(keys[:, :, LENGTH:])


@pytest.mark.parametrize("fault", ["crops one too few", "does not follow"])
def test_caches_out_of_step_are_caught(fault, monkeypatch):
    """A target that keeps a rejected entry gives other answers; a draft that misses tokens is no longer accepted."""
    if fault == "crops one too few":
        original = LayerKV.crop
        monkeypatch.setattr(LayerKV, "crop", lambda self, count: original(self, max(0, count - 1)))
        with pytest.raises((AssertionError, RuntimeError)):
            require_full_answers(find_method("knorm+vericache")(draft_length=4))
    else:
        method = find_method("snapkv+vericache")
        monkeypatch.setattr(method, "follow", lambda self, kv, step: None)
        found, _ = ask_all(method(draft_length=3), Budget("fraction", 1.0), tiny_model())
        assert any(x.speculation.accepted < x.speculation.drafted for x in found)


def test_reloaded_bytes_are_those_of_every_pass_over_the_full_cache():
    """A round fetches all entries up to its last drafted token, in each layer, as counted by hand."""
    model = tiny_model()
    token = model.shape(1).full_bytes
    with open_session(find_method("snapkv+vericache")(draft_length=3), model, Budget("fraction", 1.0)) as session:
        session.prefill(CONTEXT)
        found = session.ask(QUESTIONS[0], 9, stop=NEVER_STOP).speculation  # rounds of 4 tokens: 1 + 4 + 4
        start = LENGTH + len(QUESTIONS[0])
        assert found.rounds == 2
        assert found.reloaded_bytes == token * ((start + 4) + (start + 8))
        assert session.memory().host_bytes == token * LENGTH


@pytest.mark.parametrize("name", ["h2o+vericache", "triforce"])
def test_the_peak_counts_the_forks_that_draft(name, monkeypatch):
    """With every cache alive at the end of a draft, each storage once, at all levels."""
    outer, found = [], [0]

    def draft(session, drafter, token, count):
        outer.append(session)
        drafter = replace(drafter)
        object.__setattr__(drafter, "generate", watch(drafter.generate))
        tokens = draft_with(session, drafter, token, count)
        outer.pop()
        return tokens

    def watch(generate):
        def run(branch, *arguments):
            tokens = generate(branch, *arguments)
            alive = [x for session in [*outer, branch] for store in session.layers for x in store.tensors()]
            found[0] = max(found[0], storage_bytes(alive))
            return tokens

        return run

    monkeypatch.setattr("kvbench.methods.lossless.verified.draft_with", draft)
    method = find_method(name)()
    with open_session(method, tiny_model(), choose_budget(method)) as session:
        session.prefill(CONTEXT)
        prefilled = session.memory().peak_bytes
        session.ask(QUESTIONS[0], ANSWER, stop=NEVER_STOP)
        assert session.memory().peak_bytes == max(prefilled, found[0])
        assert found[0] > storage_bytes(x for store in session.layers for x in store.tensors())


def test_read_bytes_are_those_of_drafts_and_passes_per_token():
    """With everything accepted in rounds of 4 tokens: 3 draft steps and one pass, over 4 tokens."""
    model = tiny_model()
    with open_session(find_method("snapkv+vericache")(draft_length=3), model, Budget("fraction", 1.0)) as session:
        session.prefill(CONTEXT)
        session.ask(QUESTIONS[0], 9, stop=NEVER_STOP)
        held = model.shape(session.seen).full_bytes
        assert session.memory().read_bytes_per_step == pytest.approx((3 + 1) * held / 4, rel=1e-3)


def test_reads_of_a_pass_over_host_memory_are_reads_from_the_host():
    """All that verification reads, and nothing of a draft on the device; the bytes of both add up to all reads.

    The draft of `leoam` has entries in a file, which count as well. A cache on the device has no such reads.
    """
    model = tiny_model()
    whole, half, found = Budget("fraction", 1.0), Budget("fraction", 0.5), {}
    for name, budget in (("snapkv+vericache", whole), ("leoam+vericache", half), ("magicdec", half)):
        with open_session(find_method(name)(draft_length=3), model, budget) as session:
            session.prefill(CONTEXT)
            before = session.memory()
            session.ask(QUESTIONS[0], 9, stop=NEVER_STOP)
            found[name] = before, session.memory(), model.shape(session.seen).full_bytes
    before, after, held = found["snapkv+vericache"]
    assert before.host_read_bytes_per_step == before.read_bytes_per_step == model.shape(LENGTH).full_bytes
    assert after.host_read_bytes_per_step == pytest.approx(held / 4, rel=1e-3)
    assert after.read_bytes_per_step - after.host_read_bytes_per_step == pytest.approx(3 * held / 4, rel=1e-3)
    assert found["leoam+vericache"][1].file_read_bytes_per_step > 0
    assert found["leoam+vericache"][0].file_bytes > 0
    assert [x.host_read_bytes_per_step for x in found["magicdec"][:2]] == [0, 0]


def test_a_stream_that_drafts_is_decoded_once(monkeypatch):
    """Before the answer, as part of the time to its first token: not by the fork that drafts, and then once more."""
    decode, calls = CacheGenStream.decode, []
    monkeypatch.setattr(CacheGenStream, "decode", lambda self: calls.append(self) or decode(self))
    model, method = tiny_model(), find_method("cachegen+vericache")(draft_length=3)
    with open_session(method, model, choose_budget(method)) as session:
        session.prefill(CONTEXT)
        session.resume()
        assert len(calls) == len(session.layers)
        session.ask([], 9, stop=NEVER_STOP)
    assert len(calls) == len(session.layers)


def test_a_batch_gives_each_sequence_its_own_answer():
    """Sequences accept the same number of tokens per round, and their answers are those of one at a time."""
    model, contexts = tiny_model(), [random_ids(LENGTH, seed=4), random_ids(LENGTH, seed=5)]
    method = find_method("snapkv+vericache")(draft_length=3)
    with open_session(method, model, Budget("rows", 40)) as session:
        session.prefill(torch.tensor(contexts))
        together = session.ask(QUESTIONS[0], ANSWER, stop=NEVER_STOP).ids
    for ids, context in zip(together, contexts, strict=True):
        with open_session(Full(), model, None) as full:
            full.prefill(context)
            assert full.ask(QUESTIONS[0], ANSWER, stop=NEVER_STOP).ids[0] == ids


# QuantSpec


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_lower_half_refines_the_upper_by_sixteenths():
    """Scale 1 and minimum 0: 3.3 is the code 3 and, half a scale added, 0.8 * 16 = 12.8 sixteenths, the code 13."""
    x = torch.tensor([[0.0, 15.0, 3.3, 6.6]])
    upper = quantize(x, 4, channels=4)
    assert (upper.scale.item(), upper.minimum.item()) == (1.0, 0.0)
    assert unpack(upper.packed, 4, 4).tolist() == [[0, 15, 3, 7]]
    assert unpack(lower_half(x, upper), 4, 4).tolist() == [[8, 8, 13, 2]]


@pytest.mark.parametrize(("count", "exact"), [(63, 63), (64, 32), (95, 63), (96, 32)])
def test_one_to_two_groups_stay_exact(count, exact):
    """Codes are whole groups, and the last 32 to 63 entries are exact."""
    with Session(tiny_model(), find_method("quantspec")(group=32), capacity=count + 40) as session:
        session.prefill(random_ids(count))
        assert {(x.target.n, x.target.coded) for x in find_stores(session)} == {(exact, count - exact)}


def test_both_halves_are_sixteen_times_as_exact_as_the_upper():
    """The largest error of all 8 bits is at most an eighth of that of 4 bits, for keys and for values."""
    key, value = draw(1, 2, 96, 8), draw(1, 2, 96, 8, seed=1)
    store = HierarchicalKV(group=16)
    store._replace({"key": key, "value": value}, 100)  # as a context leaves it
    store.flush()
    for whole, upper, x in zip(store.expand(whole=True), store.expand(whole=False), (key, value), strict=True):
        assert (whole[:, :, 80:] - x[:, :, 80:]).abs().max() == 0
        assert 0 < (whole - x).abs().max() <= (upper - x).abs().max() / 8


def test_quantspec_gives_the_answers_of_its_8_bit_cache():
    """Those of greedy decoding over both halves, which need not be those of the full cache."""
    model, method = tiny_model(), find_method("quantspec")(group=16)
    with open_session(method, model, None) as session:
        session.prefill(CONTEXT)
        for question in QUESTIONS:
            session.question(question, ANSWER)
            with session.method.target(session).fork() as plain:
                wanted = plain.greedy(ANSWER, NEVER_STOP).ids
            assert session.answer(ANSWER, stop=NEVER_STOP).ids == wanted


@pytest.mark.parametrize("shape", [(4, 2, None), (4, 2, 20)], ids=["GQA", "sliding window"])
def test_quantspec_codes_later_tokens_when_plain_decoding_does(shape):
    """Also of an answer in which groups become codes, in whatever place of a round they are full."""
    model = tiny_model(*shape)
    method = find_method("quantspec")(group=8, draft_length=6).fit(None, model.shape(LENGTH))
    with open_session(method, model, None) as session:
        session.prefill(CONTEXT)
        for seed in range(3):
            with session.fork() as branch, session.fork() as steps:
                branch.question(random_ids(5 + seed, seed), 40)
                steps.question(random_ids(5 + seed, seed), 40)
                plain = method.target(steps)
                wanted = plain.greedy(40, NEVER_STOP).ids
                assert branch.answer(40, stop=NEVER_STOP).ids == wanted
                assert [x.target.coded for x in find_stores(branch)] == [x.coded for x in plain.layers]
                assert torch.allclose(branch.logits, plain.logits, atol=1e-4)


# TriForce


def test_the_first_chunk_and_the_highest_mean_product_are_retrieved(make_step):
    """Two of four chunks of two, the second one by the last query, and the entry after the last full chunk."""
    source, store = LayerKV(), RetrievedKV(bounded=True, slack=4)
    keys = torch.tensor([0.0, 0.0, 3.0, 1.0, -5.0, -5.0, 9.0, -6.0, 7.0]).view(1, 1, 9, 1)
    query = torch.tensor([-1.0, 1.0]).view(1, 1, 2, 1)  # the last one decides: means 0, 2, -5, 1.5
    for before, span in ((0, slice(0, 7)), (7, slice(7, 9))):
        step = make_step(query[:, :, : keys[:, :, span].shape[2]] if before else keys[:, :, span], keys[:, :, span],
                         before=before)
        source.append(step)
    store.retrieve(source, step, 2, 5)
    assert store.keys.flatten().tolist() == [0.0, 0.0, 3.0, 1.0, 7.0]
    assert store.seen == 9


@pytest.mark.parametrize("budget", [1.0, 0.2])
def test_read_bytes_of_triforce_are_those_of_its_passes(monkeypatch, budget):
    """Every pass over the chunks, that of the first drafted token, too; one over T tokens had T - 1 drafts.

    After a round all keys are read to choose chunks, of 8 entries, and the entries that are copied; before the first
    round this belongs to the prefill.
    """
    passes, chosen = [], []
    attend, retrieve = RetrievedKV.attend, RetrievedKV.retrieve

    def count(store, step):
        passes.append(step.query.shape[2])
        return attend(store, step)

    def choose(store, source, *rest):
        retrieve(store, source, *rest)
        key = 2 * 16 * 4  # 2 KV heads, 16 channels of float32
        chosen.append((0 if budget == 1.0 else source.n // 8 * 8 * key) + store.n * 2 * key)

    monkeypatch.setattr(RetrievedKV, "attend", count)
    monkeypatch.setattr(RetrievedKV, "retrieve", choose)
    method = find_method("triforce")(draft_length=6, window_length=2, window_budget=LENGTH, sinks=4)
    with open_session(method, tiny_model(), Budget("fraction", budget)) as session:
        session.prefill(CONTEXT)
        assert passes == []
        chosen.clear()
        found = session.answer(8, stop=NEVER_STOP).speculation
        assert len(chosen) == found.rounds * len(session.layers)
        stores = find_stores(session)
        tokens = passes[::len(stores)]  # the layers take turns
        if budget == 1.0:  # all accepted: a pass for the first of 6 tokens, and two rounds of 2 + 1 and 1 + 1
            assert (found.rounds, found.accepted, tokens) == (1, 6, [1, 3, 2])
        for layer, outer in enumerate(stores):
            inner = outer.draft
            assert inner.passes == len(tokens) == len(passes) / len(stores)
            assert (inner.drafted, inner.generated) == (sum(x - 1 for x in tokens), outer.drafted)
            chunks, window, full = (
                storage_bytes(x.tensors()) - x.spare_bytes() for x in (inner.target, inner.draft, outer.target)
            )
            read = inner.passes * chunks + inner.drafted * window + outer.passes * full
            read += sum(chosen[layer::len(stores)])
            assert read - outer.drafted - outer.generated < outer.read_bytes() * outer.generated <= read


def test_retrieved_chunks_take_later_tokens(make_step):
    """Entries of the context are copied once it is complete; later ones are appended."""
    store = RetrievedKV(bounded=True, slack=4)
    context, later = (make_step(x, x, before=n, moment=m) for x, n, m in (
        (draw(1, 1, 5, 2), 0, Moment.CONTEXT_END), (draw(1, 1, 2, 2, seed=1), 5, Moment.TURN_END)
    ))
    store.append(context)
    assert (store.n, store.seen) == (0, 5)
    source = LayerKV()
    source.append(context)
    store.retrieve(source, context, 2, None)
    store.append(later)
    assert store.keys.equal(torch.cat([context.key, later.key], dim=2))
