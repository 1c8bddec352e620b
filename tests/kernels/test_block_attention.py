"""Attention over chosen blocks and columns, compared with a softmax over their entries and with dense attention."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.block_attention import block_attention, naive
from kvbench.kernels.dense_attention import naive as dense_naive

BLOCK = 4


def choose(heads, tokens, batch=2):
    """Random blocks, every query's own among them, and random columns, inside chosen blocks too."""
    generator = torch.Generator().manual_seed(1)
    count = -(-tokens // BLOCK)
    blocks = torch.rand(batch, heads, count, count, generator=generator) < 0.3
    return blocks | torch.eye(count, dtype=torch.bool), torch.rand(batch, heads, tokens, generator=generator) < 0.2


@pytest.mark.parametrize("tokens", [1, 12, 23])
@pytest.mark.parametrize("columned", [False, True], ids=["blocks", "blocks and columns"])
def test_equals_the_reference(heads, tokens, columned, options, attention, error):
    """Any blocks and columns give attention over their entries, each counted once, to 1e-5."""
    query, keys, values = attention(heads, tokens, tokens)
    blocks, columns = choose(heads[0], tokens)
    columns = columns if columned else None
    options = {"block": BLOCK, "scale": 0.3, **{k: x for k, x in options.items() if k != "window"}}
    found = block_attention(query, keys, values, blocks, columns, **options)
    assert error(found, naive.block_attention(query, keys, values, blocks, columns, **options)) < 1e-5


def test_every_block_is_dense_attention(heads, attention, error):
    """With all blocks it is causal attention over all entries."""
    query, keys, values = attention(heads, 23, 23)
    blocks = torch.ones(2, heads[0], 6, 6, dtype=torch.bool)
    found = block_attention(query, keys, values, blocks, block=BLOCK, scale=0.3)
    assert error(found, dense_naive.dense_attention(query, keys, values, scale=0.3, seen=23)) < 1e-5


def test_other_entries_are_not_read(attention):
    """Entries that no query chose may be NaN."""
    query, keys, values = attention((6, 2), 16, 16)
    keys[:, :, 4:8], values[:, :, 4:8] = torch.nan, torch.nan
    blocks = torch.ones(2, 6, 4, 4, dtype=torch.bool)
    blocks[..., 1] = False
    found = block_attention(query, keys, values, blocks, block=BLOCK, scale=0.3)
    assert found[:, :, 8:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the output is off by no more than a few roundings."""
    query, keys, values = attention((6, 2), 23, 23, dtype=dtype)
    blocks, columns = choose(6, 23)
    found = block_attention(query, keys, values, blocks, columns, block=BLOCK, scale=0.3)
    wanted = naive.block_attention(query.double(), keys, values, blocks, columns, block=BLOCK, scale=0.3)
    assert found.dtype == dtype
    assert error(found, wanted) < allowed[dtype]


# Triton


@pytest.fixture(params=[(16, 16), (32, 16)], ids=["tiles of 16", "tiles of 32 and 16"])
def small_tiles(request, monkeypatch):
    """Tiles smaller than the prompt, larger than its blocks."""
    fast = pytest.importorskip("kvbench.kernels.block_attention.triton")
    monkeypatch.setattr(fast, "tile_sides", lambda *_: request.param)


@pytest.mark.parametrize("columned", [False, True], ids=["blocks", "blocks and columns"])
@pytest.mark.usefixtures("small_tiles")
def test_triton_equals_the_reference(heads, columned, options, triton, attention, error):
    """Several tiles of queries and entries, the last ones partial."""
    query, keys, values = attention(heads, 41, 41)
    blocks, columns = choose(heads[0], 41)
    columns = columns if columned else None
    options = {"block": BLOCK, "scale": 0.3, **{k: x for k, x in options.items() if k != "window"}}
    wanted = naive.block_attention(query, keys, values, blocks, columns, **options)
    found = block_attention(*triton([query, keys, values, blocks]), triton(columns), **triton(options))
    assert error(found.cpu(), wanted) < 1e-5


def test_triton_in_every_precision(precision, triton, attention, error, allowed):
    """Outputs are of the queries' type."""
    query, keys, values = attention((6, 2), 23, 23, dtype=precision)
    blocks, columns = choose(6, 23)
    found = block_attention(*triton([query, keys, values, blocks, columns]), block=BLOCK, scale=0.3)
    wanted = naive.block_attention(query.double(), keys, values, blocks, columns, block=BLOCK, scale=0.3)
    assert found.dtype == precision
    assert error(found.cpu(), wanted) < allowed[precision]


@pytest.mark.usefixtures("small_tiles")
def test_triton_reads_no_other_tile(triton, attention):
    """A tile of entries that no query chose may be NaN."""
    query, keys, values = attention((6, 2), 64, 64)
    keys[:, :, 16:32], values[:, :, 16:32] = torch.nan, torch.nan
    blocks = torch.ones(2, 6, 4, 4, dtype=torch.bool)
    blocks[..., 1] = False
    found = block_attention(*triton([query, keys, values, blocks]), block=16, scale=0.3)
    assert found[:, :, 32:].isfinite().all()
