"""Weights in the authors' formats, as tiny files with the names in their released code."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file

from kvbench.check.trial import open_session, random_ids
from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.methods.eviction.locret import AUTHORS as LOCRET
from kvbench.methods.eviction.locret import Locret
from kvbench.methods.lossless.drafter import Drafter
from kvbench.methods.lossless.longspec import LongSpec
from kvbench.methods.prefill.flux_attention import FluxAttention
from kvbench.methods.prefill.ftp import FTP
from kvbench.methods.prefill.router import make_routers
from kvbench.methods.prefill.seerattention import SeerAttention
from kvbench.methods.retrieval.nosa import Nosa
from kvbench.techniques.parts import get_module, get_part

WIDTH, WIDE = 16, 24


def draw(*shape):
    """Normal random numbers, other ones for every shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def layers(weights):
    """The weights of an attention module, in both layers of a model, next to one that is not of the part."""
    named = {f"model.layers.{i}.self_attn.{name}": x + i for i in range(2) for name, x in weights.items()}
    return {**named, "model.layers.0.self_attn.q_proj.weight": draw(2, 2)}


def test_heads_of_another_width_are_read(tmp_path):
    """Locret's: fc1 [width, (queries + 2 KV) * D], fc2 [KV heads, width], and an activation between them."""
    path, one, two = tmp_path / "heads.safetensors", draw(WIDE, 8 * WIDTH), draw(2, WIDE)
    save_file(layers({"fc1.weight": one, "fc2.weight": two}), path)
    method = Locret(weights=str(path)).bind(tiny_model())
    x = draw(3, 8 * WIDTH)
    wanted = torch.nn.functional.silu(x @ (one + 1).T) @ (two + 1).T
    assert torch.allclose(get_module(method.part, torch.nn.ModuleList)[1](x), wanted, atol=1e-4)
    assert "authors" in method.trained_on


