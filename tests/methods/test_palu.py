"""Palu: the full rank is exact, errors are those that any subspace leaves, groups share one, and biases are apart."""

from __future__ import annotations

import copy

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.adapter import find_bias
from kvbench.hf.tiny import tiny_model
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.palu import LatentCoder, Palu, ProjectionRecorder

CONTEXT = [x * 7 % 64 for x in range(80)]


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def find_vectors(x, heads, bias=None):
    """The recorder's vectors of these keys: their own subspaces, and their bias. x: [1, H, n, D]. bias: [H, D]"""
    bias = torch.zeros(x.shape[1], x.shape[3]) if bias is None else bias
    joined = (x - bias[:, None]).unflatten(1, (-1, heads)).transpose(2, 3).flatten(3)[0].double()
    products = dict.fromkeys(("key", "value"), joined.mT @ joined)
    state = {**products, "key_bias": bias, "value_bias": bias, "heads": torch.tensor(heads)}
    return ProjectionRecorder(heads=heads).summarize(state, 0)[0]


def test_at_the_full_rank_nothing_is_lost():
    """Two groups of two heads, to float16."""
    x = draw(1, 4, 50, 8)
    coder = LatentCoder.of(find_vectors(x, 2), 1.0, 2, 16)
    assert torch.allclose(coder.decode(coder.encode(x), 8), x, atol=2e-2)


def test_the_error_is_that_of_the_smallest_singular_values():
    """Eckart and Young: of each group's entries, the energy beyond the rank is lost and no more."""
    x = draw(1, 4, 200, 8) @ draw(8, 8, seed=1)
    coder = LatentCoder.of(find_vectors(x, 2), 0.5, 2, 16)
    lost = (coder.decode(coder.encode(x), 8) - x).square().sum().item()
    groups = x.unflatten(1, (2, 2)).transpose(2, 3).flatten(3)[0]
    wanted = sum(torch.linalg.svdvals(group)[8:].square().sum().item() for group in groups)
    assert lost == pytest.approx(wanted, rel=1e-3)


def test_heads_of_a_group_share_what_they_have_in_common():
    """Two equal heads need the rank of one: half of the rank loses nothing together, and much apart."""
    x = draw(1, 1, 200, 8).expand(1, 2, -1, -1)
    errors = []
    for heads in (2, 1):
        coder = LatentCoder.of(find_vectors(x, heads), 0.5, heads, 16)
        errors.append((coder.decode(coder.encode(x), 8) - x).square().mean().item())
    assert errors[0] < 1e-5
    assert errors[1] > 0.1


def test_quantized_latents_are_near():
    """Four bits lose little more than the subspace."""
    x = draw(1, 2, 200, 16)
    coder = LatentCoder.of(find_vectors(x, 2), 1.0, 2, 4)
    error = (coder.decode(coder.encode(x), 16) - x).square().mean() / x.square().mean()
    assert 1e-3 < error < 0.02


@pytest.mark.parametrize(("bits", "most"), [(16, 1e-3), (4, 0.1)])
def test_a_bias_costs_no_precision_and_no_rank(bits, most):
    """Keys of half the rank are restored as well with a bias of hundreds, which float16 rounds to quarters."""
    x = draw(1, 2, 200, 8) @ draw(8, 16, seed=1) / 8**0.5
    bias = 300 * draw(2, 16, seed=2)
    biased = x + bias[:, None]
    coder = LatentCoder.of(find_vectors(biased, 1, bias), 0.5, 1, bits, biased=True)
    assert (coder.decode(coder.encode(biased), 16) - biased).square().mean().sqrt() < most


def test_bytes_at_128_channels():
    """64 numbers of float16, or 4 bits and two parameters; the basis of four heads, and a bias in float32."""
    assert LatentCoder(0.5, 4, 16).entry_bytes(128) == 128
    assert LatentCoder(0.5, 4, 4).entry_bytes(128) == 32 + 4
    assert LatentCoder(0.5, 4, 16).fixed_bytes(128, 8) == 2 * (4 * 128) * (4 * 64) * 2
    biased = LatentCoder(0.5, 4, 16, biased=True)
    assert biased.fixed_bytes(128, 8) == 2 * (4 * 128) * (4 * 64) * 2 + 8 * 128 * 4


