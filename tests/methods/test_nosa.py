"""NOSA: the score of a value, compressed keys, which blocks are read, what gates learn, and the shipped part."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval import nosa, value_gate
from kvbench.methods.retrieval.nosa import Nosa
from kvbench.runs.results import TASKS
from kvbench.store.chosen import ChosenKV
from kvbench.techniques.parts import SHIPPED, get_module, get_part, read_metadata
from tests.methods.needles import draw_asked

LENGTH = 90
CONTEXT = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_score_is_scaled_softplus_of_the_values_of_all_heads():
    """Written out for one token."""
    gate, value = value_gate.ValueGate(2, 4), draw(1, 2, 3, 4)
    torch.nn.init.normal_(gate.delta.weight, generator=torch.Generator().manual_seed(1))
    joined = torch.cat([value[0, 0, 1], value[0, 1, 1]])
    wanted = gate.A * torch.log(1 + torch.exp(gate.delta.weight @ joined))
    assert torch.allclose(gate(value)[0, :, 1], wanted, atol=1e-6)


@pytest.mark.parametrize("count", [3, 16, 17, 30, 33])
def test_compressed_keys_are_means_over_two_strides(count):
    """Of blocks of 16 every 4 entries, in loops; the last ones over what there is."""
    x = draw(1, 1, count, 2)
    found = value_gate.compress(x, 16)
    assert found.shape[2] == -(-count // 4)
    for i in range(found.shape[2]):
        assert torch.allclose(found[0, 0, i], x[0, 0, 4 * i : 4 * i + 8].mean(0), atol=1e-6)


def test_a_block_takes_the_best_of_the_strides_that_overlap_it():
    """Four of its own, and the one before, whose second half it shares."""
    scores = draw(2, 11)
    found = value_gate.best_stride(scores)
    wanted = [[float(row[max(0, 4 * b - 1) : 4 * b + 4].max()) for b in range(3)] for row in scores]
    assert torch.allclose(found, torch.tensor(wanted))


def fitted(rows=48, **settings):
    """The method on a tiny model with blocks of 4."""
    model = tiny_model()
    return Nosa(block=4, steps=1, **settings).bind(model).fit(Budget("rows", rows), model.shape(LENGTH)), model


def test_queries_choose_a_part_and_scores_the_rest(monkeypatch):
    """Every mask of two decode steps: the first block, the last, the best by query, and of the others by score."""
    method, model = fitted()
    seen, read = [], ChosenKV.read

    def watch(self, step, mask, bias=None):
        blocks = torch.stack([x.any(-1) for x in mask[..., : self.indexed].split(4, -1)], -1)
        seen.append((self, step, blocks, bias))
        return read(self, step, mask, bias)

    monkeypatch.setattr(ChosenKV, "read", watch)
    with Session(model, method, capacity=LENGTH + 8) as session:
        session.prefill(CONTEXT)
        session.forward(torch.tensor([[5]]), Moment.TURN_END)
        session.forward(torch.tensor([[6]]), Moment.TURN_END)
        assert len(seen) == 4
        local, aware, agnostic = method.divide(12)
        assert (local, aware, agnostic) == (3, 3, 5)
        kept = []
        for kv, step, blocks, bias in seen:
            asked = value_gate.score_by_query(step.query, value_gate.compress(kv.keys[:, :, :LENGTH], 4), step.scale)
            by_value = value_gate.best_stride(value_gate.compress(method.score(step.layer, kv.values)[..., None][
                :, :, :LENGTH], 4)[..., 0])
            every = torch.ones(1, 2, step.seen).nonzero(as_tuple=True)
            assert torch.allclose(bias(None, *every), method.score(step.layer, kv.values)[every])
            for head in range(2):
                fixed = {0, 20, 21, 22}
                order = [int(x) for x in asked[0, head, 0].argsort(descending=True, stable=True) if int(x) not in fixed]
                fixed |= set(order[:aware])
                rest = [int(x) for x in by_value[0, head].argsort(descending=True, stable=True) if int(x) not in fixed]
                assert set(blocks[0, head].nonzero()[:, 0].tolist()) == fixed | set(rest[:agnostic])
                kept.append((set(order[:aware]), set(rest[:agnostic])))
    reused = [sum(len(one[part] & two[part]) for one, two in zip(kept, kept[4:], strict=False)) for part in (0, 1)]
    assert reused[1] / agnostic >= reused[0] / aware, "the choice by scores changes with the query's alone"


def test_scores_weigh_the_entries_that_are_read(monkeypatch):
    """A decode step is softmax attention over the chosen entries, with their scores added to the logits."""
    method, model = fitted()
    masks, steps, read = [], [], ChosenKV.read

    def watch(self, step, mask, bias=None):
        masks.append(mask)
        return read(self, step, mask, bias)

    monkeypatch.setattr(ChosenKV, "read", watch)
    with Session(model, method, capacity=LENGTH + 8) as session:
        session.prefill(CONTEXT)
        attend = session.attend

        def keep(step):
            steps.append((step, attend(step)))
            return steps[-1][1]

        session.attend = keep
        session.forward(torch.tensor([[5]]), Moment.TURN_END)
        (step, found), mask, store = steps[1], masks[1], session.layers[1]
        scores = method.score(1, store.values)
        for head in range(4):
            logits = step.query[0, head, 0] @ store.keys[0, head // 2].T * step.scale + scores[0, head // 2]
            weights = logits.masked_fill(~mask[0, head // 2], -torch.inf).softmax(0)
            assert torch.allclose(found[0, head, 0], weights @ store.values[0, head // 2], atol=1e-5)
        assert not mask.all()


def test_attention_to_learned_masks_is_the_plain_one(monkeypatch):
    """A GPU's fused attention has no gradient of a mask where neither queries, keys nor values need one."""
    attend, fused = value_gate.F.scaled_dot_product_attention, []

    def watch(query, key, value, *, attn_mask, **options):
        cuda = torch.backends.cuda
        fused.append((attn_mask.requires_grad, cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled()))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(value_gate.F, "scaled_dot_product_attention", watch)
    model = tiny_model()
    ids = torch.tensor([CONTEXT])
    with torch.enable_grad():
        value_gate.measure_loss(
            model, value_gate.make_gates(model), (ids, ids, LENGTH - 20), 16, partial(Nosa().divide_context, share=0.3)
        ).backward()
    assert (True, False) in fused
    assert (True, True) not in fused


