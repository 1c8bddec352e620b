"""What becomes of submissions, each step one transaction: taken in, claimed by a worker, concluded, withdrawn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import and_, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from kvbench.leaderboard.server.tables import Database, Event, Scope, Status, Submission, Token, note, now
from kvbench.leaderboard.submission.records import Manifest, Verification

LEASE_S = 15.0
"""A worker that has not been heard of for so long is dead, and its submission is another's."""
MOST_ATTEMPTS = 3
"""Verifications that are begun before a submission counts as one that cannot be verified."""
MOST_PER_HOUR = 60
"""Uploads of one token, whatever comes of them."""
STANDING = (Status.QUEUED, Status.VERIFYING, Status.ACCEPTED)


class ConflictError(Exception):
    """It cannot be done to this submission; the message says why."""


def admit(database: Database, token: Token, most: int) -> bool:
    """Note that this token uploads something; False: it did so as often as it may within an hour."""
    start = (datetime.now(UTC) - timedelta(hours=1)).isoformat(timespec="milliseconds")
    with database.begin() as session:
        count = session.scalar(select(func.count()).where(
            Event.actor == _actor(token), Event.action == "upload", Event.time >= start
        )) or 0
        if count < most:
            note(session, _actor(token), "upload", None)
        return count < most


def take_in(database: Database, token: Token, manifest: Manifest, supersedes: str | None) -> tuple[Submission, bool]:
    """Queue a bundle that lies in its folder; one that is there already stays as it is, unless it was withdrawn.

    Returns: the submission, and whether it was queued.

    Raises:
        ConflictError: the submitter has another bundle of this run, or may not supersede what it names.
    """
    number = manifest.identity
    try:
        with database.begin() as session:
            note(session, _actor(token), "sent", number, manifest.run_id)
            found = session.get(Submission, number, with_for_update=True)
            if found is not None and found.status not in (Status.WITHDRAWN, Status.FAILED):
                return found, False
            if supersedes is not None:
                if supersedes == number:
                    raise ConflictError(f"this is {number} itself: send it without ?supersedes=")
                _own(session, token, supersedes)
            rival = _find_rival(session, (number, supersedes), manifest)
            if rival is not None:
                raise ConflictError(f"{rival.id} is of this run already: to replace it, send this with ?supersedes=")
            if found is None:
                found = Submission(
                    id=number, content=manifest.content, submitter=manifest.submitter, run_id=manifest.run_id,
                    received=now(),
                )
                session.add(found)
            found.status, found.supersedes, found.attempts, found.error = Status.QUEUED, supersedes, 0, None
            note(session, _actor(token), "queued", number, "" if supersedes is None else f"supersedes {supersedes}")
            return found, True
    except IntegrityError:  # another process took the same bundle in at the same moment
        return take_in(database, token, manifest, supersedes)


def withdraw(database: Database, token: Token, number: str) -> Submission:
    """Take a submission back, whatever its status.

    Raises:
        ConflictError: there is none of that id that this token may withdraw.
    """
    with database.begin() as session:
        found = _own(session, token, number)
        if found.status is not Status.WITHDRAWN:
            found.status, found.owner = Status.WITHDRAWN, None
            note(session, _actor(token), "withdrawn", number)
        return found


def claim(database: Database, owner: str) -> Submission | None:
    """The oldest submission that nobody verifies, now this worker's; None: there is nothing to do."""
    late = and_(Submission.status == Status.VERIFYING, Submission.until < time.time())
    waiting = select(Submission).where(or_(Submission.status == Status.QUEUED, late)).order_by(Submission.received)
    with database.begin() as session:
        found = session.scalar(waiting.limit(1).with_for_update(skip_locked=True))
        if found is None:
            return None
        if found.attempts >= MOST_ATTEMPTS:
            _fail(session, owner, found, f"its verification ended {found.attempts} times without a result")
            return None
        found.status, found.owner, found.until = Status.VERIFYING, owner, time.time() + LEASE_S
        found.attempts += 1
        note(session, owner, "verifying", found.id, f"attempt {found.attempts}")
        return found


def renew(database: Database, owner: str, number: str) -> bool:
    """Say that the worker lives; False: the submission is no longer its own."""
    with database.begin() as session:
        found = _held(session, owner, number)
        if found is not None:
            found.until = time.time() + LEASE_S
        return found is not None


def release(database: Database, owner: str, number: str) -> None:
    """Give a submission back whose verification was stopped, as if it had not begun."""
    with database.begin() as session:
        found = _held(session, owner, number)
        if found is not None:
            found.status, found.owner = Status.QUEUED, None
            found.attempts -= 1
            note(session, owner, "released", number)


def conclude(database: Database, owner: str, number: str, record: Verification) -> bool:
    """Write down what came of a verification; False: the submission is no longer this worker's."""
    with database.begin() as session:
        found = _held(session, owner, number)
        if found is None:
            return False
        found.status = Status.REFUSED if record.refused else Status.ACCEPTED
        found.owner, found.verification = None, record.model_dump_json()
        note(session, owner, found.status.value, number, record.level or "no level")
        if found.status is Status.ACCEPTED and found.supersedes is not None:
            old = session.get(Submission, found.supersedes, with_for_update=True)
            if old is not None and old.status is not Status.WITHDRAWN:
                old.status, old.owner = Status.SUPERSEDED, None
                note(session, owner, "superseded", old.id, f"by {number}")
        return True


def fail(database: Database, owner: str, number: str, reason: str) -> bool:
    """Write down why nothing came of a verification; False: the submission is no longer this worker's."""
    with database.begin() as session:
        found = _held(session, owner, number)
        if found is not None:
            _fail(session, owner, found, reason)
        return found is not None


def find(database: Database, number: str) -> Submission | None:
    """A submission by its id."""
    with database.begin() as session:
        return session.get(Submission, number)


def list_submissions(database: Database, token: Token | None = None) -> Sequence[Submission]:
    """In the order in which they came: all, or those that a token may see."""
    wanted = select(Submission).order_by(Submission.received)
    if token is not None and token.scope is not Scope.ADMIN:
        wanted = wanted.where(Submission.submitter == token.name)
    with database.begin() as session:
        return session.scalars(wanted).all()


def list_events(database: Database, most: int) -> Sequence[Event]:
    """The newest of the audit log."""
    with database.begin() as session:
        return session.scalars(select(Event).order_by(Event.id.desc()).limit(most)).all()


def _actor(token: Token) -> str:
    return f"token {token.id} of {token.name}"


def _held(session: Session, owner: str, number: str) -> Submission | None:
    """A submission that this worker verifies."""
    found = session.get(Submission, number, with_for_update=True)
    return found if found is not None and (found.owner, found.status) == (owner, Status.VERIFYING) else None


def _own(session: Session, token: Token, number: str) -> Submission:
    found = session.get(Submission, number, with_for_update=True)
    if found is None or (token.scope is not Scope.ADMIN and found.submitter != token.name):
        raise ConflictError(f"{token.name} has no submission {number}")
    return found


def _find_rival(session: Session, besides: Sequence[str | None], manifest: Manifest) -> Submission | None:
    """A further bundle of the same run and submitter that stands: only one can be a row."""
    return session.scalar(select(Submission).where(
        Submission.submitter == manifest.submitter, Submission.run_id == manifest.run_id,
        Submission.id.not_in([x for x in besides if x is not None]), Submission.status.in_(STANDING),
    ).limit(1))


def _fail(session: Session, owner: str, found: Submission, reason: str) -> None:
    found.status, found.owner, found.error = Status.FAILED, None, reason
    note(session, owner, "failed", found.id, reason)
