"""Conversations and answers of whole models: operations that are Triton's give what torch's give."""

from __future__ import annotations

import copy

import pytest
import torch

from kvbench.diffusion.policy import denoise
from kvbench.diffusion.sampling import Sampling
from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.hf.tiny import VOCABULARY, tiny_diffusion, tiny_model
from kvbench.kernels.choice import using
from kvbench.method import Budget
from kvbench.registry import find_method

DENSE = {"dense_attention": "triton", "dense_attention.prompt": "triton", "dense_attention.chunk": "triton"}
RAGGED = {f"ragged_attention.{x}": "triton" for x in ("ragged_partial", "dense_partial", "merge_partials")}
PAGED = {
    "page_select.page_bounds": "torch", "page_select.page_scores": "triton", "page_select.select_pages": "torch",
    "page_attention": "triton",
}
PROMPT = {x: DENSE[x] for x in ("dense_attention", "dense_attention.prompt")}
METHODS = {
    "full": (None, DENSE), "knorm+adakv": (Budget("rows", 12), PROMPT | RAGGED),
    "quest": (Budget("rows", 12), PROMPT | PAGED),
}
"""Budget, and what must have run as what."""
CONVERSATIONS = {
    "snapkv": DENSE | {"window_scores": "triton"}, "h2o": DENSE | {"column_sums": "triton"}, "streaming-llm": DENSE,
    "tova": DENSE | {"window_scores": "triton"}, "quest": DENSE | PAGED,
    "kvzip": DENSE | RAGGED | {"column_sums.column_maxima": "triton"},
}
"""The implementation that must have run each operation."""
SETTINGS = {"quest": {"page": 4}, "snapkv": {"window": 4, "kernel": 3}}


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def move(model, device):
    """The model where Triton runs."""
    if device.type == "cpu":
        return model
    return Model.from_module(copy.deepcopy(model.module).to(device), id=model.id, masking=model.masking)


@pytest.fixture
def model(request, triton):
    """A tiny model where Triton runs."""
    return move(tiny_model(*request.param), triton(torch.empty(0)).device)


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("model", [(4, 2, None), (4, 1, 16)], ids=["GQA", "sliding window"], indirect=True)
@pytest.mark.parametrize("name", METHODS)
def test_triton_gives_the_logits_of_torch(name, model, static):
    """Over a prompt, several tokens at once and one; every operation that ran was the one that was asked for."""
    budget, wanted = METHODS[name]
    method = find_method(name)(**SETTINGS.get(name, {})).fit(budget, model.shape(40))
    answers = {}
    for kernels in ("torch", "triton"):
        with using(kernels) as ran, Session(model, method, capacity=70) as session:
            parts = [session.prefill(ids(40))]
            if static:
                session.make_static()
            parts += [session.force(ids(5, 2))[0], session.force(ids(1, 3))[0]]
        answers[kernels] = torch.cat(parts)
    assert torch.allclose(answers["triton"], answers["torch"], atol=1e-4)
    assert ran == wanted


@pytest.mark.slow
@pytest.mark.parametrize("model", [(4, 2, None)], ids=["GQA"], indirect=True)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_triton_gives_the_tokens_and_stores_of_torch(name, model):
    """A context in two chunks, a question of several tokens that is asked afterwards, and an answer of four."""
    method = find_method(name)(**SETTINGS.get(name, {})).fit(Budget("rows", 12), model.shape(40))
    found = {}
    for kernels in ("torch", "triton"):
        with using(kernels) as ran, Session(model, method, capacity=60, chunk=25, track=True) as session:
            session.prefill(ids(40))
            answer = session.ask(ids(5, 2), 4, stop=frozenset()).ids
            found[kernels] = answer, [
                (x.logical_positions(), x.keys, x.values, *(x.frozen.tensors() if x.frozen is not None else ()))
                for x in session.layers
            ]
    assert found["triton"][0] == found["torch"][0]
    for fast, plain in zip(found["triton"][1], found["torch"][1], strict=True):
        assert fast[0].equal(plain[0])
        assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(fast, plain, strict=True))
    assert ran == CONVERSATIONS[name]


def test_triton_fills_in_what_torch_does(triton):
    """A diffusion model's entries look at each other both ways, under a policy that keeps some of them."""
    device = triton(torch.empty(0)).device
    model, prompt = move(tiny_diffusion(shifted=False), device), torch.tensor([ids(20)], device=device)
    answers = {}
    for kernels in ("torch", "triton"):
        with using(kernels) as ran:
            answers[kernels] = denoise(
                model, find_method("fast-dllm-prefix")(), prompt, 4, Sampling(steps=2, block=4), 0
            ).ids
    assert answers["triton"] == answers["torch"]
    assert ran == DENSE
