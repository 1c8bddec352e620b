"""Conversations against plain forward passes of the same model, and steps whose shapes never change."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from kvbench.engine.autoregressive import step_logits
from kvbench.engine.ledger import Ledger
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import attached
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction.h2o import H2O
from kvbench.methods.eviction.keyformer import Keyformer
from kvbench.methods.eviction.random_decode import RandomDecode
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.methods.eviction.tova import TOVA
from kvbench.methods.heads.duo_attention import DuoAttention
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.methods.quantization.fp8 import Fp8
from kvbench.methods.quantization.full_int8 import FullInt8
from kvbench.methods.quantization.nvfp4 import Nvfp4
from kvbench.methods.quantization.turboquant import TurboQuant
from kvbench.methods.retrieval.mpcache import MPCache
from kvbench.methods.retrieval.quest import Quest

NO_STOP: frozenset[int] = frozenset()
SNAPKV = SnapKV(window=4, kernel=3)
METHODS = {"full": Full(), "full-int8": FullInt8(), "snapkv": SNAPKV, "h2o": H2O(), "streaming-llm": StreamingLLM()}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fitted(method, model, length, rows=16):
    """The method at a budget of entries, if it takes a budget."""
    return method.bind(model).fit(Budget("rows", rows) if method.card.budget == "stored" else None, model.shape(length))


def plain_logits(model, tokens):
    """Logits of transformers' own eager attention over the whole conversation. [T, V]"""
    with torch.no_grad(), attached(model.module, "eager"):
        return model.module(torch.tensor([tokens]), use_cache=False).logits[0]


def plain_answer(model, tokens, limit):
    """Greedy tokens after a conversation, every one by a forward pass over all of it."""
    tokens = list(tokens)
    for _ in range(limit):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
    return tokens[-limit:]


CONTEXT, FIRST, SECOND = ids(40), ids(7, 2), ids(5, 3)


# Parts of a conversation


def test_reference_history_replaces_the_answers():
    """With reference history a question follows the context, the earlier questions and their reference answers."""
    model, reference = tiny_model(), ids(3, 4)
    first = plain_answer(model, CONTEXT + FIRST, 4)
    second = plain_answer(model, CONTEXT + FIRST + reference + SECOND, 4)
    with Session(model, Full(), capacity=90) as session:
        session.prefill(CONTEXT)
        assert session.ask(FIRST, 4, history=reference, stop=NO_STOP).ids == [first]
        assert session.ask(SECOND, 4, history=reference, stop=NO_STOP).ids == [second]
        assert session.seen == len(CONTEXT + FIRST + reference + SECOND)


def test_own_history_has_every_token_once():
    """With its own history a question follows the whole answer before it, the token that was never run included."""
    model = tiny_model()
    first = plain_answer(model, CONTEXT + FIRST, 4)
    second = plain_answer(model, CONTEXT + FIRST + first + SECOND, 4)
    with Session(model, Full(), capacity=90) as session:
        session.prefill(CONTEXT)
        assert session.ask(FIRST, 4, stop=NO_STOP).ids == [first]
        assert session.seen == len(CONTEXT + FIRST) + 3
        assert session.ask(SECOND, 4, stop=NO_STOP).ids == [second]


def test_a_stop_token_ends_the_answer_and_is_not_in_the_history():
    """The answer ends with the stop token; the next question does not follow it."""
    model = tiny_model()
    answer = plain_answer(model, CONTEXT + FIRST, 6)
    stop = next(i for i, x in enumerate(answer) if i and x not in answer[:i])
    second = plain_answer(model, CONTEXT + FIRST + answer[:stop] + SECOND, 4)
    with Session(model, Full(), capacity=90) as session:
        session.prefill(CONTEXT)
        tokens = session.ask(FIRST, 6, stop=frozenset({answer[stop]}))
        assert tokens.ids == [answer[: stop + 1]]
        assert tokens.stop_reasons == ["stop"]
        assert tokens.steps == stop
        assert session.ask(SECOND, 4, stop=NO_STOP).ids == [second]


def test_a_visible_question_is_part_of_the_context():
    """A question prefilled with the context is answered without being asked again."""
    model = tiny_model()
    with Session(model, Full(), capacity=90) as session:
        logits = session.prefill(CONTEXT, FIRST)
        assert torch.allclose(logits[0], plain_logits(model, CONTEXT + FIRST)[-1], atol=1e-5)
        assert session.ask([], 5, stop=NO_STOP).ids == [plain_answer(model, CONTEXT + FIRST, 5)]


