"""Access tokens: created on the command line, stored as hashes, revocable."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select

from kvbench.errors import MOST, UserError, unknown
from kvbench.leaderboard.server.tables import Database, Scope, Token, note, now
from kvbench.leaderboard.submission.records import HANDLE_RULE, Handle

PREFIX = "kvb_"
"""Marks the text as a token of kvbench, for people and for secret scanners."""


def create_token(database: Database, name: str, scope: str) -> str:
    """Create a token for a submitter. It is returned here and never again.

    Raises:
        UserError: the name or the scope is not valid.
    """
    try:
        TypeAdapter(Handle).validate_python(name)
    except ValidationError as error:
        raise UserError(f"'{name}' is not a valid submitter. {HANDLE_RULE}") from error
    if scope not in tuple(Scope):
        raise unknown("scope", scope, [str(x) for x in Scope])
    token = PREFIX + secrets.token_urlsafe(32)
    with database.write() as session:
        session.add(Token(name=name, scope=Scope(scope), digest=_digest(token), created=now()))
        note(session, "command line", "token created", name, scope)
    return token


def list_tokens(database: Database) -> Sequence[Token]:
    """List all tokens, including revoked ones."""
    with database.read() as session:
        return session.scalars(select(Token).order_by(Token.id)).all()


def revoke_token(database: Database, number: int) -> Token:
    """Revoke a token.

    Raises:
        UserError: there is no such token.
    """
    with database.write() as session:
        token = session.get(Token, number) if 0 < number <= MOST else None
        if token is None:
            raise UserError(f"there is no token {number}. See `kvbench leaderboard token list`.")
        token.revoked = token.revoked or now()
        note(session, "command line", "token revoked", token.name, str(number))
        return token


def find_token(database: Database, token: str) -> Token | None:
    """Find the token that matches, or None if it is unknown or revoked. Compares hashes of 256 random bits."""
    with database.read() as session:
        return session.scalar(select(Token).where(Token.digest == _digest(token), Token.revoked.is_(None)))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
