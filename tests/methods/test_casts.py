"""FP8 and NVFP4 casts: numbers of the formats by hand, scales, saturation and bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.kernels.cast_attention.torch import from_e4m3
from kvbench.methods.baseline.full import Full
from kvbench.methods.quantization.casts import to_e4m3
from kvbench.methods.quantization.fp8 import Fp8, Fp8Coder
from kvbench.methods.quantization.nvfp4 import MAGNITUDES, Nvfp4, Nvfp4Coder, round_to_e2m1
from kvbench.store.coded import CodedKV

CONTEXT = [x % 64 for x in range(80)]


def e4m3_numbers():
    """Every number of 1 sign, 4 exponent and 3 mantissa bits, from the definition; there are no infinities."""
    found = [m / 8 * 2**-6 for m in range(8)]
    found += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return torch.tensor(found)


def test_bytes_are_the_nearest_numbers_of_the_format():
    """127 magnitudes up to 448; between them the nearest one."""
    numbers = e4m3_numbers()
    assert len(numbers) == 127
    assert numbers.max() == 448
    assert from_e4m3(to_e4m3(numbers)).equal(numbers)
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 20
    wanted = numbers[(x.abs()[:, None] - numbers).abs().argmin(-1)]
    assert from_e4m3(to_e4m3(x)).abs().equal(wanted)


def test_every_byte_is_the_number_that_torch_converts_it_to():
    """With both zeros and without a number."""
    every = torch.arange(256, dtype=torch.uint8)
    found = from_e4m3(every.view(2, 128))
    assert found.shape == (2, 128)
    assert found.view(torch.int32).flatten().equal(every.view(torch.float8_e4m3fn).float().view(torch.int32))


def test_what_is_beyond_the_range_becomes_its_end():
    """The plain cast of PyTorch gives no number there."""
    x = torch.tensor([449.0, 1e6, -1e6])
    assert from_e4m3(to_e4m3(x)).tolist() == [448, 448, -448]
    assert round_to_e2m1(torch.tensor([6.1, 100.0, -100.0])).tolist() == [7, 7, 15]


def test_ties_go_to_even_codes():
    """0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4, with either sign."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert [MAGNITUDES[x] for x in round_to_e2m1(ties)] == [0, 1, 1, 2, 2, 4, 4]
    assert [MAGNITUDES[x - 8] for x in round_to_e2m1(-ties)] == [0, 1, 1, 2, 2, 4, 4]


def test_a_block_by_hand():
    """The largest magnitude 21 gives a scale of 3.5; 5.2 is 1.49 of it, stored as 1.5; the next block has its own."""
    x = torch.zeros(1, 1, 1, 32)
    x[..., :3] = torch.tensor([21.0, 5.2, -0.5])
    x[..., 16] = 0.75
    coder = Nvfp4Coder("one")
    parts = coder.encode(x)
    assert from_e4m3(parts["block"]).flatten().tolist() == [3.5, 0.125]
    found = coder.decode(parts, 32).flatten()
    assert found[:3].tolist() == [21.0, 5.25, 0.0]
    assert found[16].item() == 0.75
    assert found.count_nonzero() == 3


def test_both_scales_by_hand():
    """A tensor's 1,344 gives a scale of 0.5. A block with 20 then has 40 / 6 = 6.67, which rounds to 6.5."""
    x = torch.zeros(1, 1, 1, 32)
    x[..., :4] = torch.tensor([20.0, 5.2, -1.7, 0.8])
    x[..., 16:18] = torch.tensor([1344.0, 200.0])
    coder = Nvfp4Coder.reaching("tensor", x.abs().amax((0, 2, 3)), 6 * 448.0)
    parts = coder.encode(x)
    assert coder.scale_of(x).item() == 0.5
    assert from_e4m3(parts["block"]).flatten().tolist() == [6.5, 448.0]
    found = coder.decode(parts, 32).flatten()
    assert found[:4].tolist() == [19.5, 4.875, -1.625, 0.0]  # 6, 1.5, -0.5 and 0 times 6.5 and 0.5
    assert found[16:18].tolist() == [1344.0, 224.0]
    assert found.count_nonzero() == 5


def test_errors_on_normal_numbers():
    """Next to exact block scales, rounding them costs 2 %; 15 even levels are better, and 8 bits much better."""
    x = torch.randn(1, 2, 2048, 64, generator=torch.Generator().manual_seed(0))
    blocks = x.unflatten(-1, (-1, 16))
    largest = blocks.abs().amax(-1, keepdim=True)
    numbers = torch.tensor([*MAGNITUDES, *(-y for y in MAGNITUDES)])
    ideal = numbers[((blocks / largest * 6)[..., None] - numbers).abs().argmin(-1)] * largest / 6
    even = (blocks / largest * 7).round() * largest / 7

    def error(found):
        return ((found - x).square().mean() / x.square().mean()).item()

    def cast(kind, limit, scaling):
        coder = kind.reaching(scaling, x.abs().amax((0, 2, 3)), limit)
        return error(coder.decode(coder.encode(x), 64))

    least = error(ideal.flatten(-2))
    for scaling in ("one", "tensor"):
        assert least < cast(Nvfp4Coder, 6 * 448.0, scaling) < 1.03 * least
    assert cast(Fp8Coder, 448.0, "one") < 0.1 * error(even.flatten(-2)) < 0.1 * least


