"""`--recompress` does something, or is refused by name before anything runs, or the card says that it does nothing."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.hf.tiny import VOCABULARY, tiny_model
from kvbench.method import Budget
from kvbench.registry import find_method
from kvbench.runs.options import Request
from kvbench.runs.request import check

pytestmark = pytest.mark.usefixtures("profile_cache")


def ids(count, seed):
    """Random tokens."""
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def talk(method, model, *, recompress):
    """Logits after a context and two questions."""
    with Session(model, method, capacity=400, recompress=recompress) as session:
        session.prefill(ids(200, 1))
        for turn in (2, 3):
            session.ask(ids(60, turn), 1, history=ids(3, 9), stop=frozenset())
        return session.logits


def test_recompressing_has_an_effect_or_is_refused(method_name, tmp_path):
    """A result row that says `recompressed each turn` was."""
    kind = find_method(method_name)
    if kind.recompressible is not None:
        asked = Request(method_name, "niah", mode="multi-turn", recompress=True, out=tmp_path)
        with pytest.raises(UserError, match=rf"{method_name.replace('+', '.')} cannot compress again at every turn: "):
            check(asked)
        return
    model = tiny_model()
    budget = None if method_name == "full" else Budget.parse("25%")
    method = kind().bind(model).fit(budget, model.shape(200))
    same = talk(method, model, recompress=True).equal(talk(method, model, recompress=False))
    assert same == any("--recompress" in x for x in kind.card.limits)


def test_the_full_cache_is_not_refused(tmp_path):
    """Every comparison needs its anchor under the same protocol."""
    assert check(Request("full", "niah", mode="multi-turn", recompress=True, out=tmp_path)).protocol.recompress
