"""Ragged attention, merged with a dense tail, against one softmax per query in float64."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.ragged_attention import Partial, dense_partial, merge_partials, naive, ragged_partial
from kvbench.kernels.ragged_attention import torch as plain

COUNTS = {"uneven": [7, 11, 0, 3], "one head keeps all": [20, 0, 0, 0], "none": [0, 0, 0, 0], "even": [5, 5, 5, 5]}
GQA = (6, 2)
SEEN = 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 queries, so that small sizes cross their edges."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 4)


def flat_entries(keys, values, counts, before):
    """The first entries of every head's keys and values, flat, with ascending positions below `before`."""
    heads = list(zip(keys.flatten(0, 1), values.flatten(0, 1), counts, strict=True))
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    generator = torch.Generator().manual_seed(1)
    return {
        "keys": torch.cat([k[:n] for k, _, n in heads]),
        "values": torch.cat([v[:n] for _, v, n in heads]),
        "offsets": offsets,
        "counts": counts,
        "positions": torch.cat([torch.randperm(before, generator=generator)[:n].sort().values for n in counts]).int(),
    }


def both(query, flat, tail_keys, tail_values, *, tail_positions, length=None, sinks=None, **options):
    """Our output: partial attentions over the flat entries and the tail, merged."""
    parts = [
        ragged_partial(query, **flat, **options),
        dense_partial(query, tail_keys, tail_values, positions=tail_positions, length=length, **options),
    ]
    return merge_partials(parts, sinks)


def reference(query, flat, tail_keys, tail_values, *, tail_positions, **options):
    """the reference implementation of `both`."""
    return naive.ragged_attention(
        query.double(), flat["keys"], flat["values"], flat["counts"], tail_keys, tail_values,
        flat_positions=flat["positions"], flat_bias=flat.get("bias"), tail_positions=tail_positions, **options,
    )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("size", [(1, 1), (1, 6), (4, 4), (5, 5), (5, 9), (6, 14)], ids=str)
def test_equals_the_reference(size, counts, options, attention, error):
    """Heads that kept everything and heads that kept nothing, under every option, give the reference's output."""
    _, keys, values = attention(GQA, 1, 20, seed=1)
    query, tail_keys, tail_values = attention(GQA, *size)
    flat = flat_entries(keys, values, counts, SEEN - size[1])
    positions = torch.arange(SEEN - size[1], SEEN).expand(2, 2, -1).int()
    options = {"scale": 0.3, "seen": SEEN, "tail_positions": positions, **options}
    assert error(
        both(query, flat, tail_keys, tail_values, **options), reference(query, flat, tail_keys, tail_values, **options)
    ) < 1e-5


def test_a_bias_is_added_after_the_soft_cap(options, attention, error):
    """A bias on the logits of flat entries goes with every option, and the tail has none."""
    _, keys, values = attention(GQA, 1, 20, seed=1)
    query, tail_keys, tail_values = attention(GQA, 5, 9)
    flat = flat_entries(keys, values, COUNTS["uneven"], SEEN - 9)
    flat["bias"] = torch.linspace(-3, 4, 21)
    positions = torch.arange(SEEN - 9, SEEN).expand(2, 2, -1).int()
    options = {"scale": 0.3, "seen": SEEN, "tail_positions": positions, **options}
    assert error(
        both(query, flat, tail_keys, tail_values, **options), reference(query, flat, tail_keys, tail_values, **options)
    ) < 1e-5


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_one_entry_with_the_log_of_a_count_is_so_many_entries(softcap, attention, error):
    """Entries repeated n times, and each once with a bias of log n, give the same output."""
    _, keys, values = attention(GQA, 1, 20, seed=1)
    query, tail_keys, tail_values = attention(GQA, 5, 9)
    options = {"scale": 0.3, "seen": 100, "tail_positions": None, "softcap": softcap}
    once = flat_entries(keys, values, COUNTS["uneven"], 50)
    repeats = torch.arange(21) % 4 + 1
    often = {**once, **{name: once[name].repeat_interleave(repeats, 0) for name in ("keys", "values", "positions")}}
    often["counts"] = [int(x.sum()) for x in repeats.split(COUNTS["uneven"])]
    once["bias"] = repeats.float().log()
    assert error(
        both(query, once, tail_keys, tail_values, **options), reference(query, often, tail_keys, tail_values, **options)
    ) < 1e-5


