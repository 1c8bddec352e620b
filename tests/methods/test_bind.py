"""Methods that move or turn keys refuse models on which they cannot, before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic_core import to_jsonable_python

from kvbench.budget import Budget, BudgetKind
from kvbench.engine.session import Session
from kvbench.errors import UndeclaredError, UserError
from kvbench.hf import Model, load_model
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.methods.eviction.expected_attention import ExpectedAttention
from kvbench.methods.eviction.streaming_llm import StreamingLLM
from kvbench.registry import find_method, list_entries
from tests.methods.test_palu import biased_model


def with_rope(**changes: bool) -> Model:
    """A tiny model whose last layer's rotation is not what it was."""
    model = tiny_model()
    return replace(model, ropes=(*model.ropes[:-1], replace(NO_ROPE, **changes)))


def test_streaming_refuses_learned_positions() -> None:
    """Keys of a model that learned its positions cannot be moved; original distances remain."""
    model = with_rope(movable=False)

    with pytest.raises(UserError, match="--set positions=original"):
        StreamingLLM().bind(model)
    assert StreamingLLM(positions="original").bind(model) == StreamingLLM(positions="original")


def test_expected_attention_refuses_an_unknown_rotation() -> None:
    """Queries whose rotation cannot be taken off have no moments to speak of."""
    with pytest.raises(UserError, match="not understood"):
        ExpectedAttention().bind(with_rope(trusted=False))


@pytest.mark.few(30)
@pytest.mark.parametrize("name", [x.name for x in list_entries("method") if x.models == "autoregressive"])
def test_a_session_without_bind_is_refused(name: str) -> None:
    """Where `bind` finds something; all other methods need no model."""
    model, kind = tiny_model(), find_method(name)
    found = kind().bind(model).resolution.keys() - kind().resolution.keys()
    if not found:
        Session(model, kind())
        return
    with pytest.raises(UserError, match=rf"{name} is not bound to a model: its .* Use method.bind\(model\)"):
        Session(model, kind())


def test_casts_with_scales_of_one_need_no_model() -> None:
    """And calibrated ones do."""
    Session(tiny_model(), find_method("fp8")())
    with pytest.raises(UserError, match="fp8 is not bound to a model: its largest"):
        Session(tiny_model(), find_method("fp8")(scale="tensor"))


def test_known_rotations_are_served() -> None:
    """On a model with rotary embeddings both bind to themselves."""
    assert StreamingLLM().bind(tiny_model()) == StreamingLLM()
    assert ExpectedAttention().bind(tiny_model()) == ExpectedAttention()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", sorted(
    (x.name for x in list_entries("method") if x.models == "autoregressive"), key=lambda x: (x == "epicache", x)
))
def test_a_result_without_the_model_declares_the_same_bytes(name: str) -> None:
    """As verification has it: bound by the saved resolution, the method resolves and declares the same."""
    check_bytes_without(load_model("mini"), name)


def test_a_result_without_the_model_counts_biases() -> None:
    """Palu stores those of the model, of which the shape says nothing."""
    check_bytes_without(biased_model(), "palu")


def check_bytes_without(model: Model, name: str) -> None:
    """Compare the declared bytes of a bound method and of one that is bound by the saved resolution."""
    shape, kind = model.shape(512), find_method(name)
    budget = Budget.parse("50%") if kind.card.budget in (BudgetKind.STORED, BudgetKind.READ) else None
    fitted = kind().bind(model).fit(budget, shape)
    saved = json.loads(json.dumps(to_jsonable_python(fitted.resolution)))
    again = kind().rebind(saved, shape).fit(budget, shape)
    resolved = json.loads(json.dumps(to_jsonable_python(again.resolution)))
    assert resolved == {key: saved[key] for key in resolved}
    for declared in ("declared_bytes", "declared_host_bytes", "declared_file_bytes", "declared_read_bytes"):
        try:
            expected = getattr(fitted, declared)(shape)
        except UndeclaredError:
            continue
        assert getattr(again, declared)(shape) == expected
