"""Tokens: made on the command line, kept as hashes, revoked at any time."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import select

from kvbench.errors import UserError, unknown
from kvbench.leaderboard.server.tables import Database, Scope, Token, note, now
from kvbench.leaderboard.submission.records import Handle

PREFIX = "kvb_"
"""By which people and scanners see what it is."""


def create_token(database: Database, name: str, scope: str) -> str:
    """A new token for a submitter: the one time that it is seen.

    Raises:
        UserError: a name or a scope that cannot be.
    """
    try:
        TypeAdapter(Handle).validate_python(name)
    except ValidationError as error:
        raise UserError(f"'{name}' cannot be a submitter: plain letters, digits, '.', '_' and '-' only.") from error
    if scope not in tuple(Scope):
        raise unknown("scope", scope, [str(x) for x in Scope])
    token = PREFIX + secrets.token_urlsafe(32)
    with database.begin() as session:
        session.add(Token(name=name, scope=Scope(scope), digest=_digest(token), created=now()))
        note(session, "command line", "token created", name, scope)
    return token


def list_tokens(database: Database) -> Sequence[Token]:
    """All of them, revoked ones too."""
    with database.begin() as session:
        return session.scalars(select(Token).order_by(Token.id)).all()


def revoke_token(database: Database, number: int) -> Token:
    """From now on it opens nothing.

    Raises:
        UserError: there is no such token.
    """
    with database.begin() as session:
        token = session.get(Token, number)
        if token is None:
            raise UserError(f"there is no token {number}. See `kvbench leaderboard token list`.")
        token.revoked = token.revoked or now()
        note(session, "command line", "token revoked", token.name, str(number))
        return token


def find_token(database: Database, token: str) -> Token | None:
    """Who this is; None: nobody, or nobody any more. What is compared is hashes of 256 random bits."""
    with database.begin() as session:
        return session.scalar(select(Token).where(Token.digest == _digest(token), Token.revoked.is_(None)))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
