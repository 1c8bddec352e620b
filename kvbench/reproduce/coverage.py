"""The published numbers of a method, and why some methods have none."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from kvbench.reproduce.claims import Claim, list_claims
from kvbench.reproduce.paper import FOLDER, HINT, list_papers
from kvbench.toml import STRICT, read_toml

REASONS = FOLDER.parent / "unread.toml"


class Reasons(BaseModel):
    """Why methods have no number, by method."""

    model_config = STRICT

    method: dict[str, str]


def list_claims_of(method: str) -> Iterator[Claim]:
    """The numbers of all papers whose row is the method, alone or combined with another one."""
    for name, paper in list_papers().items():
        yield from (x for x in list_claims(name, paper) if method in x.method.method.split("+"))


def read_reasons() -> dict[str, str]:
    """Why methods have no number, by method."""
    return read_toml(REASONS, Reasons, "file of reasons", HINT).method
