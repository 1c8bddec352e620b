"""One query that is expanded to all positions: the same sums as of separate queries, in time linear in the entries."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvbench.kernels.choice import using
from kvbench.kernels.column_sums import column_maxima, column_sums, naive

PAIRS = [(column_sums, naive.column_sums), (column_maxima, naive.column_maxima)]


@pytest.mark.parametrize("pair", PAIRS, ids=["sums", "maxima"])
@pytest.mark.parametrize("size", [(2, 2), (10, 30)], ids=str)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("special", [False, True], ids=["plain", "softcap and sinks"])
def test_equals_separate_queries(attention, heads, error, size, pair, kernels, special):
    """With and without earlier entries, soft caps and sinks."""
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton is for Linux")
    query, keys, _ = attention(heads, *size)
    query = query[:, :, :1].expand(-1, -1, size[0], -1)
    options = {"scale": 0.3, "seen": size[1]}
    if special:
        options |= {"softcap": 5.0, "sinks": torch.linspace(-1, 1, heads[0])}
    function, oracle = pair
    with using(kernels):
        found = function(query, keys, **options)
    assert error(found, oracle(query, keys, **options)) < 1e-5


@pytest.mark.parametrize("pair", PAIRS, ids=["sums", "maxima"])
def test_early_queries_may_see_only_small_logits(pair, error):
    """The last logit is 300 above the others, more than float32's exponents span."""
    keys = torch.zeros(1, 1, 5, 8)
    keys[..., 0] = torch.tensor([0.0, 1.0, 0.5, 300.0, 299.0])
    query, options = torch.ones(1, 2, 1, 8).expand(-1, -1, 4, -1), {"scale": 1.0, "seen": 5}
    function, oracle = pair
    assert error(function(query, keys, **options), oracle(query, keys, **options)) < 1e-5


def test_its_products_are_linear_in_the_length():
    """A synthetic context of H2O at 131,072 tokens on Llama-3.1-8B's shape: 1.1e9 products a layer, not 7e13."""
    query = torch.empty(1, 32, 1, 128, device="meta").expand(-1, -1, 131_072, -1)
    keys = torch.empty(1, 8, 131_072, 128, device="meta")
    with FlopCounterMode(display=False) as counter:
        column_sums(query, keys, scale=0.1, seen=131_072)
    assert counter.get_total_flops() <= 2 * 32 * 128 * 131_072
