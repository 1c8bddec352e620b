"""`kvbench leaderboard serve` and `token`: the leaderboard server and its access tokens."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json, refuse_file
from kvbench.cli.output import echo, print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.leaderboard.server.state import State
    from kvbench.leaderboard.server.tables import Database

tokens = typer.Typer(help="Manage the access tokens of `kvbench leaderboard serve`.", rich_markup_mode=None)
Url = Annotated[
    str | None, typer.Option("--db", help="Database as an SQLAlchemy URL; default: SQLite in the --state folder.")
]
Folder = Annotated[Path, typer.Option("--state", help="Folder for the database, submissions and site.")]
HERE = Path("leaderboard")


def serve_command(
    *,
    db: Url = None,
    state: Folder = HERE,
    results: Annotated[
        Path, typer.Option(help="Folder of the runs shown; accepted submissions are added to it.")
    ] = Path("results"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> int:
    """Serve the leaderboard site and accept submissions, until Ctrl-C."""
    from kvbench.log import say
    from kvbench.machine import load_extra

    uvicorn = load_extra("uvicorn", extra="server", what="kvbench leaderboard serve")
    load_extra("fastapi", extra="server", what="kvbench leaderboard serve")
    if state.resolve().is_relative_to(results.resolve()):
        raise UserError(f"--state {state} lies in --results {results}, where every run is shown. Give another --state.")
    from kvbench.leaderboard.server.listen import listening, name_url

    with listening(host, port) as sockets:
        refuse_file("--results", results)
        place, database = _open(db, state, results)
        from kvbench.leaderboard.server.app import create_app
        from kvbench.leaderboard.server.connection import Connection
        from kvbench.runs.files import saving

        with saving(results):
            results.mkdir(parents=True, exist_ok=True)
        url = name_url(host, port)
        say(f"serving {results} on {url}; submissions are stored in {place.folder}. Press Ctrl-C to stop.")
        app = create_app(database, place)
        # Its own log configuration would close the handlers of the whole process.
        server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_config=None, log_level="warning"))
        with suppress(KeyboardInterrupt):
            server.run(sockets=sockets)
        database.close()
    return 0 if server.started else 1


@tokens.command("create")
def create_command(
    name: Annotated[str, typer.Argument(help="Submitter that the token belongs to.")],
    *,
    scope: Annotated[
        str, typer.Option(help="submit: submit under this name; admin: act for every name, read the audit log.")
    ] = "submit",
    db: Url = None,
    state: Folder = HERE,
    as_json: Json = False,
) -> None:
    """Create a token and print it once; only its hash is stored."""
    _, database = _open(db, state)
    from kvbench.leaderboard.server.tokens import create_token

    token = create_token(database, name, scope)
    echo(token)
    if as_json:
        print_json({"name": name, "scope": scope, "token": token})


@tokens.command("list")
def list_command(*, db: Url = None, state: Folder = HERE, as_json: Json = False) -> None:
    """List the tokens by owner; the tokens themselves are not stored."""
    _check_database(db, state)
    _, database = _open(db, state)
    from kvbench.analysis.formatting import print_table
    from kvbench.leaderboard.server.tokens import list_tokens

    found = [
        {"id": x.id, "name": x.name, "scope": str(x.scope), "created": x.created, "revoked": x.revoked}
        for x in list_tokens(database)
    ]
    columns = ("id", "name", "scope", "created", "revoked")
    print_table("", columns, [[str(x[key] or "-") for key in columns] for x in found])
    if as_json:
        print_json(found)


@tokens.command("revoke")
def revoke_command(
    number: Annotated[int, typer.Argument(help="Id of the token in `kvbench leaderboard token list`.")],
    *,
    db: Url = None,
    state: Folder = HERE,
) -> None:
    """Revoke a token permanently; its submissions stay."""
    _check_database(db, state)
    _, database = _open(db, state)
    from kvbench.leaderboard.server.tokens import revoke_token

    echo(f"token {number} of {revoke_token(database, number).name} was revoked.")


def _check_database(url: str | None, folder: Path) -> None:
    """Refuse a folder without a database, where an empty one would be made."""
    from kvbench.leaderboard.server.state import DATABASE

    if url is None and not (folder / DATABASE).is_file():
        raise UserError(
            f"--state {folder} has no database of a server. Give the folder of `kvbench leaderboard serve`, or --db."
        )


def _open(url: str | None, folder: Path, results: Path = Path("results")) -> tuple[State, Database]:
    from kvbench.machine import load_extra

    load_extra("sqlalchemy", extra="server", what="the leaderboard server")
    from kvbench.leaderboard.server.state import State
    from kvbench.leaderboard.server.tables import Database
    from kvbench.runs.files import saving

    refuse_file("--state", folder)
    place = State(folder.resolve(), results.resolve())
    with saving(folder):
        place.make()
    return place, Database(url or place.database)
