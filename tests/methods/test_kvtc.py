"""KVTC: the allocation of bits against trying all, the transform's error, and exact first and last entries."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.kvtc import ERRORS, STEPS, ComponentRecorder, Kvtc, Transformed, allocate

CONTEXT = [x * 7 % 64 for x in range(80)]


def make_table(x):
    """Mean, variances and components of these vectors. x: [1, H, n, D]"""
    joined = x.transpose(1, 2).flatten(2).double()
    state = {"sum": joined.sum(1).expand(2, -1), "outer": (joined.mT @ joined).expand(2, -1, -1)}
    return ComponentRecorder().summarize(state, x.shape[2])[0]


def test_bits_go_where_trying_all_would_put_them():
    """Of every allocation of 7 bits to 4 components, the least error; two bits for the largest before one for all."""
    variances = [16.0, 3.0, 1.0, 0.01]
    best = min(
        (x for x in itertools.product(range(8), repeat=4) if sum(x) == 7),
        key=lambda x: sum(v * ERRORS[b] for v, b in zip(variances, x, strict=True)),
    )
    assert tuple(allocate(variances, 7)) == best
    assert allocate([0.0, 0.0], 5) == [0, 0]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_steps_and_errors_are_those_of_normal_numbers(bits):
    """The error of a uniform quantizer with this step is the one in the table, and neighboring steps have more."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))

    def error(step):
        codes = (x / step + 2**bits / 2).floor().clamp(0, 2**bits - 1)
        return ((codes - 2**bits / 2 + 0.5) * step - x).square().mean().item()

    assert error(STEPS[bits]) == pytest.approx(ERRORS[bits], rel=0.03)
    assert error(STEPS[bits]) < min(error(STEPS[bits] * 0.9), error(STEPS[bits] * 1.1))


def test_correlated_heads_need_fewer_bits():
    """Four heads of one source at 2 bits per element: an error far below that of 2 bits without the transform."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(1, 1, 2000, 8, generator=generator)
    x = source * torch.tensor([1.0, -2.0, 0.5, 3.0]).view(4, 1, 1) + 5
    found = Transformed.encode(x, make_table(x), 2.0).decode()
    error = (found - x).square().mean() / (x - 5).square().mean()
    assert error < 0.002 < ERRORS[2]


def test_the_error_is_that_of_the_quantizer():
    """Independent normal channels at 2 bits each: numbers come back from the middles of their levels."""
    x = torch.randn(1, 2, 4000, 4, generator=torch.Generator().manual_seed(0))
    found = Transformed.encode(x, make_table(x), 2.0).decode()
    assert ((found - x).square().mean() / x.var()).item() == pytest.approx(ERRORS[2], rel=0.05)


def test_the_stream_is_compressed_and_complete():
    """Components of no variance take nothing, and the bytes are near the codes' entropy of some bits per number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 4000, 4, generator=generator) * torch.tensor([8.0, 1.0, 0.0, 0.0])
    made = Transformed.encode(x, make_table(x), 1.5)
    assert len(made.bits) == 4
    assert int(made.bits.sum()) == 12
    assert len(made.stream) * 8 < 1.15 * 4000 * 12


def test_first_and_last_entries_stay_exact_and_the_rest_is_near():
    """A session's decoded cache: 3 first and 10 last entries as they were, keys rotated back to their places."""
    model = tiny_model()
    method = Kvtc(bits=6.0, sinks=3, recent=10).bind(model).fit(None, model.shape(80))
    with Session(model, method, capacity=90) as ours, Session(model, Full(), capacity=90) as full:
        for session in (ours, full):
            session.prefill(CONTEXT)
        tensors = [x for store in ours.layers for x in store.stream.tensors()]
        inner = [y.nbytes for store in ours.layers for x in store.stream.inner for y in x.tensors()]
        assert ours.memory().stored_bytes == sum(x.nbytes for x in tensors)
        assert sum(x.nbytes for x in tensors) == sum(inner) + 2 * 13 * 2 * (2 * 16 * 4)  # and the exact entries
        for session in (ours, full):
            session.force([1])
        for store, exact in zip(ours.layers, full.layers, strict=True):
            for x, y in ((store.keys, exact.keys), (store.values, exact.values)):
                assert x[:, :, :3].equal(y[:, :, :3])
                assert x[:, :, 70:80].equal(y[:, :, 70:80])
                inner = slice(3, 70)
                assert 0 < (x - y)[:, :, inner].square().mean() < 0.01 * y[:, :, inner].square().mean()


def test_compressed_entries_can_be_saved(tmp_path):
    """Right after the context, before an answer decodes them; a loaded session answers as the saved one."""
    model = tiny_model()
    method = Kvtc(recent=8).bind(model).fit(None, model.shape(80))
    with Session(model, method, capacity=100) as session:
        session.prefill(torch.arange(80) % 64)
        session.save(tmp_path / "session.safetensors")
        wanted = session.ask([7], 4, stop=frozenset())
        assert session.effect().acted
    with Session.load(tmp_path / "session.safetensors", model, method) as session:
        assert session.ask([7], 4, stop=frozenset()) == wanted


def test_settings_that_cannot_be_are_refused():
    """A budget: the text decides."""
    with pytest.raises(UserError, match="no budget"):
        Kvtc().fit(Budget("fraction", 0.25), tiny_model().shape(80))


def test_a_layer_without_a_bit_is_refused():
    """With the fewest bits per element that are one for the layer's 32 channels."""
    shape = tiny_model().shape(80)
    with pytest.raises(UserError, match=r"bits=0.001 gives a layer of 32 channels no bit. Use 0.031 or more"):
        Kvtc(bits=0.001).fit(None, shape)
    Kvtc(bits=0.031).fit(None, shape)
