"""SeerAttention: pooling, the target, what gates learn, the blocks that they choose, and weights."""

from __future__ import annotations

import pytest
import torch

from kvbench.check.trial import CONTEXT, random_ids
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Moment
from kvbench.methods.prefill import attention_gate
from kvbench.methods.prefill.seerattention import SeerAttention
from kvbench.runs.results import TASKS
from kvbench.techniques.calibration import calibration_ids
from kvbench.techniques.parts import SHIPPED, get_part, write_part

WIDTH = 8


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_targets_are_the_largest_weights_of_pairs_of_blocks(make_step):
    """Two blocks and a half of a prompt, in loops; rows sum to one and later blocks have nothing."""
    step = make_step(draw(1, 4, 10, WIDTH), draw(1, 2, 10, WIDTH, seed=1), scale=0.4)
    found = attention_gate.find_target(step, 4)
    assert found.shape == (1, 4, 3, 3)
    for head in range(4):
        weights = torch.zeros(12, 12)
        for t in range(10):
            logits = torch.stack([step.query[0, head, t] @ step.key[0, head // 2, x] * 0.4 for x in range(t + 1)])
            weights[t, : t + 1] = logits.softmax(0)
        wanted = torch.tensor([
            [float(weights[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].max()) for j in range(3)] for i in range(3)
        ])
        assert torch.allclose(found[0, head], wanted / wanted.sum(1, keepdim=True), atol=1e-5)


def test_pooled_vectors_are_those_before_rotation():
    """Of the model's own queries and keys; the last block counts its last token for those that it lacks."""
    model, steps = tiny_model(), []
    with Session(model, attention_gate.Watcher(blocks=(4,)), capacity=10) as session:
        attend = session.attend
        session.attend = lambda step: (steps.append(step), attend(step))[1]
        session.forward(torch.tensor([CONTEXT[:10]]), Moment.CONTEXT_CHUNK)
    query, key, positions = attention_gate.pool(steps[1], 4)
    plain = steps[1].rope.rotate(steps[1].key, steps[1].positions, inverse=True)[0]
    last = plain[:, [8, 9, 9, 9]]
    assert torch.allclose(key[0, :, 2], torch.cat([last.amax(1), last.amin(1), last.mean(1)], dim=1), atol=1e-5)
    asked = steps[1].rope.rotate(steps[1].query, steps[1].positions, inverse=True)[0]
    assert torch.allclose(query[0, :, 1], asked[:, 4:8].mean(1), atol=1e-5)
    assert positions.tolist() == [[0, 4, 8]]


def test_gates_learn_the_attention_of_blocks():
    """On the examples that they see, the divergence falls by half; the best prediction has none."""
    model = tiny_model()
    examples = attention_gate.collect(model, [torch.tensor([CONTEXT]), torch.tensor([random_ids(120, seed=4)])], (8,))
    gates, found = attention_gate.make_gates(model), []
    for steps in (1, 150):
        gates.load_state_dict(dict(attention_gate.train(model, examples, steps)))
        found.append(sum(
            float(attention_gate.measure_divergence(gate, x, rope).detach())
            for gate, some, rope in zip(gates, examples, model.ropes, strict=True) for x in some
        ))
    assert found[1] < found[0] / 2

    class Perfect(torch.nn.Module):
        def forward(self, *_):
            return examples[0][0].target.log()

    best = attention_gate.measure_divergence(Perfect(), examples[0][0], model.ropes[0])
    assert float(best) == pytest.approx(0, abs=1e-4)


def test_the_shipped_gates_predict_text_of_another_kind():
    """Python's manual, on which they were not trained: the divergence is at most half of untrained gates'."""
    model = load_model("mini")
    examples = attention_gate.collect(model, [calibration_ids(model, 1024)], (32,))
    gates, found = attention_gate.make_gates(model), []
    for weights in (gates.state_dict(), get_part(SeerAttention().bind(model).part).weights):
        gates.load_state_dict(dict(weights))
        found.append(sum(
            float(attention_gate.measure_divergence(gate, x, rope).detach())
            for gate, some, rope in zip(gates, examples, model.ropes, strict=True) for x in some
        ))
    assert found[1] < found[0] / 2


@pytest.mark.parametrize("dense", [0, 2, 40])
def test_rows_compute_the_fewest_blocks_with_their_share(dense):
    """From the gate's own prediction: the first and the own block, and the best ones until the share is reached.

    The last rows, two by default, are whole; so are all of them where there are fewer than asked for.
    """
    model = tiny_model()
    method = SeerAttention(cover=0.7, block=8, steps=30, dense=dense).bind(model).fit(None, model.shape(len(CONTEXT)))
    steps, found = [], []
    with Session(model, method, capacity=len(CONTEXT)) as session:
        attend = session.attend
        session.attend = lambda step: (steps.append(step), attend(step))[1]
        session.prefill(CONTEXT)
    step = steps[1]
    gates = attention_gate.make_gates(model)
    gates.load_state_dict(dict(get_part(method.part).weights))
    *pooled, positions = attention_gate.pool(step, 8)
    shares = gates[1](*pooled, step.rope, positions).exp().detach()[0]
    found = method.choose(step.query, step.key, step).blocks[0]
    for head in range(4):
        for row in range(15):
            order = sorted(range(row + 1), key=lambda j: (j not in (0, row), -float(shares[head, row, j])))
            kept, total = set(), 0.0
            for j in order:
                if total < 0.7 or j in (0, row):
                    kept.add(j)
                total += float(shares[head, row, j])
            kept = set(range(row + 1)) if row >= 15 - dense else kept
            assert set(found[head, row, : row + 1].nonzero()[:, 0].tolist()) == kept


def test_the_last_two_rows_are_whole_by_default():
    """As `seerattn_last_block_dense`, and the other rows are not."""
    model = tiny_model()
    method = SeerAttention(cover=0.1, block=8, steps=2).bind(model).fit(None, model.shape(len(CONTEXT)))
    chosen, choose = [], SeerAttention.choose

    def watch(*args):
        chosen.append(choose(*args).blocks)
        return choose(*args)

    with pytest.MonkeyPatch.context() as patch, Session(model, method, capacity=len(CONTEXT)) as session:
        patch.setattr(SeerAttention, "choose", watch)
        session.prefill(CONTEXT)
    for blocks in chosen:
        assert blocks[:, :, -2:].all()
        assert (blocks[:, :, :-2].tril().sum(-1) < blocks.shape[3]).all()
        assert not blocks[:, :, -3, : blocks.shape[3] - 2].all()


def test_a_share_of_one_computes_everything():
    model = tiny_model()
    method = SeerAttention(cover=1, steps=2).bind(model).fit(None, model.shape(len(CONTEXT)))
    with Session(model, method, capacity=len(CONTEXT)) as session:
        session.prefill(CONTEXT)
        assert not session.effect().facts["prompt_pairs_skipped"]


def test_shipped_weights_and_those_of_another_model(tmp_path):
    """Of mini, trained on tasks; another model's file and other shapes are refused."""
    model, tiny = load_model("mini"), tiny_model()
    bound = SeerAttention().bind(model)
    assert bound.trained_on == TASKS
    assert (SHIPPED / "seerattention-mini.safetensors").stat().st_size < 2_000_000
    with pytest.raises(UserError, match="was trained for model 'mini'"):
        SeerAttention(weights=str(SHIPPED / "seerattention-mini.safetensors")).bind(tiny)
    write_part(tmp_path / "narrow", "seerattention", tiny, {"0.query": torch.zeros(4, 8, 8)}, "nothing")
    with pytest.raises(UserError, match=r"weight '0\.key' has shape None"):
        SeerAttention(weights=str(tmp_path / "narrow")).bind(tiny)
    assert get_part(bound.part).data == TASKS