@pytest.mark.parametrize("heads_", [(3, 3), (4, 1)], ids=["MHA", "MQA"])
def test_other_head_layouts(heads_, attention, error):
    """One query head per KV head, and all query heads on one."""
    _, keys, values = attention(heads_, 1, 20, seed=1)
    query, tail_keys, tail_values = attention(heads_, 3, 7)
    flat = flat_entries(keys, values, list(range(0, 4 * heads_[1], 2)), 30)
    options = {"scale": 0.3, "seen": SEEN, "tail_positions": None}
    assert error(
        both(query, flat, tail_keys, tail_values, **options), reference(query, flat, tail_keys, tail_values, **options)
    ) < 1e-5


@pytest.mark.parametrize("options", [{}, {"window": 9}], ids=["plain", "window"])
@pytest.mark.parametrize("n_query", [1, 5])
def test_a_length_on_the_device_cuts_the_tail(n_query, options, attention, error):
    """Reading a whole preallocated tail up to `length` equals reading its slice, `seen` on the device or not."""
    _, keys, values = attention(GQA, 1, 20, seed=1)
    query, tail_keys, tail_values = attention(GQA, n_query, 16)
    flat = flat_entries(keys, values, COUNTS["uneven"], SEEN - 9)
    positions = torch.zeros(2, 2, 16, dtype=torch.int32)
    positions[..., :9] = torch.arange(SEEN - 9, SEEN)
    options = {"scale": 0.3, **options}
    wanted = reference(
        query, flat, tail_keys[:, :, :9], tail_values[:, :, :9], seen=SEEN, tail_positions=positions[..., :9], **options
    )
    for seen in (SEEN, torch.tensor(SEEN)):
        found = both(
            query, flat, tail_keys, tail_values, seen=seen, tail_positions=positions, length=torch.tensor(9), **options
        )
        assert error(found, wanted) < 1e-5


def test_queries_without_a_visible_entry_add_nothing(attention):
    """Where the window has left all flat entries behind, the partial is zero with weight zero, never NaN."""
    query, keys, values = attention(GQA, 3, 20)
    flat = flat_entries(keys, values, COUNTS["uneven"], 12)
    part = ragged_partial(query, **flat, scale=0.3, seen=SEEN, window=4)
    assert (part.output == 0).all()
    assert (part.lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, attention, error, allowed):
    """In 16 bits the output is off by no more than a few roundings."""
    _, keys, values = attention(GQA, 1, 20, seed=1, dtype=dtype)
    query, tail_keys, tail_values = attention(GQA, 5, 9, dtype=dtype)
    flat = flat_entries(keys, values, COUNTS["uneven"], 30)
    options = {"scale": 0.3, "seen": SEEN, "tail_positions": None}
    found = both(query, flat, tail_keys, tail_values, **options)
    assert error(found, reference(query, flat, tail_keys, tail_values, **options)) < allowed[dtype]


