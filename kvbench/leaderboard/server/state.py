"""The folders of a server: its own state (database, bundles, site) and the results to which it adds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DATABASE = "leaderboard.db"
"""The default database, in the folder of the state."""


@dataclass(frozen=True)
class State:
    """The folders of one server."""

    folder: Path
    results: Path

    @property
    def database(self) -> str:
        """URL of the default database."""
        return f"sqlite:///{self.folder / DATABASE}"

    @property
    def uploads(self) -> Path:
        """Unfinished uploads."""
        return self.folder / "uploads"

    @property
    def site(self) -> Path:
        """The site that visitors see."""
        return self.folder / "site"

    @property
    def bundles(self) -> Path:
        """The bundles of all submissions."""
        return self.folder / "bundles"

    @property
    def lock(self) -> Path:
        """File that every server of this folder holds while it runs."""
        return self.folder / ".lock"

    def bundle(self, submission: str) -> Path:
        """The bundle of a submission as it was uploaded; kept whatever its status."""
        return self.bundles / submission

    def make(self) -> None:
        """Create the server's own folders."""
        for path in (self.uploads, self.bundles):
            path.mkdir(parents=True, exist_ok=True)