def test_tokens_that_a_fork_may_not_begin_with_are_its_own():
    """A fork's ban on first tokens changes its own answer, and not that of the session that it came from."""
    model = tiny_model()
    wanted = plain_answer(model, CONTEXT, 4)
    with Session(model, Full(), capacity=90) as session:
        session.prefill(CONTEXT)
        with session.fork() as branch:
            branch.ban_first(wanted[:1])
            assert branch.answer(4, stop=NO_STOP).ids[0][0] != wanted[0]
        assert session.answer(4, stop=NO_STOP).ids == [wanted]


def test_history_is_run_even_without_a_question():
    """An empty question continues after the reference history, not before it."""
    model, reference = tiny_model(), ids(3, 4)
    with Session(model, Full(), capacity=90) as session:
        session.prefill(CONTEXT)
        session.ask(FIRST, 4, history=reference, stop=NO_STOP)
        assert session.ask([], 4, stop=NO_STOP).ids == [plain_answer(model, CONTEXT + FIRST + reference, 4)]


@pytest.mark.parametrize("chunk", [None, 3])
def test_scores_are_log_probabilities(chunk):
    """`score` gives the log-softmax of a plain forward over the conversation, in two calls as in one."""
    model, answer = tiny_model(), ids(9, 5)
    tokens = CONTEXT + FIRST + answer
    wanted = plain_logits(model, tokens).log_softmax(-1)[len(CONTEXT) - 1 : -1].gather(
        -1, torch.tensor(tokens[len(CONTEXT) :])[:, None]
    )[:, 0]
    with Session(model, Full(), chunk=chunk) as session:
        session.prefill(CONTEXT)
        found = torch.cat([session.score(FIRST), session.score(answer)], dim=1)[0]
    assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("history", [None, ids(3, 4)], ids=["own", "reference"])
def test_scores_come_after_the_whole_history(history):
    """`score` after an answer counts that answer, the token that was never run included."""
    model, answer = tiny_model(), ids(4, 5)
    with Session(model, Full(), capacity=90) as session:
        session.prefill(CONTEXT)
        made = session.ask(FIRST, 4, history=history, stop=NO_STOP).ids[0]
        found = session.score(answer)[0]
    before = CONTEXT + FIRST + (history or made)
    wanted = plain_logits(model, before + answer).log_softmax(-1)[len(before) - 1 : -1]
    assert torch.allclose(found, wanted.gather(-1, torch.tensor(answer)[:, None])[:, 0], atol=1e-5)


def test_a_batch_is_two_conversations():
    """Two contexts of equal length in one session are answered as each is alone."""
    model = tiny_model()
    contexts = [CONTEXT, ids(40, 9)]
    with Session(model, Full(), capacity=90) as session:
        session.prefill(torch.tensor(contexts))
        first = session.ask(FIRST, 4, stop=NO_STOP).ids
        second = session.ask(SECOND, 4, stop=NO_STOP).ids
    for context, a, b in zip(contexts, first, second, strict=True):
        assert a == plain_answer(model, context + FIRST, 4)
        assert b == plain_answer(model, context + FIRST + a + SECOND, 4)


@dataclass(frozen=True)
class Watched(Full):
    """Records every step of the first layer."""

    steps: tuple = ()

    def evict(self, kv, step):
        """Evict nothing."""
        if step.layer == 0:
            self.log.append((step.moment, kv.settled, step.positions[0].tolist()))


@pytest.mark.parametrize("recompress", [False, True])
def test_steps_have_moments_and_positions(recompress):
    """Moments, whether compressions are to come, and positions that count tokens, for chunks, turns and decoding."""
    log = []
    Watched.log = log
    with Session(tiny_model(), Watched(), chunk=4, recompress=recompress) as session:
        session.prefill(ids(6))
        session.ask(ids(5), 2, history=ids(2), stop=NO_STOP)
        session.ask(ids(1), 1, stop=NO_STOP)
    end = Moment.RECOMPRESS if recompress else Moment.TURN_END
    assert log == [
        (Moment.CONTEXT_CHUNK, False, [0, 1, 2, 3]),
        (Moment.CONTEXT_END, False, [4, 5]),
        (Moment.TURN_CHUNK, not recompress, [6, 7, 8, 9]),
        (end, not recompress, [10]),
        (Moment.DECODE, not recompress, [11]),
        (end, not recompress, [11, 12, 13]),
    ]


