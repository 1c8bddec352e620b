"""Prompt lookup and LongSpec: the full cache's answers from any draft, and drafts as their cards say."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from safetensors.torch import load_file

from kvbench.check.trial import CONTEXT, NEVER_STOP, open_session, random_ids
from kvbench.errors import UserError
from kvbench.hf import Model, load_model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.lossless import longspec
from kvbench.methods.lossless.drafter import ROUND, Drafter, measure_loss, read_target, train
from kvbench.methods.lossless.longspec import LongSpec
from kvbench.methods.lossless.prompt_lookup import PromptLookup, look_up
from kvbench.methods.lossless.proposed import DraftedKV
from kvbench.registry import find_method
from kvbench.runs.results import TASKS
from kvbench.task import Mode, Split, encode
from kvbench.tasks.ruler import niah
from kvbench.techniques import parts
from kvbench.techniques.parts import SHIPPED, get_part, read_metadata, write_part
from kvbench.techniques.training import TrainingProgress

QUESTIONS = [random_ids(5, seed=21), random_ids(9, seed=22)]
ANSWER = 14


def ask_all(method, model, context=CONTEXT, stop=NEVER_STOP):
    """Answers to two questions, with the tokens that the session has seen, and the last layer's counters."""
    with open_session(method, model, None) as session:
        session.prefill(context)
        answers = [session.ask(x, ANSWER, stop=stop) for x in QUESTIONS]
        return [x.ids for x in answers], [x.stop_reasons for x in answers], session.seen, answers


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["prompt-lookup", "longspec"])
@pytest.mark.parametrize("length", [1, 8, 3])
def test_any_draft_gives_the_answers_of_the_full_cache(name, length):
    """Over two questions, also where an answer ends inside a draft; a drafter of random weights is enough."""
    model, settings = tiny_model(), {"steps": 1} if name == "longspec" else {}
    first = ask_all(Full(), model)[0][0][0]
    for stop in (NEVER_STOP, frozenset(first[5:6])):
        wanted, found = (
            ask_all(x, model, stop=stop)[:3] for x in (Full(), find_method(name)(draft_length=length, **settings))
        )
        assert found == wanted


class Oracle(PromptLookup):
    """Drafts the answer itself."""

    answer = ()

    def propose(self, session, token, count):
        """The tokens of greedy decoding."""
        with session.fork() as branch:
            branch.logits = branch.forward(token[:, None], Moment.DECODE)[:, -1]
            return torch.tensor(branch.greedy(count, NEVER_STOP).ids) if count else token[:, None][:, :0]


