"""`kvbench leaderboard`: submissions verified, and shown."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json
from kvbench.cli.output import print_json
from kvbench.cli.serve import serve_command, tokens
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.leaderboard.submission.records import Check, Level, Verification

app = typer.Typer(
    help="Verify submissions, and show them.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)
app.command("serve")(serve_command)
app.add_typer(tokens, name="token")
Paths = Annotated[list[Path], typer.Argument(help="Bundles (folders or .tar), runs, or folders of them.")]
Results = Annotated[
    list[Path] | None,
    typer.Option(help="Where baselines and copies are looked for; repeatable; default: the same paths."),
]
Write = Annotated[bool, typer.Option("--write", help="Write verification.json beside each, for the site.")]


@app.command("verify")
def verify_command(
    paths: Paths, *, results: Results = None, write: Write = False, as_json: Json = False
) -> int:
    """Check submissions, level L0.

    Nothing is run and nothing is believed: prompts, scores and sums are made again. Exit code 1 where one is refused
    or cannot be verified.
    """
    from kvbench.leaderboard.submission.archive import find_bundles
    from kvbench.leaderboard.submission.repository import Repository
    from kvbench.leaderboard.verification.verify import verify

    bundles = [x for path in paths for x in find_bundles(path)]
    if not bundles:
        raise UserError(f"'{paths[0]}' holds no run. Give the folder of a run, a bundle, or a folder of them.")
    repository = Repository(results or paths)
    found = [(x, verify(x, repository).conclude()) for x in bundles]
    return _report(found, write=write, as_json=as_json, below=(None,))


@app.command("rerun")
def rerun_command(
    path: Annotated[Path, typer.Argument(help="A bundle (a folder or a .tar) or a run.")],
    *,
    share: Annotated[
        str | None, typer.Option(help="Of its samples: 10% (L1), 100% (L2); default: 10%, or none with a hidden seed.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the samples; default: one that nobody can foresee.")] = None,
    hidden_seed: Annotated[
        str | None,
        typer.Option(metavar="FILE|env:NAME", help="A secret of yours: run fresh samples that it makes, too (L3)."),
    ] = None,
    results: Results = None,
    write: Write = False,
    as_json: Json = False,
) -> int:
    """Run samples again, levels L1 to L3.

    Token is compared with token, or a fresh mean with the submitted one. Exit code 1 where it does not hold.
    """
    from kvbench.leaderboard.submission.repository import Repository
    from kvbench.leaderboard.verification.levels import Wish, raise_level, read_secret, read_share
    from kvbench.leaderboard.verification.verify import verify
    from kvbench.runs.progress import show_progress

    wanted = read_share(share or "10%") if share is not None or hidden_seed is None else None
    secret = None if hidden_seed is None else read_secret(hidden_seed)
    wish = Wish(wanted, secrets.randbits(32) if seed is None else seed, secret)
    found = verify(path, Repository(results or [path]))
    raise_level(found, wish, show_progress)
    return _report([(path, found.conclude())], write=write, as_json=as_json, below=(None, "L0"))


@app.command("build")
def build_command(
    results: Annotated[Path, typer.Argument(help="Folder with runs at any depth.")],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the site; an older site is replaced.")],
    as_json: Json = False,
) -> int:
    """Build the static site of all runs below a folder."""
    from kvbench.analysis.formatting import print_table
    from kvbench.leaderboard.site.build import build_site
    from kvbench.log import say

    built = build_site(results, output)
    for x in built.problems:
        say(f"not shown: {x.place}: {x.reason}.")
    print_table("", ("", "site"), [
        ("runs", str(built.runs)), ("protocols", str(built.groups)), ("not shown", str(len(built.problems))),
        ("open", str(built.folder / "index.html")),
    ])
    if as_json:
        print_json({**asdict(built), "folder": str(built.folder)})
    return 0


def _report(
    found: list[tuple[Path, Verification]], *, write: bool, as_json: bool, below: tuple[Level | None, ...]
) -> int:
    """A table of a bundle's checks, or a row for each of several; exit code 1 where a level is one of those below."""
    from kvbench.analysis.formatting import print_table
    from kvbench.leaderboard.submission.records import VERIFICATION
    from kvbench.runs.files import write_record

    if len(found) == 1:
        (path, record), = found
        print_record(record, str(path))
    else:
        print_table("", ("run", "level", "score", "not ok"), [
            (path.name, x.level or "-", _score(x)[2], ", ".join(f"{y.name} {y.outcome}" for y in _odd(x)))
            for path, x in found
        ])
        counts = Counter((y.outcome, y.name, y.reason) for _, x in found for y in _odd(x))
        print_table("", ("runs", "", "", "why"), [(str(n), *key) for key, n in counts.most_common()])
    for path, record in found if write else ():
        if not path.is_dir():
            raise UserError(f"{path} is a tar: unpack it to have {VERIFICATION} beside it, or leave --write out.")
        write_record(path / VERIFICATION, record)
    if as_json:
        print_json([{"path": str(path), **record.model_dump(mode="json")} for path, record in found])
    return 1 if any(record.level in below for _, record in found) else 0


def print_record(record: Verification, path: str) -> None:
    """Every check of a bundle."""
    from kvbench.analysis.formatting import print_table

    rows = [(x.name, x.outcome, x.reason) for x in record.checks]
    print_table("", (record.level or "no level", "", record.run_id or path), [*rows, _score(record)])


def _odd(record: Verification) -> list[Check]:
    return [x for x in record.checks if x.outcome != "ok"]


def _score(record: Verification) -> tuple[str, str, str]:
    """The verified score as a row."""
    score = record.score
    if score is None or score.mean is None or score.ci95 is None:
        return "score", "", "not verified" if score is None else "none"
    return "score", "", f"{score.mean:.3f} [{score.ci95[0]:.3f}, {score.ci95[1]:.3f}] {score.metric}"
