"""Delivers a bundle to a results folder, a data set repository on the Hugging Face hub, or a leaderboard server."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from kvbench.errors import UserError, first_line
from kvbench.leaderboard.submission.archive import read_files, write_folder, write_tar
from kvbench.leaderboard.submission.bundle import open_head
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import Manifest
from kvbench.log import say

HUB = "hf:"
DATASET = re.compile(rf"{HUB}[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
TOKEN = "KVBENCH_TOKEN"  # noqa: S105  # the name of a variable
AGAIN = ("withdrawn", "failed")
"""Statuses in which a server takes a bundle that it has once more."""
WAIT_S = 60
MAX_REPLY = 1 << 20


class DeliveryError(UserError):
    """The delivery failed for a reason outside the request; it can be repeated."""

    exit_code = 1


def find_place(manifest: Manifest) -> Path:
    """Folder of a bundle in a results repository; named by submitter and run, as two people may submit one run."""
    return Path(manifest.submitter) / manifest.run_id


def put_in_folder(files: Mapping[str, bytes], manifest: Manifest, root: Path) -> Path:
    """Write the bundle into its folder below `root`, atomically; a folder that holds it is left as it is.

    Raises:
        UserError: the folder holds another bundle.
        SaveError: it cannot be written.
    """
    folder = root / find_place(manifest)
    if folder.exists():
        try:
            there = open_head(read_files(folder)).manifest
        except RefusedError:
            there = None
        if there is None or there.content != manifest.content:
            raise UserError(f"{folder} holds another bundle of this run. Remove it first, if this one replaces it.")
        if there.identity != manifest.identity:
            raise UserError(
                f"{folder} holds this run with {there.stated}; this one has {manifest.stated}. "
                "Remove it first, if this one replaces it."
            )
        say(
            f"{folder} holds this submission, packed at {there.created}: it is left as it is. Remove it first, if this "
            "one replaces it."
        )
        return folder
    write_folder(files, folder)
    return folder


def find_checkout(folder: Path) -> Path | None:
    """The git checkout that contains a folder, if any."""
    return next((x for x in (folder.resolve(), *folder.resolve().parents) if (x / ".git").exists()), None)


def send_to_hub(files: Mapping[str, bytes], manifest: Manifest, repository: str) -> str:
    """Open a pull request on a data set repository; returns its URL.

    Raises:
        DeliveryError: the hub refuses it or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    place = find_place(manifest)
    operations = [CommitOperationAdd(f"{place}/{name}", io.BytesIO(data)) for name, data in files.items()]
    try:
        done = HfApi().create_commit(
            repository, operations, commit_message=f"{manifest.run_id} by {manifest.submitter}", repo_type="dataset",
            create_pr=True,
        )
    except Exception as error:  # the hub's client raises many types
        hint = "If it asks for a login, run 'hf auth login'."
        raise DeliveryError(f"the hub did not accept it for {repository}: {first_line(error)}. {hint}") from error
    return str(done.pr_url)


def find_sent(url: str, number: str) -> dict[str, Any] | None:
    """The record of a submission that a leaderboard server has; None: it must be sent, or the server does not say.

    Every upload counts towards the server's limit per hour, also that of a bundle that it has. Without this a folder
    of more runs than the limit would never be sent to its end.
    """
    try:
        with _opener().open(f"{url.rstrip('/')}/api/submissions/{number}", timeout=WAIT_S) as reply:
            found = _read(reply)
    except (OSError, http.client.HTTPException):
        return None
    return found if found.get("id") == number and found.get("status") not in AGAIN else None


def send_to_server(files: Mapping[str, bytes], url: str, token: str) -> dict[str, Any]:
    """Upload the bundle to a leaderboard server; returns the server's reply.

    Raises:
        DeliveryError: the server refuses it or cannot be reached.
    """
    body = io.BytesIO()
    write_tar(files, body)
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        say(f"{url} is not encrypted: others on the network can read your token. Use https if the server offers it.")
    request = urllib.request.Request(  # noqa: S310  # the caller checked the scheme
        f"{url.rstrip('/')}/api/submissions", data=body.getvalue(), method="POST",
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/x-tar"},
    )
    try:
        with _opener().open(request, timeout=WAIT_S) as reply:
            return _read(reply)
    except urllib.error.HTTPError as error:
        with error:
            answer = _read(error)
        hint = ". Check KVBENCH_TOKEN or --token-file" if error.code == http.HTTPStatus.UNAUTHORIZED else ""
        raise DeliveryError(
            f"{url} did not accept it ({error.code}): {answer.get('detail', error.reason)}{hint}"
        ) from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise DeliveryError(
            f"{url} cannot be reached: {reason}. Try again: a repeated upload is not a second submission."
        ) from error
    except http.client.HTTPException as error:
        reply = f"{str(error).strip()[:80]} ({type(error).__name__})"
        raise DeliveryError(
            f"{url} does not answer as a web server does: {reply}. Check the host and the port of --to."
        ) from error


def check_url(url: str) -> None:
    """Check the address of a leaderboard server, or of a data set on the hub.

    Raises:
        UserError: it is neither the URL of a server nor hf:OWNER/DATASET.
    """
    if DATASET.fullmatch(url):
        return
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:  # an invalid port or IPv6 address
        valid = plain = False
    if not valid or not plain or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(
            f"--to {url!r} is not the address of a leaderboard. Give a URL such as https://leaderboard.example.org, "
            "hf:OWNER/DATASET, or a folder."
        )


def read_token(file: Path | None) -> str:
    """Read the server token from a file or the environment; it is never printed.

    Raises:
        UserError: there is no token.
    """
    try:
        token = os.environ.get(TOKEN, "") if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError(f"--token-file {file} cannot be read: {reason}. Give a file with the token alone.") from error
    token = token.strip()
    if not token and file is None:
        raise UserError(f"a server requires a token. Set {TOKEN}, or give --token-file.")
    if not token or not token.isascii() or not token.isprintable():
        place = TOKEN if file is None else f"--token-file {file}"
        raise UserError(f"{place} holds no token: one line as `kvbench leaderboard token create` printed it.")
    return token


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects, which could send the token to another host."""

    def redirect_request(self, *_: object) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirect)


def _read(reply: IO[bytes]) -> dict[str, Any]:
    try:
        found = json.loads(reply.read(MAX_REPLY))
    except (ValueError, RecursionError, http.client.HTTPException):
        found = None
    return found if isinstance(found, dict) else {}
