"""`kvbench submit`: pack, verify and deliver a run to a leaderboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.options import Json
from kvbench.cli.output import print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.leaderboard.submission.records import Manifest


def submit_command(
    run: Annotated[str, typer.Argument(help="Folder or id of a finished run.")],
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
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token for a URL; default: $KVBENCH_TOKEN.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder in which run ids are looked up.")] = Path("runs"),
    as_json: Json = False,
) -> int:
    """Pack a run, verify it locally (level L0), and deliver it to a leaderboard."""
    from kvbench.analysis.load import find_run
    from kvbench.cli.leaderboard import print_record
    from kvbench.leaderboard.submission.bundle import pack_run
    from kvbench.leaderboard.submission.deliver import HUB, read_token
    from kvbench.leaderboard.submission.repository import Repository
    from kvbench.leaderboard.verification.outcome import RefusedError
    from kvbench.leaderboard.verification.verify import verify

    remote = to.startswith((HUB, "https://", "http://"))
    if not remote and "://" in to:
        raise UserError(f"--to {to} is not a supported destination. Give a folder, hf:OWNER/DATASET, or http(s)://...")
    token = read_token(token_file) if to.startswith("http") and remote else ""
    folder = find_run(run, out)
    try:
        files = pack_run(folder, submitter, tuple(tuned_on or ()))
    except RefusedError as error:
        raise UserError(f"run {folder} cannot be packed: {error}.") from error
    found = verify(files, Repository([] if remote else [Path(to)]))
    record = found.conclude()
    print_record(record, str(folder))
    delivered = None
    if not record.refused and found.bundle is not None and found.bundle.manifest is not None:
        delivered = _deliver(files, found.bundle.manifest, to, token)
    else:
        typer.echo("not delivered: the submission would be refused.", err=True)
    if as_json:
        print_json({"delivered": delivered, **record.model_dump(mode="json")})
    return 0 if delivered is not None else 1


def _deliver(files: dict[str, bytes], manifest: Manifest, to: str, token: str) -> dict[str, Any]:
    from kvbench.leaderboard.submission.deliver import HUB, find_checkout, put_in_folder, send_to_hub, send_to_server

    if to.startswith(HUB):
        address = send_to_hub(files, manifest, to.removeprefix(HUB))
        typer.echo(f"pull request: {address}")
        return {"pull_request": address}
    if token:
        answer = send_to_server(files, to, token)
        typer.echo(f"accepted as {answer.get('id')}: {to.rstrip('/')}/api/submissions/{answer.get('id')}")
        return answer
    place = put_in_folder(files, manifest, Path(to))
    typer.echo(f"written to {place}")
    checkout = find_checkout(place)
    if checkout is not None:
        branch = f"{manifest.submitter}/{manifest.run_id}"
        typer.echo(
            f"for a pull request, in {checkout}:\n"
            f"  git switch -c {branch}\n  git add {place.resolve().relative_to(checkout)}\n"
            f"  git commit -m '{manifest.run_id}'\n  git push -u origin {branch}"
        )
    return {"folder": str(place)}