def test_a_block_too_small_for_a_scale_is_zero():
    """And not infinite."""
    found = Nvfp4Coder("one")
    x = torch.full((1, 1, 1, 16), 1e-4)
    assert found.decode(found.encode(x), 16).equal(torch.zeros(1, 1, 1, 16))


@pytest.mark.parametrize(("coder", "limit"), [(Fp8Coder, 448.0), (Nvfp4Coder, 6 * 448.0)])
def test_a_calibrated_scale_takes_the_largest_magnitude_to_the_end(coder, limit):
    """Per tensor over both heads, so that neither is cut."""
    made = coder.reaching("tensor", torch.tensor([10.0, 4000.0]), limit)
    assert made.scale.tolist() == pytest.approx([4000 / limit])
    x = torch.zeros(1, 2, 1, 16)
    x[0, :, 0, 0] = torch.tensor([10.0, -4000.0])
    assert made.decode(made.encode(x), 16)[0, 1, 0, 0].item() == pytest.approx(-4000)


def test_heads_have_scales_of_their_own():
    """A quiet head keeps its precision next to a loud one."""
    x = torch.randn(1, 2, 50, 16, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1e-5, 100.0]).view(2, 1, 1)
    errors = []
    for scaling in ("tensor", "head"):
        coder = Fp8Coder.reaching(scaling, x.abs().amax((0, 2, 3)), 448.0)
        errors.append(((coder.decode(coder.encode(x), 16) - x)[:, 0].norm() / x[:, 0].norm()).item())
    assert errors[0] > 0.2
    assert errors[1] < 0.05


@pytest.mark.parametrize(("method", "bits"), [
    (Fp8(), 8), (Fp8(scale="tensor"), 8), (Fp8(scale="head"), 8), (Nvfp4(), 4.5), (Nvfp4(scale="tensor"), 4.5),
])
def test_stored_bytes(method, bits):
    """Bits per element and, where they are calibrated, four bytes per scale."""
    model = tiny_model()
    with Session(model, method.bind(model), capacity=90) as session:
        session.prefill(CONTEXT)
        stored = session.memory().stored_bytes
        assert stored == session.method.declared_bytes(model.shape(80))
    scales = {"one": 0, "tensor": 2 * 4, "head": 2 * 2 * 4}[method.scale]
    assert stored == 2 * (2 * 80 * 32 * bits / 8 + scales)


@pytest.mark.parametrize("method", [Fp8(skip_layers=1), Fp8(scale="head", skip_layers=1), Nvfp4(skip_layers=1)])
def test_skipped_layers_stay_exact(method):
    """Their entries equal the full cache's and take its bytes, and the other layer has its scales alone."""
    model = tiny_model()
    with Session(model, method.bind(model), capacity=90) as session, Session(model, Full(), capacity=90) as full:
        session.prefill(CONTEXT)
        full.prefill(CONTEXT)
        exact, cast = session.layers
        assert exact.keys.equal(full.layers[0].keys)
        assert isinstance(cast, CodedKV)
        assert cast.coded
        assert session.memory().stored_bytes == session.method.declared_bytes(model.shape(80))
        assert exact.nbytes() - exact.spare_bytes() == 2 * 80 * 32 * 4


def test_skipping_every_layer_is_refused():
    """It would be the full cache."""
    with pytest.raises(UserError, match=r"skip_layers=2 leaves none of the model's 2 layers to cast\. Use 0 to 1\."):
        Fp8(skip_layers=2).fit(None, tiny_model().shape(80))


def test_vectors_without_whole_blocks_are_refused():
    """24 channels are a block and a half."""
    shape = tiny_model().shape(80)
    narrow = replace(shape, layers=(replace(shape.layers[0], key_dim=24),))
    with pytest.raises(UserError, match="blocks of 16"):
        Nvfp4().fit(None, narrow)


def test_only_scales_that_are_measured_are_a_calibration():
    """Of the settings, and so of the card in a result."""
    assert Fp8().own_card == Fp8.card
    for method in (Fp8(scale="tensor"), Fp8(scale="head"), Nvfp4(scale="tensor")):
        assert method.own_card.calibration == "the largest magnitudes, in one pass"
