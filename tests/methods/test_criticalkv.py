"""CriticalKV: the norm of projected values, the two stages, and its composition with other scorers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.adapter import find_output
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Card
from kvbench.methods.eviction.criticalkv import CriticalKV, projected_norms
from kvbench.methods.eviction.snapkv import SnapKV
from kvbench.registry import find_method
from kvbench.selection import ScoredMethod


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_output_projection_is_cut_by_query_head():
    """The heads' outputs times their parts add up to the module's own projection."""
    module = tiny_model().module.model.layers[0].self_attn
    weight = find_output(module, 4, 16)
    heads = draw(3, 4, 16)
    assert torch.allclose(torch.einsum("nhd,hdm->nm", heads, weight), module.o_proj(heads.flatten(1)), atol=1e-5)


def test_a_transposed_projection_is_found_and_a_missing_one_is_not():
    """GPT-2 stores its projection the other way round; a module without one gives None."""
    config = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50, n_positions=16)
    module = AutoModelForCausalLM.from_config(config).transformer.h[0].attn
    heads = draw(3, 4, 8)
    weight = find_output(module, 4, 8)
    found = torch.einsum("nhd,hdm->nm", heads, weight) + module.c_proj.bias
    assert torch.allclose(found, module.c_proj(heads.flatten(1)), atol=1e-5)
    assert find_output(torch.nn.Identity(), 4, 8) is None
    assert find_output(module, 4, 16) is None


def test_norms_are_means_over_the_group(make_step):
    """Loops over query heads: the sum of absolute elements of v W, mean of the two heads that share a KV head."""
    weight, value = draw(4, 8, 20), draw(2, 2, 13, 8, seed=1)
    step = make_step(draw(2, 4, 13, 8), value, output=weight)
    found = projected_norms(value, step, "criticalkv").mean(2)
    for head in range(2):
        wanted = sum((value[:, head] @ weight[i]).abs().sum(-1) for i in (2 * head, 2 * head + 1)) / 2
        assert torch.allclose(found[:, head], wanted, atol=1e-4)


@dataclass(frozen=True)
class Given(ScoredMethod):
    """Has the scores .4, .3, .2 and .1."""

    card: ClassVar[Card] = SnapKV.card.model_copy(update={"name": "given"})
    sign: float = 1.0

    def score(self, kv, step):
        """As given. [1, 1, 4]"""
        return self.sign * torch.tensor([[[0.4, 0.3, 0.2, 0.1]]])


def test_two_stages_by_hand(make_step):
    """Norms 1, 1, 1 and 9: half of a budget of two is the first entry, the rest the last."""
    value = torch.tensor([1.0, -1, 1, 9]).view(1, 1, 4, 1)
    step = make_step(draw(1, 1, 4, 2), draw(1, 1, 4, 2), value, output=torch.ones(1, 1, 1))
    method = CriticalKV.over(Given)(epsilon=0.0, rows=2, length=4)
    kv = method.layer(0)
    kv.append(step)
    assert method.score(kv, step)[0, 0].tolist() == pytest.approx([torch.inf, 0.3, 0.2, 0.9])
    method.evict(kv, step)
    assert kv.values.flatten().tolist() == [1, 9]


def test_the_norm_is_the_group_s_mean_and_small_scores_are_raised(make_step):
    """Two query heads weigh the last values by 4 and 0, and by 3 and 3: the means are 2 and 3, the maxima 4 and 3."""
    value = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1]])[None, None]
    output = torch.tensor([[[4.0], [3]], [[0], [3]]])
    step = make_step(draw(1, 2, 4, 2), draw(1, 1, 4, 2), value, output=output)
    method = CriticalKV.over(Given)(epsilon=0.5, first_stage=0.0, rows=2, length=4)
    kv = method.layer(0)
    kv.append(step)
    assert method.score(kv, step)[0, 0].tolist() == pytest.approx([0.9 * 2, 0.8 * 3, 0.7 * 2, 0.6 * 3])


@pytest.mark.parametrize(("name", "settings", "weights"), [
    ("criticalkv", {"window": 5, "kernel": 1}, 1), ("pyramidkv+criticalkv", {"window": 5, "kernel": 1}, 1),
    ("compresskv+criticalkv", {"window": 5, "kernel": 1, "heads": ((0, 2),)}, 1),
    ("observed-attention+criticalkv", {}, 2),
])
def test_epsilon_is_added_to_mean_attention(make_step, name, settings, weights):
    """Of two query heads per KV head, SnapKV takes the mean and observed attention the sum."""
    query, key, output = draw(1, 4, 40, 8), draw(1, 2, 40, 8, seed=1), draw(4, 8, 20, seed=2)
    step = make_step(query, key, output=output)
    found = []
    for epsilon in (0.0, 0.25):
        method = replace(find_method(name)(first_stage=0.0, epsilon=epsilon), rows=20, length=40, **settings)
        kv = method.layer(0)
        kv.append(step)
        found.append(method.score(kv, step) / projected_norms(kv.values, step, name).mean(2) / weights)
    raised = (found[1] - found[0])[found[0] < torch.inf]
    assert torch.allclose(raised, torch.tensor(0.25), atol=1e-5)
    assert found[0][found[0] < torch.inf].max() <= 1


def test_a_composition_has_another_version_where_the_outer_methods_numbers_changed():
    """The scorer's version stands for its own changes."""
    assert find_method("pyramidkv+criticalkv").card.version == f"{find_method('pyramidkv').card.version}.2"
    assert find_method("pyramidkv+adakv").card.version == find_method("pyramidkv").card.version


