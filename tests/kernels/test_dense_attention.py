"""Dense attention against every logit written out in float64."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from kvbench.kernels.choice import using
from kvbench.kernels.dense_attention import dense_attention, naive
from kvbench.kernels.dense_attention import torch as plain

SIZES = [(1, 1), (1, 17), (5, 5), (5, 17), (4, 8), (8, 8), (9, 9), (9, 30), (17, 17)]
"""(queries, entries) about a block of 4: one query, a block, one more, several and a rest."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 queries, so that small sizes cross their edges."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 4)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_reference(heads, size, options, attention, error):
    """Every head layout, size and option gives the reference's output within 1e-5."""
    query, keys, values = attention(heads, *size)
    options = {"scale": 0.3, "seen": size[1], **options}
    assert error(
        dense_attention(query, keys, values, **options), naive.dense_attention(query, keys, values, **options)
    ) < 1e-5


@pytest.mark.parametrize("size", [(1, 12), (3, 12), (6, 12), (6, 6)], ids=str)
def test_a_window_counts_tokens_across_holes(heads, size, options, attention, holes, error):
    """With positions, entries are seen by their distance in the text and not by their distance in the block."""
    query, keys, values = attention(heads, *size)
    options = {"scale": 0.3, "seen": 40, **options, "window": 9}
    positions = holes(2, heads[1], size[1], 40, size[0])
    found = dense_attention(query, keys, values, positions=positions, **options)
    assert error(found, naive.dense_attention(query, keys, values, positions=positions, **options)) < 1e-5
    if size[0] < size[1]:
        assert not torch.allclose(found, naive.dense_attention(query, keys, values, **options), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, options, attention, error, allowed):
    """In 16 bits the output is off by no more than a few roundings."""
    query, keys, values = attention((6, 2), 9, 30, dtype=dtype)
    options = {"scale": 0.3, "seen": 30, **options}
    found = dense_attention(query, keys, values, **options)
    assert found.dtype == dtype
    assert error(found, naive.dense_attention(query.double(), keys, values, **options)) < allowed[dtype]


@pytest.mark.parametrize("n_query", [1, 3, 6])
def test_a_length_on_the_device_cuts_the_block(heads, n_query, options, attention, error):
    """Reading a whole preallocated block up to `length` equals reading its slice."""
    query, keys, values = attention(heads, n_query, 20)
    options = {"scale": 0.3, "seen": 12, **options}
    found = dense_attention(query, keys, values, length=torch.tensor(12), **options)
    assert error(found, naive.dense_attention(query, keys[:, :, :12], values[:, :, :12], **options)) < 1e-5


@pytest.mark.parametrize("n_query", [1, 3])
def test_a_length_and_positions_together(heads, n_query, attention, holes, error):
    """A static block with holes counts its window in tokens, `seen` being a number on the device as well."""
    query, keys, values = attention(heads, n_query, 20)
    positions = torch.zeros(2, heads[1], 20, dtype=torch.int32)
    positions[..., :12] = holes(2, heads[1], 12, 40, n_query)
    options = {"scale": 0.3, "window": 9}
    wanted = naive.dense_attention(
        query, keys[:, :, :12], values[:, :, :12], seen=40, positions=positions[..., :12], **options
    )
    for seen in (40, torch.tensor(40)):
        found = dense_attention(
            query, keys, values, seen=seen, positions=positions, length=torch.tensor(12), **options
        )
        assert error(found, wanted) < 1e-5


def test_queries_may_see_each_other_both_ways(heads, attention, error):
    """Without causality every query sees every entry."""
    query, keys, values = attention(heads, 5, 11)
    options = {"scale": 0.3, "seen": 11, "causal": False}
    assert error(
        dense_attention(query, keys, values, **options), naive.dense_attention(query, keys, values, **options)
    ) < 1e-5


