"""An upload on its way to the queue: streamed to the disk within limits, looked at, kept in a folder of its own."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from pathlib import Path

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import (
    MOST_PER_HOUR,
    ConflictError,
    admit,
    find,
    take_in,
)
from kvbench.leaderboard.server.tables import Database, Scope, Submission, Token
from kvbench.leaderboard.submission.archive import LARGEST_TAR, read_files, write_folder
from kvbench.leaderboard.submission.bundle import open_head
from kvbench.leaderboard.verification.outcome import RefusedError
from kvbench.runs.files import SaveError

UPLOAD_S = 600
"""Most that an upload may take."""
LEAST_FREE = 1 << 30
"""Bytes of disk below which nothing is taken in."""


async def receive(
    request: Request, database: Database, state: State, token: Token, supersedes: str | None
) -> tuple[Submission, bool]:
    """The submission that came of an upload, and whether it was queued.

    Raises:
        HTTPException: with the reason for the sender.
    """
    if not await run_in_threadpool(admit, database, token, MOST_PER_HOUR):
        detail = f"more than {MOST_PER_HOUR} uploads in an hour: come again later"
        raise HTTPException(429, detail, headers={"Retry-After": "600"})
    if shutil.disk_usage(state.folder).free < LEAST_FREE:
        raise HTTPException(507, "there is no room for submissions just now: come again later")
    path = state.uploads / f"{uuid.uuid4().hex}.tar"
    try:
        async with asyncio.timeout(UPLOAD_S):
            await _stream(request, path)
        return await run_in_threadpool(_take, path, database, state, token, supersedes)
    except TimeoutError:
        raise HTTPException(408, f"the upload took more than {UPLOAD_S} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload was cut off") from None
    finally:
        path.unlink(missing_ok=True)


async def _stream(request: Request, path: Path) -> None:
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else LARGEST_TAR + 1
    with path.open("xb") as file:
        if size <= LARGEST_TAR:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > LARGEST_TAR:
                    break
                await run_in_threadpool(file.write, part)
    if size > LARGEST_TAR:
        raise HTTPException(413, f"a bundle has at most {LARGEST_TAR >> 20} MiB", headers={"Connection": "close"})


def _take(
    path: Path, database: Database, state: State, token: Token, supersedes: str | None
) -> tuple[Submission, bool]:
    """First the files, then the row: what was answered for is there."""
    try:
        files = read_files(path)
        manifest = open_head(files).manifest
    except RefusedError as error:
        raise HTTPException(422, f"{error.verdict.name}: {error.verdict.reason}") from error
    assert manifest is not None, "a tar without a manifest was refused"
    if manifest.submitter != token.name and token.scope is not Scope.ADMIN:
        raise HTTPException(403, f"this token is {token.name}'s, and the bundle's submitter is {manifest.submitter}")
    number = manifest.identity
    folder = state.bundle(number)
    if not folder.exists():
        try:
            write_folder(files, folder)
        except SaveError:
            if not folder.exists():  # the same bundle came twice at once: the other one is as good
                raise
    try:
        return take_in(database, token, manifest, supersedes)
    except ConflictError as error:
        if find(database, number) is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise HTTPException(409, str(error)) from error
