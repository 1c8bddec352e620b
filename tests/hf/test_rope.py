"""Keys can be moved and unrotated as the model itself would have rotated them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.hf import Forward, Model, Rope, attached
from kvbench.method import Moment, Step

from .models import LONGROPE, SERVED, YARN, build, model

KEYS_CHANGE_AFTER_ROTATION = {"hunyuan_v1_dense"}
"""A norm with weights follows the rotation, so no rotation moves their keys."""
LEARNED = {"opt", "gpt2", "gpt_bigcode", "biogpt"}
"""Positions are learned and added to the input."""
NO_ROPE_LAYERS = {"smollm3": [False, True], "cohere2": [False, True], "exaone4": [False, True]}
WIDTHS = {"phi": 4, "gpt_neox": 4, "stablelm": 4, "glm": 4, "glm4": 4, "nemotron": 4, "persimmon": 4}
"""Rotated dimensions of 8, where they are not all."""
ROTATED = [name for name in SERVED if name not in KEYS_CHANGE_AFTER_ROTATION | LEARNED]
EXACT = 2e-5


def lone_steps(tiny: Model, position: int) -> list[Step]:
    """Every layer's step of one token at a position; alone, so that its value is its attention output."""
    steps: list[Step] = []

    def attend(step: Step) -> Tensor:
        steps.append(step)
        return step.value.repeat_interleave(step.query.shape[1] // step.value.shape[1], dim=1)

    with attached(tiny.module):
        positions = torch.tensor([[position], [position]])
        forward = Forward(moment=Moment.CONTEXT_END, positions=positions, seen=1, attend=attend, ropes=tiny.ropes)
        tiny.run(torch.tensor([[7], [11]]), forward)
    return sorted(steps, key=lambda step: step.layer)


def filled(value: int) -> Tensor:
    return torch.full((2, 1), value)


@pytest.mark.few(12)
@pytest.mark.parametrize(("start", "distance"), [(0, 1), (3, 200), (300, -290)])
@pytest.mark.parametrize("name", ROTATED)
def test_shift_moves_keys_and_queries_as_the_model_does(name: str, start: int, distance: int) -> None:
    """The rows of a token at p, shifted by d, are the model's own rows of that token at p + d, on every layer."""
    near, far = (lone_steps(model(name), position) for position in (start, start + distance))
    for one, other in zip(near, far, strict=True):
        for rows, moved in ((one.key, other.key), (one.query, other.query)):
            shifted = one.rope.shift(rows, filled(distance))
            assert (shifted - moved).abs().max() <= EXACT * moved.abs().max()


@pytest.mark.few(12)
@pytest.mark.parametrize("name", ROTATED)
def test_unrotated_keys_do_not_know_their_position(name: str) -> None:
    """Inverse rotation gives the same rows wherever the token stood, and rotating them again gives them back."""
    for one, other in zip(*(lone_steps(model(name), position) for position in (5, 250)), strict=True):
        plain, again = (x.rope.rotate(x.key, filled(p), inverse=True) for x, p in ((one, 5), (other, 250)))
        assert (plain - again).abs().max() <= EXACT * plain.abs().max()
        back = one.rope.rotate(plain, filled(5))
        assert (back - one.key).abs().max() <= 1e-6 * one.key.abs().max()


@pytest.mark.few(12)
@pytest.mark.parametrize("name", [*ROTATED, *sorted(LEARNED)])
def test_terms_are_what_a_rotation_does(name: str) -> None:
    """Multiples of a channel and of its partner, added up, are the rotated row, however a model pairs its channels."""
    tiny, positions = model(name), torch.tensor([[0, 7, 200], [3, 3, 41]])
    rows = torch.randn(2, 1, 3, tiny.layers[0].key_dim, generator=torch.Generator().manual_seed(0))
    for rope in tiny.ropes:
        turned, terms = rows.clone(), rope.terms(positions)
        if terms is not None:
            cos, sin, partner = (x[:, None] if x.dim() == 3 else x for x in terms)
            lead = rows[..., : cos.shape[-1]]
            turned[..., : cos.shape[-1]] = lead * cos + lead[..., partner] * sin
        assert torch.allclose(turned, rope.rotate(rows, positions), atol=1e-6)


@pytest.mark.few(12)
@pytest.mark.parametrize("name", [*ROTATED, *sorted(LEARNED)])
def test_which_layers_rotate(name: str) -> None:
    """The rotated width of every layer is the architecture's: partial, whole, or none."""
    tiny = model(name)
    assert all(rope.trusted for rope in tiny.ropes)
    assert [rope.movable for rope in tiny.ropes] == [name not in LEARNED] * 2
    plain = [True, True] if name in LEARNED else NO_ROPE_LAYERS.get(name, [False, False])
    assert [rope.angles is None for rope in tiny.ropes] == plain
    for rope, layer in zip(tiny.ropes, tiny.layers, strict=True):
        assert rope.width == (0 if rope.angles is None else WIDTHS.get(name, layer.key_dim))


def test_layers_of_different_types_turn_differently() -> None:
    """Gemma's sliding and full layers have their own base, and each layer gets its own."""
    sliding, full = model("gemma3_text").ropes
    rows = torch.ones(1, 1, 1, 8)
    distance = torch.tensor([[50]])
    assert (sliding.shift(rows, distance) - full.shift(rows, distance)).abs().max() > 0.1


def test_yarn_scaling_is_divided_out() -> None:
    """YaRN makes rotated keys longer; unrotated ones have the length that the projection gave them."""
    tiny = model("llama-yarn")
    step = lone_steps(tiny, 9)[0]
    assert step.rope.scaling == pytest.approx(0.1 * torch.log(torch.tensor(YARN["factor"])).item() + 1, rel=1e-6)
    inputs = tiny.module.model.embed_tokens(torch.tensor([[7], [11]]))
    layer = tiny.module.model.layers[0]
    projected = layer.self_attn.k_proj(layer.input_layernorm(inputs)).unflatten(-1, (2, 8)).transpose(1, 2)
    assert torch.allclose(step.rope.rotate(step.key, filled(9), inverse=True), projected, atol=1e-5)


def test_rows_of_one_block_take_their_own_positions() -> None:
    """Each row of each sequence turns by its own distance."""
    rope = model("llama").ropes[0]
    rows = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    distance = torch.tensor([[1, 5, -3], [0, 40, 2]])
    together = rope.shift(rows, distance)
    for batch in range(2):
        for row in range(3):
            alone = rope.shift(rows[batch : batch + 1, :, row : row + 1], distance[batch : batch + 1, row : row + 1])
            assert torch.allclose(together[batch, :, row], alone[0, :, 0], atol=1e-6)


def test_half_precision_rows_keep_their_type() -> None:
    """Rows in bfloat16 come back in bfloat16, as near to the float32 answer as it can say."""
    rope = model("llama").ropes[0]
    rows = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    turned = rope.shift(rows.bfloat16(), torch.tensor([[7, 7, 7]]))
    assert turned.dtype == torch.bfloat16
    assert torch.allclose(turned.float(), rope.shift(rows, torch.tensor([[7, 7, 7]])), atol=0.05)


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_learned_positions_cannot_be_moved(name: str) -> None:
    """Where positions are added to the input, unrotating is nothing to do, and moving is refused with the reason."""
    rope, rows = model(name).ropes[0], torch.ones(1, 4, 1, 8)
    assert torch.equal(rope.rotate(rows, torch.tensor([[9]]), inverse=True), rows)
    with pytest.raises(UserError, match="learned positions"):
        rope.shift(rows, torch.tensor([[9]]))


@pytest.mark.parametrize("name", sorted(KEYS_CHANGE_AFTER_ROTATION))
def test_keys_that_change_after_rotation_are_not_trusted(name: str) -> None:
    """A model whose keys are not just rotated is served, but rotating its keys is refused."""
    rope = model(name).ropes[0]
    assert not rope.trusted
    for turn in (rope.rotate, rope.shift):
        with pytest.raises(UserError, match="leaves keys where they are"):
            turn(torch.ones(1, 2, 1, 8), torch.tensor([[9]]))


def test_a_rotation_that_is_not_the_models_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose file rotates in another way than its layers do is found out."""
    module = build("llama", {})
    assert all(rope.trusted for rope in Model.from_module(module).ropes)
    import transformers.models.llama.modeling_llama as source

    honest = source.apply_rotary_pos_emb
    for layer in module.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", _with(layer.self_attn.forward, source, honest, monkeypatch))
    monkeypatch.setattr(source, "apply_rotary_pos_emb", lambda q, k, cos, sin: honest(q, k, cos, -sin))
    assert not any(rope.trusted for rope in Model.from_module(module).ropes)


def _with(forward: Any, source: Any, function: Any, patch: pytest.MonkeyPatch) -> Any:
    """A forward that finds this function in its file, whatever stands there for others."""

    def run(*args: Any, **options: Any) -> Any:
        with patch.context() as inner:
            inner.setattr(source, "apply_rotary_pos_emb", function)
            return forward(*args, **options)

    return run


def test_longrope_ends_at_its_original_length() -> None:
    """LongRoPE changes all frequencies beyond the original length, so the model's length is the original one."""
    tiny = Model.from_module(build("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}))
    assert tiny.module.config.max_position_embeddings == 512
    assert tiny.max_length == 64
    assert all(isinstance(rope, Rope) and rope.trusted for rope in tiny.ropes)
