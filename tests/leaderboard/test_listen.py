"""The addresses that the server listens on, and those that it refuses before it starts."""

from __future__ import annotations

import errno
import socket

import pytest

from kvbench.leaderboard.server.listen import listening, name_url

FREE = 0


def ask(kvbench, folder, *words):
    """Start the server, which is expected to refuse."""
    return kvbench("leaderboard", "serve", "--state", folder / "state", "--results", folder / "results", *words)


@pytest.mark.parametrize(("host", "reason"), [
    ("nan", "host 'nan' has no address"), ("nowhere.invalid", "host 'nowhere.invalid' has no address"),
    ("", "host '' has no address"), ("127.0.0.1:80", "host '127.0.0.1:80' has no address"),
    ("http://127.0.0.1", "host 'http://127.0.0.1' has no address"), ("x" * 70, "has no address"),
    ("192.0.2.1", "host '192.0.2.1' is not an address of this machine"),
])
def test_a_host_without_an_address_here_is_bad_input(kvbench, tmp_path, monkeypatch, host, reason):
    """Nothing is written. 192.0.2.0/24 is reserved for documentation (RFC 5737)."""
    real = socket.getaddrinfo

    def find(name, *rest, **options):
        if any(x.isalpha() for x in name):  # asks no name server
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find)
    found = ask(kvbench, tmp_path, "--host", host)
    assert (found.code, list(tmp_path.iterdir())) == (2, [])
    assert reason in found.err and "127.0.0.1, or 0.0.0.0 for all of them" in found.err


def test_a_port_in_use_is_bad_input(kvbench, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", FREE))
        other.listen()
        port = other.getsockname()[1]
        found = ask(kvbench, tmp_path, "--port", str(port))
    assert (found.code, list(tmp_path.iterdir())) == (2, [])
    assert f"port {port} of 127.0.0.1 is in use. Stop the program" in found.err


def test_a_state_among_the_results_is_bad_input(kvbench, tmp_path, monkeypatch):
    """Its bundles would be shown as runs, and no site is built there. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvbench.leaderboard.server.listen._bind", lambda *_: 1 / 0)
    found = kvbench("leaderboard", "serve", "--results", ".")
    assert (found.code, list(tmp_path.iterdir())) == (2, [])
    assert "--state leaderboard lies in --results ., where every run is shown. Give another --state." in found.err


def test_a_reserved_port_is_bad_input(kvbench, tmp_path, monkeypatch):
    def bind(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("kvbench.leaderboard.server.listen._bind", bind)
    found = ask(kvbench, tmp_path, "--port", "80")
    assert found.code == 2 and "port 80 is reserved for the administrator. Use --port 1024 or more" in found.err


@pytest.mark.parametrize("option", ["--state", "--results"])
def test_a_file_in_place_of_a_folder_is_bad_input(kvbench, tmp_path, option):
    (tmp_path / "file").touch()
    found = ask(kvbench, tmp_path, "--port", str(_find_free()), option, tmp_path / "file")
    assert found.code == 2 and f"{option} {tmp_path / 'file'} is not a folder" in found.err


def test_a_token_needs_no_folder_of_results(kvbench, tmp_path, monkeypatch):
    """A file called `results` in the working folder is no error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").touch()
    assert kvbench("leaderboard", "token", "create", "ada", "--state", tmp_path / "state").code == 0


def test_every_address_of_a_name_is_served(monkeypatch):
    """One of a family that is switched off here is left out."""
    here = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", FREE))
    absent = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", FREE))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [here, absent, here])
    with listening("three", FREE) as opened:
        assert len(opened) == 2
        for x in opened:
            with socket.socket() as client:
                client.connect(x.getsockname())


def test_an_address_of_the_later_protocol_is_bracketed_in_a_url():
    assert (name_url("::1", 80), name_url("localhost", 80)) == ("http://[::1]:80", "http://localhost:80")


def _find_free() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", FREE))
        return int(free.getsockname()[1])