@every_method
def test_positions_count_tokens_after_eviction(method):
    """After a compression and an answer the next token's position is the number of tokens, not of entries."""
    model, seen = tiny_model(), []
    with Session(model, fitted(method, model, 40), capacity=90) as session:
        original = session.attend
        session.attend = lambda step: (seen.append(step.positions), original(step))[1]
        session.prefill(CONTEXT)
        session.ask(FIRST, 4, stop=NO_STOP)
    assert seen[-1].tolist() == [[len(CONTEXT + FIRST) + 2]]


def test_decisions_at_the_end_of_the_context_are_compression():
    """Their time is a part of the prefill, and of its part that entries are selected and moved in."""
    class Deciding(Full):
        def end_of_context(self, session):
            time.sleep(0.05)

    with Session(tiny_model(), Deciding(), capacity=60) as session:
        session.prefill(CONTEXT)
        assert session.compress_seconds >= 0.05


def test_recompression_chooses_with_the_question():
    """With `recompress`, SnapKV's entries are within the budget again after a question; otherwise they are not."""
    model = tiny_model()
    rows = {}
    for recompress in (False, True):
        with Session(model, fitted(SNAPKV, model, 40), capacity=90, recompress=recompress, track=True) as session:
            session.prefill(CONTEXT)
            session.ask(FIRST, 1, stop=NO_STOP)
            rows[recompress] = session.layers[1].entries_kept()
            assert session.layers[1].positions[0, 0, -4:].tolist() == [43, 44, 45, 46]
    assert rows == {False: [16 + len(FIRST)] * 2, True: [16] * 2}


@pytest.mark.few
@every_method
def test_a_capacity_that_is_too_small_changes_nothing(method):
    """Sessions that reallocate at every step give the same tokens and likelihoods."""
    model = tiny_model()
    results = []
    for capacity in (0, 41, 200):
        with Session(model, fitted(method, model, 40), capacity=capacity) as session:
            session.prefill(CONTEXT)
            answers = [session.ask(FIRST, 6, stop=NO_STOP).ids, session.ask(SECOND, 6, stop=NO_STOP).ids]
            for token in ids(5, 8):
                session.forward(torch.tensor([[token]]), Moment.DECODE)
            results.append((answers, session.score(ids(4, 9))))
    assert all(answers == results[0][0] for answers, _ in results)
    assert all(torch.allclose(scores, results[0][1], atol=1e-5) for _, scores in results)


# Refusals, and the state after them


@dataclass(frozen=True)
class Trims(SnapKV):
    """Drops an entry of the first layer when the second one has run."""

    def end_of_layer(self, layers, step):
        """Keep all entries of the first layer but one."""
        if step.layer == 1 and step.moment.compresses:
            layers[0].keep_last(layers[0].n - 1)


@pytest.mark.parametrize(("method", "reads"), [(SNAPKV, 3 * 6), (Trims(window=4, kernel=3), 3 * 6 + 15)])
def test_earlier_layers_are_measured_again_only_where_a_method_may_trim_them(method, reads, monkeypatch):
    """Before and after each layer's own compression, and at the end: reads that grow with the layers, not with pairs.

    The sum at the end is what the stores hold in both cases.
    """
    model, counted = tiny_model(layers=6), []
    note = Ledger.note_layer
    monkeypatch.setattr(Ledger, "note_layer", lambda self, index: (counted.append(index), note(self, index)))
    with Session(model, fitted(method, model, 40), capacity=60) as session:
        session.prefill(CONTEXT)
        assert len(counted) == reads
        assert session.memory().end_bytes == sum(x.nbytes() for x in session.layers)


def test_a_second_context_is_refused():
    """One session holds one context."""
    with Session(tiny_model(), Full()) as session:
        session.prefill(CONTEXT)
        with pytest.raises(RuntimeError, match="already holds a context"):
            session.prefill(CONTEXT)


def test_an_empty_context_is_refused():
    """There is nothing to prefill, and the message says so."""
    with Session(tiny_model(), Full()) as session, pytest.raises(UserError, match="empty"):
        session.prefill([])


@pytest.mark.parametrize("call", [Session.score, Session.force], ids=["score", "force"])
def test_no_tokens_are_refused_and_change_nothing(call):
    """There is nothing to score, the message says so, and the history that waits to be run still does."""
    with Session(tiny_model(), Full(), capacity=60) as session:
        session.prefill(CONTEXT)
        session.remember(FIRST)
        with pytest.raises(UserError, match="no tokens"):
            call(session, [])
        assert session.pending == [FIRST]
        assert session.seen == len(CONTEXT)


