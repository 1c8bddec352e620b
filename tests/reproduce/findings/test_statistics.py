"""Statistics of findings: hand-computed cases, exact limits, and planted structure that each must see."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.reproduce.findings import attention, compressed, entries, numbers, passes, questions
from kvbench.reproduce.findings.observe import attend, causal_mask, mix, observe, run_layers

LENGTH = 400


class Made:
    """A layer of hand-made tensors."""

    def __init__(self, attention=None, query=None, key=None, value=None, index=0):
        self.attention, self.query, self.key, self.value, self.index = attention, query, key, value, index
        self.plain_key = key
        self.length = next(x.shape[1] for x in (attention, key) if x is not None)


def uniform(length: int = LENGTH) -> torch.Tensor:
    """Attention that is equal over all tokens so far. [2, T, T]"""
    mask = causal_mask(length).float()
    return (mask / mask.sum(-1, keepdim=True)).expand(2, -1, -1)


def on_first(length: int = LENGTH) -> torch.Tensor:
    """Attention to the first token alone. [2, T, T]"""
    weights = torch.zeros(2, length, length)
    weights[:, :, 0] = 1
    return weights


def keys(heads: int = 2, length: int = LENGTH, width: int = 16, seed: int = 0) -> torch.Tensor:
    """Normally distributed entries. [H, T, D]"""
    return torch.randn(heads, length, width, generator=torch.Generator().manual_seed(seed))


def see(observer, *layers):
    """The result after some layers."""
    for layer in layers:
        observer.see(layer)
    return observer.result()


def text(seed: int = 0, length: int = LENGTH) -> list[int]:
    """Tokens of a tiny model."""
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_ranks_give_equal_values_their_mean():
    """2 and 2 share the ranks 1 and 2."""
    assert numbers.ranks(torch.tensor([5.0, 2.0, 2.0, 1.0])).tolist() == [3.0, 1.5, 1.5, 0.0]


def test_rank_correlation_by_hand():
    """Any increasing function of the same numbers correlates fully."""
    x = torch.arange(10.0)
    assert float(numbers.spearman(x, x.exp())) == pytest.approx(1.0)
    assert float(numbers.spearman(x, -(x**3))) == pytest.approx(-1.0)
    assert float(numbers.spearman(x, torch.ones(10))) == 0.0


def test_layers_are_run_as_the_model_runs_them():
    """Log-probabilities equal those of transformers' own attention."""
    model, ids = tiny_model(), text(length=64)
    ours = run_layers(model, ids, lambda x: mix(x.attention, x.value), keep=64)
    with torch.no_grad():
        theirs = model.module(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_attention_equals_torch():
    """With grouped heads."""
    query, key, value = keys(4), keys(2, seed=1), keys(2, seed=2)
    found = mix(attend(query, key, 0.25, causal_mask(LENGTH)), value)
    wanted = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_sparsity_of_uniform_and_of_one_token():
    """None of uniform attention is negligible; all but one entry of a row is where one token has everything."""
    assert see(attention.Sparsity(), Made(uniform()))["median_layer"] == pytest.approx(0.0, abs=1e-6)
    assert see(attention.Sparsity(), Made(on_first()))["median_layer"] > 0.99


def test_heavy_hitters_by_hand():
    """One token takes everything: the top fifth has all of it, and sums so far choose the same tokens."""
    found = see(attention.HeavyHitters(), Made(on_first()))
    assert found["top_fifth_share"] == pytest.approx(1.0)
    assert found["local_overlap"] == 1.0


def test_a_power_law_is_recognized():
    """Columns with sums that fall as 1 / rank fit a line in logarithms; equal sums explain nothing."""
    law = (1 / torch.arange(1, LENGTH + 1)).expand(2, LENGTH, -1)
    assert see(attention.HeavyHitters(), Made(law))["power_law_r2"] == pytest.approx(1.0, abs=1e-3)
    assert see(attention.HeavyHitters(), Made(torch.ones(2, LENGTH, LENGTH)))["power_law_r2"] < 0.1


def test_a_window_hits_what_stays_attended():
    """Fixed random columns are hit in full; columns that change between window and end are not."""
    fixed = torch.rand(1, 1, LENGTH, generator=torch.Generator().manual_seed(0)).expand(2, LENGTH, -1)
    found = see(attention.ObservationWindow(), Made(fixed, key=keys()))
    assert (found["hit_rate"], found["drop"]) == (1.0, 0.0)
    changed = fixed.clone()
    changed[:, -attention.WINDOW :] = 1 - changed[:, -attention.WINDOW :]
    found = see(attention.ObservationWindow(), Made(changed, key=keys()))
    assert (found["hit_rate"], found["drop"]) == (0.0, 1.0)


def test_overlap_of_steps_and_layers():
    """Equal rows overlap fully at any distance; random rows at the rate of chance."""
    fixed = torch.rand(1, 1, LENGTH, generator=torch.Generator().manual_seed(0)).expand(2, LENGTH, -1)
    drawn = [torch.rand(2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    found = see(attention.Consecutive(), *(Made(fixed) for _ in range(8)))
    assert all(found[x] == 1.0 for x in ("next_step", "step_32", "next_layer", "distant_layers"))
    found = see(attention.Consecutive(), *map(Made, drawn))
    assert all(found[x] < 0.1 for x in ("next_step", "step_32", "next_layer", "distant_layers"))


def test_page_bounds_find_a_planted_page():
    """One page holds keys along the query: the bound finds it, and the recall is complete."""
    query = torch.zeros(1, LENGTH, 16)
    query[..., 0] = 5.0
    key = 0.01 * keys(1)
    key[:, 32:48, 0] = 5.0
    made = Made(attend(query, key, 1.0, causal_mask(LENGTH)), query=query, key=key)
    assert see(attention.PageBounds(), made, made, made)["later_layers"] == pytest.approx(1.0, abs=1e-3)


def test_entropy_of_uniform_and_of_one_token():
    """1 and 0; a fall with depth correlates with -1."""
    found = see(attention.Entropy(), Made(uniform()), Made(on_first()))
    assert found["by_layer"] == pytest.approx([1.0, 0.0], abs=1e-5)
    assert found["depth_correlation"] == pytest.approx(-1.0)


def test_outlier_channels_are_seen():
    """One large channel of the keys: rounding by token suffers, by channel it does not."""
    key = keys(width=32, length=128)
    key[..., 3] = 20 + key[..., 3]
    made = Made(uniform(128), key=key, value=keys(width=32, length=128, seed=1))
    found = see(entries.OutlierChannels(), made)
    assert found["outlier_ratio"] > 10
    assert found["key_token_over_channel"] > 2


def test_rounding_to_two_bits_by_hand():
    """Four equally spaced numbers are exact; the step is a third of the range."""
    x = torch.tensor([0.0, 1.0, 2.0, 3.0] * 8)[None, None]
    assert torch.equal(entries.quantize(x, 2), x)
    y = torch.tensor([0.0, 3.0] + [1.4] * 30)[None, None]
    assert entries.quantize(y, 2)[0, 0, 2] == 1.0


def test_subspaces_by_hand():
    """Equal subspaces overlap by 1, orthogonal ones by 0."""
    eye = torch.eye(8)
    assert entries.overlap(eye[:, :3], eye[:, :3]) == 1.0
    assert entries.overlap(eye[:, :3], eye[:, 3:6]) == 0.0


def test_low_rank_keys_have_all_their_energy():
    """Keys of rank 2 before rotation; random ones, as rotated here, have less."""
    plain = (keys(1, LENGTH, 2) @ keys(1, 2, 32, seed=1)).reshape(1, LENGTH, 32)
    made = Made(key=keys(1, LENGTH, 32), value=keys(1, LENGTH, 32, seed=2))
    made.plain_key = plain
    found = see(entries.SingularValues(), made)
    assert found["plain"] == pytest.approx(1.0, abs=1e-4)
    assert found["over_rotated"] == found["over_values"] == 1.0


def test_neighbors_that_repeat_are_similar():
    """Equal keys have similarity 1, random values about 0."""
    made = Made(uniform(), key=torch.ones(2, LENGTH, 16), value=keys())
    assert see(entries.KeySimilarity(), made)["key_less_value"] == pytest.approx(1.0, abs=0.05)


def test_the_codebooks_have_the_published_errors():
    """Lloyd's and Max's table for a normal distribution (1960): 1 to 4 bits."""
    errors = [entries.gaussian_codebook(x)[1] for x in entries.CODEBOOK_BITS]
    assert errors == pytest.approx([0.3634, 0.1175, 0.03454, 0.009497], rel=2e-3)


def test_rotation_makes_one_large_channel_gaussian():
    """Vectors with one large channel: errors of the codebook fall to the Gaussian's after a rotation."""
    key = keys(2, LENGTH, 64)
    key[..., 0] *= 20
    found = see(entries.RotatedRounding(), Made(key=key, value=key))
    assert found["plain_over_rotated"] > 1.5


def test_all_tokens_as_sinks_lose_nothing(monkeypatch):
    """With as many sinks as tokens every perplexity is that of all tokens."""
    monkeypatch.setattr(passes, "SINKS", (0, 1, 4, 8, LENGTH))
    found = passes.stream(tiny_model(), text(), newline=1)
    assert found[f"sinks_{LENGTH}"] == pytest.approx(found["full"], rel=1e-5)
    assert found["sinks_0"] != pytest.approx(found["full"], rel=1e-3)


def test_moved_keys_of_the_first_layer_are_exact():
    """A key of layer 0 depends on its token and position only; without moving it differs."""
    found = passes.edit(tiny_model(), text())
    assert found["moved"] > found["not_moved"]
    model = tiny_model()
    whole, edited = passes._collect(model, text()), passes._collect(model, text()[: 200] + text()[232:])
    turned = whole[0].step.rope.shift(whole[0].step.key[:, :, 232:], torch.full((1, LENGTH - 232), -32))
    assert torch.allclose(turned[0], edited[0].key[:, 200:], atol=1e-4)


def test_the_first_layer_of_a_reused_chunk_does_not_deviate():
    """Layer 0 does not depend on the text before; later layers do."""
    model, ids = tiny_model(), text()
    whole, alone = passes._collect(model, ids), passes._collect(model, ids[200:], first_position=200)
    assert torch.allclose(whole[0].key[:, 200:], alone[0].key, atol=1e-4)
    assert not torch.allclose(whole[1].key[:, 200:], alone[1].key, atol=1e-2)


def test_pruning_by_hand():
    """Two of four elements go, the smallest of each token, or the channels with the smallest norm."""
    x = torch.tensor([[[4.0, 1.0, 3.0, 2.0], [1.0, 9.0, 2.0, 3.0]]])
    assert passes.drop_smallest(x, 0.5, channels=False)[0].tolist() == [[4, 0, 3, 0], [0, 9, 0, 3]]
    assert passes.drop_smallest(x, 0.5, channels=True)[0].tolist() == [[4, 1, 0, 0], [1, 9, 0, 0]]


def test_pruning_nothing_changes_nothing(monkeypatch):
    """A share of 0 has no divergence."""
    monkeypatch.setattr(passes, "SPARSITIES", (0.0,))
    assert passes.prune(tiny_model(), text())["elements_0%"] == pytest.approx(0.0, abs=1e-6)


def test_observers_see_every_layer_once():
    """Two layers of a tiny model; the text's own forward is exact."""
    seen = attention.Sparsity()
    observe(tiny_model(), text(), [seen.see])
    assert len(seen.shares) == 2


def test_reading_by_all_heads_loses_no_recall(monkeypatch):
    """With all KV heads whole, recall is the full cache's; with none, sinks and window alone are read."""
    monkeypatch.setattr(compressed, "HEAD_SHARES", (0.0, 0.5, 1.0))
    model = tiny_model()
    found = compressed.retrieve(model, text(), compressed.rank_heads(model, text()))
    assert found["heads_100%"] == pytest.approx(found["full"] / max(found["full"], 1 / 50))


def test_a_planted_retrieval_head_ranks_first():
    """A head that attends to the token after the same token scores 1, the other one 0."""
    length, span = 100, 20
    weights = torch.zeros(2, length, length)
    weights[:, :, 0] = 1
    for i in range(span - 1):
        weights[1, length - span + i] = 0
        weights[1, length - span + i, i + 1] = 1
    scores = compressed.RetrievalScores(span)
    scores.see(Made(weights, key=keys(2, length)))
    assert scores.scores[0].tolist() == pytest.approx([1 / 19, 1.0])  # the first head: token 0 is its own copy


def test_a_repeated_span_stands_at_both_ends():
    """Its tokens differ from each other."""
    tokens, span = compressed.repeat_span(text())
    assert tokens[:span] == tokens[-span:]
    assert len(set(tokens[:span])) == span == 50


def test_keeping_every_entry_does_not_diverge(monkeypatch):
    """A budget of 100 % has no divergence and full agreement; a small one has both."""
    rough = compressed.diverge(tiny_model(), text())
    monkeypatch.setattr(compressed, "KEPT", 1.0)
    exact = compressed.diverge(tiny_model(), text())
    assert exact["nats_per_step"] == pytest.approx(0.0, abs=1e-6)
    assert exact["agreement"] == 1.0
    assert rough["nats_per_step"] > 1e-4


def test_a_layer_that_drops_nothing_shifts_nothing(monkeypatch):
    """With a window as long as the text; with a short one the keys of the next layer move."""
    assert compressed.drop_layers(tiny_model(), text())["by_layer"][0] > 1e-6
    monkeypatch.setattr(compressed, "WINDOW", LENGTH)
    assert compressed.drop_layers(tiny_model(), text())["by_layer"] == pytest.approx([0.0], abs=1e-6)


def test_pruning_within_the_recent_entries_changes_nothing(monkeypatch):
    """If all entries count as recent, the divergence is 0; otherwise whole channels cost more than elements."""
    found = compressed.prune_cache(tiny_model(), text())
    assert 0 < found["elements_50%"] < found["elements_70%"]
    monkeypatch.setattr(compressed, "OBSERVED", LENGTH)
    assert all(x == pytest.approx(0.0, abs=1e-6) for x in compressed.prune_cache(tiny_model(), text()).values())


def test_masses_are_those_of_the_rows():
    """Uniform attention of the last ten of 20 rows to the first ten tokens: the sum over two heads, and the largest."""
    mass = questions.Mass(10, slice(10, None))
    mass.see(Made(uniform(20), key=keys(1, 20)))
    wanted = 2 * sum(1 / x for x in range(11, 21))
    assert mass.sums[0].tolist() == [pytest.approx([wanted] * 10)]
    assert mass.largest[0].tolist() == [pytest.approx([1 / 11] * 10)]


def test_the_same_text_is_alike_at_the_same_position():
    """A text compared with itself: cosine 1 in every layer; moved, less."""
    found = questions.compare_queries(tiny_model(), text(), text())
    assert found["same_position"] == pytest.approx(1.0, abs=1e-5)
    assert found["same_content"] < 1 - 1e-3
