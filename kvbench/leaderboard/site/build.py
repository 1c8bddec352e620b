"""Builds the leaderboard's site from a folder of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.leaderboard.site.claims import read_claims
from kvbench.leaderboard.site.content import list_files
from kvbench.leaderboard.site.entries import Problem, read_entries
from kvbench.leaderboard.site.folder import check_output, write_site
from kvbench.leaderboard.site.tables import make_groups


@dataclass(frozen=True)
class Built:
    """What a site came to hold."""

    folder: Path
    runs: int
    groups: int
    """Protocols, whose rows are never compared with one another's."""
    problems: tuple[Problem, ...]
    """Folders of the results that are not shown, with the reason."""


def build_site(results: Path, output: Path) -> Built:
    """The site of all runs below a folder, in the place of an older one.

    The same runs give the same bytes. A folder that is no run is listed with the reason and harms no other.

    Raises:
        UserError: there is no such folder, or the output is something else than a site.
    """
    check_output(results, output)
    entries, problems = read_entries(results)
    groups = make_groups(entries)
    write_site(list_files(groups, problems, read_claims(results, entries)), output)
    return Built(output, len(entries), len(groups), tuple(problems))
