"""Every method on a GPU that the CPU plays: prompts, compression and decoding use one device, and copies are explicit.

Beyond the captured calls (tests/bench/test_captured_region.py) this runs what is measured once per model, too.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.utils._pytree import tree_map_only

from kvbench.check.trial import CONTEXT, FORCED, choose_budget, open_session
from kvbench.errors import UserError
from kvbench.hf import tiny
from kvbench.hf.load import Model
from kvbench.kernels.dense_attention import torch as dense
from kvbench.methods.allocation import compresskv
from kvbench.methods.baseline.full import Full
from kvbench.methods.prefill import minference
from kvbench.methods.retrieval import sentencekv
from kvbench.registry import find_method, list_entries
from kvbench.techniques import parts
from tests.toys.gpu import forget_tables, simulated_gpu

METHODS = [x.name for x in list_entries("method") if x.models == "autoregressive"]
SECOND = ("model.layers.1", "model.norm", "lm_head")
"""Parts of a spread model that lie on the second device."""
ONE_DEVICE = ("flux-attention", "ftp", "locret", "longspec", "nosa", "reasoncache", "seerattention", "xkv")
"""Methods that refuse a spread model: their trained parts, or factors of several layers, stand on one device."""


def attend_without_flash(query, keys, values, *, scale, causal):
    """As `attend_by_flash`: SDPA's flash attention on a CPU takes fewer shapes."""
    count, entries = query.shape[2], keys.shape[2]
    mask = None
    if causal:
        mask = dense.visible_entries(entries - count, count, entries, None, None, 0, query.device)
    return dense.grouped_sdpa(query, keys, values, mask, scale)


@pytest.fixture
def gpu(monkeypatch, cache):
    """A simulated GPU, on which nothing was trained or measured before."""
    monkeypatch.setattr(dense, "attend_by_flash", attend_without_flash)
    monkeypatch.setattr(dense, "sdpa_kernel", lambda _: nullcontext())
    monkeypatch.setattr(tiny, "_make", tiny._make.__wrapped__)
    for module, memo in (
        (parts, "_HASHES"), (minference, "_FOUND"), (compresskv, "_FOUND"), (sentencekv, "_SENTENCE_ENDS"),
    ):
        monkeypatch.setattr(module, memo, {})
    with simulated_gpu() as found, tiny.placed("cuda", torch.bfloat16):
        yield found
    forget_tables()


def spread(devices):
    """A model of two layers on two devices, which moves inputs as accelerate's hooks do."""
    with tiny.placed("cpu", torch.float32):
        module = copy.deepcopy(tiny.tiny_model().module)
    module.hf_device_map = {
        name: devices[name in SECOND] for name in ("model.embed_tokens", "model.rotary_emb", "model.layers.0", *SECOND)
    }
    for name, device in module.hf_device_map.items():
        module.get_submodule(name).to(device).register_forward_pre_hook(
            lambda _, *inputs, device=device: tree_map_only(torch.Tensor, lambda x: x.to(device), inputs),
            with_kwargs=True,
        )
    module.register_forward_hook(lambda _, __, output: tree_map_only(torch.Tensor, lambda x: x.to(devices[0]), output))
    return Model.from_module(module, id="tiny-spread")


def talk(method, model=None):
    """A context in two chunks, a question, and three tokens. Returns the devices of the layers."""
    with open_session(method, model or tiny.tiny_model(), choose_budget(method), chunk=70) as session:
        session.prefill(CONTEXT)
        session.ask(FORCED, 3, stop=frozenset())
        return [{x.device.type for x in kv.tensors()} for kv in session.layers]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", METHODS)
def test_nothing_mixes_devices(gpu, name):
    """From the binding to the model to decoded tokens."""
    talk(find_method(name)())
    assert gpu.refused == []


@pytest.mark.few(3)
@pytest.mark.parametrize("devices", [["cuda", "cpu"], ["cpu", "cuda"]], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_layers_may_lie_on_two_devices(gpu, name, devices):
    """As those of a model that `--device-map` spreads: what a layer takes from elsewhere is moved to its device."""
    if name in ONE_DEVICE:
        with pytest.raises(UserError, match=r"spread over several.*Leave --device-map out"):
            talk(find_method(name)(), spread(devices))
    else:
        assert talk(find_method(name)(), spread(devices)) == [{x} for x in devices]
        assert gpu.refused == []


def test_a_session_on_two_devices_is_not_saved(gpu, tmp_path):
    """A file has each tensor on the model's device or on the host."""
    with open_session(Full(), spread(["cuda", "cpu"]), None, chunk=70) as session:
        session.prefill(CONTEXT)
        with pytest.raises(UserError, match=r"spread over several devices cannot be saved\. Load the model without"):
            session.save(tmp_path / "session.safetensors")


@pytest.mark.few(4)
@pytest.mark.parametrize(("fault", "refused"), [
    (lambda x: torch.arange(16) * x, "mul of tensors on both devices"),
    (lambda x: torch.zeros(64)[x.argmax(-1)], "a tensor on the host indexed by one on the GPU"),
    (lambda x: x.float().numpy(), "numpy of a tensor on the GPU"),
    (lambda x: torch.rand(3, device=x.device, generator=torch.Generator().manual_seed(0)),
     "rand with the other device's generator"),
    (lambda x: torch.arange(16, device=x.device) @ torch.arange(16, device=x.device), "matmul of integers"),
    (lambda x: x + torch.ones(16, device=x.device) * torch.tensor(2.0), None),
    (lambda x: x.cpu() * torch.arange(16), None),
])
def test_mixed_devices_are_noticed(gpu, monkeypatch, fault, refused):
    """Tensors made on the host, numpy and generators of the host; single numbers and copies are allowed."""
    attend = Full.attend
    monkeypatch.setattr(Full, "attend", lambda self, kv, step: (fault(step.query), attend(self, kv, step))[1])
    talk(Full())
    assert {x.partition(" in /")[0] for x in gpu.refused} == ({refused} if refused else set())
