"""KVzip+ against its equation in one long sequence, and the hidden states that steps carry."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.passes import PassRequest, run_together
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Method, Moment
from kvbench.methods.eviction import kvzip_plus
from kvbench.methods.eviction.kvzip_plus import KVzipPlus, WeighedRepeat

LENGTH, SINKS = 60, 4


def make_model(*shape):
    """A tiny model whose hidden states differ in length: its norms weigh channels unequally."""
    module = copy.deepcopy(tiny_model(*shape).module)
    for layer in module.model.layers:
        weight = layer.input_layernorm.weight
        weight.data = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)).square() * 3
    return Model.from_module(module)


def ids(count, seed=1, batch=1):
    """Random tokens. [B, T]"""
    return torch.randint(VOCABULARY, (batch, count), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Recorder(Method):
    """The full cache, which keeps every layer's step and entries."""

    seen: dict[int, tuple] = field(default_factory=dict)
    card: ClassVar = FullCache.card
    reads_hidden: ClassVar = True

    def attend(self, kv, step):
        """Attend, and remember."""
        self.seen[step.layer] = kv.keys, kv.values, step
        return kv.attend(step)


def written_out(model, context):
    """Scores in float64 of a repeat in one piece: max over queries and heads of a_ji |W_O v_i| / |h_j|."""
    sequence = torch.cat([context, torch.tensor([[0, 0]]), context[:, SINKS:]], dim=1)
    recorder = Recorder()
    with Session(model, recorder) as session:
        session.prefill(sequence)
    scores = torch.full((len(model.layers), model.layers[0].kv_heads, LENGTH), torch.inf, dtype=torch.float64)
    for layer, (keys, values, step) in recorder.seen.items():
        attention = model.module.model.layers[layer].self_attn
        output = attention.o_proj.weight.double()  # [hidden, H_q * D]
        heads, width = step.query.shape[1], values.shape[3]
        group = heads // keys.shape[1]
        lengths = step.hidden[0].double().norm(dim=-1)
        for head in range(heads):
            logits = step.query[0, head].double() @ keys[0, head // group].double().T * step.scale
            weights = logits.masked_fill(~torch.ones_like(logits).tril().bool(), -torch.inf).softmax(-1)
            added = values[0, head // group].double() @ output[:, head * width : (head + 1) * width].T
            found = (weights * added.norm(dim=-1) / lengths[:, None])[LENGTH:, SINKS:LENGTH].amax(0)
            row = scores[layer, head // group, SINKS:]
            row.copy_(found if head % group == 0 else torch.maximum(row, found))
    return scores


def run(method, model, context, rows=20):
    """Marks the entries that stay. [layers, H_kv, LENGTH]"""
    fitted = method.fit(Budget("rows", rows), model.shape(LENGTH))
    with Session(model, fitted, capacity=LENGTH + 70, track=True) as session:
        session.prefill(context)
        marks = [
            torch.zeros(LENGTH, dtype=torch.bool).scatter(0, x.long(), True)
            for store in session.layers for x in store.frozen.position.split(store.frozen.counts)
        ]
        assert not any(store.state for store in session.layers)
    return torch.stack(marks).view(len(session.layers), -1, LENGTH)


def best(scores, rows=20):
    """The entries with the highest scores over all layers and heads."""
    total = rows * scores.shape[0] * scores.shape[1]
    return torch.zeros(scores.numel(), dtype=torch.bool).scatter(0, scores.flatten().topk(total).indices, True).view(
        scores.shape
    )


@pytest.mark.parametrize("shape", [(4, 2, None), (2, 2, None), (4, 1, None)], ids=["GQA", "MHA", "MQA"])
def test_the_entries_that_add_most_are_kept(shape):
    """The kept entries are those of the equation, computed in one sequence with its own projections."""
    model, context = make_model(*shape), ids(LENGTH)
    assert run(KVzipPlus(), model, context).equal(best(written_out(model, context)))


@pytest.mark.parametrize("fault", ["no hidden state", "first head's values", "sum of elements"])
def test_the_equation_catches_planted_faults(fault, monkeypatch):
    """Without the division, with one head's norm for all, or with another norm, other entries stay."""
    model, context = make_model(4, 2, None), ids(LENGTH)
    wanted = best(written_out(model, context))
    if fault == "no hidden state":
        original = WeighedRepeat.weigh
        monkeypatch.setattr(WeighedRepeat, "weigh", lambda self, kv, step, *x: original(
            self, kv, replace(step, hidden=torch.ones_like(step.hidden)), *x))
    else:
        norms = kvzip_plus.projected_norms
        monkeypatch.setattr(kvzip_plus, "projected_norms", lambda values, step, name, order: (
            norms(values, step, name, 1) if fault == "sum of elements"
            else norms(values, step, name, order)[:, :, :1].expand(-1, -1, 2, -1)))
    assert not run(KVzipPlus(), model, context).equal(wanted)


def test_steps_carry_hidden_states_only_where_they_are_asked_for():
    """The input of each attention module; alone or together with another conversation; None by default."""
    model, found = tiny_model(), {}
    attention = model.module.model.layers[1].self_attn
    hook = attention.register_forward_pre_hook(
        lambda _, args, named: found.__setitem__("input", named["hidden_states"]), with_kwargs=True)
    recorder = Recorder()
    with Session(model, recorder, capacity=20) as session, Session(model, Recorder(), capacity=20) as other:
        session.prefill(ids(6))
        assert recorder.seen[1][2].hidden.equal(found["input"])
        other.prefill(ids(7))
        run_together([PassRequest(x, ids(2), Moment.TURN_END) for x in (other, session)])
        assert recorder.seen[1][2].hidden.equal(found["input"][:, 2:])
    hook.remove()
    steps = []
    with Session(model, FullCache(), capacity=20) as session:
        session.attend = lambda step: steps.append(step) or Session.attend(session, step)
        session.prefill(ids(6))
    assert [x.hidden for x in steps] == [None, None]
    assert not attention._forward_pre_hooks


def test_a_model_whose_projection_is_not_found_is_refused(monkeypatch):
    """The message names what is needed and another method."""
    original = Session.attend
    monkeypatch.setattr(Session, "attend", lambda self, step: original(self, replace(step, output=None)))
    with pytest.raises(UserError, match="needs the weights of the output"):
        run(KVzipPlus(), tiny_model(), ids(LENGTH))


def test_a_query_without_a_hidden_state_has_no_say():
    """A token whose embedding is zeros has a state of zeros in the first layer: no score is infinite or no number."""
    module = copy.deepcopy(tiny_model().module)
    module.model.embed_tokens.weight.data[7] = 0
    model, context = Model.from_module(module), ids(LENGTH)
    context[:, 20] = 7
    method = KVzipPlus().fit(Budget("rows", 30), model.shape(LENGTH))
    with Session(model, method, capacity=LENGTH) as session:
        session.prefill(context)
        assert session.effect().facts["entries_dropped"] > 0
