"""Bytes against a method's own account, where the account needs what only the run has found, or where there is none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic_core import to_jsonable_python

from kvbench.budget import Budget, LayerShape, Shape
from kvbench.leaderboard.verification import account
from kvbench.leaderboard.verification.outcome import RefusedError
from kvbench.methods.heads.duo_attention import DuoAttention
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.methods.merging.kvmerger import KVMerger

FULL = LayerShape(4, 8, 256, 256, None)
GEMMA = Shape(8000, (replace(FULL, window=4096), FULL) * 3, 2)
"""Sliding and full layers in turn, as Gemma-2 has them."""
ORDER = tuple(sorted(((layer, head) for layer in range(6) for head in range(4)), key=lambda x: (x[1], -x[0])))
"""The heads of a model as `bind` may rank them: whole ones in every layer, not in the costly ones first."""


def look(method, fitted, budget, monkeypatch, *, held=None, resolved=None, identity=False, recompress=False):
    """What the check says of a run of one sample that held so many bytes, what its method declares if not said."""
    monkeypatch.setattr(account, "shapes", lambda *_: {GEMMA.length: GEMMA})
    line = SimpleNamespace(
        turn=0, index=0, denoising=None, tokens=SimpleNamespace(context=GEMMA.length),
        bytes=SimpleNamespace(
            full_bytes=GEMMA.full_bytes, stored_bytes=fitted.declared_bytes(GEMMA) if held is None else held,
            host_bytes=0,
        ),
        effect=SimpleNamespace(identity=identity),
    )
    spec = SimpleNamespace(
        budget=budget, recompress=recompress, model=SimpleNamespace(id="tiny", kind="autoregressive"),
        method=SimpleNamespace(name=method.card.name),
    )
    found = to_jsonable_python(fitted.resolution) if resolved is None else resolved
    result = SimpleNamespace(budget=SimpleNamespace(resolved=found))
    return account.check_bytes(SimpleNamespace(spec=spec), method, result, [line], None)


@pytest.mark.parametrize("kind", [DuoAttention, RazorAttention])
@pytest.mark.parametrize("budget", ["25%", "50%", "75%"])
def test_the_order_of_heads_is_the_runs(kind, budget, monkeypatch):
    """Which layers the whole heads are in decides the bytes, and only who had the model knows the order."""
    method = kind()
    fitted = replace(method, order=ORDER).fit(Budget.parse(budget), GEMMA)
    assert look(method, fitted, budget, monkeypatch).outcome == "ok"
    with pytest.raises(RefusedError) as refusal:
        look(method, fitted, budget, monkeypatch, held=fitted.declared_bytes(GEMMA) - 2)
    assert "declares" in refusal.value.verdict.reason


@pytest.mark.parametrize("order", [
    [[1, 0]] * 24, [list(x) for x in ORDER[1:]], [[9, 9], *(list(x) for x in ORDER[1:])], "x", [1], [[0, "a"]],
])
def test_an_order_that_is_none_is_refused(order, monkeypatch):
    """Every head of the model must be in it once."""
    fitted = replace(DuoAttention(), order=ORDER).fit(Budget.parse("50%"), GEMMA)
    found = to_jsonable_python({**fitted.resolution, "order": order})
    with pytest.raises(RefusedError, match="what its budget was resolved to"):
        look(DuoAttention(), fitted, "50%", monkeypatch, resolved=found)


def test_bytes_that_nobody_can_declare_are_flagged(monkeypatch):
    """Under a threshold the text decides: the rest is still checked."""
    method = KVMerger(mode="eps")
    fitted = method.fit(None, GEMMA)
    found = look(method, fitted, None, monkeypatch, held=12345)
    assert (found.outcome, "the text decides" in found.reason) == ("flag", True)
    with pytest.raises(RefusedError, match="the method loses nothing"):
        look(method, fitted, None, monkeypatch, held=12345, identity=True)


def test_what_was_compared_with_nothing_is_flagged(monkeypatch):
    """Between compressions a method may hold more than it declares; of what it does declare, all is still checked."""
    method = DuoAttention()
    fitted = replace(method, order=ORDER).fit(Budget.parse("50%"), GEMMA)
    declared = fitted.declared_bytes(GEMMA)

    def found(held, **said):
        return look(method, fitted, "50%", monkeypatch, held=held, recompress=True, **said)

    assert found(declared).outcome == "ok"
    assert (found(declared + 2).outcome, "1 of 1 samples hold more" in found(declared + 2).reason) == ("flag", True)
    with pytest.raises(RefusedError, match="declares"):
        found(declared - 2)
    with pytest.raises(RefusedError, match="the method loses nothing"):
        found(declared, identity=True)
