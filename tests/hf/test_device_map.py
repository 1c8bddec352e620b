"""A model spread over several places computes what it computes in one, and its rows lie where its layers do.

Without GPUs this has two halves. Weights kept on disk go through accelerate's hooks for real, numbers included. Two
devices are two for torch's fake tensors: they hold no numbers, and every operation that mixes them raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf import Model, load_model, proof, rope
from kvbench.method import Moment, Step
from kvbench.registry import find_method
from kvbench.store import LayerKV

from .models import SERVED, build, model, save
from .test_adapter import Dense, served_logits, token_ids
from .test_proof import position_off_by_one

hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed: pip install 'kvbench[accelerate]'")

PARTS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
SPREAD = {name: "disk" if name == "model.layers.1" else "cpu" for name in PARTS}
AWAY = {**dict.fromkeys(PARTS, "disk"), "model.norm": "cpu"}
FAKES = {"first": ("cpu", "meta"), "second": ("meta", "cpu")}
"""Each of two fake devices holds the embedding once: an index may lie on the CPU whatever it points into."""


@pytest.mark.few
@pytest.mark.parametrize("places", [SPREAD, AWAY], ids=["one layer", "nearly all"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_weights_on_disk(name: str, places: dict[str, str], tmp_path: Path) -> None:
    """The same logits, tokens, rows, bytes and rotations as in one place; and weights are elsewhere between passes."""
    folder = save(build(*SERVED[name]), tmp_path / name)
    whole, spread = load_model(str(folder)), load_model(str(folder), device_map=dict(places))
    assert spread.device_map == places
    assert whole.device_map is None
    away = {x.device.type for key, x in spread.module.named_parameters() if key.startswith("model.layers.1.")}
    assert away == {"meta"}
    assert spread.device == torch.device("cpu")
    assert (spread.params, spread.dtype, spread.sha256) == (whole.params, whole.dtype, whole.sha256)
    ids, found = token_ids(1), []
    for loaded in (whole, spread):
        with Session(loaded, Dense(), chunk=5) as session:
            session.prefill(ids)
            found.append((session.ask([], 6, stop=frozenset()).ids, session.memory(), session.layers[1].seen))
    assert found[0] == found[1]
    assert (served_logits(whole, ids, [0, 20]) - served_logits(spread, ids, [0, 20])).abs().max().item() <= 1e-6
    for ours, theirs in zip(spread.ropes, whole.ropes, strict=True):
        assert (ours.trusted, ours.movable, ours.width) == (theirs.trusted, theirs.movable, theirs.width)


@pytest.mark.slow
def test_a_spread_model_is_proven(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision by a copy, as any; and a planted fault is found."""
    assert load_model(str(llama), dtype="bfloat16", device_map=dict(SPREAD)).dtype == "bfloat16"
    position_off_by_one(monkeypatch)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(UserError, match="does not compute the same"):
            load_model(str(llama), dtype=dtype, device_map=dict(SPREAD))


def test_one_place_is_no_map(llama: Path) -> None:
    """Where all fits on one device, `auto` leaves the model alone."""
    loaded = load_model(str(llama), device_map="auto")
    assert (loaded.device_map, loaded.device.type) == (None, "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("name", "places", "message"), [
    ("qwen3_moe", {"": "disk"}, "cannot be kept on disk: .* Use a device map without disk"),
    ("llama", {"model.layers.0": "cpu", "model.layers.1": "disk"}, "cannot be loaded .*does not give any device"),
])
def test_a_map_that_cannot_be_is_refused(name: str, places: dict[str, str], message: str, tmp_path: Path) -> None:
    """With what is wrong, in one line."""
    folder = save(build(*SERVED[name]), tmp_path / name)
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(folder), device_map=places)
    assert "\n" not in str(caught.value)


