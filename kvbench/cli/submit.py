"""`kvbench submit`: pack, verify and deliver runs to a leaderboard."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.leaderboard import print_records
from kvbench.cli.options import Json, Out, refuse_file
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.leaderboard.submission.records import Manifest


def submit_command(
    runs: Annotated[list[str], typer.Argument(help="Folders or ids of finished runs, or folders that contain them.")],
    *,
    submitter: Annotated[
        str, typer.Option(help="Your name on the leaderboard: ASCII letters, digits, '.', '_' and '-'.")
    ],
    to: Annotated[
        str, typer.Option(help="Folder of a results repository, hf:OWNER/DATASET, or URL of a leaderboard.")
    ] = "results",
    tuned_on: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK[:SPLIT]", help="Task on which the settings were tuned; repeatable; default: none."),
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="File of the run's method, if it is your own; it is shown next to the run.")
    ] = None,
    code_url: Annotated[
        str | None, typer.Option(metavar="URL", help="https link to the method's code, shown in the run's row.")
    ] = None,
    paper_url: Annotated[
        str | None, typer.Option(metavar="URL", help="https link to the method's paper, shown in the run's row.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for a URL; default: $KVBENCH_TOKEN.")
    ] = None,
    out: Out = Path("runs"),
    as_json: Json = False,
) -> int:
    """Pack runs and deliver them to a leaderboard.

    They are verified first on this machine (level L0). Nothing is delivered unless every run can be packed. A run
    that would be refused is not delivered. The exit code is then 1, and also if the server refused a run.
    """
    from kvbench.analysis.load import find_runs
    from kvbench.leaderboard.submission.bundle import pack_run
    from kvbench.leaderboard.submission.deliver import HUB, check_url, read_token
    from kvbench.leaderboard.submission.outcome import RefusedError
    from kvbench.leaderboard.submission.records import METHOD
    from kvbench.leaderboard.verification.repository import Repository
    from kvbench.leaderboard.verification.verify import verify

    token = ""
    if "://" in to or to.startswith(HUB):
        check_url(to)
        token = "" if to.startswith(HUB) else read_token(token_file)
    else:
        refuse_file("--to", Path(to))
    folders = find_runs(runs, out)
    packed = {}
    for folder in folders:
        try:
            packed[folder] = pack_run(
                folder, submitter, tuple(tuned_on or ()), source, code_url=code_url, paper_url=paper_url
            )
        except RefusedError as error:
            raise UserError(f"run {folder} cannot be packed: {error}. Nothing was delivered.") from error
    if source is not None and not any(METHOD in x for x in packed.values()):
        raise UserError(f"--source {source} belongs to no run: all methods are kvbench's own. Leave --source out.")
    there = [] if token or to.startswith(HUB) else [Path(to)]
    repository = Repository(there)
    repository.add(folders, submitter)  # the runs may be the baselines of one another
    verified = [(verify(files, repository), files) for files in packed.values()]
    records = [found.conclude() for found, _ in verified]
    print_records(list(zip(folders, records, strict=True)))
    manifests: list[Manifest] = []
    delivered: list[dict[str, Any] | None] = []
    for (found, files), record in zip(verified, records, strict=True):
        manifest = None if found.bundle is None or record.refused else found.bundle.manifest
        delivered.append(None if manifest is None else _deliver(files, manifest, to, token))
        manifests += [] if manifest is None else [manifest]
    if refused := delivered.count(None):
        what = "the submission" if len(folders) == 1 else f"{refused} of {len(folders)} submissions"
        echo(f"not delivered: {what} would be refused.", err=True)
    if there and manifests:
        _print_pull_request(there[0], manifests)
    if as_json:
        documents = [
            {"delivered": x, **record.model_dump(mode="json")} for x, record in zip(delivered, records, strict=True)
        ]
        print_json(documents[0] if len(documents) == 1 else documents)
    return 1 if any(x is None or x.get("status") == "refused" for x in delivered) else 0


def _deliver(files: dict[str, bytes], manifest: Manifest, to: str, token: str) -> dict[str, Any]:
    from kvbench.leaderboard.submission.deliver import HUB, find_sent, put_in_folder, send_to_hub, send_to_server

    if to.startswith(HUB):
        address = send_to_hub(files, manifest, to.removeprefix(HUB))
        echo(f"pull request: {address}")
        return {"pull_request": address}
    if token:
        answer = find_sent(to, manifest.identity) or send_to_server(files, to, token)
        echo(f"{answer.get('status')} as {answer.get('id')}: {to.rstrip('/')}/api/submissions/{answer.get('id')}")
        for check in answer.get("checks") or ():
            if check.get("outcome") == "refused":
                echo(f"{check.get('name')}: {check.get('reason')}")
        if answer.get("error"):
            echo(str(answer["error"]))
        if answer.get("status") in ("queued", "verifying"):
            echo("The same command shows the state again.")
        return answer
    place = put_in_folder(files, manifest, Path(to))
    echo(f"written to {place}")
    return {"folder": str(place)}


def _print_pull_request(root: Path, manifests: list[Manifest]) -> None:
    """Print the commands for a pull request, if the folder is in a git checkout."""
    from kvbench.leaderboard.submission.deliver import find_checkout, find_place

    checkout = find_checkout(root)
    if checkout is None:
        return
    places = [(root / find_place(x)).resolve().relative_to(checkout) for x in manifests]
    what = manifests[0].run_id if len(manifests) == 1 else f"{len(manifests)}-runs-{manifests[0].run_id}"
    branch = f"{manifests[0].submitter}/{what}"
    commands = (
        ("switch", "-c", branch), ("add", *map(str, places)), ("commit", "-m", what), ("push", "-u", "origin", branch)
    )
    echo(f"for a pull request, in {checkout}:")
    for words in commands:
        echo(f"  {shlex.join(('git', *words))}")
