"""Locret: what its heads learn, the blocks that they evict after, and its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvbench.check.trial import CONTEXT, open_session, random_ids
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.eviction import retaining
from kvbench.methods.eviction.locret import HIDDEN, Locret
from kvbench.methods.eviction.retaining import collect, make_heads, rank_correlation, train
from kvbench.registry import find_method
from kvbench.runs.results import TASKS
from kvbench.techniques.parts import SHIPPED, get_module, get_part, read_metadata, write_part
from tests.methods.needles import draw_asked


@pytest.fixture(scope="module")
def model():
    """Two layers, four query heads, two KV heads."""
    return tiny_model()


def keep_by_hand(scores, budget, block, stabilizers, local):
    """Positions that stay of a list of scores: after every block the best, of equal ones the first."""
    held = []
    for start in range(0, len(scores), block):
        held += range(start, min(start + block, len(scores)))
        ended = held[-1] == len(scores) - 1
        last = max(1, min(local, budget // 4) if ended else int(stabilizers * budget))
        if len(held) > budget:
            safe, rest = held[-last:], sorted(held[:-last], key=lambda p: (-scores[p], p))
            held = sorted([*rest[: budget - last], *safe])
    return held


@pytest.mark.parametrize(
    ("block", "stabilizers", "local"), [(1024, 0.15, 100), (32, 0.5, 4), (20, 0.0, 1), (50, 0.2, 9)]
)
def test_entries_are_kept_block_by_block(model, block, stabilizers, local):
    """By hand from the scores of the first layer, which do not depend on what was evicted."""
    method = Locret(block=block, stabilizers=stabilizers, local=local, steps=5).bind(model).fit(
        Budget("rows", 30), model.shape(len(CONTEXT))
    )
    found = []

    class Watched(Locret):
        def predict(self, step):
            scores = super().predict(step)
            if step.layer == 0 and step.moment.in_context:
                found.append(scores[0])
            return scores

    watched = object.__new__(Watched)
    watched.__dict__.update(method.__dict__)
    with Session(model, watched, capacity=len(CONTEXT) + 20, track=True) as session:
        session.prefill(CONTEXT)
        positions = session.layers[0].logical_positions()[0].tolist()
    scores = torch.cat(found, dim=-1).tolist()
    assert positions == [keep_by_hand(x, 30, block, stabilizers, local) for x in scores]


@pytest.mark.parametrize("chunk", [None, 7])
def test_memory_never_exceeds_the_budget_and_a_block(model, chunk):
    """Peak entries per head, also where the context is run in smaller chunks."""
    method = Locret(block=16, steps=2).bind(model).fit(Budget("rows", 24), model.shape(len(CONTEXT)))
    most = []

    class Watched(Locret):
        def attend(self, kv, step):
            most.append(kv.nbytes())
            return super().attend(kv, step)

    watched = object.__new__(Watched)
    watched.__dict__.update(method.__dict__)
    with Session(model, watched, capacity=len(CONTEXT), chunk=chunk) as session:
        session.prefill(CONTEXT)
    entry = 2 * (2 * 16 * 4 + 4)  # 2 heads: keys and values of 16 in float32, and the score
    last = len(CONTEXT) % 16 or 16
    assert max(most) <= (24 + 16 + last) * entry


def test_a_budget_of_every_entry_is_the_full_cache(model):
    """Nothing is evicted between blocks, so the prefill is exact."""
    logits = []
    for method in (Locret(block=16, steps=2), Full()):
        with open_session(method, model, None if isinstance(method, Full) else Budget("fraction", 1.0)) as session:
            logits.append(session.prefill(CONTEXT))
    assert torch.allclose(*logits, atol=1e-5)


# Training


def test_targets_are_the_highest_logits_of_the_answer(model):
    """By hand from the queries and keys of a pass: over the group's query heads and the answer's rows."""
    ids = torch.tensor([random_ids(30, seed=5)])
    found = collect(model, [(ids, 22)])
    with Session(model, Full(), capacity=30) as session:
        steps = []
        attend = session.attend
        session.attend = lambda step: (steps.append(step), attend(step))[1]
        session.forward(ids, Moment.CONTEXT_END)
    for step, [(inputs, targets)] in zip(steps, found, strict=True):
        assert inputs.shape == (22, (4 + 2 + 2) * 16)
        for head in range(2):
            logits = torch.stack([
                step.query[0, q, 22:] @ step.key[0, head, :22].T * step.scale for q in (2 * head, 2 * head + 1)
            ])
            assert torch.allclose(targets[:, head], logits.amax((0, 1)), atol=1e-5)


def test_inputs_do_not_depend_on_positions(model):
    """In the first layer, the same token has the same input wherever it stands: it is taken before rotation."""
    ids = torch.tensor([[7, 5, 7, 9, 7, 3]])
    inputs = collect(model, [(ids, 5)])[0][0][0]
    assert torch.allclose(inputs[0], inputs[2], atol=1e-5)
    assert torch.allclose(inputs[0], inputs[4], atol=1e-5)
    assert not torch.allclose(inputs[0], inputs[1], atol=1e-2)


@pytest.mark.slow
def test_heads_learn_the_targets(model):
    """On texts that they have not seen, the trained scores rank entries as the targets do; untrained ones do not."""
    texts = [(torch.tensor([random_ids(64, seed=s)]), 48) for s in range(33)]
    examples = collect(model, texts)
    seen, unseen = [x[:30] for x in examples], [x[30:] for x in examples]
    correlations = []
    for steps in (0, 300):
        weights = train(model, seen, HIDDEN, steps)
        heads = make_heads(model, HIDDEN)
        heads.load_state_dict(dict(weights))
        correlations.append(sum(
            rank_correlation(head(inputs)[:, h], wanted[:, h])
            for head, held in zip(heads, unseen, strict=True) for inputs, wanted in held for h in range(2)
        ) / 12)
    assert abs(correlations[0]) < 0.3
    assert correlations[1] > 0.4


def test_the_loss_is_smooth_l1_and_a_share_of_neighbors_differences():
    """By hand: 0.5 * 0.5**2, 3 - 0.5; neighbors differ by 2.5."""
    predicted, wanted = torch.tensor([[1.0], [3.5]]), torch.tensor([[0.5], [0.5]])
    assert float(retaining.measure_loss(predicted, wanted)) == pytest.approx((0.125 + 2.5) / 2 + 0.0025 * 6.25)


def test_rank_correlation_by_hand():
    """One inversion among three: 1 - 6 * 2 / (3 * 8)."""
    assert rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0])) == pytest.approx(0.5)


# Weights


def test_weights_of_another_model_method_or_shape_are_refused(model, tmp_path):
    """With what the file says, and what is needed."""
    path = tmp_path / "part.safetensors"
    weights = make_heads(model, HIDDEN).state_dict()
    write_part(path, "locret", model, weights, TASKS)
    bound = Locret(weights=str(path)).bind(model)
    assert bound.trained_on == TASKS
    assert get_part(bound.part).weights.keys() == weights.keys()
    with pytest.raises(UserError, match=r"was trained for model .*Give weights of this model"):
        Locret(weights=str(path)).bind(tiny_model(2, 2))
    write_part(tmp_path / "other.safetensors", "longspec", model, weights, TASKS)
    with pytest.raises(UserError, match="has weights of method 'longspec', not 'locret'"):
        Locret(weights=str(tmp_path / "other.safetensors")).bind(model)
    other = make_heads(tiny_model(4, 4), HIDDEN).state_dict()
    write_part(tmp_path / "wide.safetensors", "locret", model, other, TASKS)
    with pytest.raises(UserError, match=r"weight '0.0.weight' has shape \(64, 192\).*needs \(64, 128\)"):
        Locret(weights=str(tmp_path / "wide.safetensors")).bind(model)


@pytest.mark.slow
def test_the_shipped_heads_rank_entries_better_than_a_window_of_attention(mini, monkeypatch):
    """By the correlation with what an answer reads, on texts of other seeds than those of the training.

    The attention of the last 32 tokens, which see the question, and untrained heads do worse.
    """
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from train_part import draw_texts  # found in the folder of scripts

    trained = get_module(Locret().bind(mini).part, torch.nn.ModuleList)
    torch.manual_seed(0)
    untrained, found = make_heads(mini, HIDDEN), {"trained": [], "window": [], "untrained": []}
    for ids, prompt in draw_texts(mini, 10, "held"):
        steps = []
        with Session(mini, Full(), capacity=ids.shape[1]) as session:
            attend = session.attend
            session.attend = lambda step: (steps.append(step), attend(step))[1]  # noqa: B023  # called in this turn
            session.forward(ids, Moment.CONTEXT_END)
        for step in steps:
            wanted, inputs = retaining.find_targets(step, prompt), retaining.gather_inputs(step)[0, :prompt]
            rows = step.query[0, :, prompt - 32 : prompt].unflatten(0, (2, -1))
            logits = rows @ step.key[0, :, None, :prompt].mT * step.scale
            hidden = torch.ones(32, prompt, dtype=torch.bool).triu(prompt - 31)
            scores = {
                "window": logits.masked_fill(hidden, -torch.inf).softmax(-1).mean((1, 2)).T,
                "trained": trained[step.layer](inputs), "untrained": untrained[step.layer](inputs),
            }
            for name, own in scores.items():
                found[name] += [rank_correlation(own[:, h], wanted[:, h]) for h in range(2)]
    means = {name: sum(x) / len(x) for name, x in found.items()}
    assert means["trained"] > means["window"] + 0.03
    assert means["trained"] > means["untrained"] + 0.1


@pytest.mark.slow
def test_the_shipped_heads_keep_answers_that_random_eviction_loses(mini):
    """At 12 % of the entries, with a question that is not seen before."""
    right = {}
    for name in ("locret", "random"):
        right[name] = 0
        for seed in range(12):
            context, question, answer = draw_asked(mini, f"test/locret/{seed}")
            method = find_method(name)().bind(mini).fit(Budget.parse("12%"), mini.shape(len(context)))
            with Session(mini, method, capacity=len(context) + 60) as session:
                session.prefill(context)
                right[name] += session.ask(question, len(answer)).ids[0] == answer
    assert right["locret"] > right["random"] + 2


def test_the_shipped_heads_are_minis_and_small():
    """Its metadata name the model and the data; below 2 MB."""
    path = SHIPPED / "locret-mini.safetensors"
    facts = read_metadata(path)
    assert (facts["method"], facts["model"], facts["data"]) == ("locret", "mini", TASKS)
    assert path.stat().st_size < 2_000_000
    assert load_file(path)["0.0.weight"].dtype == torch.bfloat16
