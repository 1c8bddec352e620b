"""The database tables of the server, through SQLAlchemy. Folders are derived from the database, never the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Engine, ForeignKey, create_engine, event, make_url
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from kvbench.errors import UserError, first_line

BUSY_S = 30
"""Seconds that a writer waits for another writer of a SQLite database."""
WRITER = 0x6B76_6265_6E63_68
"""Number of the lock that a writer holds in PostgreSQL: the bytes of "kvbench"."""


class Scope(StrEnum):
    """Rights of a token: send and withdraw under its own name, or administrate."""

    SUBMIT = "submit"
    ADMIN = "admin"


class Status(StrEnum):
    """Status of a submission."""

    QUEUED = "queued"
    VERIFYING = "verifying"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    FAILED = "failed"
    """The verification crashed, or exceeded its time or memory."""
    WITHDRAWN = "withdrawn"
    SUPERSEDED = "superseded"


class Base(DeclarativeBase):
    """Base class of all tables."""


class Token(Base):
    """An access token, stored as a hash only."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    scope: Mapped[Scope]
    digest: Mapped[str] = mapped_column(unique=True)
    created: Mapped[str]
    revoked: Mapped[str | None] = mapped_column(default=None)


class Submission(Base):
    """One bundle of one submitter."""

    __tablename__ = "submissions"

    id: Mapped[str] = mapped_column(primary_key=True)
    """Manifest.identity: the same bundle has the same id."""
    content: Mapped[str]
    submitter: Mapped[str] = mapped_column(index=True)
    run_id: Mapped[str] = mapped_column(index=True)
    status: Mapped[Status] = mapped_column(index=True)
    received: Mapped[str]
    supersedes: Mapped[str | None] = mapped_column(ForeignKey("submissions.id"), default=None)
    attempts: Mapped[int] = mapped_column(default=0)
    """Verifications that were started."""
    owner: Mapped[str | None] = mapped_column(default=None)
    """The worker that verifies it."""
    until: Mapped[float] = mapped_column(default=0.0)
    """Time in seconds since the epoch at which the last claim expires or expired; the worker renews it."""
    verification: Mapped[str | None] = mapped_column(default=None)
    """Content of verification.json."""
    error: Mapped[str | None] = mapped_column(default=None)
    """Reason of a failure."""


class Event(Base):
    """The audit log: who did what. Rows are only added, never changed."""

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
            self._reading = self._engine.execution_options(reads=True)
            with self._engine.begin() as connection:
                Base.metadata.create_all(connection)
        except ImportError as error:
            raise UserError(
                f"--db needs a driver: {error}. For PostgreSQL, pip install 'kvbench[postgresql]' and give a URL such "
                "as postgresql+psycopg://user@host/name."
            ) from error
        except SQLAlchemyError as error:
            reason = first_line(getattr(error, "orig", None) or error)
            raise UserError(
                f"--db cannot be opened: {reason}. Give a URL such as sqlite:///leaderboard.db or "
                "postgresql+psycopg://user@host/name."
            ) from error

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a transaction that only reads. It waits for no writer, and no writer waits for it."""
        with Session(self._reading, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a transaction that writes: everything inside is committed, or nothing. Writers wait for one another."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def note(session: Session, actor: str, action: str, subject: str | None, detail: str = "") -> None:
    """Add an entry to the audit log, in the transaction of the action that it records."""
    session.add(Event(time=now(), actor=actor, action=action, subject=subject, detail=detail))


def now() -> str:
    """Current time in UTC, as ISO 8601, which sorts by time."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _connect(url: str) -> Engine:
    """Connect to a database in which one transaction writes at a time, and readers see what was committed."""
    sqlite = make_url(url).get_backend_name() == "sqlite"
    engine = create_engine(url, connect_args={"timeout": BUSY_S}) if sqlite else create_engine(url, pool_pre_ping=True)

    @event.listens_for(engine, "connect")
    def _(connection: Any, _: object) -> None:
        if sqlite:
            connection.isolation_level = None  # so that the statements below begin transactions, not sqlite3
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        if sqlite:
            connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
        elif reads:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")
        else:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER})")

    return engine
