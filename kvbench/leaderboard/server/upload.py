"""Receives an upload: streams it to disk within limits, checks it, stores the bundle, and queues it."""

from __future__ import annotations

import asyncio
import shutil
import threading
import uuid
from pathlib import Path

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import ConflictError, LimitError, enqueue, find, record_upload
from kvbench.leaderboard.server.tables import Database, Scope, Status, Submission, Token
from kvbench.leaderboard.submission.archive import MAX_TAR_BYTES, read_files, write_folder
from kvbench.leaderboard.submission.bundle import open_head
from kvbench.leaderboard.submission.outcome import RefusedError

UPLOAD_S = 600
"""Seconds that one upload may take."""
MIN_FREE = 1 << 30
"""Bytes of free disk below which uploads are refused."""
PLACING = threading.Lock()
"""Held while a bundle is put in its place and queued: a refused upload may not remove the bundle of an equal one."""


async def receive(
    request: Request, database: Database, state: State, token: Token, supersedes: str | None
) -> tuple[Submission, bool]:
    """Receive an upload. Returns the submission and whether it was queued.

    Raises:
        HTTPException: the upload is refused; the detail states the reason.
    """
    try:
        await run_in_threadpool(record_upload, database, token)
    except LimitError as error:
        raise _limit(error) from error
    if shutil.disk_usage(state.folder).free < MIN_FREE:
        raise HTTPException(507, "the server's disk is almost full: try again later")
    path = state.uploads / f"{uuid.uuid4().hex}.tar"
    try:
        async with asyncio.timeout(UPLOAD_S):
            await _stream(request, path)
        return await run_in_threadpool(_store, path, database, state, token, supersedes)
    except TimeoutError:
        raise HTTPException(408, f"the upload took more than {UPLOAD_S} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload was interrupted") from None
    finally:
        path.unlink(missing_ok=True)


async def _stream(request: Request, path: Path) -> None:
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else MAX_TAR_BYTES + 1
    with path.open("xb") as file:
        if size <= MAX_TAR_BYTES:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > MAX_TAR_BYTES:
                    break
                await run_in_threadpool(file.write, part)
    if size > MAX_TAR_BYTES:
        raise HTTPException(413, f"a bundle has at most {MAX_TAR_BYTES >> 20} MiB", headers={"Connection": "close"})


def _store(
    path: Path, database: Database, state: State, token: Token, supersedes: str | None
) -> tuple[Submission, bool]:
    """Write the files before the database row, so that every submission in the database has its bundle."""
    try:
        files = read_files(path)
        manifest = open_head(files).manifest
    except RefusedError as error:
        raise HTTPException(422, f"{error.check.name}: {error.check.reason}") from error
    assert manifest is not None, "a tar without a manifest was refused"
    if manifest.submitter != token.name and token.scope is not Scope.ADMIN:
        detail = f"this token belongs to {token.name}, but the bundle's submitter is {manifest.submitter}"
        raise HTTPException(403, detail)
    number = manifest.identity
    folder = state.bundle(number)
    with PLACING:
        known = find(database, number)
        if known is None or known.status in (Status.WITHDRAWN, Status.FAILED):  # it is verified again, as it is now
            shutil.rmtree(folder, ignore_errors=True)
            write_folder(files, folder)
        try:
            return enqueue(database, token, manifest, supersedes)
        except (ConflictError, LimitError) as error:
            if find(database, number) is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise (_limit(error) if isinstance(error, LimitError) else HTTPException(409, str(error))) from error


def _limit(error: LimitError) -> HTTPException:
    return HTTPException(429, f"{error}: try again later", headers={"Retry-After": "600"})
