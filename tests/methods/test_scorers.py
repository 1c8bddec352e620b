"""Scores that need no observation window: norms, directions, means of attention, expected attention, and TOVA."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Method, Moment, Step
from kvbench.methods.eviction.expected_attention import ExpectedAttention
from kvbench.methods.eviction.keydiff import KeyDiff
from kvbench.methods.eviction.knorm import Knorm
from kvbench.methods.eviction.observed_attention import ObservedAttention
from kvbench.methods.eviction.tova import TOVA
from kvbench.store import LayerKV


def make_step(
    query: Tensor, key: Tensor, value: Tensor, rope: object = NO_ROPE, moment: Moment = Moment.CONTEXT_END
) -> Step:
    """A whole context in one forward. query: [B, H_q, T, D]"""
    count = key.shape[2]
    return Step(
        layer=0, moment=moment,
        positions=torch.arange(count)[None].expand(key.shape[0], -1), seen=count, query=query, key=key, value=value,
        scale=1.0, window=None, softcap=None, sinks=None, causal=True, rope=rope,  # type: ignore[arg-type]
    )


def stored(method: Method, step: Step) -> LayerKV:
    """The layer's store after its entries came in and were attended to."""
    kv = method.layer(0)
    kv.append(step)
    method.attend(kv, step)
    return kv


def random_step(rows: int = 12, heads: int = 4, kv_heads: int = 2, width: int = 8, **kwargs: object) -> Step:
    """Random entries."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, rows, width, generator=draw)
    key, value = (torch.randn(1, kv_heads, rows, width, generator=draw) for _ in range(2))
    return make_step(query, key, value, **kwargs)  # type: ignore[arg-type]


def test_knorm_ranks_small_keys_first() -> None:
    """The score is the negative norm, so the entry with the smallest key is worth most."""
    key = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]])[None, None]
    step = make_step(key, key, key)

    assert Knorm().score(stored(Knorm(), step), step).tolist() == [[[-5.0, -1.0, -2.0]]]


def test_knorm_tells_small_differences_apart_and_not_rounding() -> None:
    """Norms that differ by 1e-5 of their size, however small, have an order; those that differ by 1e-7 tie."""
    key = torch.tensor([[2e-5], [2.0002e-5], [3.0], [3.0000002], [3.00003]])[None, None]
    step = make_step(key, key, key)
    scores = Knorm().score(stored(Knorm(), step), step)[0, 0].tolist()

    assert scores[0] > scores[1] > scores[2] == scores[3] > scores[4]


def test_knorm_keeps_the_first_of_equal_tokens() -> None:
    """A rotation changes norms by rounding alone: of 200 equal keys in the first layer the first 20 stay."""
    model, equal = tiny_model(), [7] * 200
    fitted = Knorm().fit(Budget("rows", 20), model.shape(200))
    with Session(model, fitted, capacity=200, track=True) as session:
        session.prefill(equal)
        positions = session.layers[0].positions

    assert positions is not None
    assert positions[0].tolist() == [list(range(20))] * 2


def test_keydiff_ranks_the_odd_direction_first() -> None:
    """Of three keys in one direction and one across, the one across is worth most, whatever the lengths."""
    key = torch.tensor([[1.0, 0.0], [9.0, 0.0], [2.0, 0.1], [0.0, 5.0]])[None, None]
    step = make_step(key, key, key)

    assert KeyDiff().score(stored(KeyDiff(), step), step).argmax().item() == 3


def test_keydiff_s_anchor_is_the_mean_direction_and_no_long_key_s() -> None:
    """(1, 0) once, ten long, and (0, 1) twice: their mean points along (1, 2), so the cosines are 1 and 2 by root 5."""
    key = torch.tensor([[10.0, 0.0], [0.0, 1.0], [0.0, 1.0]])[None, None]
    step = make_step(key, key, key)

    wanted = torch.tensor([[[-1.0, -2.0, -2.0]]]) / math.sqrt(5)
    torch.testing.assert_close(KeyDiff().score(stored(KeyDiff(), step), step), wanted)


def test_observed_attention_is_the_mean_over_queries_that_see_a_row() -> None:
    """Column sums of the causal attention matrix, each divided by the queries from its own entry on."""
    step = random_step()
    kv = stored(ObservedAttention(), step)
    keys = step.key.repeat_interleave(2, dim=1)
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    weights = (step.query @ keys.transpose(-1, -2)).masked_fill(future, -torch.inf).softmax(-1)
    wanted = weights.sum(2).view(1, 2, 2, 12).sum(2) / torch.arange(12, 0, -1)

    torch.testing.assert_close(ObservedAttention().score(kv, step), wanted)


def test_observed_attention_refuses_a_second_compression() -> None:
    """The number of queries that saw a kept entry is no longer known; the number of stored entries would be wrong."""
    model = tiny_model()
    fitted = ObservedAttention().fit(Budget("rows", 8), model.shape(20))
    with Session(model, fitted, recompress=True) as session:
        session.prefill(list(range(20)))
        with pytest.raises(UserError, match="Leave --recompress out"):
            session.question([1, 2], 1)


def test_tova_drops_what_the_last_query_attends_to_least() -> None:
    """The card's example: weights .1, .4, .2, .3 and three entries to keep drop the first entry in every head."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    key = torch.stack([logits, torch.zeros(4)], dim=-1)[None, None].expand(1, 2, -1, -1)
    query = torch.zeros(1, 2, 4, 2)
    query[:, :, -1, 0] = 1.0
    step = make_step(query, key.contiguous(), torch.arange(8.0).view(1, 1, 4, 2).expand(1, 2, -1, -1).contiguous())
    method = TOVA(rows=3, length=4)
    kv = stored(method, step)

    method.evict(kv, step)

    assert [[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]] == kv.values[0, 0].tolist() == kv.values[0, 1].tolist()


