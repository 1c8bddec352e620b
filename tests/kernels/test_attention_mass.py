"""Attention mass of chosen queries against each query by itself, and against column sums over all of them."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.attention_mass import attention_mass, joint_lse, naive
from kvbench.kernels.column_sums import column_sums
from kvbench.kernels.ragged_attention import Partial

AT = torch.tensor([3, 7, 7, 11, 19])
"""Entries of five queries, one of them twice."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of one or two queries, so that small sizes cross their edges."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", 500)


def test_equals_the_reference(heads, options, attention, error):
    """Every head layout and option gives the sums of single queries within 1e-5."""
    query, keys, _ = attention(heads, len(AT), 20)
    options = {"scale": 0.3, **options}
    assert error(attention_mass(query, keys, AT, **options), naive.attention_mass(query, keys, AT, **options)) < 1e-5


@pytest.mark.parametrize("window", [None, 9])
def test_a_given_normalizer_counts_entries_that_are_elsewhere(heads, window, attention, holes, error):
    """With the log-sum-exp of a larger softmax, and positions with holes, entries get their share of that softmax."""
    query, keys, _ = attention(heads, len(AT), 20)
    lse = torch.randn(query.shape[:3], generator=torch.Generator().manual_seed(2)) + 4
    where = {"logical": AT + 7, "positions": holes(2, heads[1], 20, 27, 1), "window": window}
    options = {"scale": 0.3, "lse": lse, "softcap": 2.0, **where}
    assert error(attention_mass(query, keys, AT, **options), naive.attention_mass(query, keys, AT, **options)) < 1e-5


def test_all_queries_are_column_sums(heads, attention, error):
    """Where every entry's query is chosen, the mass is the column sum, whatever the order of the queries."""
    query, keys, _ = attention(heads, 20, 20)
    wanted = column_sums(query, keys, scale=0.3, seen=20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    assert error(attention_mass(query[:, :, order], keys, order, scale=0.3), wanted) < 1e-5


@pytest.mark.slow
def test_memory_is_linear(attention, largest, monkeypatch):
    """Logits of few queries exist at a time."""
    monkeypatch.setattr("kvbench.kernels.blocks.BLOCK_ELEMENTS", 1 << 14)
    query, keys, _ = attention((2, 1), 2000, 4000, batch=1)
    assert largest(lambda: attention_mass(query, keys, torch.arange(2000, 4000), scale=0.3)) <= query.numel() * 3


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, 6)], ids=["plain", "sinks"])
def test_the_joint_normalizer_is_that_of_one_softmax(sinks):
    """Logits cut into parts, one of which sees nothing, have the log-sum-exp of all of them and the sinks."""
    logits = torch.randn(2, 6, 5, 20, generator=torch.Generator().manual_seed(1))
    nothing = torch.full((2, 6, 5, 1), -torch.inf)
    parts = [Partial(x[..., :1], x.logsumexp(-1)) for x in (*logits.split([7, 13], dim=-1), nothing)]
    column = [] if sinks is None else [sinks.view(1, 6, 1, 1).expand(2, 6, 5, 1)]
    assert torch.allclose(joint_lse(parts, sinks), torch.cat([logits, *column], dim=-1).logsumexp(-1))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("at", [[0], [39, 3, 3, 16, 15]], ids=str)
def test_triton_equals_the_reference(at, options, triton, attention, error):
    """Queries in any order, of any entries: within 1e-5."""
    at = torch.tensor(at)
    query, keys, _ = attention((6, 2), len(at), 40, batch=1)
    options = {"scale": 0.3, **options}
    found = attention_mass(*triton([query, keys, at]), **triton(options))
    assert error(found, naive.attention_mass(query, keys, at, **options)) < 1e-5


def test_triton_gives_no_mass_without_queries(triton, attention):
    """A chunk of a prompt may hold no probe."""
    query, keys, _ = attention((6, 2), 0, 40)
    found = attention_mass(*triton([query, keys, AT[:0]]), scale=0.3)
    assert found.cpu().equal(naive.attention_mass(query, keys, AT[:0], scale=0.3).float())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("given", [True, False], ids=["lse given", "lse found"])
def test_triton_takes_a_normalizer_and_positions(given, window, heads, triton, attention, holes, error):
    """Every head layout, for a batch: the share of a larger softmax or of this one, windows counted in tokens."""
    query, keys, _ = attention(heads, len(AT), 20)
    lse = torch.randn(query.shape[:3], generator=torch.Generator().manual_seed(2)) + 4
    options = {"scale": 0.3, "softcap": 2.0, "window": window, "logical": AT + 7,
               "positions": holes(2, heads[1], 20, 27, 1)} | ({"lse": lse} if given else {})
    found = attention_mass(*triton([query, keys, AT]), **triton(options))
    assert error(found, naive.attention_mass(query, keys, AT, **options)) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_in_every_precision(precision, triton, attention, error, allowed):
    """The sums are float32."""
    query, keys, _ = attention((6, 2), len(AT), 35, dtype=precision)
    found = attention_mass(*triton([query, keys, AT]), scale=0.3)
    assert found.dtype == torch.float32
    assert error(found, naive.attention_mass(query, keys, AT, scale=0.3)) < allowed[precision]


@pytest.mark.gpu
def test_triton_at_full_size(precision, triton, error, allowed):
    """A tenth of a prompt's queries as probes, 128 channels."""
    generator = torch.Generator().manual_seed(0)
    at = torch.randperm(1500, generator=generator)[:150].sort().values
    query, keys = (
        torch.randn(2, heads, n, 128, generator=generator).to(precision) for heads, n in ((8, 150), (2, 1500))
    )
    found = attention_mass(*triton([query, keys, at]), scale=128**-0.5)
    assert error(found, naive.attention_mass(query, keys, at, scale=128**-0.5)) < allowed[precision]


def test_a_query_without_a_visible_entry_gives_no_mass():
    """As in the reference and in Triton; a difference of infinities is NaN."""
    query, keys, at = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 4, 8), torch.tensor([-1, 3])
    found = attention_mass(query, keys, at, scale=1.0)
    assert torch.allclose(found.double(), naive.attention_mass(query, keys, at, scale=1.0), atol=1e-5)