@pytest.mark.slow
def test_gates_learn_which_entries_are_asked_for():
    """The loss of answers falls, with the model as it is."""
    model = load_model("mini", dtype="float32")
    torch.manual_seed(0)
    ids = torch.randint(1, 4000, (1, 200))
    ids[0, 150:180] = ids[0, 60:90]
    labels = torch.full_like(ids, -100)
    labels[0, 152:179] = ids[0, 153:180]
    text, divide = (ids[:, :180], labels[:, :180], 140), partial(Nosa().divide_context, share=0.3)
    gates = value_gate.make_gates(model)
    before = value_gate.measure_loss(model, gates, text, 16, divide).item()
    gates.load_state_dict(dict(value_gate.train(model, 12, 16, divide, lambda _: text)))
    assert value_gate.measure_loss(model, gates, text, 16, divide).item() < 0.9 * before


@pytest.mark.slow
def test_the_shipped_gates_lose_less_than_untrained_and_random_ones(mini):
    """Loss of answers whose rows read a fifth of the blocks, on prompts that the gates were not trained on."""
    gates = {
        "trained": get_module(Nosa().bind(mini).part, torch.nn.ModuleList), "untrained": value_gate.make_gates(mini),
        "random": value_gate.make_gates(mini),
    }
    for gate in gates["random"]:
        torch.nn.init.normal_(gate.delta.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    losses, divide = dict.fromkeys(gates, 0.0), partial(Nosa().divide_context, share=0.2)
    for seed in range(12):
        context, question, answer = draw_asked(mini, f"test/nosa/{seed}")
        ids = torch.tensor([[*context, *question, *answer]])
        labels = torch.full_like(ids, -100)
        labels[0, -len(answer) - 1 : -1] = torch.tensor(answer)
        for name, own in gates.items():
            with torch.no_grad():
                text = ids, labels, len(context)
                losses[name] += float(value_gate.measure_loss(mini, own, text, 16, divide, hard=True))
    assert losses["trained"] < 0.8 * min(losses["untrained"], losses["random"])


@pytest.mark.slow
def test_blocks_chosen_by_scores_are_used_again_more_than_those_chosen_by_queries(mini, monkeypatch):
    """From token to token of a question and its answer, over layers and heads."""
    by_query, chosen, mark, choose = [], [], nosa.mark_by_query, Nosa.choose
    monkeypatch.setattr(nosa, "mark_by_query", lambda *x: by_query.append(mark(*x)) or by_query[-1])
    monkeypatch.setattr(Nosa, "choose", lambda *x: chosen.append(choose(*x)) or chosen[-1])
    same = {"scores": [], "queries": []}
    for seed in range(3):
        context, question, answer = draw_asked(mini, f"test/nosa/{seed}")
        method = Nosa().bind(mini).fit(Budget.parse("25%"), mini.shape(len(context)))
        by_query.clear()
        chosen.clear()
        with Session(mini, method, capacity=len(context) + 80) as session:
            session.prefill(context)
            for token in [*question, *answer]:
                session.forward(torch.tensor([[token]]), Moment.TURN_END)
        local = method.divide(method.rows // method.block)[0]
        fixed = torch.zeros(chosen[0].shape[-1], dtype=torch.bool)
        fixed[0] = fixed[-local:] = True
        layers = len(mini.layers)
        for one, two in zip(range(len(chosen)), range(layers, len(chosen)), strict=False):
            for name, mine in (
                ("queries", [by_query[x] & ~fixed for x in (one, two)]),
                ("scores", [chosen[x] & ~by_query[x] for x in (one, two)]),
            ):
                same[name].append(float((mine[0] & mine[1]).sum() / mine[0].sum()))
    means = {name: sum(x) / len(x) for name, x in same.items()}
    assert means["scores"] > means["queries"] + 0.2


def test_the_shipped_gates_are_those_of_mini(mini):
    """They name the tasks' text, and are smaller than 2 MB."""
    assert get_part(Nosa().bind(mini).part).data == TASKS
    path = SHIPPED / "nosa-mini.safetensors"
    assert path.stat().st_size < 2_000_000
    assert int(read_metadata(path)["steps"]) == 300


def test_a_block_that_strides_do_not_divide_is_refused():
    """With the nearest that they do."""
    with pytest.raises(UserError, match=r"block=10 is not a multiple of 4.*block=8 or 12"):
        Nosa(block=10)


@pytest.mark.parametrize(("local", "aware"), [(0.5, 0.5), (1.0, 0.0), (0.25, 0.8)])
def test_shares_that_leave_no_block_to_the_scores_are_refused(local, aware):
    """Together with the first block they would be more than the budget."""
    with pytest.raises(UserError, match="leave no block to the scores"):
        Nosa(local=local, aware=aware)


@pytest.mark.parametrize(("local", "aware"), [(0.25, 0.25), (0.5, 0.49), (0.95, 0.0), (0.0, 0.95)])
def test_the_parts_of_a_budget_are_the_budget(local, aware):
    """For every number of blocks: where rounded shares and the first block are more, a share is less."""
    for blocks in range(4, 40):
        parts = Nosa(local=local, aware=aware).divide(blocks)
        assert min(parts) >= 0
        assert 1 + sum(parts) == blocks


def test_gates_are_trained_again_for_another_division_of_the_budget():
    """Training reads the blocks of local and query-aware choice, so its weights are those of these settings."""
    parts = {fitted(aware=aware)[0].part for aware in (0.25, 0.6)}
    assert len(parts) == 2