def test_more_tokens_than_the_model_has_positions_are_refused():
    """At all four calls that run tokens, and only beyond the last position; a rotary embedding would answer badly."""
    model = replace(tiny_model(), max_length=len(CONTEXT) + 10)
    with Session(model, Full()) as session:
        with pytest.raises(UserError, match=r"needs 51 positions, and model .* has 50"):
            session.prefill(CONTEXT, visible=ids(11))
        session.prefill(CONTEXT)
        for call in (Session.score, Session.force):
            with pytest.raises(UserError, match="needs 51 positions"):
                call(session, ids(11))
        with pytest.raises(UserError, match="needs 51 positions"):
            session.ask(ids(5), 7)
        assert len(session.ask(ids(5), 6, stop=frozenset()).ids[0]) == 6
        assert session.seen == model.max_length


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_ids_outside_of_the_vocabulary_are_refused(wrong):
    """In a context, a question and an answer; on a GPU the lookup of one ends the process."""
    with Session(tiny_model(), Full(), capacity=60) as session:
        with pytest.raises(UserError, match=rf"token ids 0 to \d+, and not {wrong}"):
            session.prefill([1, wrong])
        session.prefill(CONTEXT)
        for call in (Session.score, Session.force):
            with pytest.raises(UserError, match="token ids"):
                call(session, [wrong])
        with pytest.raises(UserError, match="token ids"):
            session.ask([wrong], 2)


def test_a_batch_that_ends_differently_has_no_history_of_its_own():
    """Where one sequence stopped and the other did not, the next question cannot follow both answers."""
    model = tiny_model()
    contexts = [CONTEXT, ids(40, 9)]
    answers = [plain_answer(model, context + FIRST, 3) for context in contexts]
    stop = next(x for x in answers[0] if x not in answers[1])
    with Session(model, Full(), capacity=90) as session:
        session.prefill(torch.tensor(contexts))
        with pytest.raises(UserError, match="batch 1"):
            session.ask(FIRST, 3, stop=frozenset({stop}))


def test_a_batch_that_stops_one_after_the_other_has_no_history_of_its_own():
    """Where one sequence stopped before the other, it has entries of tokens behind its answer."""
    model = tiny_model()
    contexts = [CONTEXT, ids(40, 11)]
    first, second = (plain_answer(model, context + FIRST, 3) for context in contexts)
    stop = frozenset({first[0], second[1]})
    assert second[0] not in stop, "the second sequence stops one token later"
    with Session(model, Full(), capacity=90) as session:
        session.prefill(torch.tensor(contexts))
        with pytest.raises(UserError, match="batch 1"):
            session.ask(FIRST, 3, stop=stop)


def test_the_model_is_restored():
    """After a session, after one that failed, and after two at a time the model is what it was before."""
    model = tiny_model()
    before = model.module.config._attn_implementation
    wanted = model.module(torch.tensor([CONTEXT])).logits
    with Session(model, Full()) as one, Session(model, Full()) as two:
        one.prefill(CONTEXT)
        two.prefill(FIRST)
    with pytest.raises(UserError, match="empty"), Session(model, Full()) as session:
        session.prefill([])
    assert model.module.config._attn_implementation == before
    assert model.module(torch.tensor([CONTEXT])).logits.equal(wanted)


@pytest.mark.few
@every_method
def test_a_session_leaves_nothing_behind(method):
    """With the garbage collector off, neither the entries nor the session outlive their use."""
    model = tiny_model()
    gc.collect()
    gc.disable()
    try:
        with Session(model, fitted(method, model, 40), capacity=90) as session:
            session.prefill(CONTEXT)
            with session.fork() as branch:
                branch.ask(FIRST, 4, stop=NO_STOP)
                stores = [*session.layers, *branch.layers]
                storages = [StorageWeakRef(x.untyped_storage()) for store in stores for x in store.tensors()]
        assert len(storages) > 4
        assert all(x.expired() for x in storages)
        gone = weakref.ref(session)
        del session, branch, stores
        assert gone() is None
    finally:
        gc.enable()


def test_a_closed_session_raises():
    """A closed session does not silently answer without a cache."""
    with Session(tiny_model(), Full()) as session:
        session.prefill(CONTEXT)
    with pytest.raises(RuntimeError, match="closed"):
        session.ask(FIRST, 2)


