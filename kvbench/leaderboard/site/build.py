"""Builds the site from a folder of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.leaderboard.site.claims import read_claims
from kvbench.leaderboard.site.files import list_files
from kvbench.leaderboard.site.findings import read_pages
from kvbench.leaderboard.site.listed import Problem, read_listed
from kvbench.leaderboard.site.output import check_output, write_site
from kvbench.leaderboard.site.tables import make_groups
from kvbench.leaderboard.site.traces import read_traces


@dataclass(frozen=True)
class Built:
    """Summary of a build."""

    folder: Path
    runs: int
    groups: int
    """Number of protocols. Runs of different protocols are never compared."""
    problems: tuple[Problem, ...]
    """Folders of the results that are not shown, each with the reason."""


def build_site(results: Path, output: Path) -> Built:
    """Build the site of all runs below a folder, replacing an older site.

    The same runs give the same bytes. A folder that is not a valid run is listed with the reason; the rest is built.

    Raises:
        UserError: the folder does not exist, or the output exists and is not a site.
    """
    check_output(results, output)
    runs, problems = read_listed(results)
    groups = make_groups(runs)
    extra = read_claims(results, runs), read_pages(results), read_traces(results)
    write_site(list_files(groups, problems, *extra), output)
    return Built(output, len(runs), len(groups), tuple(problems))
