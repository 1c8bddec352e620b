"""InfiniGen: skewing, whose queries are guessed, how many entries are read, and refusals."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.adapter import project_queries
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval import infinigen
from kvbench.methods.retrieval.infinigen import InfiniGen, SkewRecorder, find_skew
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.calibration import calibrated

LENGTH = 90
CONTEXT = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def fitted(method, model, rows=30):
    """The method on a model."""
    return method.bind(model).fit(Budget("rows", rows), model.shape(LENGTH))


def test_skewing_orders_channels_by_the_queries_they_hold():
    """The matrices are orthogonal, and a text's queries have no products between channels, the largest first."""
    model = tiny_model()
    with Session(model, SkewRecorder(), capacity=LENGTH) as session:
        session.forward(torch.tensor([CONTEXT]), Moment.CONTEXT_CHUNK)
        state = session.layers[1].state
    skew = find_skew(model, state).double()
    assert torch.allclose(skew.mT @ skew, torch.eye(16, dtype=torch.float64).expand(2, -1, -1), atol=1e-5)
    sums = skew.mT @ state["outer"] @ skew
    sizes = sums.diagonal(dim1=1, dim2=2)
    assert torch.allclose(sums, torch.diag_embed(sizes), atol=1e-3 * float(sizes.max()))
    assert (sizes.diff() <= 0).all()


def test_entries_are_chosen_by_the_layer_before(monkeypatch):
    """Every mask of a decode step, from the inputs of the layer before, written out."""
    model = tiny_model(layers=4)
    method = fitted(InfiniGen(alpha=1.0, share=0.5), model)
    steps, masks = [], []
    read = ChosenKV.read

    def watch(self, step, mask, bias=None):
        masks.append(mask)
        return read(self, step, mask, bias)

    with Session(model, method, capacity=LENGTH + 20) as session:
        attend = session.attend
        session.attend = lambda step: (steps.append(step), attend(step))[1]
        session.prefill(CONTEXT)
        prompt, steps[:] = list(steps), []
        monkeypatch.setattr(ChosenKV, "read", watch)
        session.score([7])
        keys = [x.keys.clone() for x in session.layers]
    assert len(masks) == 2
    for layer, mask in zip((2, 3), masks, strict=True):
        module = model.module.model.layers[layer].self_attn
        query = module.q_proj(steps[layer - 1].hidden)[0, 0].view(4, 16)
        query = model.ropes[layer].rotate(query[None, :, None], steps[layer].positions)[0, :, 0]
        skew = calibrated(method.skew, layer)
        margins = []
        for head in range(2):
            turned = keys[layer][0, head] @ skew[head]  # the last one is the current token's
            asked = prompt[layer].query[0, 2 * head : 2 * head + 2].flatten(0, 1) @ skew[head]
            magnitude = asked.abs().sum(0) + 2 * turned[:LENGTH].abs().sum(0)
            best = magnitude.argsort(descending=True)[:8]
            logits = (query[2 * head : 2 * head + 2] @ skew[head])[:, best] @ turned[:LENGTH, best].T * 16**-0.5
            margins.append((logits - logits.amax(-1, keepdim=True)).amax(0))
        count = round(sum(int((x > -1.0).sum()) for x in margins) / 2)
        for head, margin in enumerate(margins):
            chosen = set(margin.argsort(descending=True)[: min(count, 29)].tolist())
            assert set(mask[0, head].nonzero()[:, 0].tolist()) == chosen | {LENGTH}


def read_counts(method):
    """Entries that each head read in a step of the second layer, which chooses where there are but two."""
    model = tiny_model()
    with Session(model, fitted(method, model), capacity=LENGTH + 20) as session:
        session.prefill(CONTEXT)
        session.score([7])
        return session.layers[1].reads["entries_read"] / 2


def test_alpha_and_the_budget_bound_what_is_read():
    """More with a larger alpha, at most the budget, and at least the best of both query heads and the current one."""
    counts = [read_counts(InfiniGen(alpha=x)) for x in (1e-6, 1.0, 4.0, 1e6)]
    assert counts == sorted(counts)
    assert counts[0] == 3
    assert counts[0] < counts[1] < counts[-1] == 30


def test_heads_read_equally_many():
    """The mean of their counts: 3 and 1 near the largest are 2 in each."""
    logits = torch.tensor([[[[0.0, -0.1, -0.2, -9.0, -8.0]], [[-7.0, 0.0, -9.0, -9.0, -8.0]]]])
    mask = replace(InfiniGen(alpha=1.0), rows=4).mark(logits)
    assert mask.tolist() == [[[True, True, False, False, False], [True, True, False, False, False]]]


@pytest.mark.parametrize(("layers", "exact"), [(2, 1), (3, 2), (5, 2)])
def test_two_layers_read_everything_and_one_where_there_are_two(layers, exact):
    model = tiny_model(layers=layers)
    with Session(model, fitted(InfiniGen(), model), capacity=LENGTH + 20) as session:
        session.prefill(CONTEXT)
        session.score([7])
        assert session.method.exact_layers == exact
        assert [x.reads["entries_read"] > 0 for x in session.layers] == [i >= exact for i in range(layers)]


def test_the_first_layer_reads_everything_and_stays_on_the_device():
    model = tiny_model()
    with Session(model, fitted(InfiniGen(tier="host"), model), capacity=LENGTH + 20) as session:
        session.prefill(CONTEXT)
        session.score([7])
        first, second = session.layers
        assert first.n == LENGTH + 1
        assert second.apart == LENGTH
        memory = session.memory()
        fitted_again = session.method
    assert memory.host_bytes == fitted_again.declared_host_bytes(model.shape(LENGTH)) == 2 * 2 * 16 * 4 * LENGTH


def test_models_whose_queries_cannot_be_guessed_are_refused():
    """Without a projection of that name, and with one whose output is changed afterwards."""
    plain = tiny_model(seed=5)
    module = type(plain.module)(plain.module.config)
    module.load_state_dict(plain.module.state_dict())
    model = Model.from_module(module, id="changed")
    attention = module.model.layers[1].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    assert project_queries(attention, torch.zeros(1, 1, 64), 16) is None
    with pytest.raises(UserError, match=r"queries of layer 1 of changed .* cannot be guessed"):
        InfiniGen().bind(model)


def test_a_model_of_one_layer_is_refused():
    model = tiny_model(layers=1)
    with pytest.raises(UserError, match="keeps its first layers and sliding-window layers exact"):
        fitted(InfiniGen(), model)


def test_queries_are_guessed_by_the_model_that_was_bound_last():
    """Also where it was bound before another one with the same skewing matrices, which may lie on other devices."""
    one = tiny_model()
    other = Model.from_module(copy.deepcopy(one.module))
    for model in (one, other, one):
        skew = InfiniGen().bind(model).skew
        assert [x for (found, _), x in infinigen._MODELS.items() if found == skew][-1] is model
