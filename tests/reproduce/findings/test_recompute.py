"""Divergence by the share of reused tokens that is computed again."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.methods.reuse.cacheblend import CacheBlend
from kvbench.reproduce.findings import passes
from tests.methods.reuse import model, prefilled
from tests.reproduce.findings.test_statistics import text

LENGTH = 400
SIZE = LENGTH // passes.CHUNKS
COUNT = 6 * SIZE


@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
def test_the_divergence_is_that_of_cacheblend(ratio):
    """The method itself on the same chunks: its logits of the last quarter against those of a full prefill."""
    ids = text(length=LENGTH)
    parts = tuple(tuple(ids[i : i + SIZE]) for i in range(0, COUNT, SIZE))
    tail, later = ids[COUNT : COUNT + 1], ids[COUNT + 1 :]
    with prefilled(CacheBlend(ratio=ratio), parts=parts, earlier=tuple((x,) for x in parts), tail=tail) as session:
        ours = torch.cat([session.force(later)[0], session.logits]).log_softmax(-1)
    with Session(model(), FullCache(), capacity=LENGTH) as session:
        session.prefill(ids[:COUNT], visible=tail)
        full = torch.cat([session.force(later)[0], session.logits]).log_softmax(-1)
    wanted = (full.exp() * (full - ours)).sum(-1).mean().item()
    assert wanted > 1e-4
    assert passes.recompute(model(), ids)[f"kl_{ratio:.0%}"] == pytest.approx(wanted, rel=1e-3)


def test_everything_computed_again_does_not_diverge(monkeypatch):
    """At a ratio of 1 no entry of a chunk is left."""
    monkeypatch.setattr(passes, "RATIOS", (0.0, 0.15, 1.0))
    found = passes.recompute(model(), text(length=LENGTH))
    assert found["kl_100%"] == pytest.approx(0.0, abs=1e-6)
    assert found["removed_by_15%"] == pytest.approx(1 - found["kl_15%"] / found["kl_0%"])