def test_forks_are_independent():
    """Two forks and their parent, used in turns, answer as three sessions of their own."""
    model = tiny_model()
    with Session(model, Full(), capacity=90) as parent:
        parent.prefill(CONTEXT)
        one, two = parent.fork(), parent.fork()
        found = [[x.ask(q, 3, stop=NO_STOP).ids[0]] for x, q in ((one, FIRST), (two, SECOND), (parent, FIRST))]
        for i, x in enumerate((one, two, parent)):
            found[i] += [x.ask(SECOND, 3, stop=NO_STOP).ids[0]]
    for question, answers in zip((FIRST, SECOND, FIRST), found, strict=True):
        first = plain_answer(model, CONTEXT + question, 3)
        assert answers == [first, plain_answer(model, CONTEXT + question + first + SECOND, 3)]


# Steps of static shape


@dataclass(frozen=True)
class Ragged(Full):
    """Heads keep unequal numbers of entries."""

    def evict(self, kv, step):
        """The first head keeps a third, the second five in six."""
        if step.moment.compresses:
            index = torch.arange(kv.n).expand(*kv.keys.shape[:2], -1)
            kv.keep_where(torch.stack([index[:, 0] % 3 == 0, index[:, 1] % 6 > 0], dim=1))


STATIC = {
    "full": Full(), "full-int8": FullInt8(), "snapkv": SNAPKV, "ragged": Ragged(), "fp8": Fp8(skip_layers=1),
    "nvfp4": Nvfp4(), "turboquant": TurboQuant(),
}
SHAPES = {"plain": (4, 2, None), "sliding window": (4, 2, 12)}
every_static_method = pytest.mark.parametrize("method", STATIC.values(), ids=STATIC)
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture
def _poison():
    """Fill new memory with NaN, so that a read of an unwritten entry shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def open_static(model, method, *, static=True):
    """A session with a context and a question, ready to decode."""
    session = Session(model, fitted(method, model, 40), capacity=70)
    session.__enter__()
    session.prefill(CONTEXT)
    session.forward(torch.tensor([FIRST]), Moment.TURN_END)
    if static:
        session.make_static()
    return session


def require_equal_replays(static, eager, tape):
    """Record a static step of the first of eight tokens, and replay it for the others: logits equal eager steps'."""
    tokens = [torch.tensor([[x]]) for x in ids(8, 6)]
    token = tokens[0].clone()
    with tape:
        logits = step_logits(static, token)
    assert torch.allclose(logits, step_logits(eager, tokens[0]), atol=1e-5)
    for x in tokens[1:]:
        token.copy_(x)
        tape.replay()
        assert torch.allclose(logits, step_logits(eager, x), atol=1e-5)


@every_shape
@every_static_method
@pytest.mark.usefixtures("_poison")
def test_static_steps_equal_eager_ones(method, shape):
    """Eight steps over the whole masked block give the logits of eight steps over the stored entries."""
    model = tiny_model(*shape)
    static, eager = open_static(model, method), open_static(model, method, static=False)
    with static, eager:
        for x in ids(8, 6):
            token = torch.tensor([[x]])
            assert torch.allclose(step_logits(static, token), step_logits(eager, token), atol=1e-5)
        assert static.seen == eager.seen
        assert static.effect() == eager.effect()


@pytest.mark.few(4)
@every_shape
@every_static_method
def test_a_recorded_step_replays(method, shape, new_tape):
    """A step recorded once, as in a CUDA graph, gives the logits of later steps: it has no number from the host."""
    model = tiny_model(*shape)
    static, eager = open_static(model, method), open_static(model, method, static=False)
    with static, eager:
        require_equal_replays(static, eager, new_tape())


@pytest.mark.few(4)
@every_shape
@every_static_method
def test_static_steps_have_the_same_shapes(method, shape, new_tape):
    """Two steps in a row consist of the same operations on tensors of the same shapes."""
    with open_static(tiny_model(*shape), method) as session:
        assert step_shapes(session, new_tape) == step_shapes(session, new_tape)


@pytest.mark.few(4)
@every_static_method
def test_eager_steps_grow(method, new_tape):
    """Otherwise the test above could not fail."""
    with open_static(tiny_model(), method, static=False) as session:
        assert step_shapes(session, new_tape) != step_shapes(session, new_tape)


def step_shapes(session, new_tape):
    """The operations of one step, with the shapes of their tensors."""
    with new_tape() as tape:
        step_logits(session, torch.tensor([[5]]))
    return tape.shapes


