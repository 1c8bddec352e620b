"""Head profiles: the scores by hand, a planted head, and what lies on the disk."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf import Model
from kvbench.hf.tiny import HEAD_DIM, VOCABULARY, tiny_model
from kvbench.methods.heads import profile as module
from kvbench.methods.heads.profile import COPIES, HeadProfile, find_profile, look_back, measure, probe_ids
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.store import LayerKV


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvbench" / "profiles"


def by_hand(query, keys, period, first, *, scale=1.0, window=None, softcap=None, sinks=None):
    """Echo and induction of every query head, one query at a time, in float64. [2, H_q]"""
    heads, count = query.shape[1:3]
    group = heads // keys.shape[1]
    scores = torch.zeros(2, heads, dtype=torch.float64)
    for batch in range(len(query)):
        for head in range(heads):
            for i in range(first + period, count):
                logits = (keys[batch, head // group, : i + 1].double() @ query[batch, head, i].double()) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                if window is not None:
                    logits[: max(0, i - window + 1)] = -torch.inf
                logits = logits if sinks is None else torch.cat([logits, sinks[head : head + 1].double()])
                weights = logits.softmax(0)
                earlier = [i - m * period for m in range(1, COPIES) if i - m * period >= first]
                scores[0, head] += sum(weights[j] for j in earlier)
                scores[1, head] += sum(weights[j + 1] for j in earlier)
    return scores


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1, 2, 0])}],
                         ids=["plain", "window", "softcap", "sinks"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("chunk", [3, 100])
def test_scores_are_those_by_hand(make_step, options, first, chunk, monkeypatch):
    """Blocks of queries against chunks of keys find what a loop over every query finds."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", 64)
    generator = torch.Generator().manual_seed(0)
    count, period = first + 5 * COPIES, 5
    query, keys = (torch.randn(2, x, count, 8, generator=generator) for x in (4, 2))
    kv, found = LayerKV(), torch.zeros(2, 4, dtype=torch.float64)
    for start in range(0, count, chunk):
        part = slice(start, min(start + chunk, count))
        step = make_step(query[:, :, part], keys[:, :, part], before=start, scale=0.3, **options)
        kv.append(step)
        found += torch.stack(look_back(kv, step, period, first))
        if step.window is not None:
            kv.keep_last(step.window)

    wanted = by_hand(query, keys, period, first, scale=0.3, **options)

    assert torch.allclose(found, wanted, rtol=1e-5)
    assert wanted.min() > 0


def test_a_perfect_induction_head_scores_one_and_no_echo(make_step):
    """The card's oracle: a head that looks at what followed its token has induction 1 and echo 0, an echo head not."""
    period = 6
    token = torch.eye(8)[torch.arange(period).repeat(COPIES)]  # [T, D]
    before = torch.eye(8)[(torch.arange(period) - 1).remainder(period).repeat(COPIES)]
    before[0] = 0  # nothing came before it
    query = 100 * torch.stack([token, token])[None]
    step = make_step(query, torch.stack([before, token])[None])
    kv = LayerKV()
    kv.append(step)
    echo, induction = (x / ((COPIES - 1) * period) for x in look_back(kv, step, period, 0))

    assert torch.allclose(induction, torch.tensor([1.0, 0.0], dtype=torch.float64), atol=1e-6)
    others = [m / (m + 1) for m in range(1, COPIES)]  # an echo head sees the token itself and m copies
    assert torch.allclose(echo, torch.tensor([0.0, sum(others) / len(others)], dtype=torch.float64), atol=1e-6)


def planted(tokens):
    """A tiny model whose query head 3 of layer 0 looks for the token that follows its own in the probe.

    Every token's embedding has a code of its own and the code of its follower; slow rotary dimensions compare them.
    """
    model = tiny_model()
    network = copy.deepcopy(model.module)
    code = torch.nn.functional.normalize(torch.randn(VOCABULARY, 4, generator=torch.Generator().manual_seed(1)), dim=-1)
    probe = probe_ids(model, tokens)[0, :tokens]
    follower = torch.arange(VOCABULARY)
    follower[probe] = probe.roll(-1)
    slow = torch.tensor([6, 7, 14, 15])
    embeddings = torch.zeros_like(network.model.embed_tokens.weight)
    embeddings[:, :4], embeddings[:, 4:8] = code, code[follower]
    attention = network.model.layers[0].self_attn
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(embeddings)
        attention.q_proj.weight[3 * HEAD_DIM :].zero_()
        attention.q_proj.weight[3 * HEAD_DIM + slow, 4 + torch.arange(4)] = 14.0
        attention.k_proj.weight[HEAD_DIM:].zero_()
        attention.k_proj.weight[HEAD_DIM + slow, torch.arange(4)] = 14.0
    return Model.from_module(network, id="planted")


