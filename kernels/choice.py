"""Which implementation of an operation runs: chosen around a run, found at the call, and noted."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, cast

IMPLEMENTATIONS = ("torch", "triton", "flash")
REST = {"flash": "torch"}
"""Of an implementation that is made for some operations: what the others run as. It is noted as what it is."""

P = ParamSpec("P")
R = TypeVar("R")

_choice: ContextVar[tuple[str, dict[str, str]]] = ContextVar("choice", default=("torch", {}))
_look: ContextVar[Callable[[str, object, object], None] | None] = ContextVar("look", default=None)


@contextmanager
def using(name: str) -> Iterator[dict[str, str]]:
    """Inside, operations run as `name`, of IMPLEMENTATIONS. The dict has what ran, by `<op>` or `<op>.<function>`.

    An operation that has no such implementation raises NotImplementedError when it is called: none stands in for it,
    but for what REST says.
    """
    ran: dict[str, str] = {}
    token = _choice.set((name, ran))
    try:
        yield ran
    finally:
        _choice.reset(token)


@contextmanager
def comparing(look: Callable[[str, object, object], None]) -> Iterator[None]:
    """Inside, what runs as another implementation than torch's runs as torch's too: `look(operation, one, torch's)`."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """The operation that a function of `kernels/<op>/torch.py` implements; `triton.py` has another of the same name.

    An implementation may take a function from another one by importing it: noted is where the function stands.
    """
    package = function.__module__.rpartition(".")[0]
    op, name = package.rpartition(".")[2], function.__name__
    label = op if name == op else f"{op}.{name}"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen, _ = _choice.get()
        found = function if chosen == "torch" else cast("Callable[P, R]", _find(package, chosen, name))
        note(label, found.__module__.rpartition(".")[2])
        result = found(*args, **kwargs)
        if found is not function and (look := _look.get()) is not None:
            with using("torch"):
                twin = function(*args, **kwargs)
            look(label, result, twin)
        return result

    return call


def note(label: str, implementation: str) -> None:
    """Say what ran, where an implementation leaves its work to one of several."""
    _choice.get()[1][label] = implementation


@functools.cache
def _find(package: str, implementation: str, name: str) -> Callable[..., object]:
    module = f"{package}.{implementation}"
    if importlib.util.find_spec(module) is None:
        if implementation in REST:
            return _find(package, REST[implementation], name)
        raise NotImplementedError(f"{package.rpartition('.')[2]} has no {implementation} implementation")
    return cast("Callable[..., object]", getattr(importlib.import_module(module), name))
