"""ReasonCACHE: the prefix against in-context learning, what that of mini learned, and bad weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvbench.engine.agreement import FullCache
from kvbench.engine.recording import InexactPrefillError
from kvbench.engine.session import Session
from kvbench.engine.stores import Stores
from kvbench.errors import UserError
from kvbench.hf import Model, Rope
from kvbench.hf.tiny import tiny_model
from kvbench.method import Moment
from kvbench.methods.reuse.reasoncache import PrefixedKV, ReasonCache
from kvbench.methods.reuse.trained_prefix import Prefix, predict, train
from kvbench.runs.results import TASKS
from kvbench.store import LayerKV
from kvbench.tasks.scbench import kv
from kvbench.techniques.parts import SHIPPED, get_part, read_metadata, write_part
from kvbench.techniques.training import TrainingProgress

DEMONSTRATION = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(1))
CONTEXT = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(2))
LATER = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def model():
    """Two layers, four query heads, two KV heads."""
    return tiny_model()


def prefixed(model, path, *, entries=12, noise=0.0):
    """The method with the demonstration's last entries as its prefix, and the prefix."""
    prefix = Prefix(model, entries)
    prefix.take(model, DEMONSTRATION)
    with torch.no_grad():
        for i, x in enumerate(prefix.parameters()):
            x.add_(noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))
    write_part(path, "reasoncache", model, prefix.state_dict(), TASKS)
    method = ReasonCache(weights=str(path), entries=entries).bind(model).fit(None, model.shape(40))
    return method, prefix.requires_grad_(requires_grad=False)


def run(model, method, context=CONTEXT):
    """Logits after the context and after every later token."""
    with Session(model, method, capacity=80) as session:
        first = session.prefill(context)
        return torch.cat([first[:, None], session.force(LATER)[:, 1:]], dim=1)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("fault", [None, "keys are not moved", "after the text"])
def test_an_untrained_prefix_is_in_context_learning(tmp_path, monkeypatch, window, fault):
    """The logits are those of the full cache with the demonstration before the context, also in sliding windows.

    Planted faults: keys that stay at their places, and a prefix behind the context.
    """
    model = tiny_model(window=window)
    method, _ = prefixed(model, tmp_path / "part")
    wanted = run(model, FullCache(), torch.cat([DEMONSTRATION, CONTEXT], dim=1))
    if fault == "keys are not moved":
        monkeypatch.setattr(Rope, "shift", lambda self, x, distance: x)
        method, _ = prefixed(tiny_model(window=window, seed=0), tmp_path / "other", noise=1e-6)
    elif fault == "after the text":
        def append(self, step):
            LayerKV.append(self, step)
            if self.before is not None and step.moment is Moment.CONTEXT_END:
                self._replace({
                    "key": torch.cat([self.keys, self.before[0][None]], 2),
                    "value": torch.cat([self.values, self.before[1][None]], 2),
                }, 80)

        monkeypatch.setattr(PrefixedKV, "append", append)
    assert torch.allclose(run(model, method), wanted, atol=1e-4) is (fault is None)


def test_the_prefix_is_used_as_it_was_trained(model, tmp_path):
    """In training the text stands after the prefix; here the prefix stands before position 0. The logits are equal."""
    method, prefix = prefixed(model, tmp_path / "part", noise=0.3)
    ids = torch.cat([CONTEXT, torch.tensor([LATER[:-1]])], dim=1)
    with torch.no_grad():
        wanted = predict(model, prefix, ids, torch.arange(39, 43))
    assert torch.allclose(run(model, method), wanted, atol=1e-4)
    assert not torch.allclose(wanted, run(model, FullCache()), atol=1e-2)


def test_a_prefix_of_fewer_entries_is_the_end_of_the_demonstration(model):
    """Its keys, moved back to the first positions, and its values."""
    whole, part = Prefix(model, 12), Prefix(model, 5)
    for prefix in (whole, part):
        prefix.take(model, DEMONSTRATION)
    back = torch.full((1, 5), -7)
    for layer, rope in enumerate(model.ropes):
        assert torch.allclose(rope.shift(whole.keys[layer].data[None, :, 7:], back)[0], part.keys[layer], atol=1e-5)
        assert torch.equal(whole.values[layer][:, 7:], part.values[layer])


def test_its_bytes_are_those_of_all_entries_and_the_prefix(model, tmp_path):
    """40 tokens and 12 entries, in two layers of two heads, keys and values of 16 numbers of 4 bytes."""
    method, _ = prefixed(model, tmp_path / "part")
    with Session(model, method, capacity=80) as session:
        session.prefill(CONTEXT)
        assert session.memory().stored_bytes == (40 + 12) * 2 * 2 * 2 * 16 * 4
        assert session.effect().facts["prefix_entries"] == 2 * 2 * 12
        assert session.effect().entries_kept == (40.0, 40.0)


