"""kvbench's attention function computes what transformers' own does, on every architecture that is served."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvbench.engine.session import Session
from kvbench.hf import Model, attached
from kvbench.hf.adapter import list_attentions, project_queries
from kvbench.method import BudgetKind, Card, Method, Moment

from .models import ARCHITECTURES, VOCABULARY, build, model

LENGTH, PROMPT, LIMIT = 26, 23, 6
FORMS = {"whole prompt": [0, PROMPT], "chunks": [*range(0, PROMPT, 5), PROMPT], "step by step": list(range(PROMPT + 1))}
EXACT = 1e-5


@dataclass(frozen=True)
class Dense(Method):
    """Every row held, every row read."""

    card: ClassVar[Card] = Card(
        name="dense", title="Dense", idea="Keep all. Read all.", arxiv=None, year=None, family="test", stages=(),
        budget=BudgetKind.NONE, heads="independent", upstream=None,
    )


def token_ids(batch: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(5))


def stock_attention(model: Model) -> str:
    """The default, but never SDPA for a model with soft caps: up to transformers 5.17 it leaves them out."""
    caps = getattr(model.module.config, "attn_logit_softcapping", None)
    return "eager" if caps else model.module.config._attn_implementation


def served_logits(model: Model, ids: Tensor, bounds: list[int]) -> Tensor:
    """Logits of every position through a session: the prompt in chunks, then decode steps. [B, T, V]"""
    with Session(model, Dense(), capacity=LENGTH) as session:
        chunks = itertools.pairwise(bounds)
        parts = [session.forward(ids[:, low:high], Moment.CONTEXT_END, keep=high - low) for low, high in chunks]
        parts += [session.forward(ids[:, i : i + 1], Moment.DECODE) for i in range(bounds[-1], ids.shape[1])]
    return torch.cat(parts, dim=1)


def stock_logits(model: Model, ids: Tensor) -> Tensor:
    """The same by transformers' attention and cache: the prompt at once, then steps. [B, T, V]"""
    with torch.no_grad(), attached(model.module, stock_attention(model)):
        answer = model.module(input_ids=ids[:, :PROMPT], use_cache=True)
        parts = [answer.logits]
        for i in range(PROMPT, ids.shape[1]):
            cache = answer.past_key_values
            answer = model.module(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            parts.append(answer.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_stock_attention(name: str, batch: int) -> None:
    """Every position's logits are within 1e-5 of stock cached decoding, however the prompt is cut."""
    tiny, ids = model(name), token_ids(batch)
    stock = stock_logits(tiny, ids)
    assert stock.std() > 0.01, "logits so alike that no difference could show"
    for form, bounds in FORMS.items():
        worst = (served_logits(tiny, ids, bounds) - stock).abs().max().item()
        assert worst <= EXACT, f"{form}: {worst:.1e}"


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_generate(name: str, chunk: int | None) -> None:
    """A session's greedy answers of a batch of two are those of transformers' `generate`."""
    tiny, prompts = model(name), token_ids(2)[:, :PROMPT]
    with attached(tiny.module, stock_attention(tiny)):
        stock = tiny.module.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=LIMIT,
            pad_token_id=0, eos_token_id=VOCABULARY + 1,  # none of its tokens ends an answer
        )[:, PROMPT:]
    with Session(tiny, Dense(), chunk=chunk) as session:
        session.prefill(prompts)
        tokens = session.ask([], LIMIT, stop=frozenset())
    assert tokens.ids == stock.tolist()


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_attention_is_given_back(before: str) -> None:
    """A session switches the model to kvbench's attention, and back to what it had, whether or not it failed."""
    module = build("llama", {})
    module.set_attn_implementation(before)
    tiny = Model.from_module(module)
    with Session(tiny, Dense()):
        assert module.config._attn_implementation == "kvbench"
    assert module.config._attn_implementation == before
    with pytest.raises(ZeroDivisionError), Session(tiny, Dense()):
        1 / 0  # noqa: B018
    assert module.config._attn_implementation == before


def test_call_outside_a_session_is_refused() -> None:
    """While kvbench's attention is attached, a plain call, padded or not, raises: nothing is dropped silently."""
    tiny, ids = model("llama"), token_ids(2)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    with attached(tiny.module):
        with pytest.raises(RuntimeError, match="outside a kvbench session"):
            tiny.module(input_ids=ids)
        with pytest.raises(RuntimeError, match="outside a kvbench session"):
            tiny.module(input_ids=ids, attention_mask=padding)


def test_mask_is_refused() -> None:
    """A mask that reaches the attention function within a forward pass raises, with the reason."""
    tiny, ids = model("llama"), token_ids(1)
    layer = tiny.module.model.layers[0].self_attn
    hook = layer.register_forward_pre_hook(
        lambda _module, args, named: (args, {**named, "attention_mask": torch.ones(1, 1, LENGTH, LENGTH)}),
        with_kwargs=True,
    )
    try:
        with pytest.raises(RuntimeError, match="padded batches are not supported"):
            served_logits(tiny, ids, [0, PROMPT])
    finally:
        hook.remove()


@dataclass(frozen=True)
class Reading(Dense):
    """Dense, with the layers' inputs."""

    reads_hidden: ClassVar[bool] = True


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_projected_queries_are_the_layer_s_own(name: str) -> None:
    """Without a norm, with one for each head, and with one over all heads; rotated, they are those of the step."""
    tiny, steps = model(name), []
    with Session(tiny, Reading()) as session:
        attend = session.attend
        session.attend = lambda step: (steps.append(step), attend(step))[1]  # type: ignore[method-assign]
        session.prefill(token_ids(2))
    for step, layer, attention, rope in zip(steps, tiny.layers, tiny.attentions, tiny.ropes, strict=True):
        assert step.hidden is not None
        found = project_queries(attention, step.hidden, layer.key_dim)
        assert found is not None
        assert (rope.rotate(found, step.positions) - step.query).abs().max().item() <= EXACT


def test_queries_with_another_norm_are_not_projected() -> None:
    """Weights that differ by head, as Command R+ has."""
    attention = list_attentions(build("cohere", {"use_qk_norm": True}))[0]
    assert project_queries(attention, torch.zeros(1, 1, 32), 8) is None
