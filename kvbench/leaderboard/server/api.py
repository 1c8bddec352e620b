"""The HTTP routes below /api."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

from kvbench import __version__
from kvbench.leaderboard.server import submissions
from kvbench.leaderboard.server.publisher import Publisher
from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import ConflictError
from kvbench.leaderboard.server.tables import Database, Scope, Status, Submission, Token
from kvbench.leaderboard.server.tokens import find_token
from kvbench.leaderboard.server.upload import receive
from kvbench.leaderboard.server.worker import Worker
from kvbench.leaderboard.submission.records import Check, Level, Verification

router = APIRouter(prefix="/api")
TAR = {"requestBody": {
    "required": True, "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
    "description": (
        "A plain tar of spec.json, samples.jsonl.gz, result.json and manifest.json, and of method.py for a method of "
        "the submitter's own (`kvbench submit`)."
    ),
}}
MAX_EVENTS = 1000
bearer = HTTPBearer(auto_error=False, description="A token of `kvbench leaderboard token create`.")


@dataclass(frozen=True)
class Services:
    """The objects that request handlers use."""

    database: Database
    state: State
    worker: Worker
    publisher: Publisher


class SubmissionStatus(BaseModel):
    """The status of a submission, as the API returns it."""

    id: str
    run_id: str
    submitter: str
    status: Status
    received: str
    supersedes: str | None
    level: Level | None
    checks: tuple[Check, ...]
    error: str | None

    @classmethod
    def of(cls, found: Submission) -> SubmissionStatus:
        """Build the response from the database row."""
        record = None if found.verification is None else Verification.model_validate_json(found.verification)
        return cls(
            id=found.id, run_id=found.run_id, submitter=found.submitter, status=found.status, received=found.received,
            supersedes=found.supersedes, level=record and record.level, checks=record.checks if record else (),
            error=found.error,
        )


class AuditEntry(BaseModel):
    """One line of the audit log."""

    time: str
    actor: str
    action: str
    subject: str | None
    detail: str


def find_services(request: Request) -> Services:
    """Return the services of the application that handles this request."""
    services: Services = request.app.state.services
    return services


def identify(
    services: Annotated[Services, Depends(find_services)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> Token:
    """Return the token of this request, or answer 401."""
    token = None if credentials is None else find_token(services.database, credentials.credentials)
    if token is None:
        raise HTTPException(401, "no token, or one that is unknown or revoked", {"WWW-Authenticate": "Bearer"})
    return token


Own = Annotated[Services, Depends(find_services)]
Known = Annotated[Token, Depends(identify)]


@router.get("/health")
def tell_health() -> dict[str, str]:
    """Report that the server is up, and its version."""
    return {"status": "ok", "version": __version__}


@router.post("/submissions", status_code=202, openapi_extra=TAR, responses={
    200: {"model": SubmissionStatus, "description": "The same bundle was submitted before."},
    401: {"description": "No valid token."},
    403: {"description": "The token belongs to another submitter."}, 408: {"description": "The upload took too long."},
    409: {"description": "Another bundle of this run is active."}, 413: {"description": "The bundle is too large."},
    422: {"description": "The upload is not a valid bundle."}, 429: {"description": "Too many uploads in an hour."},
})
async def send(
    request: Request, response: Response, services: Own, token: Known,
    supersedes: Annotated[str | None, Query(max_length=64, description="A submission of yours to replace.")] = None,
) -> SubmissionStatus:
    """Send a bundle. Sending the same bundle again does not create a second submission."""
    found, queued = await receive(request, services.database, services.state, token, supersedes)
    if queued:
        services.worker.wake()
    else:
        response.status_code = 200
    return SubmissionStatus.of(found)


@router.get("/submissions")
def show_all(services: Own, token: Known) -> list[SubmissionStatus]:
    """List your submissions; an administrator sees all."""
    return [SubmissionStatus.of(x) for x in submissions.list_submissions(services.database, token)]


@router.get("/submissions/{number}", responses={404: {"description": "Unknown id."}})
def show(number: str, services: Own) -> SubmissionStatus:
    """Show the status of a submission and the checks of its verification."""
    found = submissions.find(services.database, number)
    if found is None:
        raise HTTPException(404, "there is no such submission")
    return SubmissionStatus.of(found)


@router.post("/submissions/{number}/withdraw", responses={409: {"description": "Not yours, or unknown."}})
def withdraw(number: str, services: Own, token: Known) -> SubmissionStatus:
    """Withdraw a submission: its row is removed; its bundle and the audit log are kept."""
    try:
        found = submissions.withdraw(services.database, token, number)
    except ConflictError as error:
        raise HTTPException(409, str(error)) from error
    services.publisher.publish()
    return SubmissionStatus.of(found)


@router.get("/audit")
def show_audit(
    services: Own, token: Known, most: Annotated[int, Query(ge=1, le=MAX_EVENTS)] = 100
) -> list[AuditEntry]:
    """List the audit log, newest first. Administrators only."""
    if token.scope is not Scope.ADMIN:
        raise HTTPException(403, "this requires a token of scope admin")
    events = submissions.list_events(services.database, most)
    return [AuditEntry.model_validate(x, from_attributes=True) for x in events]
