"""The full cache in 8 bits: stored tensors, accuracy, and bytes."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.full_int8 import FullInt8


def ids(count, seed=1):
    """Random tokens. [1, T]"""
    return torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def test_codes_are_all_that_is_stored():
    """After the context, old and new entries are int8 codes and float16 scales within half a step of the exact ones."""
    model = tiny_model()
    with Session(model, FullInt8(), capacity=80) as ours, Session(model, Full(), capacity=80) as full:
        for session in (ours, full):
            session.prefill(ids(40))
        for store, exact in zip(ours.layers, full.layers, strict=True):
            stored = store._held()
            assert {name: x.dtype for name, x in stored.items()} == {
                "key": torch.int8, "value": torch.int8, "key_scale": torch.float16, "value_scale": torch.float16
            }
            for name, rows in (("key", exact.keys), ("value", exact.values)):
                scale = stored[f"{name}_scale"].float()[..., None]
                assert ((stored[name] * scale - rows).abs() <= 0.57 * scale).all()
        ours.forward(ids(1, 5), Moment.DECODE)
        assert all(store.keys.dtype == torch.int8 and store.n == 41 for store in ours.layers)


def test_answers_are_near_the_full_cache_s():
    """The first token is exact, and later logits are off by less than 2 %, and by something."""
    model = tiny_model()
    with Session(model, FullInt8()) as ours, Session(model, Full()) as full:
        assert ours.prefill(ids(40)).equal(full.prefill(ids(40)))
        found, wanted = (x.forward(ids(20, 2), Moment.TURN_END, keep=20) for x in (ours, full))
    error = ((found - wanted).square().mean() / wanted.square().mean()).sqrt()
    assert 1e-5 < error < 0.02


def test_bytes_and_effect():
    """Two bytes of scale per entry and a byte per element, and the effect counts entries and codes."""
    with Session(tiny_model(), FullInt8(), capacity=80) as session:
        session.prefill(ids(40))
        memory, proof = session.memory(), session.effect()
    assert memory.stored_bytes == 2 * 2 * 40 * (16 + 16 + 4)
    assert memory.stored_bytes / memory.full_bytes == (16 + 16 + 4) / (4 * 32)
    assert proof.acted
    assert proof.facts["entries_quantized"] == 2 * 2 * 40
    assert 100 < proof.facts["distinct_codes"] <= 255


def test_only_its_own_budget_can_be_asked_for():
    """The budget that it reaches may be requested; others are refused, and the message names the one."""
    shape = tiny_model().shape(100)
    assert FullInt8().fit(None, shape) == FullInt8().fit(Budget.parse("28.1%"), shape)
    for text in ("50%", "1024"):
        with pytest.raises(UserError, match=f"{text}.*28.1%"):
            FullInt8().fit(Budget.parse(text), shape)
    with pytest.raises(UserError, match=r"no paper budget on its card\. Leave --budget out"):
        FullInt8().fit(Budget.parse("paper"), shape)
