"""A2ATS: the queries' metric, scores at one distance, and the union that a group reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval import a2ats
from kvbench.methods.retrieval.a2ats import A2ATS, CodebookRecorder, query_metric


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def rope():
    """The rotary embedding of a tiny model."""
    return tiny_model().ropes[0]


def started(make_step, monkeypatch, rope, words=None, metric=None, **settings):
    """A layer of two KV heads with 40 keys of 16 channels, a codebook by hand, and one more token.

    words: [H_kv, C, D]; None: every key before rotation.
    """
    plain = draw(1, 2, 41, 16, seed=1)
    words = plain[0, :, :40] if words is None else words
    metric = torch.eye(16).expand(2, -1, -1) if metric is None else metric
    monkeypatch.setattr(a2ats, "calibrated", lambda *_: torch.cat([words, metric], dim=1))
    method = A2ATS(**{"codewords": words.shape[1], "sinks": 2, "recent": 3, "distance": 30, **settings})
    method = replace(method, codebooks="by hand", rows=12, length=40)
    keys = rope.rotate(plain, torch.arange(41)[None])
    kv = method.layer(0)
    step = make_step(draw(1, 4, 40, 16), keys[:, :, :40], draw(1, 2, 40, 16, seed=2), rope=rope)
    kv.append(step)
    method.evict(kv, step)
    later = make_step(
        rope.rotate(draw(1, 4, 1, 16, seed=3), torch.tensor([[40]])), keys[:, :, 40:], draw(1, 2, 1, 16, seed=5),
        before=40, moment=Moment.DECODE, rope=rope,
    )
    kv.append(later)
    return method, kv, later, plain


def ask(method, kv, step):
    """The entries that each KV head reads for the new token."""
    marked = []
    read = type(kv).read
    kv.read = lambda token, mask: marked.append(mask) or read(kv, token, mask)
    method.attend(kv, step)
    return [x.nonzero().flatten().tolist() for x in marked[0][0]]


def test_the_metric_is_the_error_that_queries_see():
    """|(k - c) L|^2 is (k - c)^T H (k - c), with H the queries' products by their root mean square."""
    queries, error = draw(200, 8).double(), draw(8, seed=1).double()
    outer = queries.T @ queries
    wanted = error @ (outer / outer.square().mean().sqrt()) @ error
    found = (error @ query_metric(outer)).square().sum()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_every_key_its_own_codeword_gives_exact_scores_at_the_distance(make_step, monkeypatch, rope):
    """The entries read are those with the largest products of the query, turned to the distance, with plain keys."""
    method, kv, step, plain = started(make_step, monkeypatch, rope)
    found = ask(method, kv, step)
    query = rope.rotate(draw(1, 4, 1, 16, seed=3), torch.tensor([[30]]))[0, :, 0]
    for head in range(2):
        union = set()
        for q in query[2 * head : 2 * head + 2]:
            scores = plain[0, head, 2:38] @ q
            union |= {int(x) + 2 for x in scores.topk(12 - 2 - 3).indices}
        assert set(found[head]) == {0, 1, 38, 39, 40} | union


def test_the_score_of_a_key_at_the_distance_is_its_true_product(rope):
    """A query 30 tokens after a key, against the same query at position 30 and the key at none."""
    query, key = draw(1, 1, 1, 16, seed=1), draw(1, 1, 1, 16, seed=2)
    exact = rope.rotate(query, torch.tensor([[75]])) @ rope.rotate(key, torch.tensor([[45]])).mT
    found = rope.rotate(query, torch.tensor([[30]])) @ key.mT
    assert torch.allclose(exact, found, atol=1e-4)


