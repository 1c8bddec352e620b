"""Methods that move or turn keys refuse models on which they cannot, before anything runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.methods.eviction.expected_attention import ExpectedAttention
from kvbench.methods.eviction.streaming_llm import StreamingLLM


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


def test_known_rotations_are_served() -> None:
    """On a model with rotary embeddings both bind to themselves."""
    assert StreamingLLM().bind(tiny_model()) == StreamingLLM()
    assert ExpectedAttention().bind(tiny_model()) == ExpectedAttention()
