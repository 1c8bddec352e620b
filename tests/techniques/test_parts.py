"""Trained parts: when a file is read again, and which settings are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.methods.eviction.locret import HIDDEN, Locret
from kvbench.methods.eviction.retaining import make_heads
from kvbench.registry import find_method
from kvbench.techniques import parts
from kvbench.techniques.parts import find_part, get_part, make_part, write_part


def test_a_file_that_was_written_again_is_read_again(tmp_path):
    """In one process: the path is the same, and the weights are not."""
    path, model = tmp_path / "part.safetensors", tiny_model()
    for count in (1, 2):
        write_part(path, "locret", model, {"x": torch.ones(count)}, "data")
        found = [find_part(Locret(weights=str(path)), model, dict, "not trained") for _ in range(2)]
        assert found[0] == found[1]
        assert get_part(found[0]).weights["x"].equal(torch.ones(count))


def test_a_tilde_in_the_path_of_weights_is_the_home_folder(tmp_path, monkeypatch):
    """A shell leaves it as it is in `--set weights=~/part.safetensors`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_part(tmp_path / "part.safetensors", "locret", tiny_model(), {"x": torch.ones(3)}, "data")
    sha256 = find_part(Locret(weights="~/part.safetensors"), tiny_model(), dict, "not trained")
    assert get_part(sha256).weights["x"].equal(torch.ones(3))


def test_a_part_is_trained_once_for_a_model_and_its_element_type():
    """Of the same settings: another element type gives other weights."""
    calls = []

    def train():
        calls.append(1)
        return {"x": torch.ones(3)}

    for dtype in ("float32", "bfloat16", "float32"):
        find_part(Locret(), SimpleNamespace(id="m", sha256="0", dtype=dtype, device_map=None), train, "of a test")
    assert len(calls) == 2


def test_weights_of_other_names_or_shapes_are_other_weights():
    """The same numbers in another order of channels compute something else."""
    made = [make_part({name: torch.ones(shape)}, "") for name, shape in (("x", (2, 1)), ("y", (2, 1)), ("x", (1, 2)))]
    assert len({x.sha256 for x in made}) == 3


@pytest.mark.parametrize("settings", [{}, {"weights": "file"}], ids=["shipped", "file"])
def test_steps_are_refused_where_nothing_is_trained(tmp_path, monkeypatch, settings):
    """A result would state a training that did not take place."""
    model = tiny_model()
    weights = make_heads(model, HIDDEN).state_dict()
    write_part(tmp_path / "file", "locret", model, weights, "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "_HASHES", {})  # a later test of this model trains its own
    if not settings:
        monkeypatch.setattr(parts, "find_shipped", lambda *_: make_part(weights, "data"))
    assert Locret(**settings).bind(model).trained_on == "data"
    with pytest.raises(UserError, match=r"locret: steps=7 has no effect, because no part.*Leave --set steps"):
        Locret(steps=7, **settings).bind(model)


@pytest.mark.parametrize(
    "name", ["flux-attention", "ftp", "locret", "longspec", "nosa", "reasoncache", "seerattention"]
)
def test_another_number_of_steps_is_another_training(name):
    """In one process: a result states its steps."""
    one, again, more = (find_method(name)(steps=x).bind(tiny_model()).part for x in (2, 2, 3))
    assert one == again != more
