"""Invariants of side effects: a run changes no setting, no later run and nothing on the model."""

from __future__ import annotations

from dataclasses import replace
from inspect import get_annotations

from torch import Tensor

from kvbench.check.trial import CONTEXT, FORCED, LENGTH, choose_budget, fit_at_budget, open_at_budget, random_ids, talk
from kvbench.engine.session import Session
from kvbench.hf import Model
from kvbench.hf.tiny import tiny_model
from kvbench.method import Method


def settings_are_frozen(method: Method) -> str:
    """Settings are fields and cannot be changed on the object, and `fit` returns a new one."""
    own = vars(type(method))
    plain = [name for name, hint in get_annotations(type(method)).items() if "ClassVar" not in str(hint)]
    assert "__dataclass_fields__" in own or not plain, (
        f"{' and '.join(plain)} cannot be set: decorate the class with @dataclass(frozen=True)"
    )
    for name in method.settings:
        try:
            setattr(method, name, None)
        except AttributeError:
            continue
        raise AssertionError(f"setting {name} can be changed: make it a frozen dataclass")
    before = replace(method)
    method.fit(choose_budget(method), tiny_model().shape(LENGTH))
    assert method == before, "`fit` changed the method it was called on"
    return f"{', '.join(method.settings) or 'no settings'}"


def runs_are_repeatable(method: Method) -> str:
    """Two samples of one run, for which the method is fitted once, are bit-identical, with another one in between."""
    model = tiny_model()
    fitted = fit_at_budget(method, model)

    def run(seed: int) -> tuple[Tensor, list[list[list[int]]], Tensor]:
        with Session(model, fitted, capacity=LENGTH + 200) as session:
            logits = session.prefill(random_ids(LENGTH, seed))
            return logits, [x.ids for x in talk(session)], session.score(FORCED)

    first, _, again = run(4), run(5), run(4)
    assert first[0].equal(again[0]) and first[1] == again[1] and first[2].equal(again[2]), "a second run differs"
    return "logits, tokens and likelihoods equal"


def model_is_restored(method: Method) -> str:
    """After a session, also after a failed one, the model has its own attention, weights and hooks."""
    model = tiny_model()
    before = look_at(model)
    with open_at_budget(method, model) as session:
        session.prefill(CONTEXT)
        talk(session)
    assert look_at(model) == before, "the model was left changed"
    try:
        with open_at_budget(method, model) as session:
            session.prefill(CONTEXT)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert look_at(model) == before, "the model was left changed by a failed session"
    return "attention, hooks, attributes and weights as before"


def look_at(model: Model) -> tuple[object, ...]:
    """The state of a model that a run may not change: attention, hooks, attributes, sums of weights."""
    hooks = [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.module.modules()]  # noqa: SLF001
    names = [sorted(vars(x)) for x in model.module.modules()]
    weights = [x.sum().item() for x in model.module.state_dict().values()]
    return model.module.config._attn_implementation, hooks, names, weights  # noqa: SLF001  # transformers' name
