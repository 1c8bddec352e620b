"""Each test has its own cache folder, so that no test reads another test's examples."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _fresh_cache(cache: Path) -> None:
    """Use the cache folder of this test."""