def test_tova_s_heads_choose_together() -> None:
    """Weights .1 .4 .2 .3 of one head and .5 .1 .2 .2 of the other: the mean drops entry 2, which neither would."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.5, 0.1, 0.2, 0.2]]).log()
    key = torch.stack([logits, torch.zeros(2, 4)], dim=-1)[None]  # [1, 2, 4, 2]
    query = torch.zeros(1, 2, 4, 2)
    query[:, :, -1, 0] = 1.0
    step = make_step(query, key, torch.arange(8.0).view(1, 1, 4, 2).expand(1, 2, -1, -1).contiguous())
    method = TOVA(rows=3, length=4)
    kv = stored(method, step)

    method.evict(kv, step)

    assert [[0.0, 1.0], [2.0, 3.0], [6.0, 7.0]] == kv.values[0, 0].tolist() == kv.values[0, 1].tolist()


def test_tova_evicts_a_prompt_at_once_and_not_entry_by_entry() -> None:
    """One eviction by the last query keeps other entries than an eviction after every token (a regression test)."""
    model = tiny_model()
    ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    kept = []
    for first in (60, 20):
        with_context = TOVA().fit(Budget("rows", 20), model.shape(first))

        with Session(model, with_context, capacity=80, track=True) as session:
            session.prefill(ids[:first])
            for token in ids[first:]:
                session.ask([token], 1, history=[], stop=frozenset())
            positions = session.layers[0].positions
            assert positions is not None
            kept.append(positions[0, 0].sort().values.tolist())

    assert 20 == len(kept[0]) == len(kept[1])
    assert kept[0] != kept[1]


def test_expected_attention_without_spread_is_attention_of_the_mean_query() -> None:
    """With equal queries and one position to come, scores are that query's softmax over the entries after the sinks."""
    method = ExpectedAttention(future=1, sinks=2, value_norm=False)
    step = random_step(heads=2, kv_heads=2)
    query = step.query[:, :, :1].expand(-1, -1, 12, -1).contiguous()
    step = make_step(query, step.key, step.value)
    found = method.score(stored(method, step), step)
    wanted = (query[:, :, :1] @ step.key[:, :, 2:].transpose(-1, -2)).softmax(-1)[:, :, 0]

    assert found[..., :2].isinf().all()
    torch.testing.assert_close(found[..., 2:], wanted)


@pytest.mark.parametrize("future", [1, 7])
def test_expected_attention_turns_the_mean_query_to_the_positions_to_come(future: int) -> None:
    """Equal queries, rotated as a model rotates them, are turned back and on: to the mean of their future selves."""
    rope, rows, here = tiny_model().ropes[0], 20, torch.arange(20)[None]
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(1, 4, 1, 16, generator=draw)
    query = rope.rotate(plain.expand(-1, -1, rows, -1).contiguous(), here)
    key = rope.rotate(torch.randn(1, 2, rows, 16, generator=draw), here)
    step = replace(make_step(query, key, key, rope), scale=0.25)
    method = ExpectedAttention(future=future, sinks=2, value_norm=False)
    found = method.score(stored(method, step), step)
    later = torch.arange(rows, rows + future)[None]
    mean = rope.rotate(plain.expand(-1, -1, future, -1).contiguous(), later).mean(2, keepdim=True)
    logits = mean.unflatten(1, (2, 2)) @ key[:, :, None, 2:].mT * 0.25  # [1, 2, 2, 1, 18]

    torch.testing.assert_close(found[..., 2:], logits.softmax(-1)[:, :, :, 0].mean(2), atol=1e-6, rtol=0)


