"""Flux Attention: both kinds of layers against explicit masks, what the routers of mini learned, and bad weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.ragged_attention import Partial
from kvbench.method import Moment
from kvbench.methods.prefill import flux_attention
from kvbench.methods.prefill.flux_attention import FluxAttention, RoutedKV
from kvbench.methods.prefill.router import make_routers, mark_stream, opens, pool_queries, run_gated, train
from kvbench.runs.results import TASKS
from kvbench.tasks.ruler import niah
from kvbench.tasks.scbench import kv
from kvbench.tasks.words import draw_keys, draw_numbers
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import SHIPPED, find_part, get_part, read_metadata, write_part

CONTEXT = torch.randint(64, (1, 120), generator=torch.Generator().manual_seed(1))
LATER = [5, 9, 2, 7, 7, 1]


@pytest.fixture(scope="module")
def model():
    """Two layers, four query heads, two KV heads."""
    return tiny_model()


def routed(model, path, *, whole):
    """The method with routers that decide the same for every prompt."""
    routers = make_routers(model)
    for index, router in enumerate(routers.values()):
        router[-1].weight.data.zero_()
        router[-1].bias.data.copy_(torch.tensor([0.0, 1.0] if whole[index] else [1.0, 0.0]))
    write_part(path, "flux-attention", model, routers.state_dict(), TASKS)
    return FluxAttention(weights=str(path), sinks=200, local=500).bind(model).fit(None, model.shape(120))


def run(model, method):
    """Logits after the context and after every later token."""
    with Session(model, method, capacity=140) as session:
        first = session.prefill(CONTEXT)
        return torch.cat([first[:, None], session.force(LATER)[:, 1:]], dim=1)


def run_masked(model, stream, own):
    """The same by explicit masks. stream: of prompt blocks. own: of later tokens, from their index to what they read"""
    ids = torch.cat([CONTEXT, torch.tensor([LATER[:-1]])], dim=1)
    count = ids.shape[1]
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    for token in range(count):
        for entry in range(token + 1):
            mask[token, entry] = stream[token // 2, entry // 2] if token < 120 else own(token, entry)
    method = FullCache()

    class Masked(FullCache):
        def attend(self, kv, step):
            logits = step.query @ kv.keys.repeat_interleave(2, 1).mT * step.scale
            return logits.masked_fill(~mask, -torch.inf).softmax(-1) @ kv.values.repeat_interleave(2, 1)

    masked = object.__new__(Masked)
    masked.__dict__.update(method.__dict__)
    with Session(model, masked, capacity=140) as session:
        return session.forward(ids, Moment.CONTEXT_END, keep=len(LATER))


def test_routers_that_open_every_layer_are_the_full_cache(model, tmp_path):
    """In the prompt and while decoding."""
    wanted = run(model, FullCache())
    assert torch.allclose(run(model, routed(model, tmp_path / "a", whole=(True, True))), wanted, atol=1e-5)
    assert not torch.allclose(run(model, routed(model, tmp_path / "b", whole=(True, False))), wanted, atol=1e-3)


@pytest.mark.parametrize("fault", [None, "sink", "window", "prompt"])
def test_sparse_layers_are_streaming_attention(model, tmp_path, monkeypatch, fault):
    """Against explicit masks: blocks of 2, 3 first and 7 last blocks in the prompt, 6 and 14 entries later.

    Planted faults: no sinks later, a window that is one entry too wide, one more block in the prompt.
    """
    method = routed(model, tmp_path / "a", whole=(False, False))
    assert (method.block_size, method.stream_blocks()) == (2, (3, 7))
    wanted = run_masked(model, mark_stream(63, 3, 7), lambda token, entry: entry < 6 or token - entry < 14)
    if fault == "sink":
        monkeypatch.setattr(flux_attention, "ragged_partial", lambda query, keys, values, *_, **__: Partial(
            torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf)
        ))
    elif fault == "window":
        monkeypatch.setattr(FluxAttention, "layer", lambda self, index: RoutedKV(sinks=6, local=15))
    elif fault == "prompt":
        monkeypatch.setattr(flux_attention, "mark_stream", lambda count, sinks, local, device: mark_stream(
            count, sinks, local + 1, device
        ))
    assert torch.allclose(run(model, method), wanted, atol=1e-5) is (fault is None)


@pytest.mark.parametrize("settings", [{"sinks": 8000}, {"block": 128}])
def test_a_sparse_layer_reads_the_whole_of_a_context_shorter_than_its_first_blocks(model, tmp_path, settings):
    """234 or 128 first entries of 120: a question has the logits of the full cache."""
    found = []
    routers = routed(model, tmp_path / "a", whole=(False, False))
    for method in (replace(routers, **settings).fit(None, model.shape(120)), FullCache()):
        with Session(model, method, capacity=140) as session:
            session.prefill(CONTEXT)
            session.question(LATER, 1)
            found.append(session.logits)
    assert torch.allclose(*found, atol=1e-5)


def test_the_blocks_of_a_sparse_layer_by_hand():
    """One first block and the two last ones, of four."""
    assert mark_stream(4, 1, 2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]


def test_a_sparse_layer_reads_fewer_bytes(model, tmp_path):
    """20 of 120 entries in one of two layers, counted after a decode step, and not below the declared least."""
    method = routed(model, tmp_path / "a", whole=(True, False))
    with Session(model, method, capacity=140) as session:
        session.prefill(CONTEXT)
        session.force([3])
        facts, entry = session.effect().facts, 2 * 2 * 16 * 4  # keys and values of 16 in two heads, float32
        assert session.memory().read_bytes_per_step == (121 + 20) * entry
        assert (facts["layers_sparse"], facts["entries_skipped"]) == (1, (121 - 20) * 2)
    shape = model.shape(120)
    assert method.least_read_bytes(shape) == 2 * 20 * entry
    assert method.declared_read_bytes(shape) == shape.full_bytes


def test_a_batch_is_routed_sequence_by_sequence(model):
    """Routers that read the prompt: each sequence has the decision that it has alone."""
    method = FluxAttention().bind(model).fit(None, model.shape(120))
    with Session(model, method, capacity=140) as session:
        session.prefill(torch.cat([CONTEXT, CONTEXT.flip(1)]))
        assert [len(x.whole) for x in session.layers] == [2, 2]


def test_pooled_queries_are_those_before_rotation(make_step):
    """By hand without rotation: the mean of the first 100 and the last 100 of 250 tokens, over both heads."""
    query = torch.randn(1, 2, 250, 4, generator=torch.Generator().manual_seed(0))
    step = make_step(query, query[:, :1])
    wanted = torch.cat([query[:, :, :100], query[:, :, 150:]], dim=2).mean((1, 2))
    assert torch.allclose(pool_queries(step, 250), wanted, atol=1e-6)
    assert torch.allclose(pool_queries(step, 120), query[:, :, :120].mean((1, 2)), atol=1e-6)


# Training


@pytest.mark.slow
def test_training_makes_layers_sparse_and_spares_the_model(model):
    """A target of 1 closes both layers of prompts that need neither; the model's weights stay as they are."""
    before = [x.clone() for x in model.module.parameters()]
    blocks = lambda tokens: (2, mark_stream(-(-tokens // 2), 1, 2))  # noqa: E731
    labels = torch.full((1, 40), -100)
    labels[0, 20] = 3
    weights = train(model, 150, 1.0, blocks, lambda _: [(CONTEXT[:, :40], labels, 40)])
    routers = make_routers(model)
    routers.load_state_dict(weights)
    _, gates = run_gated(model, (CONTEXT[:, :40], labels, 40), blocks,
                         lambda layer, pooled: opens(routers[str(layer)], pooled).float())
    assert [float(x) for x in gates.values()] == [0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))


def test_a_model_of_sliding_windows_alone_is_refused():
    """No layer has a router to train, and the method would have no effect."""
    windows = tiny_model(window=24)
    for _ in range(2):  # the second time, its part of no weights is known
        with pytest.raises(UserError, match="flux-attention keeps sliding-window layers exact, and this model has no"):
            FluxAttention().bind(windows).fit(None, windows.shape(200))


def hidden_prompt(rng):
    """A key among noise, with the question: the answer is anywhere."""
    task = niah.NiahSingle1()
    pairs = list(zip(draw_keys(rng, 1), draw_numbers(rng, 1), strict=True))
    example = task.compose(task.haystack_for(rng), pairs, [0], 420, id="")
    return example, task


def recent_prompt(rng, model):
    """A piece of Python's manual, a short JSON object and a question about it."""
    task = kv.KeyValueShort()
    asked = task.compose(task.pairs(rng, 5), [rng.randrange(5)], id="")
    start = rng.randrange(6000)
    before = calibration_ids(model, 8000)[0, start : start + 380].tolist()
    text = f"\n{asked.context}\n\n{asked.turns[0].question}"
    return before + model.tokenizer(text, add_special_tokens=False).input_ids


def layers_open(model, ids):
    """Which layers the shipped routers give every entry."""
    method = FluxAttention().bind(model).fit(None, model.shape(len(ids)))
    with Session(model, method, capacity=len(ids) + 20) as session:
        session.prefill(ids)
        return [x.whole[0] for x in session.layers]


@pytest.mark.slow
def test_the_shipped_routers_tell_prompts_apart(mini):
    """With a hidden key the layer that finds keys reads every entry; where the answer is recent, fewer layers do."""
    hidden, recent = [], []
    for seed in range(6):
        rng = random.Random(f"test/flux/{seed}")
        example, task = hidden_prompt(rng)
        turn = example.turns[0]
        text = f"{example.context}{task.joint}{turn.question}{turn.prefix}"
        hidden.append(layers_open(mini, mini.tokenizer(text, add_special_tokens=False).input_ids))
        recent.append(layers_open(mini, recent_prompt(rng, mini)))
    assert sum(x[2] for x in hidden) >= 5
    assert sum(map(sum, recent)) <= sum(map(sum, hidden)) / 2


def test_the_shipped_routers_are_minis_and_small(mini):
    """Its metadata name the model, the data and the target; below 2 MB."""
    path = SHIPPED / "flux-attention-mini.safetensors"
    facts = read_metadata(path)
    assert (facts["method"], facts["model"], facts["data"]) == ("flux-attention", "mini", TASKS)
    assert json.loads(facts["sparsity"]) == 0.9
    assert path.stat().st_size < 2_000_000
    assert FluxAttention().bind(mini).trained_on == TASKS


# Weights


@pytest.mark.parametrize("settings", [{"sinks": 1024}, {"local": 2048}, {"block": 8}])
def test_routers_trained_under_other_settings_are_others(model, settings):
    """In one process: what a sparse layer reads in training depends on them."""
    first, second = (FluxAttention(steps=2, **x).bind(model) for x in ({}, settings))
    assert first.part != second.part
    assert first.trained_on != second.trained_on
    assert FluxAttention(steps=2).bind(model).part == first.part


def test_weights_of_another_model_or_without_a_router_are_refused(model, tmp_path):
    """With what the file says, and what is needed."""
    path = tmp_path / "part.safetensors"
    weights = make_routers(model).state_dict()
    write_part(path, "flux-attention", model, weights, TASKS)
    bound = FluxAttention(weights=str(path)).bind(model)
    assert get_part(bound.part).weights.keys() == weights.keys()
    with pytest.raises(UserError, match=r"was trained for model .*Give weights of this model"):
        FluxAttention(weights=str(path)).bind(tiny_model(2, 2))
    write_part(tmp_path / "one", "flux-attention", model, {k: v for k, v in weights.items() if k[0] == "0"}, TASKS)
    with pytest.raises(UserError, match=r"weight '1.0.bias' has shape None, and .* needs \(128,\)"):
        FluxAttention(weights=str(tmp_path / "one")).bind(model)
    with pytest.raises(UserError, match=r"no readable safetensors file.*Check the path"):
        find_part(FluxAttention(weights=str(tmp_path / "none")), model, dict, "")
