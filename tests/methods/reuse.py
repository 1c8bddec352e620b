"""Shared by the tests of reuse: a model of four layers, a prompt of parts, and sessions over them."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from kvbench.check.trial import random_ids
from kvbench.engine.agreement import FullCache
from kvbench.engine.reuse import Reuse
from kvbench.engine.session import Session
from kvbench.hf.tiny import tiny_model

LEAD, *DOCUMENTS = (tuple(random_ids(n, seed=i)) for i, n in enumerate((6, 30, 20, 25)))
TAIL = random_ids(7, seed=99)
PARTS = (LEAD, *DOCUMENTS)
ALONE = tuple((x,) for x in PARTS)
"""Each part ran by itself before."""
ANSWER = random_ids(5, seed=3)


def model():
    """A Llama of four layers in float32."""
    return tiny_model(layers=4)


@contextmanager
def prefilled(method, parts=PARTS, earlier=ALONE, tail=TAIL, store=None):
    """A session after the prompt of these parts and the tail, with its logits."""
    reuse = Reuse(parts, earlier) if store is None else Reuse(parts, earlier, store)
    found = model()
    bound = method.bind(found).fit(None, found.shape(sum(map(len, parts)) + len(tail)))
    with Session(found, bound, capacity=400, reuse=reuse) as session:
        session.prefill([x for part in parts for x in part], visible=tail)
        yield session


def run(method, **options):
    """Logits after the prompt, and those of an answer forced after it."""
    with prefilled(method, **options) as session:
        return torch.cat([session.logits, session.force(ANSWER)[0]])


def run_full(parts=PARTS, tail=TAIL):
    """The same of a full prefill."""
    with Session(model(), FullCache(), capacity=400) as session:
        session.prefill([x for part in parts for x in part], visible=tail)
        return torch.cat([session.logits, session.force(ANSWER)[0]])


def distance(a, b):
    """The largest difference."""
    return (a - b).abs().max().item()
