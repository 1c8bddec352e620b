"""KVzip against a repeat computed in one long sequence, and its declared bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, Qwen2Config

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Method, Moment
from kvbench.methods.eviction import kvzip
from kvbench.methods.eviction.kvzip import KVzip
from kvbench.store import LayerKV
from kvbench.text.tokens import tokenize

LENGTH, SINKS = 60, 4
PROMPT = ANSWER = [0]
"""The tiny models' tokenizer reads any text as this one token."""
WITHOUT = torch.tensor([[*PROMPT, *ANSWER]])
"""The text before the first chunk, for a model without a chat template."""


def ids(count, seed=1, batch=1):
    """Random tokens. [B, T]"""
    return torch.randint(VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


def session_of(method, model, rows, **options):
    """A session under a method that may keep this many entries per head."""
    return Session(model, method.fit(Budget("rows", rows), model.shape(LENGTH)), capacity=LENGTH + 40, track=True,
                   **options)


def kept(session):
    """Marks the entries that stayed. [layers, B, H_kv, LENGTH] bool"""
    layers = []
    for store in session.layers:
        heads = [torch.zeros(LENGTH, dtype=torch.bool).scatter(0, x.long(), True)
                 for x in store.frozen.position.split(store.frozen.counts)]
        layers.append(torch.stack(heads).unflatten(0, store.positions.shape[:2]))
    return torch.stack(layers)


@dataclass(frozen=True)
class Recorder(Method):
    """The full cache, which shows what every layer saw."""

    seen: dict[int, tuple] = field(default_factory=dict)
    card: ClassVar = FullCache.card

    def attend(self, kv, step):
        """Attend, and remember rotated queries and keys."""
        self.seen[step.layer] = step.query, kv.keys, step
        return kv.attend(step)


def written_out(model, context, chunks, window=None):
    """KVzip's scores in float64: context, prompt and chunk as one sequence, all logits at once."""
    scores = torch.zeros(len(model.layers), context.shape[0], model.layers[0].kv_heads, LENGTH, dtype=torch.float64)
    for start, stop, prompt in chunks:
        sequence = torch.cat([context, prompt, context[:, start:stop]], dim=1)
        recorder = Recorder()
        with Session(model, recorder) as session:
            session.prefill(sequence)
        for layer, (query, keys, step) in recorder.seen.items():
            columns = torch.tensor([*range(SINKS), *range(start, stop), *range(LENGTH, sequence.shape[1])])
            rows = torch.arange(LENGTH, sequence.shape[1])
            asked = query.double().unflatten(1, (keys.shape[1], -1))[:, :, :, rows]
            logits = asked @ keys.double()[:, :, None, columns].mT * step.scale
            distance = rows[:, None] - columns
            sees = (distance >= 0) & (distance < (window or len(sequence[0]) + 1))
            weights = logits.masked_fill(~sees, -torch.inf).softmax(-1)[..., SINKS : SINKS + stop - start]
            scores[layer, ..., start:stop] = weights.amax((2, 3))
    return scores


def best(scores, rows):
    """The entries of all layers and heads with the highest scores. [layers, B, H_kv, LENGTH] bool"""
    pool = scores.transpose(0, 1).flatten(1)  # a sequence has its own
    total = rows * scores.shape[0] * scores.shape[2]
    marks = torch.zeros_like(pool, dtype=torch.bool).scatter(1, pool.topk(total).indices, True)
    return marks.view(scores.transpose(0, 1).shape).transpose(0, 1)


@pytest.mark.parametrize("shape", [(4, 2, None), (2, 2, None), (4, 1, None)], ids=["GQA", "MHA", "MQA"])
def test_the_entries_that_a_repeat_attends_to_are_kept(shape):
    """In chunks of 20 the kept entries are those of a repeat in one sequence; softmax over sinks, chunk and repeat."""
    model, context = tiny_model(*shape), ids(LENGTH, batch=2)
    prompt, answer = torch.tensor([PROMPT, PROMPT]), torch.tensor([ANSWER, ANSWER])
    chunks = [
        (start, min(start + 20, LENGTH), torch.cat([prompt, context[:, max(SINKS, start - 8) : start], answer], dim=1))
        for start in range(SINKS, LENGTH, 20)
    ]
    scores = written_out(model, context, chunks)
    scores[..., :SINKS] = torch.inf
    with session_of(KVzip(chunk_size=20), model, 20) as session:
        session.prefill(context)
        assert kept(session).equal(best(scores, 20))


def test_a_sliding_layer_is_judged_by_what_its_window_leaves():
    """Entries out of the window are gone, those in it count by the queries of the repeat that still see them."""
    model, context = tiny_model(4, 2, 48), ids(LENGTH)
    later = torch.cat([torch.tensor([PROMPT]), context[:, 26:34], torch.tensor([ANSWER])], dim=1)
    chunks = [(SINKS, 34, WITHOUT), (34, LENGTH, later)]
    scores = written_out(model, context, chunks, window=48)
    scores[..., : LENGTH - 48] = -1
    with session_of(KVzip(chunk_size=30), model, 20) as session:
        session.prefill(context)
        assert kept(session).equal(best(scores, 20 * 48 // LENGTH))


def test_a_repeat_in_one_piece_keeps_other_entries():
    """Chunks matter to the method: its softmax leaves the other chunks out, and the oracle can tell."""
    model, context = tiny_model(), ids(LENGTH)
    scores = written_out(model, context, [(SINKS, LENGTH, WITHOUT)])
    scores[..., :SINKS] = torch.inf
    with session_of(KVzip(chunk_size=20), model, 20) as session:
        session.prefill(context)
        assert not kept(session).equal(best(scores, 20))


def test_a_budget_is_met_exactly_over_all_heads_and_layers():
    """Heads and layers keep unequal numbers of entries, whose sum is the budget to the entry, sinks in every head."""
    with session_of(KVzip(), tiny_model(), 20) as session:
        session.prefill(ids(LENGTH, batch=2))
        rows = kept(session)
        assert rows.sum((0, 2, 3)).tolist() == [20 * 2 * 2] * 2
        assert len(set(rows.sum(-1).flatten().tolist())) > 2
        assert rows[..., :SINKS].all()


def test_equal_scores_do_not_change_the_number_of_entries():
    """Where all scores tie exactly the budget stays; a threshold would drop all of them or none."""
    model = tiny_model()
    method = KVzip().fit(Budget("rows", 20), model.shape(LENGTH))
    with Session(model, FullCache()) as session:
        session.prefill(ids(LENGTH))
        for store in session.layers:
            store.state["score"] = torch.full((1, 2, LENGTH), 0.5)
        method._keep(session, SINKS)
        assert sum(sum(store.entries_kept()) for store in session.layers) == 20 * 2 * 2


def test_the_repeat_leaves_nothing_behind(monkeypatch):
    """No entry or position of it remains, no cache is copied for it, and the context's logits are the full cache's."""
    def refuse(*_):
        pytest.fail("the cache was copied")

    model = tiny_model()
    dense = Session(model, FullCache(), capacity=LENGTH, chunk=7)
    with session_of(KVzip(chunk_size=20), model, 20, chunk=7) as session, dense:
        monkeypatch.setattr(LayerKV, "_reallocate", refuse)
        found, wanted = session.prefill(ids(LENGTH)), dense.prefill(ids(LENGTH))
        assert torch.allclose(found, wanted, atol=1e-5)
        assert session.seen == LENGTH
        for store in session.layers:
            assert (store.seen, store.n, store.capacity, store.state) == (LENGTH, 0, LENGTH + 40, {})
            assert store.spare_bytes() == 40 * 2 * (2 * 16 * 4 + 4)
        assert session.compress_seconds > 0


def test_what_a_repeat_holds_is_part_of_the_peak(monkeypatch):
    """The session reports the peak of a repeat: all entries, and its scores."""
    branches, fork = [], Session.fork

    def watch(session):
        branches.append(fork(session))
        return branches[-1]

    monkeypatch.setattr(Session, "fork", watch)
    with session_of(KVzip(chunk_size=20), tiny_model(), 20) as session:
        session.prefill(ids(LENGTH))
        peaks = [x.ledger._peak for x in branches]  # as the branch counted, before it closed
        assert len(peaks) == 3
        assert session.memory().peak_bytes == max(peaks)


FIRST, LATER = [0] * 5, [0] * 10
"""The prompts as `with_template` tokenizes them, a token per word."""


def with_template(model, head=""):
    """The model with a chat template that puts a head before the conversation, and <63> before an answer."""
    template = "{% for x in messages %}{{ x['content'] }}{% endfor %}{% if add_generation_prompt %}<63>{% endif %}"
    backend = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
    backend.pre_tokenizer = WhitespaceSplit()  # a token per word, so that the head has several
    tokenizer = type(model.tokenizer)(tokenizer_object=backend, chat_template=head + template)
    return replace(model, tokenizer=tokenizer)


def test_what_is_run_for_each_chunk():
    """A prompt, the last tokens before the chunk, the chat template's answer header, the chunk; sinks are left out."""
    context = torch.arange(30)[None]
    made = list(KVzip(chunk_size=10, hint=3).repeats(with_template(tiny_model()), context))
    assert [(x.start, x.stop) for x, _ in made] == [(4, 14), (14, 24), (24, 30)]
    assert made[0][1].tolist() == [[*FIRST, 63, *range(4, 14)]]
    assert made[1][1].tolist() == [[*LATER, 11, 12, 13, 63, *range(14, 24)]]
    assert made[2][1].tolist() == [[*LATER, 21, 22, 23, 63, *range(24, 30)]]


def test_after_a_visible_question_the_user_asks_for_the_repeat(chat_mini):
    """The prompt ends in the header and the start of an answer: the answer is ended, and a turn of the user begins."""
    model = load_model(str(chat_mini), "cpu", "float32")

    def read(text):
        return tokenize(model.tokenizer, text, special=False)

    hidden = read("[user]The text. What is it?")
    for asked, before in ((hidden, ""), (hidden + read("[end][assistant]") + read(" It is"), "[end][user]")):
        ((_, made),) = KVzip().repeats(model, torch.tensor([asked]))
        text = model.tokenizer.decode(made[0].tolist())
        assert text.startswith(f"{before}{kvzip.FIRST.lstrip() if before else kvzip.FIRST}[end][assistant]")


def test_without_a_chat_template_the_authors_answer_header_is_run(monkeypatch):
    """The header that they use for unknown models stands between prompt and repeat."""
    texts = []
    monkeypatch.setattr(kvzip, "tokenize", lambda _, text, special: texts.append(text) or ())
    list(KVzip().repeats(tiny_model(), torch.arange(30)[None]))
    assert texts[1:4] == [kvzip.FIRST, kvzip.LATER, "\n\nAnswer: "]


HEAD = "<50> <51> <52> <53> <54> <55> <56> "
"""More tokens than there are sinks."""


def test_the_head_of_a_chat_template_is_neither_repeated_nor_dropped():
    """Its tokens stay in every head of every layer, repeats begin after them, and the budget counts them."""
    model, context = with_template(tiny_model(), HEAD), ids(LENGTH)
    context[0, :7] = torch.arange(50, 57)
    method = KVzip(chunk_size=30)
    made = list(method.repeats(model, context))
    assert [(x.start, x.stop) for x, _ in made] == [(7, 37), (37, 60)]
    assert made[0][1].tolist() == [[*FIRST, 63, *context[0, 7:37].tolist()]]
    with session_of(method, model, 20) as session:
        session.prefill(context)
        rows = kept(session)
        assert rows[..., :7].all()
        assert rows.sum().item() == 20 * 2 * 2


def test_a_context_without_the_head_has_only_sinks():
    """A task that uses no template on a model that has one: only as much is protected as stands there."""
    model, context = with_template(tiny_model(), HEAD), torch.arange(30)[None]
    assert KVzip().protected(model, context) == SINKS
    context[0, :6] = torch.arange(50, 56)
    assert KVzip().protected(model, context) == 6
    assert KVzip().protected(model, torch.cat([context, torch.arange(30)[None]])) == SINKS


def test_a_budget_within_the_head_is_refused():
    """Before anything runs, with the least budget."""
    model, context = with_template(tiny_model(), HEAD), ids(LENGTH)
    context[0, :7] = torch.arange(50, 57)
    with session_of(KVzip(), model, 7) as session:
        with pytest.raises(UserError, match="--budget 8 or more"):
            session.prefill(context)
        assert session.seen == 0


def mixed_model():
    """Two layers that see everything and two with a window of 24."""
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, use_sliding_window=True, sliding_window=24, max_window_layers=2, initializer_range=0.2,
        max_position_embeddings=200,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model.from_module(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def test_sliding_layers_share_a_budget_of_their_own():
    """Entries never move between layers of different shapes, so that the declared bytes are the measured ones."""
    model = mixed_model()
    assert [x.window for x in model.layers] == [None, None, 24, 24]
    method = KVzip(chunk_size=20).fit(Budget("rows", 30), model.shape(LENGTH))
    with Session(model, method, capacity=LENGTH + 40) as session:
        session.prefill(ids(LENGTH))
        rows = [sum(store.entries_kept()) for store in session.layers]
        assert (rows[0] + rows[1], rows[2] + rows[3]) == (2 * 30, 2 * 12)
        assert session.memory().stored_bytes == method.declared_bytes(model.shape(LENGTH))


def test_a_visible_question_is_compressed_with_the_context():
    """It is repeated like the rest, and nothing marks its entries."""
    model = tiny_model()
    with session_of(KVzip(), model, 20) as one, session_of(KVzip(), model, 20) as other:
        context = ids(LENGTH)[0].tolist()
        one.prefill(context[:50], visible=context[50:])
        other.prefill(context)
        assert kept(one).equal(kept(other))


@pytest.mark.parametrize("rows", [20, LENGTH])
def test_a_second_compression_is_refused(rows):
    """Only a context is repeated, whether entries of it were dropped or not."""
    with session_of(KVzip(), tiny_model(), rows, recompress=True) as session:
        session.prefill(ids(LENGTH))
        with pytest.raises(UserError, match="--recompress"):
            session.question(ids(5, 2), 1)


def test_a_repeat_beyond_the_models_positions_is_refused():
    """Before anything runs, with what would fit."""
    model = replace(tiny_model(), max_length=100)
    with session_of(KVzip(), model, 20) as session:
        with pytest.raises(UserError, match="--set chunk_size below 2048"):
            session.prefill(ids(LENGTH))
        assert session.seen == 0
    with session_of(KVzip(chunk_size=30), model, 20) as session:
        session.prefill(ids(LENGTH))


@pytest.mark.parametrize("settings", [{"chunk_size": 0}, {"hint": -1}, {"sinks": -1}])
def test_settings_without_a_meaning_are_refused(settings):
    """With the value and what is allowed."""
    with pytest.raises(UserError, match=str(next(iter(settings.values())))):
        KVzip(**settings)


def test_answers_are_given_from_the_entries_kept():
    """A later turn attends to the frozen entries and its own, as a full cache behind a mask does."""
    model, context, question = tiny_model(), ids(LENGTH), ids(9, 2)

    @dataclass(frozen=True)
    class Masked(Recorder):
        """Attention over all entries but those that were dropped."""

        marks: torch.Tensor | None = None

        def attend(self, kv, step):
            """Softmax in float64, causal, over what was kept."""
            if step.moment.in_context:
                return kv.attend(step)
            query = step.query.double().unflatten(1, (2, -1))
            logits = query @ kv.keys.double()[:, :, None].mT * step.scale
            sees = torch.arange(kv.n) <= torch.arange(kv.n - 9, kv.n)[:, None]
            stored = torch.cat([self.marks[step.layer], torch.ones(1, 2, 9, dtype=torch.bool)], -1)
            weights = logits.masked_fill(~(sees & stored[:, :, None, None]), -torch.inf).softmax(-1)
            return (weights @ kv.values.double()[:, :, None]).flatten(1, 2).float()

    with session_of(KVzip(), model, 20) as ours:
        ours.prefill(context)
        with Session(model, Masked(marks=kept(ours))) as oracle:
            oracle.prefill(context)
            found, wanted = (x.forward(question, Moment.TURN_END, keep=9) for x in (ours, oracle))
    assert torch.allclose(found, wanted, atol=1e-4)
