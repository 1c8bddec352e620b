"""Life cycle of a submission: queued, claimed by a worker, concluded, withdrawn. Each step is one transaction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session, aliased

from kvbench.leaderboard.server.tables import Database, Event, Scope, Status, Submission, Token, note, now
from kvbench.leaderboard.submission.records import Manifest, Verification

LEASE_S = 15.0
"""Seconds after which a worker that does not renew its claim counts as dead; others may then claim its submission."""
MAX_ATTEMPTS = 3
"""Attempts at verification before a submission counts as failed."""
MAX_PER_HOUR = 60
"""Uploads per submitter and hour, accepted or not, over all its tokens."""
MAX_WAITING = 60
"""Submissions of one submitter that may wait for verification."""
STANDING = (Status.QUEUED, Status.VERIFYING, Status.ACCEPTED)


class ConflictError(Exception):
    """The operation does not apply to this submission; the message says why."""


class LimitError(Exception):
    """The submitter has reached a limit; the message says which."""


def record_upload(database: Database, token: Token) -> None:
    """Record an upload.

    Raises:
        LimitError: the tokens of this submitter have reached the limit per hour.
    """
    start = (datetime.now(UTC) - timedelta(hours=1)).isoformat(timespec="milliseconds")
    recent = select(func.count()).where(Event.action == "upload", Event.subject == token.name, Event.time >= start)
    with database.write() as session:
        if (session.scalar(recent) or 0) >= MAX_PER_HOUR:
            raise LimitError(f"{token.name} has sent {MAX_PER_HOUR} uploads within an hour")
        note(session, _actor(token), "upload", token.name)


def enqueue(database: Database, token: Token, manifest: Manifest, supersedes: str | None) -> tuple[Submission, bool]:
    """Queue a bundle that lies in its folder; a known bundle keeps its status unless it was withdrawn or failed.

    Returns: the submission, and whether it was queued.

    Raises:
        ConflictError: the submitter has another bundle of this run, or may not supersede the one that it names.
        LimitError: too many submissions of the submitter wait for verification.
    """
    number = manifest.identity
    with database.write() as session:
        note(session, _actor(token), "sent", number, manifest.run_id)
        found = session.get(Submission, number)
        if found is not None and found.status not in (Status.WITHDRAWN, Status.FAILED):
            return found, False
        if supersedes is not None:
            if supersedes == number:
                raise ConflictError(f"this is submission {number} itself: send it without ?supersedes=")
            _find_own(session, token, supersedes)
        rival = _find_rival(session, (number, supersedes), manifest)
        if rival is not None:
            raise ConflictError(
                f"{rival.id} is a submission of this run: withdraw it with POST /api/submissions/{rival.id}/withdraw, "
                f"or send this one to /api/submissions?supersedes={rival.id}"
            )
        if _count_waiting(session, manifest.submitter) >= MAX_WAITING:
            raise LimitError(f"{MAX_WAITING} submissions of {manifest.submitter} wait for verification")
        if found is None:
            found = Submission(
                id=number, content=manifest.content, submitter=manifest.submitter, run_id=manifest.run_id,
                received=now(),
            )
            session.add(found)
        found.status, found.supersedes, found.attempts, found.error = Status.QUEUED, supersedes, 0, None
        note(session, _actor(token), "queued", number, "" if supersedes is None else f"supersedes {supersedes}")
        return found, True


def withdraw(database: Database, token: Token, number: str) -> Submission:
    """Withdraw a submission of any status.

    Raises:
        ConflictError: no submission of that id that this token may withdraw.
    """
    with database.write() as session:
        found = _find_own(session, token, number)
        if found.status is not Status.WITHDRAWN:
            found.status, found.owner = Status.WITHDRAWN, None
            note(session, _actor(token), "withdrawn", number)
        return found


def claim(database: Database, owner: str) -> Submission | None:
    """Claim the next submission that waits for verification. Returns None if there is none.

    Submitters take turns: the next one is the one whose last claim is the longest ago, with its oldest submission.
    """
    late = and_(Submission.status == Status.VERIFYING, Submission.until < time.time())
    same = aliased(Submission)
    served = select(func.max(same.until)).where(same.submitter == Submission.submitter).scalar_subquery()
    waiting = select(Submission).where(or_(Submission.status == Status.QUEUED, late))
    with database.write() as session:
        found = session.scalar(waiting.order_by(served, Submission.received, Submission.id).limit(1))
        if found is None:
            return None
        if found.attempts >= MAX_ATTEMPTS:
            _fail(session, owner, found, f"its verification ended {found.attempts} times without a result")
            return None
        found.status, found.owner, found.until = Status.VERIFYING, owner, time.time() + LEASE_S
        found.attempts += 1
        note(session, owner, "verifying", found.id, f"attempt {found.attempts}")
        return found


def renew(database: Database, owner: str, number: str) -> bool:
    """Renew the claim of a worker. Returns False if the submission no longer belongs to it."""
    with database.write() as session:
        found = _find_claimed(session, owner, number)
        if found is not None:
            found.until = time.time() + LEASE_S
        return found is not None


def release(database: Database, owner: str, number: str) -> None:
    """Return a submission to the queue after its verification was stopped; the attempt does not count."""
    with database.write() as session:
        found = _find_claimed(session, owner, number)
        if found is not None:
            found.status, found.owner, found.until = Status.QUEUED, None, 0.0
            found.attempts -= 1
            note(session, owner, "released", number)


def conclude(database: Database, owner: str, number: str, record: Verification) -> bool:
    """Store the result of a verification. Returns False if the submission no longer belongs to this worker."""
    with database.write() as session:
        found = _find_claimed(session, owner, number)
        if found is None:
            return False
        found.status = Status.REFUSED if record.refused else Status.ACCEPTED
        found.owner, found.verification = None, record.model_dump_json()
        note(session, owner, found.status.value, number, record.level or "no level")
        if found.status is Status.ACCEPTED and found.supersedes is not None:
            old = session.get(Submission, found.supersedes)
            if old is not None and old.status is not Status.WITHDRAWN:
                old.status, old.owner = Status.SUPERSEDED, None
                note(session, owner, "superseded", old.id, f"by {number}")
        return True


def fail(database: Database, owner: str, number: str, reason: str) -> bool:
    """Store the reason why a verification failed. Returns False if the submission no longer belongs to this worker."""
    with database.write() as session:
        found = _find_claimed(session, owner, number)
        if found is not None:
            _fail(session, owner, found, reason)
        return found is not None


def find(database: Database, number: str) -> Submission | None:
    """Find a submission by its id."""
    with database.read() as session:
        return _find(session, number)


def list_submissions(database: Database, token: Token | None = None) -> Sequence[Submission]:
    """List submissions by time of receipt: all, or those that a token may see."""
    wanted = select(Submission).order_by(Submission.received)
    if token is not None and token.scope is not Scope.ADMIN:
        wanted = wanted.where(Submission.submitter == token.name)
    with database.read() as session:
        return session.scalars(wanted).all()


def list_events(database: Database, most: int) -> Sequence[Event]:
    """List the newest entries of the audit log."""
    with database.read() as session:
        return session.scalars(select(Event).order_by(Event.id.desc()).limit(most)).all()


def _actor(token: Token) -> str:
    return f"token {token.id} of {token.name}"


def _find_claimed(session: Session, owner: str, number: str) -> Submission | None:
    """Return the submission if this worker has claimed it."""
    found = session.get(Submission, number)
    return found if found is not None and (found.owner, found.status) == (owner, Status.VERIFYING) else None


def _find(session: Session, number: str) -> Submission | None:
    """Find a submission by an id that a client gave; PostgreSQL refuses some characters."""
    return session.get(Submission, number) if number.isascii() and number.isalnum() else None


def _find_own(session: Session, token: Token, number: str) -> Submission:
    found = _find(session, number)
    if found is None or (token.scope is not Scope.ADMIN and found.submitter != token.name):
        raise ConflictError(f"{token.name} has no submission {number}")
    return found


def _count_waiting(session: Session, submitter: str) -> int:
    return session.scalar(select(func.count()).where(
        Submission.submitter == submitter, Submission.status.in_((Status.QUEUED, Status.VERIFYING))
    )) or 0


def _find_rival(session: Session, besides: Sequence[str | None], manifest: Manifest) -> Submission | None:
    """Find another active bundle of the same run and submitter: only one of them can have a row."""
    return session.scalar(select(Submission).where(
        Submission.submitter == manifest.submitter, Submission.run_id == manifest.run_id,
        Submission.id.not_in([x for x in besides if x is not None]), Submission.status.in_(STANDING),
    ).limit(1))


def _fail(session: Session, owner: str, found: Submission, reason: str) -> None:
    found.status, found.owner, found.error = Status.FAILED, None, reason
    note(session, owner, "failed", found.id, reason)