def test_gates_without_a_projection_of_queries_are_read(tmp_path):
    """SeerAttention's attn_gate_weights: keys are projected for every query head, queries stay as they are."""
    path, model, weight = tmp_path / "attn_gate_weights.safetensors", tiny_model(), draw(4, 3 * WIDTH, WIDTH)
    save_file(layers({"attn_gate.mask_linear_k.weight": weight}), path)
    method = SeerAttention(weights=str(path)).bind(model)
    query, key, places = draw(1, 4, 2, WIDTH), draw(1, 2, 2, 3 * WIDTH), torch.tensor([[0, 8]])
    found = get_module(method.part, torch.nn.ModuleList)[0](query, key, model.ropes[0], places)
    for head in range(4):
        asked = model.ropes[0].rotate(query, places)[0, head, 1]
        keys = model.ropes[0].rotate((key[0, head // 2] @ weight[head])[None, None], places)[0, 0]
        assert torch.allclose(found[0, head, 1], (keys @ asked * WIDTH**-0.5).log_softmax(0), atol=1e-4)


def test_routers_are_read_from_the_shards_of_a_checkpoint(tmp_path):
    """Flux Attention's: two networks one after the other, a folder with two files."""
    model = tiny_model()
    own = make_routers(model).state_dict()
    theirs = {0: "feat_extractor.0", 2: "feat_extractor.2", 3: "router_head_agnostic.0", 5: "router_head_agnostic.2",
              7: "router_head_agnostic.4"}
    for layer in range(2):
        save_file({
            f"model.layers.{layer}.self_attn.mask_allocator.cls_{theirs[place]}.{kind}":
            own[f"{layer}.{place}.{kind}"].clone() for place in theirs for kind in ("weight", "bias")
        }, tmp_path / f"model-{layer}.safetensors")
    part = get_part(FluxAttention(weights=str(tmp_path)).bind(model).part)
    assert set(part.weights) == set(own)
    assert all(torch.equal(part.weights[name], own[name]) for name in own)


def test_gates_of_values_are_read_from_a_checkpoint(tmp_path):
    """NOSA's: A by KV head, and delta over the values of all heads."""
    model, scale, delta = tiny_model(), draw(2), draw(2, 2 * WIDTH)
    save_file(layers({"A": scale, "delta.weight": delta}), tmp_path / "model.safetensors")
    method = Nosa(weights=str(tmp_path)).bind(model)
    value = draw(1, 2, 5, WIDTH)
    wanted = scale * torch.nn.functional.softplus(value[0].transpose(0, 1).flatten(1) @ delta.T)
    assert torch.allclose(method.score(0, value)[0].T, wanted, atol=1e-5)


def drafting_layer():
    """The weights of LongSpec's layer for a model with 4 query and 2 KV heads, by the names in its code."""
    size, held, inner = 4 * WIDTH, 2 * WIDTH, 64
    shapes = {f"{x}_layernorm.weight": (size,) for x in ("input", "post_self_attention", "post_cross_attention")}
    shapes |= {"mlp.gate_proj.weight": (inner, size), "mlp.up_proj.weight": (inner, size)}
    shapes |= {"mlp.down_proj.weight": (size, inner)}
    for name in ("self_attn", "cross_attn"):
        shapes |= {f"{name}.{x}_proj.weight": (rows, size) for x, rows in (("q", size), ("k", held), ("v", held))}
        shapes |= {f"{name}.{x}_proj.bias": (rows,) for x, rows in (("q", size), ("k", held), ("v", held))}
        shapes[f"{name}.o_proj.weight"] = (size, size)
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def layer_logits(weights, model, ids, keys, values):
    """The prediction of LongSpec's layer after these ids, head by head. keys, values: of the last layer [2, n, D]."""

    def norm(x, name):
        variance = x.square().mean(-1, keepdim=True)
        return x / (variance + model.config.rms_norm_eps).sqrt() * weights[f"{name}_layernorm.weight"]

    def project(x, name):
        return x @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", torch.tensor(0.0))

    def turn(x, place):
        angle = place / 10000 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        a, b = x.split(WIDTH // 2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    def attend(query, keys, values):
        return torch.softmax(keys @ query / WIDTH**0.5, 0) @ values

    last, first = len(ids) - 1, max(0, len(ids) - 1 - 512)
    embedded = model.get_input_embeddings().weight[ids]
    x = norm(embedded, "input")
    queries = project(x[last], "self_attn.q").split(WIDTH)
    own_keys, own_values = (project(x, f"self_attn.{name}").split(WIDTH, 1) for name in "kv")
    near = range(first, last + 1)
    heads = [
        attend(turn(query, last), torch.stack([turn(own_keys[h // 2][i], i) for i in near]), own_values[h // 2][first:])
        for h, query in enumerate(queries)
    ]
    hidden = embedded[last] + project(torch.cat(heads), "self_attn.o")
    queries = project(norm(hidden, "post_self_attention"), "cross_attn.q").split(WIDTH)
    heads = [attend(turn(query, last), keys[h // 2], values[h // 2]) for h, query in enumerate(queries)]
    hidden = hidden + project(torch.cat(heads), "cross_attn.o")
    x = norm(hidden, "post_cross_attention")
    x = torch.nn.functional.silu(project(x, "mlp.gate")) * project(x, "mlp.up")
    return (hidden + project(x, "mlp.down")) @ model.lm_head.weight.T


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 530])
def test_a_drafting_layer_is_read(tmp_path, length):
    """LongSpec's: biases, no norms of queries and keys, none before the output head, and 512 earlier tokens."""
    module = copy.deepcopy(tiny_model().module)
    module.config.rms_norm_eps = 0.01
    model, weights, text = Model.from_module(module, id="tiny-eps"), drafting_layer(), random_ids(length, seed=5)
    save_file(weights, tmp_path / "model.safetensors")
    method = LongSpec(weights=str(tmp_path), window=513).bind(model)
    assert method.holder == 1
    assert "authors" in method.trained_on
    with open_session(method, model, None) as session:
        session.prefill(text[:-1])
        entries = session.layers[-1].keys, session.layers[-1].values
        drafter = Drafter(model, 513, published=True)
        drafter.load_state_dict(dict(get_part(method.part).weights))
        found = drafter(model, torch.tensor([text]), torch.arange(length)[None], *entries, 1)[0, 0]
        keys, values = (x[0] for x in entries)
        wanted = layer_logits(weights, module, text, keys, values)
        assert torch.allclose(found, wanted, atol=1e-3), (found - wanted).abs().max()
        draft, known = method.propose(session, torch.tensor(text[-1:]), 4)[0].tolist(), list(text)
        for token in draft:
            assert token == int(layer_logits(weights, module, known, keys, values).argmax())
            known.append(token)


@pytest.mark.parametrize(("window", "left_out", "reason"), [
    (64, "cross_attn.k_proj.bias", "reads the last 513 tokens, and window is 64. Use --set window=513."),
    (513, "self_attn.q_proj.bias", "'query.bias' has shape None, and tiny-4q2kv needs .64,"),
])
def test_a_drafting_layer_with_another_window_or_without_a_bias_is_refused(tmp_path, window, left_out, reason):
    """With what the layer needs."""
    save_file({x: y for x, y in drafting_layer().items() if x != left_out}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=reason):
        LongSpec(weights=str(tmp_path / "model.safetensors"), window=window).bind(tiny_model())


@pytest.mark.parametrize(("weights", "reason"), [
    ({"fc1.weight": draw(WIDE, 8 * WIDTH), "fc2.weight": draw(3, WIDE)}, "has shape .3, 24., and .* needs .2, 24."),
    ({"fc1.weight": draw(WIDE, 8), "fc2.weight": draw(2, WIDE)}, "has shape .24, 8., and .* needs .24, 128."),
    ({"fc1.weight": draw(WIDE, 8 * WIDTH)}, "has shape None"),
])
def test_weights_of_another_shape_are_refused(tmp_path, weights, reason):
    """With both shapes."""
    save_file(layers(weights), tmp_path / "heads.safetensors")
    with pytest.raises(UserError, match=reason):
        Locret(weights=str(tmp_path / "heads.safetensors")).bind(tiny_model())


def test_weights_that_fit_one_model_are_refused_by_another(tmp_path):
    """In one process, as the cells of a sweep: the authors' files do not say which model they are for."""
    path = tmp_path / "heads.safetensors"
    save_file(layers({"fc1.weight": draw(WIDE, 8 * WIDTH), "fc2.weight": draw(2, WIDE)}), path)
    method = Locret(weights=str(path))
    method.bind(tiny_model())
    with pytest.raises(UserError, match=r"has shape None, and tiny-.* needs"):
        method.bind(tiny_model(layers=3))


def test_files_without_the_part_are_refused(tmp_path):
    """A checkpoint of something else, a file that is cut off, and a folder without files."""
    save_file({"model.embed_tokens.weight": draw(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors has no weights of locret"):
        Locret(weights=str(tmp_path / "model.safetensors")).bind(tiny_model())
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:40])
    with pytest.raises(UserError, match="no readable safetensors file"):
        Locret(weights=str(tmp_path / "cut.safetensors")).bind(tiny_model())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no weights of locret"):
        Locret(weights=str(tmp_path / "empty")).bind(tiny_model())
    with pytest.raises(UserError, match="empty is a folder"):
        FTP(weights=str(tmp_path / "empty")).bind(tiny_model())


def test_every_part_with_published_weights_refuses_a_pickled_file(tmp_path):
    """By its name alone."""
    for method in (Locret, SeerAttention, FluxAttention, Nosa, LongSpec):
        with pytest.raises(UserError, match="safetensors files only"):
            method(weights=str(tmp_path / "part.bin")).bind(tiny_model())


@pytest.mark.few
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickled_files_are_refused_unread(tmp_path, suffix):
    """The message has the command that converts them, which runs."""
    path = tmp_path / f"heads{suffix}"
    torch.save(layers({"fc1.weight": draw(WIDE, 8 * WIDTH), "fc2.weight": draw(2, WIDE)}), path)
    with pytest.raises(UserError, match="safetensors files only") as found:
        Locret(weights=str(path)).bind(tiny_model())
    _, code, _ = str(found.value).split('"')
    exec(code, {})  # the command is `python -c` and this
    assert "authors" in Locret(weights=str(path.with_suffix(".safetensors"))).bind(tiny_model()).trained_on


def test_names_of_other_layers_are_left_alone():
    """Only the part's own names are renamed."""
    assert LOCRET("model.layers.11.self_attn.fc2.weight") == "11.2.weight"
    assert LOCRET("model.layers.11.mlp.fc2.weight") is None
    assert LOCRET("model.layers.11.self_attn.fc2.bias") is None