def test_a_session_at_the_full_rank_gives_the_full_cache_s_logits():
    """Keys are projected before rotation and rotated back to their places."""
    model = tiny_model()
    logits = []
    for method in (Palu(rank=1.0).bind(model).fit(None, model.shape(80)), Full()):
        with Session(model, method, capacity=90) as session:
            session.prefill(CONTEXT)
            logits.append(session.force([5, 6, 7]))
    assert torch.allclose(*logits, atol=0.05)


def test_subspaces_are_measured_before_rotation(make_step):
    """Keys that are one vector before rotation have that direction as their subspace."""
    rope, vector = tiny_model().ropes[0], draw(1, 2, 1, 16)
    key = rope.rotate(vector.expand(-1, -1, 30, -1), torch.arange(30)[None])
    recorder = ProjectionRecorder(heads=2, biases=((torch.zeros(2, 16), torch.zeros(2, 16)),))
    step = make_step(draw(1, 4, 30, 16), key, rope=rope)
    kv = recorder.layer(0)
    kv.append(step)
    recorder.attend(kv, step)
    first = recorder.summarize(kv.state, 30)[0, 0, :, :, 0].flatten()
    assert torch.cosine_similarity(first, vector.flatten(), dim=0).abs() > 0.999


def biased_model():
    """The tiny model, whose first layer adds 300 to some channels of keys and a number to values."""
    module = copy.deepcopy(tiny_model().module)
    attention = module.model.layers[0].self_attn
    for project, channels in ((attention.k_proj, [3, 20]), (attention.v_proj, [5])):
        project.bias = torch.nn.Parameter(torch.zeros(32))
        project.bias.data[channels] = 300.0 if project is attention.k_proj else -7.0
    return Model.from_module(module, id="tiny-biased")


def test_biases_of_a_model_are_apart_and_their_bytes_count():
    """A layer with biases has coders with them, its attention is near the full cache's, and bytes are as declared."""
    model = biased_model()
    method = Palu(rank=1.0).bind(model).fit(None, model.shape(80))
    (keys, values), (others, _) = method.coders(0), method.coders(1)
    assert keys.bias[0, 3] == keys.bias[1, 4] == 300
    assert values.bias[0, 5] == -7
    assert others.bias is None
    assert method.biased == ((0,), (0,))
    with Session(model, method, capacity=90) as session, Session(model, Full(), capacity=90) as full:
        for x in (session, full):
            x.prefill(CONTEXT)
        assert session.memory().stored_bytes == method.declared_bytes(model.shape(80))
        assert torch.allclose(session.force([5, 6, 7]), full.force([5, 6, 7]), atol=0.01)


def test_a_bias_is_not_found_before_a_norm_or_in_another_projection():
    """Zeros stand for none."""
    attention = biased_model().attentions[0]
    assert find_bias(attention, "k", 2, 16).max() == 300
    assert not find_bias(attention, "k", 4, 16).any()
    attention.k_norm = torch.nn.Identity()
    assert not find_bias(attention, "k", 2, 16).any()
    assert find_bias(attention, "v", 2, 16).min() == -7
    assert not find_bias(torch.nn.Identity(), "v", 2, 16).any()


@pytest.mark.parametrize(("settings", "message"), [
    ({"group": 3}, "do not divide 4"), ({"rank": 0.05}, "less than one"),
])
def test_settings_that_cannot_be_are_refused(settings, message):
    """With the reason."""
    with pytest.raises(UserError, match=message):
        Palu(**settings).fit(None, tiny_model(4, 4).shape(80))


@pytest.mark.parametrize("biased", [[[0], [2]], [[0]]])
def test_biases_of_layers_that_the_model_lacks_are_refused(biased):
    """A result that is verified names keys' and values' layers."""
    with pytest.raises(UserError, match="biased does not name layers"):
        Palu().rebind({"biased": biased}, tiny_model().shape(80))