def test_negative_scores_are_refused(make_step):
    """A larger norm would make them worse."""
    step = make_step(draw(1, 1, 4, 2), draw(1, 1, 4, 2), output=torch.ones(1, 2, 1))
    method = CriticalKV.over(Given)(sign=-1.0, rows=2, length=4)
    kv = method.layer(0)
    kv.append(step)
    with pytest.raises(UserError, match="are negative"):
        method.score(kv, step)


@pytest.mark.parametrize("name", ["knorm", "keydiff", "qfilter", "compactor"])
def test_methods_with_negative_scores_are_refused_by_name(name):
    """Before a model is loaded."""
    with pytest.raises(UserError, match=rf"{name}\+criticalkv makes no sense: .* negative"):
        find_method(f"{name}+criticalkv")


def test_without_a_first_stage_equal_norms_change_nothing():
    """Norms of one leave SnapKV's order; a first stage of the whole budget is SnapKV whatever the norms."""
    model = tiny_model()
    ids = torch.randint(64, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    kept = {}
    for name, settings in (("snapkv", {}), ("criticalkv", {"first_stage": 1.0}), ("criticalkv", {"first_stage": 0.0})):
        method = find_method(name)(window=8, **settings).fit(Budget("rows", 30), model.shape(100))
        with Session(model, method, track=True) as session:
            session.prefill(ids)
            kept[name, *settings.values()] = session.layers[0].positions
    assert kept["snapkv",].equal(kept["criticalkv", 1.0])
    assert not kept["snapkv",].equal(kept["criticalkv", 0.0])


def test_an_unknown_projection_is_refused(make_step):
    """The message says what is missing and which method does without."""
    key = draw(1, 2, 40, 8)
    method = replace(CriticalKV(window=4), rows=10, length=40)
    kv, step = method.layer(0), make_step(key, key)
    kv.append(step)
    with pytest.raises(UserError, match=r"criticalkv needs the weights .* such as snapkv"):
        method.score(kv, step)


@pytest.mark.parametrize("name", ["observed-attention+criticalkv", "snapkv+criticalkv+adakv"])
def test_it_weighs_the_scores_of_other_methods(name):
    """A composition keeps its budget, and other entries than the scorer alone."""
    model = tiny_model()
    ids = torch.randint(64, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for x in (name, name.replace("+criticalkv", "")):
        method = find_method(x)().fit(Budget("rows", 40), model.shape(100))
        with Session(model, method, track=True) as session:
            session.prefill(ids)
            store = session.layers[0]
            found.append(store.positions.flatten() if store.frozen is None else store.frozen.position)
            assert sum(store.entries_kept()) == 80
    assert not found[0].equal(found[1])
