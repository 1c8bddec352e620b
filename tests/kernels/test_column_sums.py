"""Column sums, maxima and second moments against the whole attention matrix in float64."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.choice import using
from kvbench.kernels.column_sums import column_maxima, column_sums, naive

ALL = {
    "sums": (column_sums, naive.column_sums), "maxima": (column_maxima, naive.column_maxima),
}
"""Functions and their references."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A few queries at a time, so that small sizes cross the blocks' edges."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", 200)


@pytest.mark.parametrize("size", [(1, 1), (1, 16), (2, 16), (3, 16), (16, 16), (17, 17), (10, 30)], ids=str)
def test_equals_the_reference(heads, size, options, attention, error):
    """Every head layout, size and option gives the reference's sums within 1e-5."""
    query, keys, _ = attention(heads, *size)
    options = {"scale": 0.3, "seen": size[1], **options}
    for found, wanted in ALL.values():
        assert error(found(query, keys, **options), wanted(query, keys, **options)) < 1e-5


@pytest.mark.parametrize("size", [(1, 12), (5, 20)], ids=str)
def test_a_window_counts_tokens_across_holes(heads, size, attention, holes, error):
    """With positions, entries are seen by their distance in the text."""
    query, keys, _ = attention(heads, *size)
    options = {"scale": 0.3, "seen": 60, "window": 11, "positions": holes(2, heads[1], size[1], 60, size[0])}
    for found, wanted in ALL.values():
        assert error(found(query, keys, **options), wanted(query, keys, **options)) < 1e-5


def test_the_card_s_case(attention, error):
    """257 queries, four heads on one: within 1e-5 of the matrix, and 1,028 in all: every query spreads a mass of 1."""
    query, keys, _ = attention((4, 1), 257, 257, batch=1)
    sums = column_sums(query, keys, scale=0.3, seen=257)
    assert error(sums, naive.column_sums(query, keys, scale=0.3, seen=257)) < 1e-5
    assert abs(sums.double().sum().item() - 4 * 257) < 1e-2


def test_entries_that_no_query_sees_have_no_mass(heads, attention):
    """Entries outside every query's window sum to exactly zero."""
    query, keys, _ = attention(heads, 3, 30)
    sums = column_sums(query, keys, scale=0.3, seen=30, window=5)
    assert (sums[..., : 30 - 3 - 5 + 1] == 0).all()
    assert (sums[..., 30 - 3 - 5 + 1 :] > 0).all()


def test_chunks_add_up(heads, attention):
    """The sums of two chunks of queries are those of both at once."""
    query, keys, _ = attention(heads, 20, 20)
    whole = column_sums(query, keys, scale=0.3, seen=20)
    parts = column_sums(query[:, :, 13:], keys, scale=0.3, seen=20)
    parts[..., :13] += column_sums(query[:, :, :13], keys[:, :, :13], scale=0.3, seen=13)
    assert torch.allclose(parts, whole, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the sums are float32 and off by no more than a few roundings of a logit."""
    query, keys, _ = attention((6, 2), 40, 50, dtype=dtype)
    found = column_sums(query, keys, scale=0.3, seen=50)
    assert found.dtype == torch.float32
    assert error(found, naive.column_sums(query, keys, scale=0.3, seen=50)) < allowed[dtype]


def test_maxima_by_hand():
    """Two queries whose logits are log 1, log 3 and log 1, log 1, log 2: weights 1/4, 3/4 and 1/4, 1/4, 1/2."""
    keys = torch.tensor([[0.0, 0.0], [3.0, 1.0], [1.0, 2.0]]).clamp_min(1).log().view(1, 1, 3, 2)
    query = torch.eye(2).view(1, 1, 2, 2)
    found = column_maxima(query, keys, scale=1.0, seen=3)
    assert torch.allclose(found, torch.tensor([[[0.25, 0.75, 0.5]]]))


@pytest.mark.parametrize("size", [(1, 16), (16, 16), (10, 30)], ids=str)
def test_factors_weigh_queries_before_the_maximum(heads, size, options, attention, error):
    """Each query's weights are multiplied by its factor; the greatest product counts, not the greatest weight."""
    query, keys, _ = attention(heads, *size)
    options = {"scale": 0.3, "seen": size[1], **options}
    factors = torch.rand(2, size[0], generator=torch.Generator().manual_seed(0)) + 0.1
    found = column_maxima(query, keys, **options, factors=factors)
    assert error(found, naive.column_maxima(query, keys, **options, factors=factors)) < 1e-5
    assert size[0] == 1 or error(found, naive.column_maxima(query, keys, **options)) > 1e-3


def test_factors_by_hand():
    """Weights 1/4, 3/4 and 1/4, 1/4, 1/2 times 4 and 1."""
    keys = torch.tensor([[0.0, 0.0], [3.0, 1.0], [1.0, 2.0]]).clamp_min(1).log().view(1, 1, 3, 2)
    query, factors = torch.eye(2).view(1, 1, 2, 2), torch.tensor([[4.0, 1.0]])
    for maxima in (column_maxima, naive.column_maxima):
        found = maxima(query, keys, scale=1.0, seen=3, factors=factors).float()
        assert torch.allclose(found, torch.tensor([[[1.0, 3.0, 0.5]]]))


@pytest.mark.parametrize("options", [{}, {"window": 100, "softcap": 2.0}], ids=["plain", "everything"])
def test_memory_is_linear(options, attention, largest, monkeypatch):
    """The largest temporary is one block, whatever the number of entries: no T x N tensor is ever made."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", 1 << 20)
    peaks = {}
    for n in (2048, 4096):
        query, keys, _ = attention((2, 1), n, n, batch=1)
        peaks[n] = largest(lambda q=query, k=keys, n=n: column_sums(q, k, scale=0.3, seen=n, **options))
    assert peaks[4096] <= 1.1 * (1 << 20)
    assert peaks[2048] <= 1.1 * (1 << 20)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [(1, 1), (1, 15), (2, 16), (3, 17), (18, 34)], ids=str)
def test_triton_equals_the_reference(size, options, triton, attention, error):
    """One entry, a block of 16, one entry less and more, several; one block of queries and two: within 1e-5."""
    query, keys, _ = attention((6, 2), *size, batch=1)
    options = {"scale": 0.3, "seen": size[1], **options}
    found = column_sums(*triton([query, keys]), **triton(options))
    assert error(found, naive.column_sums(query, keys, **options)) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_s_maxima_equal_the_reference(options, triton, attention, error):
    """Over blocks of queries, of entries, and over the heads of a group."""
    query, keys, _ = attention((6, 2), 18, 20, batch=1)
    options = {"scale": 0.3, "seen": 20, **options}
    found = column_maxima(*triton([query, keys]), **triton(options))
    assert error(found, naive.column_maxima(query, keys, **options)) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_triton_s_factors_equal_the_reference(options, triton, attention, error):
    """Queries in a batch with factors of their own."""
    query, keys, _ = attention((6, 2), 18, 20, batch=2)
    options = {"scale": 0.3, "seen": 20, **options}
    factors = torch.rand(2, 18, generator=torch.Generator().manual_seed(0)) + 0.1
    found = column_maxima(*triton([query, keys]), **triton({**options, "factors": factors}))
    assert error(found, naive.column_maxima(query, keys, **options, factors=factors)) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_in_every_precision(heads, precision, triton, attention, error, allowed):
    """Every head layout, for a batch; both passes are Triton's and the sums are float32."""
    query, keys, _ = attention(heads, 3, 35, dtype=precision)
    with using("triton") as ran:
        found = column_sums(*triton([query, keys]), scale=0.3, seen=35)
    assert ran == {"column_sums": "triton"}
    assert found.dtype == torch.float32
    assert error(found, naive.column_sums(query, keys, scale=0.3, seen=35)) < allowed[precision]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [3, 33])
