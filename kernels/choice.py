"""Selects the implementation of operations for a run, and records which implementation ran."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, cast

IMPLEMENTATIONS = ("torch", "triton", "flash")
REST = {"flash": "torch"}
"""The fallback of an implementation that covers only some operations. The record names the fallback."""

P = ParamSpec("P")
R = TypeVar("R")

_choice: ContextVar[tuple[str, dict[str, str]]] = ContextVar("choice", default=("torch", {}))
_look: ContextVar[Callable[[str, object, object], None] | None] = ContextVar("look", default=None)


@contextmanager
def using(name: str) -> Iterator[dict[str, str]]:
    """Run operations with the implementation `name`, one of IMPLEMENTATIONS.

    Yields a dict of the implementations that ran, by `<op>` or `<op>.<function>`; several are joined by `+`. An
    operation without this implementation raises NotImplementedError when it is called, unless REST has a fallback.
    """
    ran: dict[str, str] = {}
    token = _choice.set((name, ran))
    try:
        yield ran
    finally:
        _choice.reset(token)


@contextmanager
def comparing(look: Callable[[str, object, object], None]) -> Iterator[None]:
    """Also run torch's implementation of every operation, and call `look(operation, result, torch's result)`."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def operation(function: Callable[P, R], *, writes: str | None = None) -> Callable[P, R]:
    """Turn a function of `kernels/<op>/torch.py` into an operation that dispatches to the chosen implementation.

    `triton.py` defines a function of the same name, or imports another implementation's; the record names the module
    that defines it. writes: the argument that the operation writes into, if it returns nothing.
    """
    package = function.__module__.rpartition(".")[0]
    op, name = package.rpartition(".")[2], function.__name__
    label = op if name == op else f"{op}.{name}"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen, _ = _choice.get()
        found = function if chosen == "torch" else cast("Callable[P, R]", _find(package, chosen, name))
        note(label, found.__module__.rpartition(".")[2])
        look = None if found is function else _look.get()
        if look is None:
            return found(*args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs)
        written = None if writes is None else given.arguments[writes]
        if writes is not None and written is not None:  # the torch implementation writes into a copy
            given.arguments[writes] = written.clone()
        result = found(*args, **kwargs)
        with using("torch"):
            plain = function(*given.args, **given.kwargs)
        look(label, result if writes is None else written, plain if writes is None else given.arguments[writes])
        return result

    return call


def note(label: str, implementation: str) -> None:
    """Record what ran, for an implementation that chooses among several kernels itself; all of them, joined by `+`."""
    ran = _choice.get()[1]
    before = ran.get(label, implementation)
    ran[label] = before if before == implementation else join(before, implementation)


def join(first: str, second: str) -> str:
    """The names of both records, each once, such as `sdpa_flash+sdpa_math` of layers without and with a window."""
    return "+".join(sorted({*first.split("+"), *second.split("+")}))


@functools.cache
def _find(package: str, implementation: str, name: str) -> Callable[..., object]:
    module = f"{package}.{implementation}"
    if importlib.util.find_spec(module) is None:
        if implementation in REST:
            return _find(package, REST[implementation], name)
        raise NotImplementedError(f"{package.rpartition('.')[2]} has no {implementation} implementation")
    return cast("Callable[..., object]", getattr(importlib.import_module(module), name))
