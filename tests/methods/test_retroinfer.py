"""RetroInfer: the estimate of clusters that are not read, and what a token reads."""

from __future__ import annotations

import pytest
import torch

from kvbench.kernels.dense_attention.naive import attention_weights
from kvbench.method import Moment
from kvbench.methods.retrieval.retroinfer import RetroInfer


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def answer(make_step, keys, *, softcap=None, factor=1, **settings):
    """One token after a context with these keys: its output, that of full attention, and the store.

    factor: of the query.
    """
    length = keys.shape[2]
    method = RetroInfer(**{"sinks": 2, "recent": 2, "cluster": 8, "rows": 20, "length": length, **settings})
    values = draw(1, 2, length, 8, seed=2)
    kv = method.layer(0)
    step = make_step(draw(1, 4, length, 8), keys, values, scale=0.4)
    kv.append(step)
    method.evict(kv, step)
    later = make_step(
        factor * draw(1, 4, 1, 8, seed=3), draw(1, 2, 1, 8, seed=4), draw(1, 2, 1, 8, seed=5), before=length,
        moment=Moment.DECODE, scale=0.4, softcap=softcap,
    )
    kv.append(later)
    weights = attention_weights(
        later.query, torch.cat([keys, later.key], 2), scale=0.4, seen=length + 1, softcap=softcap
    ).float()
    wanted = (weights @ torch.cat([values, later.value], 2)[:, :, None]).flatten(1, 2)
    return method.attend(kv, later), wanted, kv


def in_eights():
    """64 keys between two sinks and two recent ones: eight different ones, each eight times."""
    middle = draw(1, 2, 8, 8, seed=1).repeat_interleave(8, dim=2)
    return torch.cat([draw(1, 2, 2, 8, seed=6), middle, draw(1, 2, 2, 8, seed=7)], dim=2)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "factor": 6}])
def test_clusters_of_equal_keys_are_estimated_exactly(make_step, options):
    """Two of eight clusters are read, six estimated: full attention, because no key differs from its cluster's mean.

    Also with the model's soft cap and logits that exceed it.
    """
    output, wanted, kv = answer(make_step, in_eights(), estimated=1.0, **options)
    assert kv.reads["entries_skipped"] == 2 * (69 - 21)
    assert torch.allclose(output, wanted, atol=1e-5)


@pytest.mark.parametrize("settings", [{"estimated": 0.0}, {"estimated": 0.3}])
def test_without_the_estimate_attention_is_missing(make_step, settings):
    """A planted fault: with fewer clusters estimated the output is another one."""
    output, wanted, _ = answer(make_step, in_eights(), **settings)
    assert (output - wanted).abs().max() > 1e-2


def test_the_size_of_a_cluster_counts(make_step):
    """A planted fault: with cluster sizes of one in the estimate, the output is not that of full attention."""
    log = torch.Tensor.log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "log", lambda self: torch.zeros_like(log(self)))
        output, wanted, _ = answer(make_step, in_eights(), estimated=1.0)
    assert (output - wanted).abs().max() > 1e-2


def test_a_token_reads_centers_some_mean_values_and_entries(make_step):
    """Eight centers with nine offsets, two mean values, and 20 entries with its own, per KV head."""
    *_, kv = answer(make_step, in_eights(), estimated=0.25)
    assert kv.reads["bytes"] == 2 * (8 * 8 * 4 + 9 * 4 + 2 * 8 * 4 + 21 * 2 * 8 * 4)


def test_more_is_estimated_better(make_step):
    """On random keys the estimate brings the output closer to full attention than leaving clusters out."""
    keys = draw(1, 2, 64, 8, seed=1)
    distances = []
    for share in (0.0, 1.0):
        output, wanted, _ = answer(make_step, keys, estimated=share)
        distances.append((output - wanted).norm().item())
    assert distances[1] < distances[0]
