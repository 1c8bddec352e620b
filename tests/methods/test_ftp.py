"""FTP: tokens that skip layers against masks, the schedule, what the router of mini learned, and bad weights."""

from __future__ import annotations

import json
import random

import pytest
import torch

from kvbench.engine import stores
from kvbench.engine.recording import InexactPrefillError
from kvbench.engine.session import Session
from kvbench.engine.shared import SharedPrefill
from kvbench.errors import UserError
from kvbench.hf import adapter
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.prefill import token_router
from kvbench.methods.prefill.ftp import FTP
from kvbench.methods.prefill.token_router import (
    describe,
    divide,
    keep_highest,
    make_router,
    measure_received,
    run_gated,
    score_static,
    train,
)
from kvbench.runs.results import TASKS
from kvbench.tasks.ruler import niah
from kvbench.tasks.words import draw_keys, draw_numbers
from kvbench.techniques.parts import SHIPPED, get_part, read_metadata, write_part

CONTEXT = torch.randint(64, (1, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model():
    """Three layers, four query heads, two KV heads."""
    return tiny_model(layers=3)


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory):
    """A router that keeps early tokens and those that received much attention."""
    path = tmp_path_factory.mktemp("ftp") / "part.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        router = make_router()
    with torch.no_grad():
        router[0].bias[0] = 9.0
        router[0].weight[:2] = torch.tensor([[-9.0, 0, 0, 0], [0, 0, 3.0, 0]])
        router[2].weight[0, :2] = torch.tensor([9.0, 1.0])
    write_part(path, "ftp", model, router.state_dict(), TASKS)
    return str(path)


def fitted(model, rows, weights):
    """The method at a budget."""
    return FTP(weights=weights).bind(model).fit(Budget("rows", rows), model.shape(60))


def run_session(model, method):
    """Logits of every token of the context, and the positions of every layer's entries."""
    with Session(model, method, capacity=80, track=True) as session:
        logits = session.forward(CONTEXT, Moment.CONTEXT_END, keep=60)
        return logits, [x.logical_positions()[0, 0].tolist() for x in session.layers]


def run_oracle(model, method):
    """The same by masks over all tokens: each layer's output is mixed in by gates of 0 and 1."""
    router = make_router()
    router.load_state_dict(dict(get_part(method.part).weights))

    def gates(layer, features, count):
        scores = router(features)[..., 0]
        return torch.zeros_like(scores).scatter_(1, keep_highest(scores, count), 1.0)

    with torch.no_grad():
        logits, found = run_gated(model, CONTEXT, torch.arange(60), 60, method.kept, gates)
    places = [found[x][0].nonzero()[:, 0].tolist() if x in found else list(range(60)) for x in range(3)]
    return logits, places


@pytest.mark.parametrize("rows", [15, 40, 55])
def test_skipped_tokens_bypass_the_layer(model, weights, rows):
    """Logits and places equal those of a pass over all tokens with masks."""
    method = fitted(model, rows, weights)
    (logits, places), (wanted, chosen) = run_session(model, method), run_oracle(model, method)
    assert [len(x) for x in places] == list(method.kept)
    assert places == chosen
    assert torch.allclose(logits, wanted, atol=1e-4)


@pytest.mark.parametrize("fault", ["layers in another order", "positions stay", "skipped tokens are lost"])
def test_faults_of_skipping_are_caught(model, weights, monkeypatch, fault):
    """Each gives other logits than the masks."""
    method = fitted(model, 30, weights)
    wanted, _ = run_oracle(model, method)
    if fault == "layers in another order":
        real = adapter.decoder_layers
        monkeypatch.setattr(adapter, "decoder_layers", lambda module: real(module)[::-1])
    elif fault == "positions stay":
        take = adapter._take
        monkeypatch.setattr(adapter, "_take", lambda x, places: take(x, places) if x.shape[2] == 64 else (
            x[:, : places.shape[1]]
        ))
    else:
        monkeypatch.setattr(torch.Tensor, "scatter", lambda x, *args, _real=torch.Tensor.scatter: _real(
            x * (x.dim() < 3), *args
        ))
    try:
        logits, _ = run_session(model, method)
    except RuntimeError:  # a layer without its places
        return
    assert not torch.allclose(logits, wanted, atol=1e-3)


def test_a_skipped_token_has_no_entry_but_keeps_its_hidden_state(model, weights):
    """If one layer runs a single token, that layer's entries are one, and every other layer has all."""
    method = fitted(model, 40, weights)
    object.__setattr__(method, "kept", (60, 1, 60))
    logits, places = run_session(model, method)
    assert [len(x) for x in places] == [60, 1, 60]
    assert torch.allclose(logits, run_oracle(model, method)[0], atol=1e-4)


def test_later_tokens_run_every_layer(model, weights):
    """A question and an answer get an entry in each layer."""
    with Session(model, fitted(model, 30, weights), capacity=80) as session:
        session.prefill(CONTEXT)
        session.ask([1, 2, 3], 4, stop=frozenset())
        assert [x.n for x in session.layers] == [30 + 3 + 3] * 3


def test_a_shared_prefill_is_refused(model, weights):
    """Its entries are those of all tokens in all layers."""
    recording = SharedPrefill()
    with Session(model, fitted(model, 30, weights), capacity=80) as session:
        session._recording, session._compare = recording, False
        with pytest.raises(InexactPrefillError, match="tokens of the context skip layers"):
            stores.Stores._replay(session, None, Moment.CONTEXT_END)


# The router's inputs, and the schedule


@pytest.mark.parametrize(
    ("weights", "length", "total", "wanted"),
    [
        ((1, 1), 10, 12, (6, 6)), ((1, 1), 10, 13, (6, 7)), ((0, 1), 10, 15, (10, 5)),
        ((1, 3), 10, 12, (8, 4)), ((0.01, 1), 10, 8, (7, 1)), ((1, 1), 10, 2, (1, 1)),
    ],
)
def test_layers_skip_by_their_weights(weights, length, total, wanted):
    """By hand; a layer that runs one token skips no more, and the others take the rest."""
    assert divide(weights, length, total) == wanted
    assert sum(wanted) == total


def test_inputs_by_hand():
    """Place, attention times the number of tokens over ten, rank, and share."""
    found = describe(torch.tensor([[0.2, 0.1, 0.7]]), 0.25)[0]
    assert torch.allclose(found, torch.tensor([[0, 0.06, 0.5, 0.25], [0.5, 0.03, 0, 0.25], [1, 0.21, 1, 0.25]]))


def test_the_imitated_router_keeps_first_and_last_tokens():
    """Of 20 tokens with half skipped: the first two of ten, and the last eight."""
    features = describe(torch.zeros(1, 20), 0.5)
    assert keep_highest(score_static(features), 10)[0].tolist() == [0, *range(11, 20)]


def test_received_attention_is_a_mean_over_the_queries_that_see_the_token(make_step):
    """Equal keys: the first of three tokens receives 1, 1/2 and 1/3."""
    key = torch.zeros(1, 1, 3, 2)
    found = measure_received(make_step(key.expand(-1, 2, -1, -1), key), key)[0].tolist()
    assert found == pytest.approx([(1 + 1 / 2 + 1 / 3) / 3, (1 / 2 + 1 / 3) / 2, 1 / 3])


# Training and weights


def ask(seed, model):
    """A key among noise with its question, and the ids of the answer."""
    rng, task = random.Random(f"test/ftp/{seed}"), niah.NiahMultikey1()
    pairs = list(zip(draw_keys(rng, 2), draw_numbers(rng, 2), strict=True))
    example = task.compose(task.haystack_for(rng), pairs, [0], 160, id="")
    turn = example.turns[0]
    text = f"{example.context}{task.joint}{turn.question}{turn.prefix}"
    ids, answer = (model.tokenizer(x, add_special_tokens=False).input_ids for x in (text, turn.answer))
    return torch.tensor([ids]), torch.tensor([answer])


@pytest.mark.slow
def test_the_shipped_router_loses_less_than_the_one_it_imitated(mini):
    """Loss of answers with half of all tokens skipped, on prompts that it has not seen."""
    method = FTP().bind(mini)
    router = make_router()
    router.load_state_dict(dict(get_part(method.part).weights))
    losses = {"trained": [], "static": []}
    for seed in range(6):
        ids, answer = ask(seed, mini)
        text = torch.cat([ids, answer[:, :-1]], dim=1)
        count, prompt = text.shape[1], ids.shape[1]
        kept = divide(method.schedule, prompt, round(0.5 * prompt * 5))
        for name, score in (("trained", lambda x: router(x)[..., 0]), ("static", score_static)):
            def gates(_, features, number, score=score):
                scores = score(features)
                return torch.zeros_like(scores).scatter_(1, keep_highest(scores, number), 1.0)

            with torch.no_grad():
                logits, _ = run_gated(mini, text, torch.arange(prompt - 1, count), prompt, kept, gates)
            losses[name].append(float(torch.nn.functional.cross_entropy(logits[0], answer[0])))
    assert sum(losses["trained"]) < 0.8 * sum(losses["static"])


def test_the_shipped_router_is_minis_and_small():
    """Its metadata name the model, the data and the schedule; below 2 MB."""
    path = SHIPPED / "ftp-mini.safetensors"
    facts = read_metadata(path)
    assert (facts["method"], facts["model"], facts["data"]) == ("ftp", "mini", TASKS)
    assert len(json.loads(facts["schedule"])) == 5
    assert path.stat().st_size < 2_000_000


def test_weights_of_another_model_or_shape_are_refused(model, tmp_path):
    """With what the file says, and what is needed."""
    path = tmp_path / "part.safetensors"
    write_part(path, "ftp", model, make_router().state_dict(), TASKS, schedule=[1, 0, 1])
    assert FTP(weights=str(path)).bind(model).schedule == (1, 0, 1)
    with pytest.raises(UserError, match=r"was trained for model .*Give weights of this model"):
        FTP(weights=str(path)).bind(tiny_model(2, 2))
    write_part(tmp_path / "wide", "ftp", model, {"0.weight": torch.zeros(8, 4)}, TASKS)
    with pytest.raises(UserError, match=r"weight '0.bias' has shape None"):
        FTP(weights=str(tmp_path / "wide")).bind(model)
    write_part(tmp_path / "long", "ftp", model, make_router().state_dict(), TASKS, schedule=[1, 1])
    with pytest.raises(UserError, match=r"schedule of 2 layers, and .* has 3"):
        FTP(weights=str(tmp_path / "long")).bind(model)


def test_a_saved_schedule_of_another_shape_is_refused(model):
    """A result's schedule needs a share from 0 to 1 for every layer, and one layer that skips."""
    for wrong in ([1, 1], [0, 0, 0], [1, 1, -1]):
        with pytest.raises(UserError, match="the schedule does not name"):
            FTP().rebind({"schedule": wrong}, model.shape(64))


def test_training_asks_only_layers_that_may_skip(model, monkeypatch):
    """Where one layer of three may skip, as in a model whose others have windows, no step asks the others to."""
    labels = torch.cat([torch.full((1, 30), -100), CONTEXT[:, 31:], torch.full((1, 1), -100)], dim=1)
    kept, run = [], token_router.run_gated
    monkeypatch.setattr(token_router, "run_gated", lambda *x: kept.append(x[4]) or run(*x))
    found = train(model, 4, (0.0, 1.0, 0.0), lambda _: (CONTEXT, labels, 30))
    assert all(x.isfinite().all() for x in found.values())
    assert len(kept) == 8 and all((x[0], x[2]) == (30, 30) and x[1] < 30 for x in kept)