def test_triton_counts_a_window_in_tokens_across_holes(window, triton, attention, holes, error):
    """With positions, entries are seen by their distance in the text; keys and positions may be a part of a block."""
    query, keys, _ = attention((6, 2), 3, 40)
    options = {"scale": 0.3, "seen": 90, "window": window, "positions": holes(2, 2, 40, 90, 3)}
    wanted = naive.column_sums(query, keys, **options)
    block = torch.cat([keys, torch.full_like(keys, torch.nan)], dim=2)
    assert error(column_sums(*triton([query, block[:, :, :40]]), **triton(options)), wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_triton_gives_entries_that_no_query_sees_no_mass(triton, attention):
    """Entries outside every query's window sum to exactly zero, whole blocks of them too."""
    query, keys, _ = attention((6, 2), 3, 50)
    sums = column_sums(*triton([query, keys]), scale=0.3, seen=50, window=5).cpu()
    assert (sums[..., : 50 - 3 - 5 + 1] == 0).all()
    assert (sums[..., 50 - 3 - 5 + 1 :] > 0).all()


class Unlaunched:
    """A kernel whose launches do nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def test_triton_s_memory_is_linear(largest, monkeypatch):
    """At 131,072 tokens nothing is made with more elements than there are queries: no logits, no copy of the keys."""
    attention = pytest.importorskip("kvbench.kernels.dense_attention.triton")
    sums = pytest.importorskip("kvbench.kernels.column_sums.triton")
    monkeypatch.setattr(attention, "_processors", lambda device: 132)
    for module, kernel in ((attention, "attend_tiles"), (attention, "merge_parts"), (sums, "weigh_entries")):
        monkeypatch.setattr(module, kernel, Unlaunched())
    n = 131_072
    query, keys = (torch.empty(1, heads, n, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    with using("triton"):
        assert largest(lambda: column_sums(query, keys, scale=0.1, seen=n, sinks=torch.zeros(32))) == 32 * n


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_triton_blocks_end_where_entries_do(more, precision, triton, attention, error, allowed):
    """One block of entries as a GPU has them, one entry less and one more."""
    fast = pytest.importorskip("kvbench.kernels.column_sums.triton")
    n = fast._blocks(1, 24, precision.itemsize)[0] + more
    query, keys, _ = attention((3, 1), 2, n, batch=1, dtype=precision)
    found = column_sums(*triton([query, keys]), scale=0.3, seen=n)
    assert error(found, naive.column_sums(query, keys, scale=0.3, seen=n)) < allowed[precision]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 9000), (200, 1500), (1100, 1100)], ids=str)
def test_triton_at_full_size(size, precision, triton, error, allowed):
    """128 channels: a step, a chunk of a prompt, and a whole prompt."""
    generator = torch.Generator().manual_seed(0)
    query, keys = (
        torch.randn(2, heads, n, 128, generator=generator).to(precision) for heads, n in ((8, size[0]), (2, size[1]))
    )
    options = {"scale": 128**-0.5, "seen": size[1]}
    found = column_sums(*triton([query, keys]), **options)
    assert error(found, naive.column_sums(query, keys, **options)) < allowed[precision]
