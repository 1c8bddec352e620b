"""Opens the sockets that the server listens on, before anything else is set up."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvbench.errors import UserError

HOST_RULE = "Use an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them."


@contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """One bound socket for each address that the host's name has on this machine; closed at the end.

    Raises:
        UserError: it has none, or the port is in use or reserved.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise UserError(f"host '{host}' has no address. {HOST_RULE}")
    opened = []
    with ExitStack() as stack:
        for family, kind, protocol, _, address in found:
            try:
                one = stack.enter_context(socket.socket(family, kind, protocol))
                _bind(one, address)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue  # a name may have an address of a family that is switched off here
                raise UserError(_explain(error, host, port)) from error
            opened.append(one)
        if not opened:
            raise UserError(f"host '{host}' is not an address of this machine. {HOST_RULE}")
        yield opened


def name_url(host: str, port: int) -> str:
    """The URL of the server."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _bind(one: socket.socket, address: tuple[Any, ...]) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    one.bind(address)
    one.listen()


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use. Stop the program that uses it, or give another --port."
    if error.errno == errno.EACCES:
        return f"port {port} is reserved for the administrator. Use --port 1024 or more, behind a proxy if need be."
    return f"{name_url(host, port)} cannot be served: {error.strerror}. {HOST_RULE}"
