"""The text on which methods measure, and what is measured once."""

from __future__ import annotations

from dataclasses import replace
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.techniques.calibration import calibrated, calibration_ids, remember


def test_the_text_is_the_beginning_of_pythons_manual():
    """Its topics in the order of their names, at most as many tokens as the model has positions."""
    model = load_model("mini")
    first, second, *_ = sorted(topics)
    text = f"{topics[first]}\n{topics[second]}"
    wanted = model.tokenizer(text, add_special_tokens=False).input_ids
    assert calibration_ids(model, 64).tolist() == [wanted[:64]]
    assert calibration_ids(replace(model, max_length=40), 64).tolist() == [wanted[:40]]


def test_a_tokenizer_that_cannot_split_text_gives_random_tokens(capsys):
    """The same ones each time, of the whole vocabulary, and a message says so."""
    found = calibration_ids(tiny_model(), 1000)
    assert "random tokens are used instead" in capsys.readouterr().err
    assert set(found.flatten().tolist()) == set(range(VOCABULARY))
    assert torch.equal(found, calibration_ids(tiny_model(), 1000))


def test_a_text_of_fewer_than_16_tokens_is_refused():
    """Asked for, or all that the model has positions for."""
    assert calibration_ids(tiny_model(), 16).shape == (1, 16)
    with pytest.raises(UserError, match=r"^tokens=15 is too few to calibrate on\. Use --set tokens=16 or more\.$"):
        calibration_ids(tiny_model(), 15)
    assert calibration_ids(replace(tiny_model(), max_length=16), 20).shape == (1, 16)
    with pytest.raises(UserError, match="takes 15 positions, too few to calibrate a method on 20 tokens of text"):
        calibration_ids(replace(tiny_model(), max_length=15), 20)


def test_a_method_measures_once_for_each_loaded_model_and_number_of_tokens():
    """Another method, other weights, another element type, device, spread over devices and text are measured anew."""
    class One:
        """A method."""

    class Other:
        """Another one."""

    made = []

    def find():
        made.append(float(len(made)))
        return torch.tensor(-1.0), torch.tensor(made[-1])

    model = SimpleNamespace(sha256="a", dtype="float32", device="cpu", device_map=None)
    others = [SimpleNamespace(**{**vars(model), name: name}) for name in vars(model)]
    asked = [(One, model, 16), (One, model, 16), (Other, model, 16), *((One, x, 16) for x in others),
             (One, model, 17), (Other, model, 16)]
    names = [remember(*x, find) for x in asked]
    assert [calibrated(x, 1).item() for x in names] == [0, 0, 1, 2, 3, 4, 5, 6, 1]


def test_a_method_gets_the_tensors_on_the_devices_of_its_model():
    """Also where those of a model on other devices have the same values, and with them the same hash."""
    one = SimpleNamespace(sha256="a", dtype="float32", device="cpu", device_map=None)
    spread = SimpleNamespace(**{**vars(one), "device_map": {"layers.0": "cpu", "layers.1": "cuda:0"}})
    kind = type("Measured", (), {})
    found = {}
    for model in (one, spread, one):
        name = remember(kind, model, 16, lambda: (torch.tensor(1.0),))
        assert calibrated(name, 0) is found.setdefault(id(model), calibrated(name, 0))
    assert found[id(one)] is not found[id(spread)]
