"""`kvbench leaderboard`: verify submissions and build the site."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json, check_results
from kvbench.cli.output import print_json
from kvbench.cli.serve import serve_command, tokens
from kvbench.errors import MOST_SEED, UserError, check_number, suggest_file

if TYPE_CHECKING:
    from kvbench.leaderboard.submission.records import Check, Level, Verification

app = typer.Typer(
    help="Verify submissions, build the leaderboard site, and serve it.", add_completion=False,
    rich_markup_mode=None,
)
app.command("serve")(serve_command)
app.add_typer(tokens, name="token")
Paths = Annotated[list[Path], typer.Argument(help="Submissions (folders or .tar), runs, or folders that contain them.")]
Results = Annotated[
    list[Path] | None,
    typer.Option(help="Folders in which baselines and duplicates are looked up; repeatable; default: the paths given."),
]
Own = Annotated[bool, typer.Option("--own", help="The runs are yours: they need no manifest.")]
Write = Annotated[bool, typer.Option("--write", help="Write verification.json next to the files, for the site.")]


@app.command("verify")
def verify_command(
    paths: Paths, *, results: Results = None, own: Own = False, write: Write = False, as_json: Json = False
) -> int:
    """Verify submissions without running a model (level L0).

    Prompts, scores and sums are recomputed. Exit code 1 if a submission is refused or cannot be verified.
    """
    from kvbench.leaderboard.submission.archive import find_bundles
    from kvbench.leaderboard.verification.repository import Repository
    from kvbench.leaderboard.verification.verify import verify

    _check_paths(paths)
    check_results(results or [])
    bundles = [x for path in paths for x in find_bundles(path)]
    if not bundles:
        raise UserError(f"'{paths[0]}' contains no run. Give the folder of a run, a submission, or a folder of them.")
    _check_folders(bundles if write else [])
    repository = Repository(results or paths)
    found = [(x, verify(x, repository, own=own).conclude()) for x in bundles]
    return _report(found, write=write, as_json=as_json, below=(None,))


@app.command("rerun")
def rerun_command(
    path: Annotated[Path, typer.Argument(help="A submission (a folder or .tar) or a run.")],
    *,
    share: Annotated[
        str | None,
        typer.Option(help="Share of samples to run again: 10% (L1), 100% (L2); default: 10%; with --hidden-seed 100%."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that selects the samples; default: random.")] = None,
    hidden_seed: Annotated[
        str | None,
        typer.Option(metavar="FILE|env:NAME", help="Secret seed: also run new contexts generated from it (L3)."),
    ] = None,
    results: Results = None,
    own: Own = False,
    write: Write = False,
    as_json: Json = False,
) -> int:
    """Verify a submission by running samples again (levels L1 to L3).

    L1 and L2 compare tokens, L3 compares the mean score on new samples. Exit code 1 if the results disagree.
    """
    from kvbench.leaderboard.submission.archive import find_bundles
    from kvbench.leaderboard.verification.levels import read_secret, read_share, rerun_levels
    from kvbench.leaderboard.verification.repository import Repository
    from kvbench.leaderboard.verification.verify import verify
    from kvbench.runs.progress import show_progress

    _check_paths([path])
    if list(find_bundles(path)) != [path]:
        raise UserError(f"'{path}' is not one submission. Give the folder of one, or its .tar.")
    check_results(results or [])
    _check_folders([path] if write else [])
    if seed is not None:
        check_number("seed", seed, 0, MOST_SEED)
    wanted = read_share(share or ("10%" if hidden_seed is None else "100%"))
    secret = None if hidden_seed is None else read_secret(hidden_seed)
    if secret is not None and wanted < 1:
        raise UserError(f"--share {share} is too little for --hidden-seed: L3 includes L2. Leave --share out.")
    found = verify(path, Repository(results or [path]), own=own)
    rerun_levels(found, wanted, secrets.randbits(32) if seed is None else seed, secret, show_progress)
    return _report([(path, found.conclude())], write=write, as_json=as_json, below=(None, "L0"))


@app.command("build")
def build_command(
    results: Annotated[Path, typer.Argument(help="Folder with runs at any depth.")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the site; an existing site is replaced.")],
    as_json: Json = False,
) -> None:
    """Build a static site of all runs in a folder."""
    from kvbench.analysis.formatting import print_table
    from kvbench.leaderboard.site.build import build_site
    from kvbench.log import say

    built = build_site(results, output)
    for x in built.problems:
        say(f"warning: {x.place} is not shown: {x.reason}.")
    if not built.runs:
        say(f"warning: '{results}' contains no run that can be shown, so the site has none.")
    print_table("", ("", "site"), [
        ("runs", str(built.runs)), ("protocols", str(built.groups)), ("not shown", str(len(built.problems))),
        ("open", str(built.folder / "index.html")),
    ])
    if as_json:
        print_json({**asdict(built), "folder": str(built.folder)})


def _check_paths(paths: list[Path]) -> None:
    """Refuse a path that is not there."""
    for path in paths:
        if not path.exists():
            raise UserError(f"'{path}' does not exist.{suggest_file(path)} Give a run or a submission.")


def _check_folders(paths: list[Path]) -> None:
    """Refuse a path into which no record can be written, before a verification that may take hours."""
    for path in paths:
        if not path.is_dir():
            raise UserError(f"--write needs a folder, and {path} is a .tar file. Unpack it, or leave out --write.")


def _report(
    found: list[tuple[Path, Verification]], *, write: bool, as_json: bool, below: tuple[Level | None, ...]
) -> int:
    """Print the checks of one submission, or one row for each of several; exit code 1 if a level is in `below`."""
    from kvbench.leaderboard.submission.records import VERIFICATION
    from kvbench.leaderboard.submission.seal import seal
    from kvbench.leaderboard.verification.repository import read_record
    from kvbench.log import say
    from kvbench.runs.files import write_record

    print_records(found)
    for path, record in found if write else ():
        earlier = read_record(path)
        write_record(path / VERIFICATION, seal(record))
        if earlier is not None and (record.level or "") < (earlier.level or ""):
            say(
                f"warning: {path / VERIFICATION} had level {earlier.level} and has {record.level or 'none'} now. "
                "`kvbench leaderboard rerun` verifies above L0."
            )
    if as_json:
        print_json([{"path": str(path), **record.model_dump(mode="json")} for path, record in found])
    return 1 if any(record.level in below for _, record in found) else 0


def print_records(found: list[tuple[Path, Verification]]) -> None:
    """Print every check of one submission, or one row for each of several and their checks that are not ok."""
    from kvbench.analysis.formatting import print_table

    if len(found) == 1:
        (path, record), = found
        _print_record(record, str(path))
        return
    print_table("", ("run", "level", "score", "not ok"), [
        (path.name, x.level or "-", _score(x)[2], ", ".join(f"{y.name} {y.outcome}" for y in _odd(x)))
        for path, x in found
    ])
    counts = Counter((y.outcome, y.name, y.reason) for _, x in found for y in _odd(x))
    if counts:
        print_table("", ("runs", "outcome", "check", "reason"), [(str(n), *key) for key, n in counts.most_common()])


def _print_record(record: Verification, path: str) -> None:
    """Print every check of a submission."""
    from kvbench.analysis.formatting import print_table

    rows = [(x.name, x.outcome, x.reason) for x in record.checks]
    print_table("", (record.level or "no level", "", record.run_id or path), [*rows, _score(record)])


def _odd(record: Verification) -> list[Check]:
    return [x for x in record.checks if x.outcome != "ok"]


def _score(record: Verification) -> tuple[str, str, str]:
    """The verified score, as a table row."""
    from kvbench.analysis.metrics import Metric

    score = record.score
    if score is None or score.mean is None:
        return "score", "", "not verified" if score is None else "none"
    metric = Metric.of(score)
    interval = "no interval" if score.ci95 is None else metric.write_interval(score.ci95)
    return "score", "", f"{metric.write(score.mean)} {interval} {metric.title}"
