"""PQCache: codes, the products that they give, and which entries are read."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.hf.tiny import tiny_model
from kvbench.method import Budget, Moment
from kvbench.methods.retrieval.pqcache import PQCache


def draw(*shape, seed=0):
    """Normal random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def started(make_step, **settings):
    """A layer of two KV heads with 60 entries, their codes, and one more entry whose queries read."""
    method = PQCache(**{"sinks": 2, "rows": 20, "length": 60, **settings})
    kv = method.layer(0)
    step = make_step(draw(1, 4, 60, 8), draw(1, 2, 60, 8, seed=1), draw(1, 2, 60, 8, seed=2))
    kv.append(step)
    method.evict(kv, step)
    later = make_step(
        draw(1, 4, 1, 8, seed=3), draw(1, 2, 1, 8, seed=4), draw(1, 2, 1, 8, seed=5), before=60, moment=Moment.DECODE,
        scale=0.2,
    )
    kv.append(later)
    return method, kv, later


def quantized(kv, head, entry, sinks=2):
    """A key put together from the centers that its codes name."""
    codes = kv.code("code")[0, head, entry - sinks].tolist()
    return torch.cat([kv.index["centers"][0, head, part, code] for part, code in enumerate(codes)])


def test_products_are_those_of_keys_put_together_from_centers(make_step):
    """Every query head with every entry after the sinks, the new one included; swapped codes would be seen."""
    method, kv, step = started(make_step, bits=3)
    method.extend(kv, step)
    found = method.approximate(kv, step, 61)
    for head in range(2):
        wanted = torch.stack([quantized(kv, head, x) for x in range(2, 61)])
        for query in range(2):
            assert torch.allclose(found[0, head, query], wanted @ step.query[0, 2 * head + query, 0], atol=1e-5)
    codes = kv.code("code")
    codes.copy_(codes.flip(-1))
    assert (method.approximate(kv, step, 61) - found).abs().max() > 0.1


def test_a_code_names_the_nearest_center(make_step):
    """Of the context and of the new entry, in each part."""
    method, kv, step = started(make_step, bits=3)
    method.extend(kv, step)
    for head in range(2):
        for entry in (2, 17, 59, 60):
            for part in range(2):
                own = kv.keys[0, head, entry, 4 * part : 4 * part + 4]
                distances = (kv.index["centers"][0, head, part] - own).norm(dim=-1)
                code = kv.code("code")[0, head, entry - 2, part].item()
                assert distances[code] <= distances.min() + 1e-5 or entry < 60  # the last centers moved once more


def test_a_center_per_key_chooses_the_best_entries(make_step):
    """With 58 centers for 58 keys products are exact, so the entries with the most attention are read."""
    method, kv, step = started(make_step, bits=6)
    marked = []
    read = type(kv).read
    kv.read = lambda token, mask: marked.append(mask) or read(kv, token, mask)
    method.attend(kv, step)
    last = method.last
    for head in range(2):
        queries = step.query[0, 2 * head : 2 * head + 2, 0]
        shares = (queries @ kv.keys[0, head, 2 : 61 - last].T * 0.2).softmax(-1).sum(0)
        best = {int(x) + 2 for x in shares.topk(20 - 2 - last).indices}
        assert set(marked[0][0, head].nonzero().flatten().tolist()) == {0, 1} | best | set(range(61 - last, 61))


def test_bytes_read_are_codes_centers_and_entries(make_step):
    """A byte per part of each candidate, 8 centers of 8 channels, and 20 entries, per KV head."""
    method, kv, step = started(make_step, bits=3)
    method.attend(kv, step)
    assert kv.reads["bytes"] == 2 * ((61 - 2 - method.last) * 2 + 8 * 8 * 4 + 20 * 2 * 8 * 4)


def test_parts_that_do_not_divide_a_key_are_refused():
    """With the number of channels."""
    with pytest.raises(UserError, match="keys of 16 channels do not divide into 3 parts"):
        PQCache(parts=3).fit(Budget("rows", 50), tiny_model().shape(100))
