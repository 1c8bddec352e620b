"""S2O: the order of visits, where they stop, and what is counted."""

from __future__ import annotations

import pytest
import torch

from kvbench.hf.tiny import tiny_model
from kvbench.methods.prefill.s2o import S2O
from kvbench.store.prompt import MILLION, PromptKV


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attend(method, query, key, value, make_step, **options):
    """Output and store of one prompt."""
    kv, step = PromptKV(), make_step(query, key, value, scale=0.4, **options)
    kv.append(step)
    return method.attend_prompt(kv, step), kv, step


def naive(query, keys, values, block, segment, tau, scale):
    """One head in plain loops: outputs, and the earlier blocks that each segment visited, in their order."""
    outputs, visits = [], []
    size = block * segment
    for low in range(0, len(query), size):
        rows = range(low, min(low + size, len(query)))
        guide = query[rows.start : rows.stop].mean(0)
        means = [keys[j * block : (j + 1) * block].mean(0) for j in range(low // block)]
        order = sorted(range(len(means)), key=lambda j: -float(means[j] @ guide))
        seen = {t: list(range(low, t + 1)) for t in rows}
        mass = {t: sum(torch.exp(query[t] @ keys[j] * scale) for j in seen[t]) for t in rows}
        visited = []
        for j in order:
            visited.append(j)
            entries = range(j * block, (j + 1) * block)
            gains = {t: sum(torch.exp(query[t] @ keys[x] * scale) for x in entries) for t in rows}
            stop = all(gains[t] < tau * mass[t] for t in rows)
            for t in rows:
                mass[t] = mass[t] + gains[t]
                seen[t] += entries
            if stop:
                break
        visits.append(visited)
        outputs += [(query[t] @ keys[seen[t]].T * scale).softmax(0) @ values[seen[t]] for t in rows]
    return torch.stack(outputs), visits


@pytest.mark.parametrize("tau", [0.05, 0.3, 1.0])
def test_outputs_and_visits_are_those_of_the_definition(tau, make_step):
    """Two KV heads with two query heads each, and a prompt that does not fill its last block."""
    query, key, value = draw(1, 4, 45, 8), draw(1, 2, 45, 8, seed=1), draw(1, 2, 45, 6, seed=2)
    output, kv, _ = attend(S2O(tau=tau, segment=2, block_size=4), query, key, value, make_step)
    pairs = 0
    for head in range(4):
        wanted, visits = naive(query[0, head], key[0, head // 2], value[0, head // 2], 4, 2, tau, 0.4)
        assert torch.allclose(output[0, head], wanted, atol=1e-5)
        for number, visited in enumerate(visits):
            rows = range(8 * number, min(8 * number + 8, 45))
            pairs += sum(4 * len(visited) + t - rows.start + 1 for t in rows)
    assert kv.facts()["prompt_pairs_computed"].value == pairs


@pytest.mark.parametrize("segment", [1, 3])
def test_zero_never_stops(segment, make_step):
    """With tau 0 it is dense attention, also with soft cap and sinks, in any order of blocks."""
    query, key, value = draw(2, 4, 45, 8), draw(2, 2, 45, 8, seed=1), draw(2, 2, 45, 6, seed=2)
    options = {"softcap": 2.0, "sinks": torch.linspace(-1, 2, 4)}
    output, kv, step = attend(S2O(tau=0, segment=segment, block_size=4), query, key, value, make_step, **options)
    assert torch.allclose(output, kv.attend(step), atol=1e-5)
    assert not kv.facts()["prompt_pairs_skipped"].value


def test_density_falls_with_tau(make_step):
    """A larger tau computes no more pairs."""
    query, key, value = draw(1, 4, 64, 8), draw(1, 2, 64, 8, seed=1), draw(1, 2, 64, 8, seed=2)
    stores = [attend(S2O(tau=tau, block_size=4), query, key, value, make_step)[1] for tau in (0, 0.05, 0.2, 1)]
    counts = [x.facts()["prompt_pairs_computed"].value for x in stores]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_heavy_block_after_a_light_one_is_lost_and_shown(make_step):
    """The trap of the greedy rule: keys that cancel in the mean rank last, behind blocks that end the visit."""
    query = torch.zeros(1, 1, 32, 4)
    query[..., 0] = 5.0
    key = torch.zeros(1, 1, 32, 4)
    key[0, 0, 20:28, 0] = 1.0
    key[0, 0, 4, 0], key[0, 0, 5, 0] = 8.0, -9.0
    _, kv, _ = attend(S2O(tau=0.9, segment=1, block_size=4), query, key, key, make_step)
    assert kv.facts()["worst_lost_mass_millionths"].value > 0.99 * MILLION


def test_blocks_of_segments_are_those_of_the_context():
    """Sixteen or so segments in a short context."""
    assert S2O().fit(None, tiny_model().shape(120)).block_size == 2
