"""Constraints on settings, written as annotations of a dataclass's fields, and the one message of a violation.

`window: Positive = 32` or `kernel: Annotated[int, Ge(1), Odd] = 7`: pydantic checks them when a method is constructed,
in Python as by `--set`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from annotated_types import Ge, Gt, Le, Predicate
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from kvbench.errors import UserError

__all__ = ["Ge", "Gt", "Le", "Natural", "Odd", "Positive", "Share"]


def is_odd(value: int) -> bool:
    """Whether a whole number is odd."""
    return value % 2 == 1


Odd = Predicate(is_odd)
Natural = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
Share = Annotated[float, Ge(0), Le(1)]
WORDS: Mapping[object, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "none",
}


def setting_fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields that are settings: those that `fit` and `bind` fill in are not."""
    return {x.name: x for x in dataclasses.fields(kind) if x.init and not x.metadata.get("resolved")}


def setting_types(kind: type) -> Mapping[str, Any]:
    """The settings' types with their constraints, by name."""
    if kind not in _hints:
        hints = get_type_hints(kind, include_extras=True)
        _hints[kind] = {name: hints[name] for name in setting_fields(kind)}
    return _hints[kind]


_hints: WeakKeyDictionary[type, dict[str, Any]] = WeakKeyDictionary()


def describe(hint: Any) -> str:
    """The rule that a type and its constraints state, as it stands after `must be`."""
    if get_origin(hint) is Annotated:
        base, *constraints = get_args(hint)
        flat = [y for x in constraints for y in (x.metadata if isinstance(x, FieldInfo) else (x,))]
        return describe_constraints(flat) or describe(base)
    if get_origin(hint) is Literal:
        *most, last = map(str, get_args(hint))
        return f"one of {', '.join((*most, last))}" if most else last
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(describe(x) for x in get_args(hint))
    return WORDS.get(hint) or str(hint).removeprefix("typing.")


def describe_constraints(constraints: Sequence[object]) -> str:
    """Bounds in words; empty where there are none."""
    low = next((x.ge for x in constraints if isinstance(x, Ge)), None)
    above = next((x.gt for x in constraints if isinstance(x, Gt)), None)
    high = next((x.le for x in constraints if isinstance(x, Le)), None)
    if low is not None and high is not None:
        words = [f"between {low} and {high}"]
    else:
        words = [f"{low} or more"] if low is not None else [f"above {above}"] if above is not None else []
        words += [f"at most {high}"] if high is not None else []
    return " and ".join(["odd"] * (Odd in constraints) + words)


def violation(name: str, kind: type, setting: str, value: object) -> UserError:
    """The error of a setting that breaks its constraint. name: of the method or task."""
    default = setting_fields(kind)[setting].default
    step = "Leave it out for the default" if default in (None, dataclasses.MISSING) else f"The default is {default}"
    hint = setting_types(kind)[setting]
    rule = describe(hint).removesuffix(" or none")
    if _is_whole(hint) and rule != WORDS[int] and not re.fullmatch(r"-?\d+", str(value)):
        rule = f"a whole number, {rule}"
    return UserError(f"{name}: {setting} must be {rule}, got {value}. {step}.")


def _is_whole(hint: Any) -> bool:
    """Whether a type is of whole numbers, or of these and none."""
    if get_origin(hint) in (Union, types.UnionType):
        return any(map(_is_whole, get_args(hint)))
    return hint is int or (get_origin(hint) is Annotated and get_args(hint)[0] is int)


def validate(made: Any, name: str) -> None:
    """Check every setting of an instance.

    Raises:
        UserError: a value breaks the constraint of its field.
    """
    kind = type(made)
    if kind not in _adapters:
        _adapters[kind] = {}
        for setting, hint in setting_types(kind).items():
            with contextlib.suppress(PydanticSchemaGenerationError):  # a type such as Tensor has no constraints
                _adapters[kind][setting] = TypeAdapter(hint)
    for setting, adapter in _adapters[kind].items():
        value = getattr(made, setting)
        try:
            adapter.validate_python(value, strict=True)  # nothing is converted, so "32" is no whole number
        except ValidationError:
            raise violation(name, kind, setting, repr(value) if isinstance(value, str) else value) from None


_adapters: WeakKeyDictionary[type, dict[str, TypeAdapter[Any]]] = WeakKeyDictionary()