def test_codes_name_the_nearest_codeword_in_the_metric(make_step, monkeypatch, rope):
    """Of the context and of a new key; a metric of one channel changes them, as it must."""
    words = draw(2, 6, 16, seed=7)
    codes = []
    for metric in (None, torch.diag(torch.tensor([1.0] + 15 * [0.0])).expand(2, -1, -1)):
        method, kv, step, plain = started(make_step, monkeypatch, rope, words=words, metric=metric)
        method.extend(kv, step)
        weights = torch.eye(16) if metric is None else metric[0]
        for head in range(2):
            for entry in (0, 11, 39, 40):
                distances = ((plain[0, head, entry] - words[head]) @ weights).norm(dim=-1)
                assert kv.code("code")[0, head, entry, 0] == distances.argmin()
        codes.append(kv.code("code").clone())
    assert not codes[0].equal(codes[1])


def test_a_codebook_is_calibrated_in_plain_keys():
    """With a codeword for every token of the text, each is the key of a token before rotation."""
    model = tiny_model()
    keys = torch.randn(2, 20, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    queries = draw(2, 50, 16, seed=1).double()
    found = CodebookRecorder(codewords=20).summarize({"outer": queries.mT @ queries, "key": keys}, 20)
    assert torch.allclose(found[:, :20], keys, atol=1e-3)
    method = A2ATS(codewords=32, tokens=64).bind(model)
    assert method.codebooks != A2ATS(codewords=16, tokens=64).bind(model).codebooks


def test_equal_keys_are_one_first_center():
    """Three keys, each many times and with rounding errors: three codewords, and the others are near no key."""
    keys = draw(1, 3, 16)[:, torch.arange(30) % 3] + 1e-6 * draw(1, 30, 16, seed=1)
    assert a2ats.find_distinct(keys[0].double()).tolist() == [0, 1, 2]
    found = CodebookRecorder(codewords=8).summarize({"outer": torch.eye(16).double()[None], "key": keys}, 30)
    distances = (keys[0, :, None] - found[0, :8]).norm(dim=-1)
    assert (distances < 1e-3).any(1).all()
    assert (distances[:, 3:] > 1e3).all()


def test_a_group_reads_the_union(make_step, monkeypatch, rope):
    """Codewords, codes of the candidates, and the entries that either query head chose, once; its key, the metric."""
    method, kv, step, _ = started(make_step, monkeypatch, rope)
    found = ask(method, kv, step)
    read = sum(map(len, found)) * 2 * 16 * 4
    assert kv.reads["bytes"] == read + 2 * ((40 + 16) * 16 * 4 + (41 - 2 - 3) * 2)
    layer, shape = tiny_model().shape(40).layers[0], tiny_model().shape(40)
    assert method.token_bytes(layer, shape) >= kv.reads["bytes"] - 2 * (2 * 16 * 4 + 2)


def test_every_token_of_a_question_reads_the_metric(make_step, monkeypatch, rope):
    """Three new keys are encoded with it; declared bytes are those of one, and the least differ by entries only."""
    method, kv, step, _ = started(make_step, monkeypatch, rope)
    before = kv.reads["bytes"]
    three = replace(
        step, key=draw(1, 2, 3, 16), positions=torch.arange(40, 43)[None],
    )
    method.extend(kv, three)
    assert kv.reads["bytes"] - before == 3 * 2 * 16 * 16 * 4
    shape = tiny_model().shape(40)
    own = 2 * (12 * 2 * 16 * 4 + (40 + 16) * 16 * 4 + (40 - 2 - 3) * 2)  # entries, codewords and metric, codes
    assert method.least_read_bytes(shape) == len(shape.layers) * own


def test_a_choice_of_everything_is_full_attention(make_step, monkeypatch, rope):
    """With a budget above the number of entries."""
    method, kv, step, _ = started(make_step, monkeypatch, rope)
    wanted = kv.attend(step)
    assert torch.allclose(replace(method, rows=100).attend(kv, step), wanted, atol=1e-5)


def test_declared_reads_are_bounds():
    """At most every query head chooses other entries, at least all choose the same."""
    model = tiny_model()
    method = A2ATS(codewords=16, tokens=64).bind(model).fit(Budget("rows", 80), model.shape(140))
    assert method.declared_read_bytes(model.shape(140)) - method.least_read_bytes(model.shape(140)) == (
        2 * 2 * 8 * 2 * 16 * 4
    )