def test_a_shared_prefill_is_refused(model, tmp_path):
    """Its entries did not see the prefix."""
    with Session(model, prefixed(model, tmp_path / "part")[0], capacity=80) as session:
        session._recording, session._compare = object(), False
        with pytest.raises(InexactPrefillError, match="attends to a trained prefix"):
            Stores._replay(session, None, Moment.CONTEXT_END)


def test_training_lowers_the_loss_and_spares_the_model(model):
    """On one text; the model's weights stay as they are, and no step leaves the demonstration's entries."""
    before = [x.clone() for x in model.module.parameters()]
    labels, losses = torch.cat([CONTEXT[:, 1:], torch.tensor([[-100]])], dim=1), []
    progress = TrainingProgress(keep=lambda *x: losses.append(x[3]))
    train(model, 12, 30, DEMONSTRATION, lambda _: (CONTEXT, labels), progress)
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
    untouched, start = train(model, 12, 0, DEMONSTRATION, None), Prefix(model, 12)
    start.take(model, DEMONSTRATION)
    assert all(torch.equal(untouched[name], x) for name, x in start.state_dict().items())


@pytest.mark.slow
def test_the_shipped_prefix_teaches_a_format(mini):
    """More answers in the format are right than without a demonstration, or with one that takes five times the room."""
    path = SHIPPED / "reasoncache-mini.safetensors"
    demonstration = json.loads(read_metadata(path)["demonstration"])
    assert len(demonstration) > 4 * ReasonCache.entries
    task, right = kv.KeyValueShort(), {"prefix": 0, "nothing": 0, "demonstration": 0}
    for seed in range(8):
        rng = random.Random(f"test/reasoncache/{seed}")
        example = task.compose(task.pairs(rng, 8), [rng.randrange(8)], id="")
        turn = example.turns[0]
        ids = mini.tokenizer(f"{example.context}\n\n{turn.question}", add_special_tokens=False).input_ids
        for name in right:
            method = ReasonCache().bind(mini) if name == "prefix" else FullCache()
            before = demonstration if name == "demonstration" else []
            with Session(mini, method.fit(None, mini.shape(len(ids))), capacity=400) as session:
                session.prefill([*before, *ids])
                answer = session.ask([], 12).ids[0]
            right[name] += mini.tokenizer.decode(answer, skip_special_tokens=True) == f" {turn.answer}."
    assert right["prefix"] >= 6
    assert right["prefix"] > max(right["nothing"], right["demonstration"])


def test_the_shipped_prefix_is_minis_and_small(mini):
    """Its metadata name the model and the data; below 2 MB."""
    path = SHIPPED / "reasoncache-mini.safetensors"
    facts = read_metadata(path)
    assert (facts["method"], facts["model"], facts["data"]) == ("reasoncache", "mini", TASKS)
    assert path.stat().st_size < 2_000_000
    assert ReasonCache().bind(mini).trained_on == TASKS


def test_weights_of_another_model_or_shape_are_refused(model, tmp_path):
    """With what the file says, and what is needed."""
    path = tmp_path / "part.safetensors"
    prefixed(model, path)
    with pytest.raises(UserError, match=r"was trained for model .*Give weights of this model"):
        ReasonCache(weights=str(path), entries=12).bind(tiny_model(2, 2))
    wider = tiny_model(4, 4)
    write_part(path, "reasoncache", model, Prefix(wider, 12).state_dict(), TASKS)
    with pytest.raises(UserError, match=r"weight 'keys.0' has shape \(4, 12, 16\), and .* needs \(2, 12, 16\)"):
        ReasonCache(weights=str(path), entries=12).bind(model)


def test_a_prefix_of_other_entries_is_refused_with_its_number(model, mini, tmp_path):
    """Of a file, and the shipped one, which no setting names."""
    path = tmp_path / "part.safetensors"
    prefixed(model, path)
    with pytest.raises(UserError, match=r"entries is 16, and the prefix .* has 12\. Use --set entries=12"):
        ReasonCache(weights=str(path)).bind(model)
    with pytest.raises(UserError, match=r"entries is 8, and the prefix trained for mini has 16\. Use --set entries=16"):
        ReasonCache(entries=8).bind(mini)


def test_a_prefix_of_more_entries_than_a_text_is_trained_on_longer_texts(model):
    """It starts as that many tokens, as long as the model takes twice as many."""
    part = get_part(ReasonCache(entries=128, steps=1).bind(model).part)
    assert part.weights["keys.0"].shape == (2, 128, 16)
    with pytest.raises(UserError, match=r"entries=128 is too many .* Use --set entries=120 or fewer"):
        ReasonCache(entries=128, steps=2).bind(replace(model, max_length=240))


def test_learned_positions_are_refused():
    """A prefix stands before the first position."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    module = GPT2LMHeadModel(config)
    with pytest.raises(UserError, match="moves keys to the positions before the text"):
        ReasonCache().bind(Model.from_module(module))
