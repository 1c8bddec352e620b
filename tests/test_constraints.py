"""Constraints in words: the rule of a message is the rule that was broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from kvbench.constraints import Ge, Gt, Le, Natural, Odd, Positive, Share, describe, validate
from kvbench.errors import UserError


@pytest.mark.parametrize(("hint", "words"), [
    (Natural, "0 or more"), (Positive, "1 or more"), (Share, "between 0 and 1"),
    (Annotated[int, Ge(1024)], "1024 or more"), (Annotated[int, Ge(2), Le(32767)], "between 2 and 32767"),
    (Annotated[float, Gt(0), Le(8)], "above 0 and at most 8"), (Annotated[float, Gt(0)], "above 0"),
    (Annotated[int, Ge(1), Odd], "odd and 1 or more"), (Annotated[int, Le(3)], "at most 3"),
    (Positive | None, "1 or more or none"), (int, "a whole number"),
])
def test_every_bound_is_named(hint, words):
    """Both ends of a range, and whole numbers where there is no bound."""
    assert describe(hint) == words


@dataclass(frozen=True)
class Settings:
    """A whole number and a share."""

    window: Positive = 32
    share: Share = 0.5


@pytest.mark.parametrize(("value", "shown"), [("32", "'32'"), (32.0, "32.0"), (True, "True"), (0, "0")])
def test_a_setting_in_python_has_the_type_of_its_field(value, shown):
    """A text that reads as a number would be kept as it is, and compute and be recorded as something else."""
    rule = "1 or more" if value == 0 else "a whole number, 1 or more"
    with pytest.raises(UserError, match=f"mine: window must be {rule}, got {shown}. The default is 32."):
        validate(Settings(window=value), "mine")
    validate(Settings(share=1), "mine")  # a whole number is a number
