"""Parts that methods of reuse share: the earlier prompt that has a part, and attention weights of a few tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.engine.reuse import Reuse
from kvbench.engine.session import Session
from kvbench.hf.rope import NO_ROPE
from kvbench.hf.tiny import tiny_model
from kvbench.methods.reuse.concat_aligned import ConcatAligned
from kvbench.methods.reuse.epic import Epic
from kvbench.step import Moment, Step
from kvbench.store.chunks import ChunkStore
from kvbench.techniques.reuse import attention_rows, find_source
from tests.methods.reuse import ALONE, PARTS, TAIL

A, B, C, X = ((x,) for x in range(4))


@pytest.mark.parametrize(("earlier", "found"), [
    (((A, B, C), (X, B, C)), (0, 2)),  # more of the parts before it are the same
    (((X, B, C), (A, B, C)), (1, 2)),
    (((X, B, C), (A, X, C)), (1, 2)),  # of equal ones, the latest
    (((A, B, C, X), (A, B, C)), (1, 2)),
    (((C, A, B), (A, X, C)), (1, 2)),  # at another place
    (((A, B), (C, A)), (1, 0)),
    (((A, B), (X,)), None),
])
def test_the_source_of_a_part_is_the_earlier_prompt_most_like_this_one(earlier, found):
    """Up to the part, here the last of three."""
    mixed = SimpleNamespace(reuse=Reuse((A, B, C), earlier))
    source = find_source(mixed, 2)
    if found is None:
        assert source is None
    else:
        assert source is not None
        assert source[0] is earlier[found[0]]
        assert source[1] == found[1]


@pytest.mark.parametrize("other", [
    {"method": ConcatAligned(behind="nothing")}, {"method": Epic()}, {"template": "b"}, {"origin": "b"},
    {"model": tiny_model(layers=4, seed=1)},
])
def test_chunks_of_another_owner_are_misses(other):
    """The same tokens of other settings, another method, another template, other code or another model."""
    owner = {"method": ConcatAligned(), "template": "a", "origin": "a", "model": tiny_model(layers=4)}

    def fill(method, template, origin, model):
        reuse = Reuse(PARTS, ALONE, store, template, origin)
        with Session(model, method, capacity=400, reuse=reuse) as session:
            session.prefill([x for part in PARTS for x in part], visible=TAIL)

    store = ChunkStore()
    fill(**owner)
    fill(**owner)
    assert (store.hits, store.misses, store.mismatched) == (4, 4, 0)
    fill(**{**owner, **other})
    assert store.hits == 4
    assert store.mismatched > 0


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_weights_are_those_of_the_model(softcap):
    """With its scale, its soft cap, its groups of heads, and no entry after a token's own place."""
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(1, x, n, 8, generator=generator) for x, n in ((4, 3), (2, 6)))
    step = Step(
        layer=0, moment=Moment.CONTEXT_END, positions=torch.arange(3)[None], seen=6, query=query, key=keys, value=keys,
        scale=0.7, window=None, softcap=softcap, sinks=None, causal=True, rope=NO_ROPE,
    )
    found = attention_rows(step, keys, torch.tensor([1, 4, 5]), slice(1, None))
    assert found.shape == (4, 2, 6)
    for head in range(4):
        for row, place in ((0, 4), (1, 5)):
            logits = torch.stack([query[0, head, row + 1] @ keys[0, head // 2, j] for j in range(place + 1)]) * 0.7
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            wanted = torch.cat([logits.softmax(0), torch.zeros(5 - place)])
            assert torch.allclose(found[head, row], wanted, atol=1e-6)