def test_expected_attention_counts_the_spread_and_the_values() -> None:
    """Mean and biased covariance of all queries but the sinks', turned to one position; times the value's norm."""
    rope, rows, here = tiny_model().ropes[0], 20, torch.arange(20)[None]
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(1, 2, rows, 16, generator=draw)
    key = rope.rotate(torch.randn(1, 2, rows, 16, generator=draw), here)
    value = torch.randn(1, 2, rows, 16, generator=draw)
    step = replace(make_step(rope.rotate(plain, here), key, value, rope), scale=0.25)
    method = ExpectedAttention(future=1, sinks=2, epsilon=0.01)
    found = method.score(stored(method, step), step)
    turned = rope.rotate(plain[:, :, 2:], torch.full((1, rows - 2), rows))[0].double()  # [2, 18, 16]
    for head in range(2):
        keys, covariance = key[0, head, 2:].double(), torch.cov(turned[head].T, correction=0)
        logits = keys @ turned[head].mean(0) * 0.25 + torch.einsum("nd,de,ne->n", keys, covariance, keys) * 0.25**2 / 2
        wanted = (logits.softmax(-1) + 0.01) * value[0, head, 2:].norm(dim=-1)
        torch.testing.assert_close(found[0, head, 2:].double(), wanted, atol=1e-5, rtol=0)


def test_expected_attention_protects_the_first_tokens_and_not_the_first_entries_stored() -> None:
    """In a layer whose window has slid past the first tokens, every entry left competes."""
    method = ExpectedAttention(sinks=4)
    step = replace(random_step(), window=6)
    kv = stored(method, step)
    kv.keep_last(6)

    assert method.score(kv, step).isfinite().all()


def test_expected_attention_matches_many_gaussian_queries() -> None:
    """The closed form is the mean of the exponential over queries drawn from the same Gaussian, within 2 %."""
    method = ExpectedAttention(future=1, sinks=0)
    draw = torch.Generator().manual_seed(1)
    mean = torch.randn(4, generator=draw, dtype=torch.float64) * 0.3
    root = torch.randn(4, 4, generator=draw, dtype=torch.float64) * 0.3
    keys = torch.randn(1, 1, 5, 4, generator=draw)
    step = make_step(torch.zeros(1, 1, 5, 4), keys, keys)
    kv = stored(method, step)
    logits = method._logits(kv, mean[None, None], (root @ root.T)[None, None], 1.0)  # the closed form
    queries = mean + torch.randn(400_000, 4, generator=draw, dtype=torch.float64) @ root.T
    drawn = torch.exp(queries @ keys[0, 0].double().T).mean(0)

    torch.testing.assert_close(logits.exp()[0, 0], drawn, rtol=0.02, atol=0.0)


def test_the_mean_rotation_shrinks() -> None:
    """An average of rotations is a contraction in every plane, and one rotation keeps lengths."""
    model = tiny_model()
    step = random_step(width=16, rope=model.ropes[0])

    many = ExpectedAttention(future=512)._mean_rotation(step)  # the step under test
    one = ExpectedAttention(future=1)._mean_rotation(step)

    assert torch.linalg.svdvals(many).max() <= 1 + 1e-6
    torch.testing.assert_close(one @ one.T, torch.eye(16, dtype=torch.float64), atol=1e-6, rtol=0)


def test_expected_attention_forgets_its_moments_after_compression() -> None:
    """The running moments are freed with the context's end, so that the ledger counts only entries."""
    model = tiny_model()

    fitted = ExpectedAttention().fit(Budget("rows", 30), model.shape(100))
    with Session(model, fitted) as session:
        session.prefill(torch.randint(64, (100,), generator=torch.Generator().manual_seed(0)).tolist())

        assert all(not store.state for store in session.layers)
        assert math.isclose(0.3, session.memory().stored_bytes / session.memory().full_bytes)


def test_expected_attention_ranks_a_later_turn_by_all_queries_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where questions are compressed too, their queries join the context's: the sinks' count for nothing."""
    model, counts = tiny_model(), []
    really = ExpectedAttention.score

    def score(self: ExpectedAttention, kv: LayerKV, step: Step) -> Tensor:
        counts.append(int(kv.state["count"]))
        return really(self, kv, step)

    monkeypatch.setattr(ExpectedAttention, "score", score)
    fitted = ExpectedAttention(sinks=4).fit(Budget("rows", 30), model.shape(100))
    with Session(model, fitted, capacity=150, recompress=True) as session:
        session.prefill([x % 64 for x in range(100)])
        session.question([1, 2, 3], 1)
        session.question([4], 1)

    assert counts == [96, 96, 99, 99, 100, 100]


@pytest.mark.parametrize("kind", [Knorm, KeyDiff, ObservedAttention, ExpectedAttention, TOVA])
def test_scores_do_not_know_the_batch(kind: type[Method]) -> None:
    """Two different contexts in one batch keep what each keeps alone."""
    model = tiny_model()

    contexts = [torch.randint(64, (80,), generator=torch.Generator().manual_seed(i)).tolist() for i in (1, 2)]
    fitted = kind().fit(Budget("rows", 20), model.shape(80))
    alone = []
    for context in contexts:
        with Session(model, fitted) as session:
            session.prefill(context)
            alone.append(session.layers[1].keys[0].clone())
    with Session(model, fitted) as session:
        session.prefill(torch.tensor(contexts))
        together = session.layers[1].keys

        for i in range(2):
            torch.testing.assert_close(together[i], alone[i], atol=1e-5, rtol=1e-4)
