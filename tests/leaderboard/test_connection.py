"""Connections of silent clients are closed, and no others."""

from __future__ import annotations

import asyncio
import time

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvbench.leaderboard.server import connection
from kvbench.leaderboard.server.connection import Connection

SILENCE_S = 0.1
PATIENCE_S = 30
SIZE = 8_000_000
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


async def answer(scope, receive, send):
    """Reads the body if there is one, waits longer than a client may be silent, and sends a large response."""
    size = int(dict(scope["headers"]).get(b"content-length", 0))
    while size > 0:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size -= len(message["body"])
    await asyncio.sleep(7 * SILENCE_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % SIZE)]})
    await send({"type": "http.response.body", "body": b"x" * SIZE})


async def refuse(scope, receive, send):
    """Responds without reading the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def converse(app, talk):
    """Serve one connection, and talk to it as a client; gives the seconds until the server closed it, and the reply."""

    async def run():
        loop, config = asyncio.get_running_loop(), Config(app, log_config=None, log_level="error")
        config.load()
        server = await loop.create_server(lambda: Connection(config, ServerState(), {}), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            begun = time.monotonic()
            async with asyncio.timeout(PATIENCE_S):
                reply = await talk(reader, writer)
            writer.close()
            return time.monotonic() - begun, reply

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE_S", SILENCE_S)


async def read_to_end(reader):
    """Everything until the connection is closed or reset."""
    found = b""
    try:
        while part := await reader.read(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD, HEAD + b"ab"], ids=["nothing", "head", "no body", "part"])
def test_a_silent_client_is_disconnected(sent):
    async def talk(reader, writer):
        writer.write(sent)
        return await read_to_end(reader)

    seconds, reply = converse(answer, talk)
    assert reply == b""
    assert seconds >= SILENCE_S


@pytest.mark.parametrize("app", [answer, refuse])
def test_a_trickle_of_headers_or_of_a_refused_body_does_not_keep_a_connection(app):
    """One byte at a time, more often than a client may be silent."""
    async def talk(reader, writer):
        ended = asyncio.ensure_future(read_to_end(reader))
        writer.write(b"GET / HTTP/1.1\r\n" if app is answer else HEAD.replace(b": 4", b": 999999"))
        while not ended.done():
            writer.write(b"a")
            await asyncio.sleep(SILENCE_S / 4)
        return ended.result()

    _, reply = converse(app, talk)
    assert reply[:12] == (b"" if app is answer else b"HTTP/1.1 401")


def test_a_client_that_does_not_read_is_disconnected():
    async def talk(reader, writer):
        reader._transport.pause_reading()
        writer.write(HEAD + b"abcd")
        await asyncio.sleep(14 * SILENCE_S)
        reader._transport.resume_reading()
        return await read_to_end(reader)

    _, reply = converse(answer, talk)
    assert len(reply) < SIZE


def test_a_slow_request_is_answered_in_full(monkeypatch):
    """Parts of a body that arrive in time, a server that takes longer than a client may, and a slow reader."""
    monkeypatch.setattr(connection, "SILENCE_S", 5 * SILENCE_S)

    async def talk(reader, writer):
        writer.write(HEAD)
        for byte in b"abcd":
            await asyncio.sleep(2 * SILENCE_S)
            writer.write(bytes([byte]))
        head = await reader.readuntil(b"\r\n\r\n")
        found = 0
        while part := await reader.read(1 << 20):
            found += len(part)
            if found >= SIZE:
                break
            await asyncio.sleep(SILENCE_S / 50)
        return head[:12], found

    _, reply = converse(answer, talk)
    assert reply == (b"HTTP/1.1 200", SIZE)


def test_each_request_is_progress():
    """Although Python gives the next request the place in memory of one that ended."""

    class Ended:
        response_complete = True

    config, loop = Config(answer, log_config=None, log_level="error"), asyncio.new_event_loop()
    kept, found = Connection(config, ServerState(), {}, loop), []
    loop.close()
    for _ in range(2):
        kept.cycle = Ended()
        found.append(kept._describe_progress())
        kept.cycle = None
    assert found[0] != found[1]
