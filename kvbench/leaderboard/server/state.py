"""Where a server keeps what: its own folder with database, bundles and site, and the results that it adds to."""

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
        """The URL of the database, where no other is given."""
        return f"sqlite:///{self.folder / 'leaderboard.db'}"

    @property
    def uploads(self) -> Path:
        """What is still coming in."""
        return self.folder / "uploads"

    @property
    def site(self) -> Path:
        """What visitors see."""
        return self.folder / "site"

    def bundle(self, submission: str) -> Path:
        """A bundle as it came, whatever became of it."""
        return self.folder / "bundles" / submission

    def make(self) -> None:
        """Make its own folders."""
        for path in (self.uploads, self.folder / "bundles"):
            path.mkdir(parents=True, exist_ok=True)
