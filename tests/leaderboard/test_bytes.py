"""The check of bytes for methods whose declaration depends on the run, or that cannot declare bytes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from pydantic_core import to_jsonable_python

from kvbench.budget import Budget, LayerShape, Shape
from kvbench.leaderboard.verification import declared
from kvbench.leaderboard.verification.outcome import RefusedError
from kvbench.methods.heads.duo_attention import DuoAttention
from kvbench.methods.heads.razor_attention import RazorAttention
from kvbench.methods.merging.kvmerger import KVMerger
from kvbench.task import Mode

FULL = LayerShape(4, 8, 256, 256, None)
GEMMA = Shape(8000, (replace(FULL, window=4096), FULL) * 3, 2)
"""Alternating sliding and full layers, as in Gemma-2."""
ORDER = tuple(sorted(((layer, head) for layer in range(6) for head in range(4)), key=lambda x: (x[1], -x[0])))
"""A ranking of heads as `bind` may return it: full heads spread over layers, not in the most expensive ones first."""


def look(method, fitted, budget, monkeypatch, *, stored=None, resolved=None, identity=False, recompress=False):
    """Run the check on one sample with these stored bytes; default: the bytes that the method declares."""
    monkeypatch.setattr(declared, "find_shapes", lambda *_: {GEMMA.length: GEMMA})
    for name in ("check_entries", "check_reads", "_check_end"):  # test_forgeries.py has cases of them
        monkeypatch.setattr(declared, name, lambda *_, **__: None)
    line = SimpleNamespace(
        turn=0, index=0, denoising=None, tokens=SimpleNamespace(context=GEMMA.length, query=0, generated=0),
        bytes=SimpleNamespace(
            full_bytes=GEMMA.full_bytes, stored_bytes=fitted.declared_bytes(GEMMA) if stored is None else stored,
            host_bytes=0, file_bytes=0, off_device_bytes=0,
        ),
        effect=SimpleNamespace(identity=identity),
    )
    spec = SimpleNamespace(
        budget=budget, recompress=recompress, model=SimpleNamespace(id="tiny", kind="autoregressive"),
        method=SimpleNamespace(name=method.card.name), mode=Mode.SINGLE,
    )
    found = to_jsonable_python(fitted.resolution) if resolved is None else resolved
    result = SimpleNamespace(budget=SimpleNamespace(resolved=found, kind=method.budget_kind.value))
    made = [(None, SimpleNamespace(turns=[SimpleNamespace(answer=())], parts=()))]
    return declared.check_bytes(SimpleNamespace(spec=spec), method, result, [line], made, None)


@pytest.mark.parametrize("kind", [DuoAttention, RazorAttention])
@pytest.mark.parametrize("budget", ["25%", "50%", "75%"])
def test_declared_bytes_use_the_head_order_of_the_run(kind, budget, monkeypatch):
    """The layers of the full heads determine the bytes, and only the run knows their order."""
    method = kind()
    fitted = replace(method, order=ORDER).fit(Budget.parse(budget), GEMMA)
    assert look(method, fitted, budget, monkeypatch).outcome == "ok"
    with pytest.raises(RefusedError) as refusal:
        look(method, fitted, budget, monkeypatch, stored=fitted.declared_bytes(GEMMA) - 2)
    assert "declares" in refusal.value.check.reason


@pytest.mark.parametrize("order", [
    [[1, 0]] * 24, [list(x) for x in ORDER[1:]], [[9, 9], *(list(x) for x in ORDER[1:])], "x", [1], [[0, "a"]],
])
def test_an_invalid_head_order_is_refused(order, monkeypatch):
    """Every head must occur exactly once."""
    fitted = replace(DuoAttention(), order=ORDER).fit(Budget.parse("50%"), GEMMA)
    found = to_jsonable_python({**fitted.resolution, "order": order})
    with pytest.raises(RefusedError, match="its resolved budget"):
        look(DuoAttention(), fitted, "50%", monkeypatch, resolved=found)


def test_undeclarable_bytes_are_flagged(monkeypatch):
    """With a threshold the bytes depend on the text; everything else is still checked."""
    method = KVMerger(mode="eps")
    fitted = method.fit(None, GEMMA)
    found = look(method, fitted, None, monkeypatch, stored=12345)
    assert (found.outcome, "the text decides" in found.reason) == ("flag", True)
    with pytest.raises(RefusedError, match="its journal has identity"):
        look(method, fitted, None, monkeypatch, stored=12345, identity=True)


def test_excess_bytes_under_recompress_are_flagged(monkeypatch):
    """Between compressions a method may store more than declared, never less."""
    method = DuoAttention()
    fitted = replace(method, order=ORDER).fit(Budget.parse("50%"), GEMMA)
    declared = fitted.declared_bytes(GEMMA)

    def found(stored, **said):
        return look(method, fitted, "50%", monkeypatch, stored=stored, recompress=True, **said)

    assert found(declared).outcome == "ok"
    assert (found(declared + 2).outcome, "1 of 1 samples store more" in found(declared + 2).reason) == ("flag", True)
    with pytest.raises(RefusedError, match="declares"):
        found(declared - 2)
    with pytest.raises(RefusedError, match="its journal has identity"):
        found(declared, identity=True)
