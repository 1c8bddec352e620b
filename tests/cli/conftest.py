"""Every test has a cache folder of its own, so that no example is read from another test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _fresh_cache(cache: Path) -> None:
    """Use the cache folder of this test."""
