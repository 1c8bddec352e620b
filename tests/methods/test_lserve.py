"""LServe: the two kinds of heads, bounds of parts of pages, and choices that several tokens share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.kernels.page_select import page_bounds
from kvbench.method import Budget, Moment
from kvbench.methods.heads.lserve import PARTS, HierarchicalPagedKV, LServe

pytestmark = pytest.mark.usefixtures("profile_cache")


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive_choice(query, keys, at, count, part):
    """Pages that one query head chooses at an entry, in plain loops. query: [D]. keys: [n, D]"""
    size, scores = part * PARTS, {}
    for page in range((at + 1) // size):
        bounds = []
        for x in range(PARTS):
            some = keys[page * size + x * part : page * size + (x + 1) * part]
            low, high = some.min(0).values, some.max(0).values
            bounds.append(sum(float(max(q * a, q * b)) for q, a, b in zip(query, low, high, strict=True)))
        scores[page] = max(bounds)
    own = at // size
    scores.pop(own, None)
    return {own, *sorted(scores, key=lambda x: -scores[x])[: count - 1]}


@pytest.mark.parametrize("sizes", [[1] * 11, [4, 7], [11]], ids=str)
@pytest.mark.parametrize("interval", [1, 4])
def test_outputs_are_those_of_the_definition(sizes, interval, make_step):
    """Eleven tokens after a context of 38, in passes of different sizes, against choices in plain loops."""
    keys, values, queries = draw(1, 2, 49, 6, seed=1), draw(1, 2, 49, 6, seed=2), 2 * draw(1, 4, 49, 6, seed=3)
    kv = HierarchicalPagedKV(page=2, count=3, interval=interval)
    kv.append(make_step(queries[:, :, :38], keys[:, :, :38], values[:, :, :38]))
    kv.index()
    outputs, start = [], 38
    for size in sizes:
        part = slice(start, start + size)
        step = make_step(
            queries[:, :, part], keys[:, :, part], values[:, :, part], before=start, moment=Moment.TURN_END, scale=0.4
        )
        kv.append(step)
        outputs.append(kv.attend(step))
        start += size
    output = torch.cat(outputs, dim=2)
    for head in range(4):
        for t in range(38, 49):
            chosen_at = t - (t - 38) % interval
            pages = naive_choice(queries[0, head, chosen_at], keys[0, head // 2], chosen_at, 3, 2) | {t // 8}
            entries = [x for x in range(t + 1) if x // 8 in pages]
            weights = (keys[0, head // 2, entries] @ queries[0, head, t] * 0.4).softmax(0)
            assert torch.allclose(output[0, head, t - 38], weights @ values[0, head // 2, entries], atol=1e-5)
    assert kv.reads["choices"] == (11 if interval == 1 else 3)


def test_a_page_that_a_token_chose_is_not_read_again_as_its_own(make_step):
    """Three pages of eight entries: the tokens of entries 38 and 42 choose, and page 5 begins with entry 40."""
    kv, read = HierarchicalPagedKV(page=2, count=3, interval=4), []
    keys, queries = draw(1, 2, 46, 6), draw(1, 4, 46, 6, seed=1)
    kv.append(make_step(queries[:, :, :38], keys[:, :, :38]))
    kv.index()
    for t in range(38, 46):
        part = slice(t, t + 1)
        step = make_step(queries[:, :, part], keys[:, :, part], before=t, moment=Moment.DECODE)
        kv.append(step)
        before = kv.reads["pages_read"]
        kv.attend(step)
        read.append((kv.reads["pages_read"] - before) / 4 / PARTS)
    assert read == [3, 3, 4, 4, 3, 3, 3, 3]
    assert int(kv.distinct) <= kv.reads["pages_read"]


def test_a_part_decides_for_its_page():
    """The page of the single best key is chosen, though the bounds of another whole page are larger."""
    keys = torch.zeros(1, 1, 64, 2)
    keys[0, 0, 9] = torch.tensor([3.0, 3.0])  # page 1: one key in both channels
    keys[0, 0, 16, 0], keys[0, 0, 22, 1] = 4.0, 4.0  # page 2: one channel each, in different parts
    kv, query = HierarchicalPagedKV(page=2, count=2), torch.ones(1, 1, 1, 2)
    kv.get_bounds = lambda: page_bounds(keys, 2)
    assert set(kv.choose(query, 63).flatten().tolist()) == {1, 7}
    whole = page_bounds(keys, 8)[0, 0]
    assert float(whole[2, 2:].sum()) > float(whole[1, 2:].sum())


def test_tokens_that_reuse_a_choice_read_no_bounds():
    """Eight tokens, of which two choose: the bounds of parts are read twice."""
    model, read = tiny_model(), {}
    context = torch.randint(VOCABULARY, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    for interval in (1, 4):
        method = LServe(interval=interval).bind(model).fit(Budget("rows", 48), model.shape(120))
        with Session(model, method, capacity=140) as session:
            session.prefill(context)
            session.force([1, 2, 3, 4, 5, 6, 7, 8])
            assert session.effect().facts["choices"] == 8 // interval * len(paged(session))
            read[interval] = sum(x.reads["bytes"] for x in paged(session))
            bounds = sum(sum((120 + t) // 4 for t in range(1, 9)) * 2 * 16 * 4 * x.keys.shape[1]
                         for x in paged(session))
            chosen = sum(((121 // 4) + (125 // 4)) * 2 * 16 * 4 * x.keys.shape[1] for x in paged(session))
    assert read[1] - read[4] == bounds - chosen


def test_the_first_step_reads_the_declared_bytes_in_a_window_longer_than_the_context():
    """Streaming heads then keep first entries, and every entry's position with it, which is read."""
    model = tiny_model(window=400)
    context = torch.randint(VOCABULARY, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    method = LServe().bind(model).fit(Budget("rows", 75), model.shape(150))
    with Session(model, method, capacity=160) as session:
        session.prefill(context)
        session.force([1])
        assert session.memory().read_bytes_per_step == method.declared_read_bytes(model.shape(150))


def paged(session):
    """The stores of retrieval heads."""
    return [x for layer in session.layers for _, x in layer.groups if isinstance(x, HierarchicalPagedKV)]


def test_half_of_the_heads_stream():
    """Over all layers together, and the others hold every entry; streaming heads hold first and last ones."""
    model = tiny_model()
    for sparsity, whole in ((0.5, 2), (0.75, 1), (0.0, 4)):
        method = LServe(sparsity=sparsity).bind(model).fit(Budget("rows", 48), model.shape(120))
        assert method.retrieval == whole
        with Session(model, method, capacity=140) as session:
            session.prefill(list(range(60)) * 2)
            kept = [x for layer in session.layers for x in layer.entries_kept()]
        assert sorted(kept) == [48] * (4 - whole) + [120] * whole


def test_without_streaming_heads_and_with_every_page_it_is_dense(make_step):
    """Enough pages to choose give full attention."""
    keys, query = draw(1, 2, 30, 6, seed=1), draw(1, 4, 30, 6)
    kv = HierarchicalPagedKV(page=2, count=9, interval=4)
    kv.append(make_step(query, keys))
    kv.index()
    step = make_step(query[:, :, :3], keys[:, :, :3], before=30, moment=Moment.TURN_END)
    kv.append(step)
    found = kv.attend(step)
    kv.selective = False
    assert torch.allclose(found, kv.attend(step), atol=1e-5)


def test_pages_of_short_contexts_are_smaller():
    """16 entries below 4,096 tokens, the paper's 64 from there on, or as set."""
    shape = tiny_model().shape(120)
    fitted = [LServe(page=x).fit(Budget("rows", 1000), replace(shape, length=y)).page_size
              for x, y in ((None, 4000), (None, 4096), (32, 4096))]
    assert fitted == [16, 64, 32]


def test_a_budget_below_three_pages_is_refused():
    """A token reads whole pages, of 64 entries from 4,096 tokens on, so 191 entries per head cannot be kept to."""
    shape = replace(tiny_model().shape(120), length=4096)
    assert LServe().fit(Budget("rows", 192), shape).pages == 3
    with pytest.raises(UserError, match="191 tokens per KV head of 4096, and lserve needs at least 192"):
        LServe().fit(Budget("rows", 191), shape)


def test_pages_without_whole_parts_are_refused():
    """Three entries are no four parts; six would lose two."""
    for page in (3, 6):
        with pytest.raises(UserError, match=f"pages of {page} entries do not divide into 4 parts"):
            LServe(page=page)
