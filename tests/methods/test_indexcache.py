"""IndexCache: which layers choose, that the others read the same pages, and what they store."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.passes import PassRequest, run_together
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.page_select import page_scores
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval import indexcache
from kvbench.methods.retrieval.indexcache import IndexCache
from kvbench.methods.retrieval.quest import Quest
from kvbench.store.paged import PagedKV

LENGTH, ROWS = 64, 20


def ids(count, seed=1):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def converse(method):
    """Logits of six tokens after a context and a question, and the session's bytes and counters."""
    model = tiny_model()
    with Session(model, method.fit(Budget("rows", ROWS), model.shape(LENGTH)), capacity=120) as session:
        session.prefill(ids(LENGTH))
        session.question(ids(5, 2), 6)
        logits = torch.cat([session.force([x]) for x in ids(6, 3)], dim=1)
        return logits, session.memory(), session.effect().facts


@pytest.fixture
def read(monkeypatch):
    """The pages that attention reads, one layer after the other."""
    found, original = [], PagedKV.attend_pages

    def watched(self, step, pages):
        found.append((step.layer, pages))
        return original(self, step, pages)

    monkeypatch.setattr(PagedKV, "attend_pages", watched)
    return found


def test_layers_that_choose_for_themselves_are_quest():
    """With every layer choosing, by head, logits, bytes and counters are Quest's, bit for bit."""
    wanted, found = converse(Quest(page=4)), converse(IndexCache(page=4, every=1, sets="head"))
    assert torch.equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]


@pytest.mark.parametrize("sets", ["layer", "head"])
def test_sharing_layers_read_the_pages_of_the_same_pass(sets, read, monkeypatch):
    """The second layer reads what the first one chose for the same token, and bounds are scored in the first only."""
    scored = []
    for module in (indexcache, "kvbench.store.paged"):
        target = f"{getattr(module, '__name__', module)}.page_scores"
        monkeypatch.setattr(target, lambda query, bounds: scored.append(1) or page_scores(query, bounds))
    converse(IndexCache(page=4, pattern="FS", sets=sets))
    first, second = ([pages for layer, pages in read if layer == x] for x in (0, 1))
    assert len(first) == len(second) == len(scored) == 7
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    assert len({str(x.tolist()) for x in first[1:]}) > 1, "every token reads the same pages: the test shows nothing"


def test_all_heads_read_the_same_pages(read):
    """By layer one set; by head several."""
    for sets, same in (("layer", True), ("head", False)):
        read.clear()
        converse(IndexCache(page=4, pattern="FS", sets=sets))
        assert all((pages == pages[:, :1]).all() for _, pages in read) is same


def test_sharing_layers_store_and_read_no_bounds():
    """Bounds of 16 pages of two KV heads in one layer of two: measured and declared, stored and read."""
    _, both, _ = converse(IndexCache(page=4, pattern="FF"))
    _, one, _ = converse(IndexCache(page=4, pattern="FS"))
    assert both.stored_bytes - one.stored_bytes == 16 * 2 * 2 * 16 * 4
    shape = tiny_model().shape(LENGTH)
    fitted = [IndexCache(page=4, pattern=x).fit(Budget("rows", ROWS), shape) for x in ("FF", "FS")]
    assert fitted[0].declared_bytes(shape) - fitted[1].declared_bytes(shape) == 16 * 2 * 2 * 16 * 4
    assert fitted[0].declared_read_bytes(shape) - fitted[1].declared_read_bytes(shape) == 16 * 2 * 2 * 16 * 4


def test_forks_do_not_share_pages(read):
    """Two continuations whose layers take turns read the pages of their own tokens."""
    model = tiny_model()
    method = IndexCache(page=4, pattern="FS").fit(Budget("rows", ROWS), model.shape(LENGTH))
    with Session(model, method, capacity=120) as session:
        session.prefill(ids(LENGTH))
        with session.fork() as branch:
            for x in ids(3, 4):
                tokens = (session, x), (branch, (x + 7) % VOCABULARY)
                run_together([PassRequest(talk, torch.tensor([[y]]), Moment.DECODE) for talk, y in tokens])
    assert [layer for layer, _ in read] == [0, 0, 1, 1] * 3
    assert all(read[i][1].equal(read[i + 2][1]) for i in (0, 1, 4, 5, 8, 9))
    assert any(not read[i][1].equal(read[i + 1][1]) for i in (0, 4, 8))


def test_the_regular_pattern_is_the_papers():
    """Layers 0 and 1 choose, then every fourth after layer 1; layers that read everything do not count."""
    method = IndexCache(every=4, dense_layers=0)
    assert "".join("SF"[method.chooses(x)] for x in range(12)) == "FFSSSFSSSFSS"
    method = IndexCache(every=2, dense_layers=2)
    assert "".join("SF"[method.chooses(x)] for x in range(2, 8)) == "FFSFSF"


def test_bad_patterns_and_mixed_layers_are_refused():
    """With the number of layers, or the reason."""
    shape = tiny_model().shape(LENGTH)
    for wrong in ("F", "SF", "FX"):
        with pytest.raises(UserError, match="F or S for each of the 2 layers"):
            IndexCache(page=4, pattern=wrong).fit(Budget("rows", ROWS), shape)
    mixed = replace(shape, layers=(shape.layers[0], replace(shape.layers[1], window=32)))
    with pytest.raises(UserError, match="different windows"):
        IndexCache(page=4).fit(Budget("rows", ROWS), mixed)