def test_spreading_is_silent(
    llama: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings of accelerate about offloaded weights are known."""
    load_model(str(llama), device_map=dict(SPREAD))
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


@dataclass(frozen=True)
class Turning(Dense):
    """Uses all that a step says of the new rows: turns their keys to zero and back, and stores positions."""

    def layer(self, index: int) -> LayerKV:
        """With positions and scores."""
        del index
        return LayerKV(track=True, column_sums=True, queries=2)

    def evict(self, kv: LayerKV, step: Step) -> None:
        """The first rows go, in an order that positions decide."""
        turned = step.rope.rotate(step.key, step.positions, inverse=True)
        moved = step.rope.shift(step.rope.rotate(turned, step.positions), -step.positions)
        if step.moment.compresses:
            assert kv.positions is not None
            kv.keep((kv.scores + kv.positions + moved.sum()).topk(5, dim=-1).indices.sort(-1).values)


def place(module: nn.Module, device: str, *, root: bool = False) -> None:
    """Put a part's fake tensors on a device, with accelerate's own hook; its way to move tensors knows no fake ones."""
    for part in [] if root else module.modules():
        for held in (part._parameters, part._buffers):
            for key, x in held.items():
                if x is not None:
                    moved = x.detach().to(device)
                    held[key] = nn.Parameter(moved, requires_grad=False) if held is part._parameters else moved
    hook = hooks.AlignDevicesHook(execution_device=device, io_same_device=root, skip_keys="past_key_values")
    hook.init_hook = lambda x: x
    hooks.add_hook_to_module(module, hook)


@cache
def fake_model(name: str, where: str) -> tuple[FakeTensorMode, Model]:
    """A model whose two layers are on two devices that hold no numbers."""
    real, devices, mode = model(name), FAKES[where], FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = build(*SERVED[name])
        for part in PARTS:
            place(module.get_submodule(part), devices[part in ("model.layers.1", "model.norm", "lm_head")])
        place(module, devices[0], root=True)
        shape, kinds = real.layers[0], getattr(module.config, "layer_types", None) or [None, None]
        keys = [torch.zeros(1, shape.kv_heads, 1, shape.key_dim, device=x) for x in devices]
        ropes = tuple(next(rope._find(module, kind, key)) for kind, key in zip(kinds, keys, strict=True))
    return mode, replace(real, module=module, ropes=ropes)


@pytest.fixture(params=[(name, where) for name in ("llama", "gemma3_text") for where in FAKES], ids=str)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Model, tuple[str, str]]]:
    """One of these, as long as a test lasts."""
    mode, spread = fake_model(*request.param)
    for module in ("dense", "layer"):
        monkeypatch.setattr(f"kvbench.store.{module}.storage_bytes", lambda _: 0)  # fake tensors have no addresses
    for check in ("kvbench.selection.refuse_nan", "kvbench.engine.session.refuse_unknown"):
        monkeypatch.setattr(check, lambda *_: None)  # and no values
    with mode:
        yield spread, FAKES[request.param[1]]


METHODS = [
    Turning(), replace(find_method("streaming-llm")(), rows=9, length=20),
    replace(find_method("snapkv")(window=4), rows=9, length=20),
]


@pytest.mark.few
def test_rows_lie_where_their_layers_do(fake: tuple[Model, tuple[str, str]]) -> None:
    """Prefill in chunks, a fork, a question and a step: no operation meets two devices, and answers come back."""
    spread, devices = fake
    ids = torch.zeros(1, 20, dtype=torch.long, device=devices[0])
    for method in METHODS:
        with Session(spread, method, capacity=30, chunk=10) as session:
            assert session.prefill(ids).device.type == devices[0]
            with session.fork() as branch:
                branch.question(ids[:, :3], 2)
                assert branch.forward(ids[:, :1], Moment.DECODE).device.type == devices[0]
                for kv, device in zip(branch.layers, devices, strict=True):
                    assert {x.device.type for x in kv.tensors()} == {device}


@pytest.mark.slow
def test_positions_left_behind_are_seen(fake: tuple[Model, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a step whose positions stayed with the model's input raises."""
    spread, devices = fake
    honest = Step.__init__

    def left_behind(step: Step, **options: object) -> None:
        honest(step, **{**options, "positions": options["positions"].to(devices[0])})

    monkeypatch.setattr(Step, "__init__", left_behind)
    with pytest.raises(Exception, match="devices"), Session(spread, Turning(), chunk=8) as session:
        session.prefill(torch.zeros(1, 20, dtype=torch.long, device=devices[0]))


@pytest.mark.slow
def test_the_proof_runs_on_two_devices(fake: tuple[Model, tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of its comparison, chunks and single steps, and the rotations that it tries."""
    spread, devices = fake
    ids = torch.zeros(1, 12, dtype=torch.long, device=devices[0])
    chunks, asked = [(0, 10), (10, 11), (11, 12)], []
    head = spread.module.lm_head.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0].shape[1]))
    root = spread.module.register_forward_pre_hook(
        lambda _, __, options: asked.append(options["logits_to_keep"]), with_kwargs=True
    )
    sides: list[Tensor] = [proof._stock(spread.module, ids, chunks, [7, 8, 9, 10, 11])]
    for hook in (head, root):
        hook.remove()
    # Fake tensors let an index of another GPU pass, which a real one does not take: none is a tensor.
    assert asked == [[7, 8, 9], 3, [0], 1, [0], 1]
    sides.append(proof._served(spread.module, ids, chunks))
    assert {x.device.type for x in sides} == {devices[0]}
    assert sides[0].shape[1] == 5
    monkeypatch.setattr(rope, "_difference", lambda x, y: float((x + y).device.type not in devices))
    with proof.attached(spread.module):
        near, far = ([x.key for x in proof.catch_steps(spread.module, at)] for at in (3, 9))
        assert [x.device.type for x in near] == list(devices)
        assert all(x.trusted for x in rope.prove_ropes(spread.module, near, far, 6))
