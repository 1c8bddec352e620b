"""Constraints in words: the rule of a message is the rule that was broken."""

from __future__ import annotations

from typing import Annotated

import pytest

from kvbench.constraints import Ge, Gt, Le, Natural, Odd, Positive, Share, describe


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