def test_a_draft_that_is_right_is_accepted_whole():
    """A round gives its draft and one more token."""
    answers = ask_all(Oracle(draft_length=3), tiny_model())[3]
    for answer in answers:
        assert answer.speculation.accepted == answer.speculation.drafted
        assert answer.speculation.rounds == -(-(ANSWER - 1) // 4)


def test_ids_are_those_of_the_conversation():
    """All but the newest token, after drafts were rejected: the last layer's store has them, others have none."""
    with open_session(LongSpec(steps=1, draft_length=5), tiny_model(), None) as session:
        session.prefill(CONTEXT)
        answer = session.ask(QUESTIONS[0], ANSWER, stop=NEVER_STOP).ids[0]
        last = session.layers[-1]
        assert isinstance(last, DraftedKV)
        assert last.ids[0].tolist() == [*CONTEXT, *QUESTIONS[0], *answer[:-1]]
        assert not any(x.state for x in session.layers[:-1])


@pytest.mark.parametrize(("text", "longest", "count", "wanted"), [
    ([1, 2, 3, 4, 1, 2, 3], 3, 8, [4, 1, 2, 3]), ([1, 2, 3, 9, 2, 3, 8, 7, 2, 3], 3, 2, [8, 7]),
    ([5, 2, 6, 3, 1, 2], 3, 2, [6, 3]), ([1, 2, 3], 3, 4, []), ([7], 3, 4, []), ([7, 7, 7], 2, 4, [7]),
    ([1, 2, 3, 4, 5, 1, 2, 6, 1, 2], 2, 4, [6, 1, 2]),  # the author's code takes the earlier one: four tokens follow it
])
def test_lookup_by_hand(text, longest, count, wanted):
    """The latest earlier occurrence of the longest known end."""
    assert look_up(torch.tensor(text), longest, count).tolist() == wanted


def test_a_repeated_text_is_drafted_by_lookup():
    """The proposal is what followed before."""
    with open_session(PromptLookup(), tiny_model(), None) as session:
        session.prefill([9, 8, 7, 6, 5, 9, 8])
        assert PromptLookup(holder=1).propose(session, torch.tensor([7]), 3).tolist() == [[6, 5, 9]]


# The drafter


def draft_by_hand(drafter, model, ids, count):
    """Tokens that follow ids one by one, each by a pass over all of them with the entries of all but the last."""
    positions = torch.arange(len(ids))[None]
    _, keys, values = read_target(model, torch.tensor([ids[:-1]]), positions[:, :-1], drafter.reads)
    text = list(ids)
    for _ in range(count):
        logits = drafter(model, torch.tensor([text]), torch.arange(len(text))[None], keys, values, 1)
        text.append(int(logits[0, -1].argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("window", [64, 5, 1])
@pytest.mark.parametrize("reads", [0, 1])
def test_a_draft_is_that_of_a_pass_over_all_tokens(window, reads, tmp_path):
    """Only the window is computed, at its own positions, over the layer that the weights name."""
    model = tiny_model()
    torch.manual_seed(reads)
    write_part(tmp_path / "part", "longspec", model, Drafter(model, window).state_dict(), "nothing", reads=reads)
    method = LongSpec(weights=str(tmp_path / "part"), window=window).bind(model)
    assert method.holder == reads
    drafter = Drafter(model, window, reads)
    drafter.load_state_dict(dict(get_part(method.part).weights))
    for context in (CONTEXT, CONTEXT[:3]):
        with open_session(method, model, None) as session, torch.no_grad():
            session.prefill(context)
            found = method.propose(session, torch.tensor([17]), 6)
            assert found[0].tolist() == draft_by_hand(drafter, model, [*context, 17], 6)


def test_the_same_weights_are_read_with_another_window(tmp_path):
    """In one process, the narrow one first."""
    model = tiny_model()
    torch.manual_seed(7)
    weights = Drafter(model, 64).state_dict()
    write_part(tmp_path / "part", "longspec", model, weights, "nothing")
    drafts = []
    for window in (2, 64):
        method = LongSpec(weights=str(tmp_path / "part"), window=window).bind(model)
        own = Drafter(model, window)
        own.load_state_dict(weights)
        with open_session(method, model, None) as session, torch.no_grad():
            session.prefill(CONTEXT)
            drafts.append(method.propose(session, torch.tensor([17]), 8)[0].tolist())
            assert drafts[-1] == draft_by_hand(own, model, [*CONTEXT, 17], 8)
    assert drafts[0] != drafts[1]


def test_training_reads_no_entry_that_a_draft_could_not():
    """Changing entries from a round's start on changes no prediction of the round; an earlier one does."""
    model = tiny_model()
    torch.manual_seed(0)
    drafter = Drafter(model, 64)
    ids = torch.tensor([random_ids(40, seed=3)])
    positions = torch.arange(40)[None]
    seen = []

    class Spy(Drafter):
        def forward(self, model, ids, positions, keys, values, rows, far=None):
            seen.append(far)
            return super().forward(model, ids, positions, keys, values, rows, far)

    spy = Spy(model, 64)
    spy.load_state_dict(drafter.state_dict())
    measure_loss(spy, model, (ids, positions >= 10, positions), 0)
    far = seen[0]
    for row in range(10, 40):
        start = row // ROUND * ROUND
        assert far[row - 10].nonzero()[:, 0].tolist() == list(range(max(1, start)))


def test_a_drafter_learns(monkeypatch):
    """On texts of one repeated token sequence it predicts the model's choices after training, not before."""
    model = tiny_model()
    ids = torch.tensor([random_ids(40, seed=s) for s in range(4)])
    positions = torch.arange(40).expand_as(ids)
    batch = (ids, positions >= 8, positions)
    shares = []
    train(model, 64, 40, lambda step: batch, progress=TrainingProgress(keep=lambda *x: shares.append(x[3])))
    assert shares[0] < 0.3
    assert shares[-1] > 0.8


def test_a_model_that_was_drafted_for_is_freed(monkeypatch):
    """A sweep over several models holds one at a time."""
    monkeypatch.setattr(parts, "_HASHES", {})
    monkeypatch.setattr(longspec, "_DRAFTERS", {})  # those of the same weights would not be made again
    module = copy.deepcopy(tiny_model().module)
    LongSpec(steps=1).bind(Model.from_module(module))
    held = weakref.ref(module)
    del module
    gc.collect()
    assert held() is None


# Weights


def test_weights_of_another_model_method_or_shape_are_refused(tmp_path):
    """With what the file says, and what is needed."""
    model, other = tiny_model(), tiny_model(2, 2)
    weights = Drafter(model, 64).state_dict()
    path = tmp_path / "part.safetensors"
    write_part(path, "longspec", model, weights, TASKS)
    found = LongSpec(weights=str(path)).bind(model)
    assert found.trained_on == TASKS
    with pytest.raises(UserError, match=r"was trained for model .*Give weights of this model"):
        LongSpec(weights=str(path)).bind(other)
    write_part(path, "locret", model, weights, TASKS)
    with pytest.raises(UserError, match="has weights of method 'locret', not 'longspec'"):
        LongSpec(weights=str(path)).bind(tiny_model(4, 1))
    narrow = tmp_path / "narrow.safetensors"
    write_part(narrow, "longspec", model, {**weights, "query.weight": weights["query.weight"][:3]}, TASKS)
    with pytest.raises(UserError, match=r"weight 'query.weight' has shape \(3, \d+\).*needs"):
        LongSpec(weights=str(narrow)).bind(model)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"12345678901234567890")
    with pytest.raises(UserError, match="is no readable safetensors file"):
        LongSpec(weights=str(broken)).bind(model)
    with pytest.raises(UserError, match="is no readable safetensors file"):
        LongSpec(weights=str(tmp_path / "absent.safetensors")).bind(model)


def test_a_part_is_found_once_per_model():
    """The same hash from the process's memory; other settings train another part."""
    model = tiny_model()
    one, again, more = (LongSpec(steps=x).bind(model).part for x in (2, 2, 3))
    assert one == again != more


@pytest.mark.slow
def test_the_shipped_drafter_is_right_more_often_than_a_lookup_and_than_an_untrained_one(tmp_path):
    """Accepted tokens per pass on needles that are new to it; every answer is that of the full cache."""
    mini = load_model("mini", dtype="float32")
    torch.manual_seed(0)
    write_part(tmp_path / "untrained", "longspec", mini, Drafter(mini, LongSpec.window).state_dict(), "nothing")
    methods = {
        "full": Full(), "trained": LongSpec().bind(mini), "lookup": PromptLookup().bind(mini),
        "untrained": LongSpec(weights=str(tmp_path / "untrained")).bind(mini),
    }
    task, passes, accepted = niah.NiahSingle3(), dict.fromkeys(methods, 0), dict.fromkeys(methods, 0)
    for example in task.examples(
        seed=7, split=Split.DEV, n=4, length=400, turns=1, mode=Mode.SINGLE, tokenizer=mini.tokenizer
    ):
        asked, answers = encode(task, example, mini.tokenizer), {}
        for name, method in methods.items():
            with open_session(method, mini, None) as session:
                session.prefill(list(asked.context))
                answer = session.ask(list(asked.turns[0].first), 40)
            answers[name] = answer.ids
            if name != "full":
                passes[name] += answer.speculation.rounds
                accepted[name] += answer.speculation.accepted
        assert all(x == answers["full"] for x in answers.values())
    rates = {name: accepted[name] / passes[name] for name in methods if name != "full"}
    assert rates["trained"] > rates["lookup"] + 0.5
    assert rates["trained"] > rates["untrained"] + 3


def test_the_shipped_drafter_is_minis_and_small():
    """Its metadata name the model and the data; below 2 MB."""
    path = SHIPPED / "longspec-mini.safetensors"
    facts = read_metadata(path)
    assert (facts["method"], facts["model"], facts["data"], facts["reads"]) == ("longspec", "mini", TASKS, "2")
    assert path.stat().st_size < 2_000_000
    assert load_file(path)["query.weight"].dtype == torch.bfloat16
