"""Statistics of layers with rotation and layers without: hand-computed cases and planted structure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.hf import load_model
from kvbench.hf.tiny import tiny_model
from kvbench.reproduce.findings import hybrid
from kvbench.reproduce.findings.observe import causal_mask, mix, run_layers
from kvbench.reproduce.findings.run import make_prompt
from tests.reproduce.findings.test_statistics import keys, see, text, uniform

LENGTH = 200


def made(attention, key, *, rotated):
    """A layer of hand-made tensors."""
    return SimpleNamespace(attention=attention, key=key, length=LENGTH, rotated=rotated)


@pytest.mark.parametrize(("ids", "wanted"), [
    ([1, 7, 8, 9, 2, 3, 4, 7, 8, 9], (7, slice(1, 4))),
    ([7, 8, 1, 7, 8, 2, 7, 8], (6, slice(3, 5))),  # of equal pieces the last
    ([1, 2, 3, 4], (4, slice(0, 0))),
])
def test_the_needle_is_the_longest_piece_that_the_end_repeats(ids, wanted):
    """Where it stands, and where its repetition begins."""
    assert hybrid.find_needle(ids) == wanted


def test_the_needle_of_a_prompt_is_its_answer():
    """The number that the question asks for, among others; the answer ends the text."""
    model = load_model("mini-hybrid")
    ids = make_prompt(model, "niah_multikey_1", 0, 512)
    answer, needle = hybrid.find_needle(ids)
    assert ids[answer:] == ids[needle] and needle.stop < answer
    assert sum(x.isdigit() for x in model.tokenizer.decode(ids[answer:])) == 7
    assert ids != make_prompt(model, "niah_multikey_1", 1, 512)


def test_attention_by_hand():
    """One layer attends to the needle while it answers, the other equally to all tokens so far."""
    found = torch.zeros(2, LENGTH, LENGTH)
    found[:, :, 0] = 1
    found[:, 189:199, 0], found[:, 189:199, 5], found[:, 189:199, 16] = 0.05, 0.75, 0.2  # of ten tokens from 190 on
    layers = made(uniform(LENGTH), keys(2, LENGTH), rotated=True), made(found, keys(2, LENGTH), rotated=False)
    values = see(hybrid.LayerKinds(190, slice(5, 15)), *layers)
    assert values["needle_unrotated"] == pytest.approx(0.75)
    assert values["behind_unrotated"] == pytest.approx(0.2)
    assert values["needle_rotated"] == pytest.approx(sum(10 / n for n in range(190, 200)) / 10)
    assert values["recent_rotated"] == pytest.approx(8 / 64)
    assert values["needle_by_layer"] == [values["needle_rotated"], values["needle_unrotated"]]


def test_attention_to_the_own_token_is_recent():
    """All of it to the token itself, or 40 tokens before."""
    itself, before = torch.eye(LENGTH).expand(2, -1, -1), torch.eye(LENGTH).roll(-40, 1).tril().expand(2, -1, -1)
    layers = made(before, keys(2, LENGTH), rotated=True), made(itself, keys(2, LENGTH), rotated=False)
    values = see(hybrid.LayerKinds(190, slice(5, 15)), *layers)
    assert (values["recent_unrotated"], values["recent_rotated"]) == (1.0, 0.0)


def test_rank_and_outliers_of_keys_by_hand():
    """Keys of rank 1 have all of their energy; one channel of 16 with half of their size is 8 times the mean."""
    one = torch.ones(2, LENGTH, 16)
    one[..., 3] = 15.0
    layers = made(uniform(LENGTH), keys(2, LENGTH), rotated=True), made(uniform(LENGTH), one, rotated=False)
    values = see(hybrid.LayerKinds(190, slice(5, 15)), *layers)
    assert values["energy_unrotated"] == pytest.approx(1.0, abs=1e-5)
    assert values["energy_rotated"] < 0.5
    assert values["outlier_unrotated"] == pytest.approx(8.0)
    assert values["outlier_rotated"] < 2


def test_a_window_hides_what_is_farther():
    """Distances below it; log-probabilities equal those of the model's own attention."""
    assert causal_mask(4, 2).tolist() == [
        [True, False, False, False], [True, True, False, False], [False, True, True, False], [False, False, True, True],
    ]
    for model in (tiny_model(window=16), load_model("mini-hybrid", dtype="float32")):
        ids = text(length=100)
        ours = run_layers(model, ids, lambda x: mix(x.attention, x.value), keep=100)
        with torch.no_grad():
            theirs = model.module(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert torch.allclose(ours, theirs, atol=1e-4)
