"""HTTP connections that are closed when the client is silent while the server waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

SILENCE_S = 20.0
"""Seconds that a client may take for the headers of a request, or between two parts of a body or of a response."""


class Connection(H11Protocol):
    """A connection of uvicorn, whose own timeout begins only after the first response."""

    _received = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._watch(None, 0.0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the client."""
        self._received += len(data)
        super().data_received(data)

    def _watch(self, last: object, since: float) -> None:
        """Close the connection if the client has made no progress for too long."""
        now, progress = self.loop.time(), self._describe_progress()
        if progress is None or progress != last:
            since = now
        elif now - since >= SILENCE_S:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(SILENCE_S / 4, self._watch, progress, since)

    def _describe_progress(self) -> tuple[Any, ...] | None:
        """Progress of the client, in bytes sent or read; None while the server works on its request."""
        if self.cycle is None or self.cycle.response_complete:
            return "between requests", self.cycle  # bytes do not count: headers must be complete in time
        if self.flow.write_paused:
            return "response", self.transport.get_write_buffer_size()
        if self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            return "body", self._received
        return None