@pytest.mark.parametrize("large", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_flash_attention_gives_what_explicit_logits_give(dtype, large, attention, monkeypatch, error, allowed):
    """The output and its log-sum-exp, of heads with unequal counts and of the tail."""
    _, keys, values = attention(GQA, 1, 20, seed=1, dtype=dtype)
    query, tail_keys, tail_values = attention(GQA, 1, 6, dtype=dtype)
    flat = flat_entries(keys, values, COUNTS["uneven"], 30)

    def attend():
        return [
            ragged_partial(large * query, **flat, scale=0.3, seen=SEEN),
            dense_partial(large * query, tail_keys, tail_values, positions=None, scale=0.3, seen=SEEN),
        ]

    by_flash = attend()
    monkeypatch.setattr(plain, "_flash_takes", lambda *_: False)
    for found, wanted in zip(by_flash, attend(), strict=True):
        assert error(found.output, wanted.output) < allowed[dtype]
        seen = wanted.lse.isfinite()
        assert torch.equal(found.lse.isfinite(), seen)
        assert (found.lse - wanted.lse)[seen].abs().max() < 1e-5 * large


def test_a_large_mean_of_the_keys_costs_no_precision(attention):
    """Logits near 1,000 that differ by less than 2, which 16 bits would round to multiples of 4."""
    query, keys, values = attention(GQA, 1, 20, dtype=torch.bfloat16)
    query[..., 0], keys[..., 0] = 4.0, 256.0
    found = dense_partial(query, keys, values, positions=None, scale=1.0, seen=20)
    weights = (query.unflatten(1, (2, 3)).double() @ keys[:, :, None].double().mT).softmax(-1)
    wanted = (weights @ values[:, :, None].double()).flatten(1, 2)
    assert (found.output - wanted).abs().max() < 0.02


def test_memory_is_linear(attention, largest, monkeypatch):
    """No tensor of T x N elements, over flat entries or over the tail."""
    monkeypatch.setattr(plain, "QUERY_BLOCK", 128)
    peaks = {}
    for n in (1024, 2048):
        query, keys, values = attention((2, 1), n, n, batch=1)
        flat = flat_entries(keys, values, [n], 2 * n)
        peaks[n] = largest(
            lambda q=query, k=keys, v=values, f=flat, n=n: both(q, f, k, v, scale=0.3, seen=3 * n, tail_positions=None)
        )
    assert peaks[2048] <= 2.1 * peaks[1024]
    assert peaks[2048] < 2048 * 2048


TILED = {"uneven": [7, 40], "about a tile": [16, 17], "one head keeps all": [0, 70], "none": [0, 0]}


@pytest.fixture
def triton_error(triton, attention, error):
    """Error of Triton's output over flat entries of `counts` and a tail of `size`: queries, entries."""

    def measure(counts, size, dtype=torch.float32, heads=GQA, *, biased=False, **options):
        batch = len(counts) // heads[1]
        _, keys, values = attention(heads, 1, max(counts) + 1, batch=batch, seed=1, dtype=dtype)
        query, tail_keys, tail_values = attention(heads, *size, batch=batch, dtype=dtype)
        seen = max(counts) + size[1] + 2  # some are gone: a window counts tokens
        flat = flat_entries(keys, values, counts, seen - size[1])
        if biased:
            flat["bias"] = torch.linspace(-3, 4, sum(counts))
        positions = torch.arange(seen - size[1], seen).expand(batch, heads[1], -1).int()
        options = {"scale": 0.3, "seen": seen, "tail_positions": positions, **options}
        wanted = reference(query, flat, tail_keys, tail_values, **options)
        found = both(*triton([query, flat, tail_keys, tail_values]), **triton(options))
        return error(found, wanted)

    return measure


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("counts", TILED.values(), ids=TILED)
def test_triton_equals_the_reference(counts, options, triton_error):
    """Several tiles of a head, one, none: under every option Triton's output is the reference's within 1e-5."""
    assert triton_error(counts, (3, 17), **options) < 1e-5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("counts", TILED.values(), ids=TILED)
def test_triton_counts_a_window_in_tokens(counts, triton_error):
    """A window that ends among the flat entries leaves each head those whose positions are in it."""
    assert triton_error(counts, (3, 17), window=17 + max(counts) // 2) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_adds_a_bias_after_the_soft_cap(options, triton_error):
    """A bias goes with every option."""
    assert triton_error([7, 40], (3, 17), biased=True, **options) < 1e-5


@pytest.mark.usefixtures("small_tiles")
def test_triton_serves_batches_and_head_layouts(heads, precision, triton_error, allowed):
    """Two sequences, one query each, in every precision."""
    assert triton_error([0, 33, 15, 16, 17, 1][: 2 * heads[1]], (1, 1), precision, heads) < allowed[precision]


@pytest.mark.usefixtures("small_tiles")
def test_triton_adds_nothing_for_queries_without_a_visible_entry(triton, attention):
    """Where the window has left all flat entries behind, the partial is zero with weight zero, never NaN."""
    query, keys, values = attention(GQA, 3, 20)
    flat = flat_entries(keys, values, COUNTS["uneven"], 12)
    part = ragged_partial(triton(query), **triton(flat), scale=0.3, seen=SEEN, window=4)
    assert (part.output == 0).all()
    assert (part.lse == -torch.inf).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 12])
