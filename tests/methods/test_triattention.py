"""TriAttention: the trigonometric series against its definition, the share of norms, and what is pinned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.eviction.triattention import (
    CenterRecorder,
    TriAttention,
    expected_products,
    find_centers,
    pair_norms,
    standardize,
)
from kvbench.techniques import calibration
from kvbench.techniques.calibration import measure


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_rotated(make_step, rope, count=30):
    """A step whose keys are rotated as the model rotates them, and the keys before."""
    plain = draw(1, 2, count, 16)
    key = rope.rotate(plain, torch.arange(count)[None])
    return make_step(draw(1, 4, count, 16, seed=1), key, rope=rope), plain


def test_scores_are_the_authors_series(make_step):
    """Per pair f: |q||k| cos(w (next - p + d) + phase), the mean over d = 1, 2, 4, 8, and (E|q| - |E q|) |k|."""
    rope = tiny_model().ropes[0]
    step, plain = make_rotated(make_step, rope)
    center = draw(4, 16, seed=2)
    norm = torch.complex(center[:, :8], center[:, 8:]).abs() + draw(4, 8, seed=3).abs()
    found = expected_products(step.key, center, torch.cat([norm, norm], dim=1), step, 8)
    frequencies = 10000.0 ** (-torch.arange(8) / 8)
    for head in range(4):
        q = torch.complex(center[head, :8], center[head, 8:])
        for place in range(30):
            k = torch.complex(plain[0, head // 2, place, :8], plain[0, head // 2, place, 8:])
            phase, amplitude = (q * k.conj()).angle(), q.abs() * k.abs()
            wanted = sum(
                (amplitude * torch.cos(frequencies * (30 - place + d) + phase)).sum() for d in (1, 2, 4, 8)
            ) / 4 + ((norm[head] - q.abs()) * k.abs()).sum()
            assert found[0, head // 2, head % 2, place].item() == pytest.approx(wanted.item(), abs=2e-4)


def test_a_pair_s_norm_survives_rotation(make_step):
    """Rotated keys have the norms of the keys before rotation, so that these need not be recovered."""
    rope = tiny_model().ropes[0]
    step, plain = make_rotated(make_step, rope)
    assert torch.allclose(pair_norms(step.key, step), pair_norms(plain, step), atol=1e-5)
    assert torch.allclose(pair_norms(plain, step)[..., :8], (plain[..., :8] ** 2 + plain[..., 8:] ** 2).sqrt())


def test_centers_are_means_over_the_text(monkeypatch):
    """Chunks do not matter, and the mean norm of a pair is at least the norm of its mean."""
    model = tiny_model()
    whole = measure(model, CenterRecorder(), 64, find_centers)
    monkeypatch.setattr(calibration, "CHUNK", 7)
    for one, other in zip(measure(model, CenterRecorder(), 64, find_centers), whole, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
        center, norm = one
        means = torch.complex(center[:, :8], center[:, 8:]).abs()
        assert (norm[:, :8] >= means - 1e-5).all()
        assert norm[:, :8].equal(norm[:, 8:])


def test_centers_are_measured_before_rotation(make_step):
    """Queries that are one vector before rotation have it as their center, and its norms."""
    rope, vector = tiny_model().ropes[0], draw(1, 4, 1, 16)
    query = rope.rotate(vector.expand(-1, -1, 30, -1), torch.arange(30)[None])
    recorder, step = CenterRecorder(), make_step(query, draw(1, 2, 30, 16), rope=rope)
    kv = recorder.layer(0)
    kv.append(step)
    recorder.attend(kv, step)
    center, norm = find_centers(kv.state, 30)
    assert torch.allclose(center, vector[0, :, 0], atol=1e-5)
    assert torch.allclose(norm, pair_norms(vector, step)[0, :, 0], atol=1e-5)


def test_a_group_s_largest_standardized_score_counts(make_step, monkeypatch):
    """Each query head's scores have mean 0 and deviation 1 before the largest of two heads is taken."""
    step, _ = make_rotated(make_step, tiny_model().ropes[0])
    center = draw(4, 16, seed=2)
    center[1] *= 100  # without standardizing, the second head would decide alone
    monkeypatch.setitem(calibration._FOUND, "some", (torch.stack([center, pair_norms(center[None], step)[0]]),))
    method = replace(TriAttention(centers="some", farthest=8), rows=10, length=30)
    kv = method.layer(0)
    kv.append(step)
    logits = expected_products(step.key, center, pair_norms(center[None], step)[0], step, 8)
    unit = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True, correction=0)
    assert torch.allclose(method.score(kv, step, 10), torch.maximum(unit[:, :, 0], unit[:, :, 1]), atol=1e-4)


def test_pinned_entries_do_not_move_the_standard():
    """Logits 1, 3 and a pinned 100: the two that may go have mean 2 and deviation 1."""
    logits, counted = torch.tensor([[[[1.0, 3.0, 100.0]]]]), torch.tensor([[[[True, True, False]]]])
    assert standardize(logits, counted)[..., :2].tolist() == [[[[-1.0, 1.0]]]]


@pytest.mark.parametrize("pinned", [True, False])
def test_the_prompt_is_pinned_where_it_fits(pinned):
    """A budget of 40 holds the prompt of 20, if pinned, and generated tokens; it is met once in eight tokens."""
    model = tiny_model()
    method = TriAttention(period=8, recent=2, tokens=64, pin_prompt=pinned).bind(model)
    with Session(model, method.fit(Budget("rows", 40), model.shape(20)), capacity=100) as session:
        session.prefill([x % 64 for x in range(20)])
        for token in range(60):
            session.forward(torch.tensor([[token % 64]]), Moment.DECODE)
            assert session.layers[0].n <= 47
        prompts = [(store.positions < 20).sum(-1).min().item() for store in session.layers]
    assert all(x == 20 for x in prompts) is pinned
