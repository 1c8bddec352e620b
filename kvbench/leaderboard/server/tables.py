"""What the server remembers, in any database that SQLAlchemy knows. The database is the truth; folders follow it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Engine, ForeignKey, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from kvbench.errors import UserError

BUSY_S = 30
"""Most that a writer of SQLite waits for another one."""


class Scope(StrEnum):
    """What a token may do: send and withdraw under its own name, or all."""

    SUBMIT = "submit"
    ADMIN = "admin"


class Status(StrEnum):
    """Where a submission is."""

    QUEUED = "queued"
    VERIFYING = "verifying"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"
    """Its verification could not be finished: it took too long, or too much."""
    WITHDRAWN = "withdrawn"
    SUPERSEDED = "superseded"


class Base(DeclarativeBase):
    """All tables."""


class Token(Base):
    """Who may send. The token itself is not kept, only its hash."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    scope: Mapped[Scope]
    digest: Mapped[str] = mapped_column(unique=True)
    created: Mapped[str]
    revoked: Mapped[str | None] = mapped_column(default=None)


class Submission(Base):
    """One bundle of one submitter, once."""

    __tablename__ = "submissions"

    id: Mapped[str] = mapped_column(primary_key=True)
    """Manifest.identity: the same bundle has the same one."""
    content: Mapped[str]
    submitter: Mapped[str] = mapped_column(index=True)
    run_id: Mapped[str] = mapped_column(index=True)
    status: Mapped[Status] = mapped_column(index=True)
    received: Mapped[str]
    supersedes: Mapped[str | None] = mapped_column(ForeignKey("submissions.id"), default=None)
    attempts: Mapped[int] = mapped_column(default=0)
    """Verifications that were begun."""
    owner: Mapped[str | None] = mapped_column(default=None)
    """The worker that verifies it."""
    until: Mapped[float] = mapped_column(default=0.0)
    """When that worker counts as dead, in seconds of the epoch; it says so again and again that it is not."""
    verification: Mapped[str | None] = mapped_column(default=None)
    """verification.json."""
    error: Mapped[str | None] = mapped_column(default=None)
    """Why it failed."""


class Event(Base):
    """The audit log: what was done, by whom. Rows are added, and never changed."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[str] = mapped_column(index=True)
    actor: Mapped[str] = mapped_column(index=True)
    action: Mapped[str]
    subject: Mapped[str | None]
    detail: Mapped[str]


class Database:
    """Transactions on one database."""

    def __init__(self, url: str) -> None:
        try:
            self._engine = _connect(url)
            Base.metadata.create_all(self._engine)
        except (SQLAlchemyError, ImportError) as error:
            reason = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise UserError(f"--db cannot be opened: {reason}. Give a URL such as sqlite:///leaderboard.db.") from error

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """All or nothing of what is done inside."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Let go of all connections."""
        self._engine.dispose()


def note(session: Session, actor: str, action: str, subject: str | None, detail: str = "") -> None:
    """Add to the audit log, in the same transaction as what it tells of."""
    session.add(Event(time=now(), actor=actor, action=action, subject=subject, detail=detail))


def now() -> str:
    """The time, for people and for order."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _connect(url: str) -> Engine:
    if not url.startswith("sqlite"):
        return create_engine(url, pool_pre_ping=True)
    engine = create_engine(url, connect_args={"timeout": BUSY_S})

    # Python's sqlite3 begins transactions late, and then two readers that want to write lock each other out.
    @event.listens_for(engine, "connect")
    def _(connection: Any, _: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine
