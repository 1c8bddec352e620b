"""The folders of a server: its own state (database, bundles, site) and the results to which it adds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class State:
    """The folders of one server."""

    folder: Path
    results: Path

    @property
    def database(self) -> str:
        """URL of the default database."""
        return f"sqlite:///{self.folder / 'leaderboard.db'}"

    @property
    def uploads(self) -> Path:
        """Unfinished uploads."""
        return self.folder / "uploads"

    @property
    def site(self) -> Path:
        """The site that visitors see."""
        return self.folder / "site"

    def bundle(self, submission: str) -> Path:
        """The bundle of a submission as it was uploaded; kept whatever its status."""
        return self.folder / "bundles" / submission

    def make(self) -> None:
        """Create the server's own folders."""
        for path in (self.uploads, self.folder / "bundles"):
            path.mkdir(parents=True, exist_ok=True)
