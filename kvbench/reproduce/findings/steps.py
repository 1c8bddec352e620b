"""A finding about methods of kvbench: divergence from the full cache by step, where no pass verifies the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvbench.engine.agreement import FullCache
from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.method import Budget, Method
from kvbench.registry import find_method
from kvbench.reproduce.findings.numbers import divergence
from kvbench.reproduce.findings.observe import Values

METHODS = {"kvzip": "25%", "snapkv": "25%", "random": "25%", "kivi": None}
"""Methods and their budgets; KIVI's settings are its budget."""
PART = 8
"""Later tokens from one point of the curves to the next."""


def follow(model: Model, ids: Sequence[int]) -> Values:
    """VeriCache, figure 4: the divergence summed over the last quarter of a text, by method."""
    context = len(ids) * 3 // 4
    exact = _force(model, FullCache(), ids, context)
    found: Values = {}
    for name, budget in METHODS.items():
        method = find_method(name)().bind(model)
        fitted = method.fit(None if budget is None else Budget.parse(budget), model.shape(context))
        rough = _force(model, fitted, ids, context)
        steps = divergence(exact, rough)
        sums = steps[: len(steps) // PART * PART].unflatten(0, (-1, PART)).sum(1).cumsum(0)
        found[f"{name}_sum"] = sums.tolist()
        found[f"{name}_second_half"] = 1 - float(sums[len(sums) // 2 - 1] / sums[-1].clamp_min(1e-12))
        found[f"{name}_agreement"] = float((exact.argmax(-1) == rough.argmax(-1)).float().mean())
    return found


def _force(model: Model, method: Method, ids: Sequence[int], context: int) -> Tensor:
    """Log-probabilities that predict each token after the context, which the method compressed. [T, V]"""
    with Session(model, method, capacity=len(ids)) as session:
        session.prefill(ids[:context])
        return session.force(ids[context:])[0].double().log_softmax(-1)