def test_a_window_both_ways_is_refused(attention):
    """A bidirectional window is not served, and says so."""
    query, keys, values = attention((3, 3), 5, 11)
    with pytest.raises(NotImplementedError, match="window"):
        dense_attention(query, keys, values, scale=0.3, seen=11, causal=False, window=4)


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 2.0}], ids=["plain", "window", "softcap"])
def test_memory_is_linear(options, attention, largest, monkeypatch):
    """No tensor of T x N elements: twice the entries make the largest temporary at most about twice as large."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 256)
    peaks = {}
    for n in (2048, 4096):
        query, keys, values = attention((2, 1), n - 7, n, batch=1)
        shape = {"scale": 0.3, "seen": n, **options}
        peaks[n] = largest(lambda q=query, k=keys, v=values, s=shape: dense_attention(q, k, v, **s))
    assert peaks[4096] <= 2.1 * peaks[2048]
    assert peaks[4096] < 4096 * 4089


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 40), (17, 17)], ids=str)
def test_triton_equals_the_reference(size, options, triton, attention, error):
    """One tile and several, one block of queries and several: Triton's output is the reference's within 1e-5."""
    query, keys, values = attention((6, 2), *size, batch=1)
    options = {"scale": 0.3, "seen": size[1], **options}
    found = dense_attention(*triton([query, keys, values]), **triton(options))
    assert error(found, naive.dense_attention(query, keys, values, **options)) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_in_every_precision(heads, precision, triton, attention, error, allowed):
    """Every head layout, for a batch; the output is of the queries' type."""
    query, keys, values = attention(heads, 1, 35, dtype=precision)
    found = dense_attention(*triton([query, keys, values]), scale=0.3, seen=35)
    assert found.dtype == precision
    assert error(found, naive.dense_attention(query.double(), keys, values, scale=0.3, seen=35)) < allowed[precision]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_triton_counts_a_window_in_tokens_across_holes(static, triton, attention, holes, error):
    """By positions, and with the numbers of a captured step on the device."""
    query, keys, values = attention((6, 2), 3, 40, batch=1)
    positions = holes(1, 2, 40, 90, 3)
    options = {"scale": 0.3, "window": 33}
    wanted = naive.dense_attention(query, keys, values, seen=90, positions=positions, **options)
    if static:  # the block goes on behind the entries
        keys, values = (torch.cat([x, x[:, :, :5] + 1], dim=2) for x in (keys, values))
        positions = torch.cat([positions, positions[..., :5]], dim=2)
        options |= {"length": torch.tensor(40), "seen": torch.tensor(90)}
    found = dense_attention(*triton([query, keys, values]), **triton({"seen": 90, "positions": positions, **options}))
    assert error(found, wanted) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_serves_queries_that_see_each_other_both_ways(triton, attention, error):
    """Without causality every query sees every entry."""
    query, keys, values = attention((6, 2), 5, 20)
    options = {"scale": 0.3, "seen": 20, "causal": False}
    found = dense_attention(*triton([query, keys, values]), **options)
    assert error(found, naive.dense_attention(query, keys, values, **options)) < 1e-5
    with pytest.raises(NotImplementedError, match="window"):
        dense_attention(query, keys, values, **options, window=4)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_triton_blocks_end_where_entries_do(more, precision, triton, attention, error, allowed):
    """One block of entries as a GPU has them, one entry less and one more."""
    fast = pytest.importorskip("kvbench.kernels.dense_attention.triton")
    n = fast._blocks(3, 24, 20, precision.itemsize)[1] + more
    query, keys, values = attention((3, 1), 1, n, batch=1, dtype=precision)
    found = dense_attention(*triton([query, keys, values]), scale=0.3, seen=n)
    assert error(found, naive.dense_attention(query.double(), keys, values, scale=0.3, seen=n)) < allowed[precision]