def test_a_planted_head_is_found(monkeypatch):
    """On a model, the one query head that looks for what followed its token makes its KV head the first."""
    monkeypatch.setattr(module, "TOKENS", 12)
    model = planted(12)
    profile = find_profile(model)

    assert profile.induction[0][1] > 0.95
    assert profile.echo[0][1] < 0.1  # the other query head of the group looks nowhere in particular
    assert max(profile.induction[0][0], *profile.induction[1]) < 0.6
    assert RazorAttention().bind(model).order[0] == (0, 1)


def test_probes_are_copies_of_unlike_tokens():
    """As many random tokens as the paper has, over all probes; in each no two are equal, and all its copies are."""
    ids = probe_ids(tiny_model(), 40)

    assert ids.shape == (63, COPIES * 40)
    assert all(len(set(x.tolist())) == 40 for x in ids)
    assert all(part.equal(ids[:, :40]) for part in ids.split(40, dim=1))
    assert not ids[0].equal(ids[1])


@pytest.mark.slow
def test_scores_do_not_depend_on_chunks(monkeypatch):
    """The probe in chunks of 5 tokens has the scores of the probe as a whole."""
    model = tiny_model()
    whole = measure(model, 32)
    monkeypatch.setattr(module, "CHUNK", 5 * 79)
    parts = measure(model, 32)

    for a, b in ((whole.echo, parts.echo), (whole.induction, parts.induction)):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), rtol=1e-4)


def test_a_profile_is_measured_once(cache, capsys, monkeypatch):
    """The second time it comes from the disk, without a line; the first time says what it does and how far it is."""
    monkeypatch.setattr(module, "PATIENCE", -1)
    first = find_profile(tiny_model(), 8)
    said = capsys.readouterr().err
    monkeypatch.setattr(module, "measure", None)

    assert find_profile(tiny_model(), 8) == first
    (path,) = cache.iterdir()
    begin, *progress, end = said.splitlines()
    assert begin == "measuring the head profile of tiny-4q2kv (probes: 313, each 4 copies of 8 random tokens) ..."
    assert progress[0].startswith("head profile: 1 of ")
    assert f"kept in {path}" in end
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_settings_have_profiles_of_their_own(cache):
    """Another probe, another model: another file."""
    for model, tokens in ((tiny_model(), 8), (tiny_model(), 9), (tiny_model(2, 2), 8)):
        find_profile(model, tokens)

    assert len(list(cache.iterdir())) == 3


@pytest.mark.few
@pytest.mark.parametrize("damage", ["", "{", '{"schema_version": 2}', "echo: [[1.0]]", "tokens: 9", "echo: NaN"])
def test_a_broken_file_is_measured_again(cache, capsys, damage):
    """For every content of the file, the profile is right, the file is mended, and a line says so."""
    right = find_profile(tiny_model(), 8)
    (path,) = cache.iterdir()
    whole = path.read_text()
    name, _, value = damage.partition(": ")
    path.write_text(json.dumps({**json.loads(whole), name: json.loads(value)}) if value and name != '{"schema_version"'
                    else damage)
    capsys.readouterr()

    assert find_profile(tiny_model(), 8) == right
    assert path.read_text() == whole
    assert "it is measured again" in capsys.readouterr().err


def test_another_model_s_profile_is_refused(cache):
    """A file that says another model's hash is not used, however it came to its name."""
    find_profile(tiny_model(), 8)
    (path,) = cache.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_sha256": "0" * 64}))

    with pytest.raises(UserError, match=r"was made for another model .*Remove the file"):
        find_profile(tiny_model(), 8)


def test_a_profile_goes_on_without_a_disk(tmp_path, monkeypatch, capsys):
    """Where nothing can be written the profile is measured each time, and a line says why."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    assert find_profile(tiny_model(), 8) == measure(tiny_model(), 8)
    assert "not kept" in capsys.readouterr().err


def test_a_probe_that_does_not_fit_is_refused():
    """More tokens than a vocabulary has, or than a quarter of the positions, are refused with what is allowed."""
    with pytest.raises(UserError, match=r"probe=65 is too long for tiny-4q2kv.*--set probe=64"):
        find_profile(tiny_model(), 65)


def test_models_without_room_get_the_short_probe():
    """2,500 tokens where the model takes them, 64 where not, fewer where its vocabulary is smaller."""
    assert isinstance(find_profile(tiny_model()), HeadProfile)
    assert find_profile(tiny_model()).tokens == VOCABULARY == module.SHORT_TOKENS