@pytest.mark.few(2)
@every_static_method
def test_a_static_step_needs_no_values(method):
    """A decode step runs under FakeTensorMode: no operation reads a number from the device."""
    with open_static(tiny_model(), method) as session, FakeTensorMode(allow_non_fake_inputs=True):
        assert step_logits(session, torch.zeros(1, 1, dtype=torch.long)).shape == (1, VOCABULARY)


@dataclass(frozen=True)
class Peeking(Full):
    """Asks the device for a number in every step."""

    def attend(self, kv, step):
        """Attend after reading a number."""
        assert kv.length is None or kv.length.item() > 0
        return super().attend(kv, step)


def test_a_peek_at_a_value_is_caught():
    """A planted `.item()` fails under FakeTensorMode."""
    with open_static(tiny_model(), Peeking()) as session, FakeTensorMode(allow_non_fake_inputs=True):  # noqa: SIM117
        with pytest.raises(DataDependentOutputException):
            step_logits(session, torch.zeros(1, 1, dtype=torch.long))


ROLLING = [H2O(), TOVA(), Keyformer(), StreamingLLM(), StreamingLLM(positions="original")]
HEADS = [DuoAttention(), RazorAttention()]


@pytest.mark.parametrize("method", [*ROLLING, *HEADS], ids=lambda x: x.card.name)
def test_a_recorded_step_that_evicts_replays(method, new_tape):
    """A step that adds one entry and drops another, recorded once, equals later eager steps; nothing grows."""
    model = tiny_model()
    static, eager = open_static(model, method), open_static(model, method, static=False)
    with static, eager:
        held = [x.nbytes() for x in static.layers]
        require_equal_replays(static, eager, new_tape())
        assert [x.nbytes() for x in static.layers] == held


@pytest.mark.parametrize("method", [Quest(page=8), MPCache(page=8)], ids=lambda x: x.card.name)
def test_pages_without_bounds_have_static_steps(method):
    """With a budget of the whole context no page has bounds, and a static step computes none."""
    model = tiny_model()
    whole = method.bind(model).fit(Budget("fraction", 1.0), model.shape(len(CONTEXT)))
    with Session(model, whole, capacity=70) as static:
        static.prefill(CONTEXT)
        with static.fork() as eager:
            wanted = [step_logits(eager, torch.tensor([[x]])) for x in FIRST]
        static.make_static()
        for x, logits in zip(FIRST, wanted, strict=True):
            assert torch.allclose(step_logits(static, torch.tensor([[x]])), logits, atol=1e-5)


def test_a_method_that_cannot_be_static_says_why():
    """`make_static` refuses with the method's name and reason."""
    method = RandomDecode(window=4)
    with open_static(tiny_model(), method, static=False) as session, pytest.raises(UserError, match="random-decode"):
        session.make_static()
    assert method.graphable


@pytest.mark.parametrize(("model", "rows", "reason"), [
    (tiny_model(), 60, "has dropped no entry yet, so it grows"),
    (tiny_model(4, 2, 12), 10, "has a sliding window"),
])
def test_a_store_that_evicts_refuses_to_be_static(model, rows, reason):
    """Where the host's number of entries grows, or positions in a window are the host's."""
    with Session(model, fitted(H2O(), model, 40, rows), capacity=70) as session:
        session.prefill(CONTEXT)
        session.forward(torch.tensor([FIRST]), Moment.TURN_END)
        with pytest.raises(UserError, match=reason):
            session.make_static()
        assert not session.is_static


def test_a_full_static_session_refuses_steps():
    """Steps beyond the capacity are refused, and no entry is overwritten."""
    with Session(tiny_model(), Full(), capacity=42) as session:
        session.prefill(CONTEXT)
        session.make_static()
        for _ in range(2):
            step_logits(session, torch.tensor([[5]]))
        with pytest.raises(UserError, match="capacity"):
            step_logits(session, torch.tensor([[5]]))
        with pytest.raises(UserError, match="capacity"):
            session.ask(FIRST, 2)


def test_a_static_session_answers_and_forks():
    """`ask` works on a static session with spare capacity, and its forks are independent."""
    model = tiny_model()
    with Session(model, Full(), capacity=70) as session:
        session.prefill(CONTEXT)
        session.make_static()
        with session.fork() as branch:
            assert branch.ask(SECOND, 4, stop=NO_STOP).ids == [plain_answer(model, CONTEXT + SECOND, 4)]
        assert session.ask(FIRST, 4, stop=NO_STOP).ids == [plain_answer(model, CONTEXT + FIRST, 4)]