@pytest.fixture
def flash_attn(monkeypatch):
    """Operations run as flash's; the package is a loop over queries that does what its documentation says."""

    def attend(q, k, v, *, softmax_scale, causal, window_size, softcap):  # [B, T, H, D]
        queries, heads, rows, group = q.shape[1], q.shape[2], torch.arange(k.shape[1]), q.shape[2] // k.shape[2]
        output = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float64)
        for t in range(queries):
            at = t + k.shape[1] - queries
            (left, right), sees = window_size, rows <= at if causal else rows >= 0
            sees = sees & (rows >= at - left if left >= 0 else sees) & (rows <= at + right if right >= 0 else sees)
            for head in range(heads):
                logits = k[:, sees, head // group].double() @ q[:, t, head, :, None].double() * softmax_scale
                logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
                output[:, t, head] = (logits.softmax(1) * v[:, sees, head // group].double()).sum(1)
        return output.to(q.dtype)

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=attend))
    with using("flash") as ran:
        yield ran


@pytest.mark.parametrize("size", [(5, 5), (5, 17), (1, 17)], ids=str)
def test_flash_attn_is_asked_for_what_the_reference_does(size, heads, options, flash_attn, attention, error):
    """Prompts and chunks of every head layout, windows and soft caps; sinks and single queries are torch's."""
    query, keys, values = (x.repeat(1, 1, 1, 2)[..., :20] for x in attention(heads, *size))
    options = {"scale": 0.3, "seen": size[1], **options}
    found = dense_attention(query, keys, values, **options)
    assert error(found, naive.dense_attention(query, keys, values, **options)) < 1e-5
    label = "dense_attention.prompt" if size == (5, 5) else "dense_attention.chunk"
    noted = {} if size[0] == 1 else {label: "torch" if "sinks" in options else "flash_attn"}
    assert flash_attn == {"dense_attention": "flash", **noted}


def test_flash_attn_has_no_window_across_holes(flash_attn, attention, holes, error):
    """Where a window counts tokens, and where it may look ahead, torch's attention serves or refuses."""
    query, keys, values = (x.repeat(1, 1, 1, 2)[..., :20] for x in attention((6, 2), 3, 12))
    options = {"scale": 0.3, "seen": 40, "window": 9, "positions": holes(2, 2, 12, 40, 3)}
    found = dense_attention(query, keys, values, **options)
    assert error(found, naive.dense_attention(query, keys, values, **options)) < 1e-5
    assert flash_attn["dense_attention.chunk"] == "sdpa_flash"
    both = {"scale": 0.3, "seen": 12, "causal": False}
    found = dense_attention(query, keys, values, **both)
    assert error(found, naive.dense_attention(query, keys, values, **both)) < 1e-5
    assert flash_attn["dense_attention.chunk"] == "flash_attn+sdpa_flash"  # both have run by now
    with pytest.raises(NotImplementedError, match="window"):
        dense_attention(query, keys, values, **both, window=4)


def test_which_kernel_of_sdpa_takes_what_is_noted(attention):
    """Flash attention where keys are as wide as values, the plain one elsewhere, none of them for soft caps."""
    query, keys, values = attention((6, 2), 3, 12)
    for rows, softcap, n, label, wanted in (
        (keys, None, 3, "prompt", "sdpa_flash"), (values, None, 3, "prompt", "sdpa_math"),
        (keys, None, 12, "chunk", "sdpa_flash"), (values, None, 12, "chunk", "sdpa_math"),
        (keys, 2.0, 12, "chunk", "torch"),
    ):
        with using("torch") as ran:
            dense_attention(query, keys[:, :, :n], rows[:, :, :n], scale=0.3, seen=n, softcap=softcap)
        assert ran == {"dense_attention": "torch", f"dense_attention.{label}": wanted}


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(200, 1500), (700, 700)], ids=str)
def test_sdpa_s_flash_attention_takes_prompts_and_chunks_on_a_gpu(size, precision, error, allowed):
    """In 16 bits, grouped heads and all, aligned at the bottom right; in 32 bits it is the plain one, in blocks."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, n, 128, generator=generator).to(precision)
        for heads, n in ((8, size[0]), (2, size[1]), (2, size[1]))
    )
    options = {"scale": 128**-0.5, "seen": size[1]}
    with using("torch") as ran:
        found = dense_attention(query.cuda(), keys.cuda(), values.cuda(), **options)
    assert error(found, naive.dense_attention(query.double(), keys, values, **options)) < allowed[precision]
    assert "sdpa_flash" in ran.values() if precision.itemsize == 2 else "sdpa_math" in ran.values()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1, 9000), (200, 1500), (700, 700)], ids=str)
def test_triton_at_full_size(size, precision, triton, error, allowed):
    """128 channels: a step, a chunk of a prompt, and a whole prompt, which in 16 bits is SDPA's flash attention."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, n, 128, generator=generator).to(precision)
        for heads, n in ((8, size[0]), (2, size[1]), (2, size[1]))
    )
    options = {"scale": 128**-0.5, "seen": size[1]}
    with using("triton") as ran:
        found = dense_attention(*triton([query, keys, values]), **options)
    assert error(found, naive.dense_attention(query.double(), keys, values, **options)) < allowed[precision]
    if size[0] == size[1]:
        assert ran["dense_attention.prompt"] == ("sdpa_flash" if precision.itemsize == 2 else "triton")
