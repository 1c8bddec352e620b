"""What the server answers to, below /api."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel

from kvbench import __version__
from kvbench.leaderboard.server import submissions
from kvbench.leaderboard.server.intake import receive
from kvbench.leaderboard.server.publisher import Publisher
from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.submissions import ConflictError
from kvbench.leaderboard.server.tables import Database, Event, Scope, Status, Submission, Token
from kvbench.leaderboard.server.tokens import find_token
from kvbench.leaderboard.server.worker import Worker
from kvbench.leaderboard.submission.records import Check, Level, Verification

router = APIRouter(prefix="/api")
TAR = {"requestBody": {
    "required": True, "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
    "description": "A plain tar of spec.json, samples.jsonl.gz, result.json and manifest.json (`kvbench submit`).",
}}
MOST_EVENTS = 1000
bearer = HTTPBearer(auto_error=False, description="A token of `kvbench leaderboard token create`.")


@dataclass(frozen=True)
class House:
    """Whom requests are passed on to."""

    database: Database
    state: State
    worker: Worker
    publisher: Publisher


class Answer(BaseModel):
    """A submission as its submitter sees it."""

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
    def of(cls, found: Submission) -> Answer:
        """What is told of it."""
        record = None if found.verification is None else Verification.model_validate_json(found.verification)
        return cls(
            id=found.id, run_id=found.run_id, submitter=found.submitter, status=found.status, received=found.received,
            supersedes=found.supersedes, level=record and record.level, checks=record.checks if record else (),
            error=found.error,
        )


class Logged(BaseModel):
    """A row of the audit log."""

    time: str
    actor: str
    action: str
    subject: str | None
    detail: str

    @classmethod
    def of(cls, event: Event) -> Logged:
        """What is told of it."""
        return cls(**{name: getattr(event, name) for name in cls.model_fields})


def find_house(request: Request) -> House:
    """Of the application that was asked."""
    house: House = request.app.state.house
    return house


def identify(
    house: Annotated[House, Depends(find_house)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],
) -> Token:
    """Whose token it is."""
    token = None if credentials is None else find_token(house.database, credentials.credentials)
    if token is None:
        raise HTTPException(401, "no token, or one that is unknown or revoked", {"WWW-Authenticate": "Bearer"})
    return token


Own = Annotated[House, Depends(find_house)]
Known = Annotated[Token, Depends(identify)]


@router.get("/health")
def tell_health() -> dict[str, str]:
    """Whether the server answers."""
    return {"status": "ok", "version": __version__}


@router.post("/submissions", status_code=202, openapi_extra=TAR, responses={
    200: {"model": Answer, "description": "It was here already."}, 401: {"description": "No token."},
    403: {"description": "The token is another submitter's."}, 408: {"description": "It took too long."},
    409: {"description": "Another submission of this run stands."}, 413: {"description": "It is too large."},
    422: {"description": "It is no bundle."}, 429: {"description": "Too many in an hour."},
})
async def send(
    request: Request, response: Response, house: Own, token: Known,
    supersedes: Annotated[str | None, Query(max_length=64, description="A submission of yours to replace.")] = None,
) -> Answer:
    """Send a bundle; the same one again is no second submission."""
    found, queued = await receive(request, house.database, house.state, token, supersedes)
    if queued:
        house.worker.wake()
    else:
        response.status_code = 200
    return Answer.of(found)


@router.get("/submissions")
def show_all(house: Own, token: Known) -> list[Answer]:
    """Your submissions; an administrator sees all."""
    return [Answer.of(x) for x in submissions.list_submissions(house.database, token)]


@router.get("/submissions/{number}", responses={404: {"description": "There is none of this id."}})
def show(number: str, house: Own) -> Answer:
    """Where a submission is, and what its verification found."""
    found = submissions.find(house.database, number)
    if found is None:
        raise HTTPException(404, "there is no such submission")
    return Answer.of(found)


@router.post("/submissions/{number}/withdraw", responses={409: {"description": "It is not yours."}})
def withdraw(number: str, house: Own, token: Known) -> Answer:
    """Take a submission back: its row goes, its bundle and the audit log stay."""
    try:
        found = submissions.withdraw(house.database, token, number)
    except ConflictError as error:
        raise HTTPException(409, str(error)) from error
    house.publisher.wake()
    return Answer.of(found)


@router.get("/audit")
def show_audit(
    house: Own, token: Known, most: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 100
) -> list[Logged]:
    """What was done, newest first; for administrators."""
    if token.scope is not Scope.ADMIN:
        raise HTTPException(403, "this is for tokens of scope admin")
    return [Logged.of(x) for x in submissions.list_events(house.database, most)]