def test_triton_reads_a_block_that_others_follow(window, triton, attention, error):
    """A length beyond the block reads all of the block's entries and nothing else."""
    query, keys, values = attention(GQA, 2, 40)
    keys[:, :, 20:], values[:, :, 20:] = torch.inf, torch.nan
    options = {"scale": 0.3, "seen": 27, "window": window, "length": torch.tensor(27)}
    found = dense_partial(*triton([query, keys[:, :, :20], values[:, :, :20]]), **triton(options))
    wanted = plain.dense_partial(query, keys[:, :, :20], values[:, :, :20], **options)
    assert error(found.output, wanted.output) < 1e-5


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, 6)], ids=["", "sinks"])
def test_triton_merges_as_torch_does(parts, sinks, triton):
    """Any number of parts, some of them empty."""
    generator = torch.Generator().manual_seed(0)
    made = [
        Partial(torch.randn(2, 6, 3, 20, generator=generator), torch.randn(2, 6, 3, generator=generator))
        for _ in range(parts)
    ]
    for part in made[1:]:
        part.output[0], part.lse[0] = 0, -torch.inf
    found = merge_partials([Partial(*triton([x.output, x.lse])) for x in made], triton(sinks))
    assert torch.allclose(found.cpu(), plain.merge_partials(made, sinks), atol=1e-6)


def test_triton_merges_parts_in_any_memory_order(triton):
    """The heads of a token may be adjacent in memory, as in what torch computes from a model's queries."""
    generator = torch.Generator().manual_seed(0)
    made = [
        Partial(*(torch.randn(2, 3, 6, *rest, generator=generator).transpose(1, 2) for rest in ((20,), ())))
        for _ in range(3)
    ]
    found = merge_partials([Partial(*triton([x.output, x.lse])) for x in made])
    assert torch.allclose(found.cpu(), plain.merge_partials(made), atol=1e-6)


def test_triton_blocks_end_where_entries_do(precision, triton_error, allowed):
    """Heads of no entry, of one, and of a block and one more or less, in the blocks that a GPU has."""
    fast = pytest.importorskip("kvbench.kernels.dense_attention.triton")
    block = fast._blocks(3, 24, 20, precision.itemsize)[1]
    assert triton_error([0, 1, block - 1, block, block + 1, 2 * block], (1, block + 1), precision) < allowed[precision]


@pytest.mark.gpu
@pytest.mark.parametrize("n_query", [1, 70])
def test_triton_at_full_size(n_query, precision, triton, error, allowed):
    """Heads of 128 channels and of thousands of entries, and one of none."""
    generator = torch.Generator().manual_seed(0)
    counts = [5000, 0, 1, 3333, 2048, 129, 7000, 64]
    query, keys, values, tail_keys, tail_values = (
        torch.randn(*shape, 128, generator=generator).to(precision)
        for shape in ((1, 32, n_query), (1, 8, 7000), (1, 8, 7000), (1, 8, 150), (1, 8, 150))
    )
    flat = flat_entries(keys, values, counts, 8000)
    options = {"scale": 128**-0.5, "seen": 8150, "tail_positions": None}
    found = both(*triton([query, flat, tail_keys, tail_values]), **options)
    assert error(found, reference(query, flat, tail_keys, tail_values, **options)) < allowed[precision]


def test_parts_without_a_visible_entry_merge_to_zero():
    part = Partial(torch.zeros(1, 2, 1, 4), torch.full((1, 2, 1), -torch.inf))
    assert (merge_partials([part, part]) == 0).all()
