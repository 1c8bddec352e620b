"""The server as a process: kills lose nothing, and concurrent submitters are each counted once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvbench.leaderboard.server.state import State
from kvbench.leaderboard.server.tables import Database
from kvbench.leaderboard.server.tokens import create_token
from kvbench.leaderboard.submission.archive import read_files
from kvbench.leaderboard.submission.bundle import open_head
from kvbench.leaderboard.submission.deliver import DeliveryError, send_to_server

from .conftest import later

pytestmark = pytest.mark.slow


class Server:
    """A running `kvbench leaderboard serve`."""

    def __init__(self, folder: Path, db: str | None) -> None:
        self.folder, self.state = folder, State(folder / "state", folder / "results")
        self.state.make()
        self.db = db or self.state.database
        self.database = Database(self.db)
        self.admin = create_token(self.database, "root", "admin")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it and wait until it responds."""
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("kvbench")), "leaderboard", "serve", "--state", self.state.folder,
             "--results", self.state.results, "--port", str(self.port), "--db", self.db], stderr=subprocess.DEVNULL,
        )
        self.wait(lambda: self.get("/api/health"))

    def kill(self) -> None:
        """Kill it without warning."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def get(self, path: str):
        """The JSON response, or None."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.admin}"})
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read())
        except (OSError, ValueError):
            return None

    def wait(self, condition, seconds: float = 240) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.get("/api/submissions")
            time.sleep(0.1)

    def done(self) -> int:
        """Number of accepted submissions."""
        found = self.get("/api/submissions") or []
        assert not {x["status"] for x in found} & {"refused", "failed"}, found
        return sum(x["status"] == "accepted" for x in found)

    def counts(self, action: str) -> Counter[str]:
        """Number of audit entries of an action, by submission."""
        return Counter(x["subject"] for x in self.get("/api/audit?most=1000") if x["action"] == action)


@pytest.fixture
def server(tmp_path, db):
    running = Server(tmp_path, db)
    yield running
    running.kill()
    running.database.close()


def test_a_kill_in_the_middle_of_an_upload_leaves_no_file(server):
    head = f"POST /api/submissions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.admin}"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}\r\nContent-Length: 9999\r\n\r\nhalf".encode())
        server.wait(lambda: list(server.state.uploads.iterdir()))
        server.kill()
        assert len(list(server.state.uploads.iterdir())) == 1
    server.start()
    assert list(server.state.uploads.iterdir()) == []


def test_fifty_concurrent_submitters_are_each_accepted_once(server, snapkv):
    """Each sends its bundle twice at the same time."""
    names = [f"s{i}" for i in range(50)]
    tokens = {name: create_token(server.database, name, "submit") for name in names}
    bundles = {name: later(snapkv, 1e-3 * (i + 1), name) for i, name in enumerate(names)}
    with ThreadPoolExecutor(100) as pool:
        sent = list(pool.map(lambda x: send_to_server(bundles[x], server.url, tokens[x]), [*names, *names]))
    numbers = [x["id"] for x in sent]
    assert numbers[:50] == numbers[50:] and len(set(numbers)) == 50
    server.wait(lambda: server.done() == 50)
    for action in ("queued", "verifying", "accepted"):
        assert server.counts(action) == dict.fromkeys(numbers, 1), action
    shown = server.state.site / "results.json"
    server.wait(lambda: shown.exists() and all(f'"{name}"' in shown.read_text() for name in names))
    published = [open_head(read_files(x)).submitter for x in server.state.results.glob("*/*")]
    assert sorted(published) == sorted(names)


def test_repeated_kills_lose_and_repeat_no_verification(server, snapkv):
    names = [f"s{i}" for i in range(8)]
    tokens = {name: create_token(server.database, name, "submit") for name in names}
    numbers = {}
    for i, name in enumerate(names):
        files = later(snapkv, 1e-3 * (i + 1), name)
        while name not in numbers:
            try:
                numbers[name] = send_to_server(files, server.url, tokens[name])["id"]
            except DeliveryError:  # it is down, and is sent again as a user would
                time.sleep(0.1)
        if i % 4 == 3:
            server.wait(lambda x=i: server.done() >= x - 2)  # one of these four is being verified
            server.kill()
            server.start()
    server.wait(lambda: server.done() == 8)
    server.wait(lambda: len(list(server.state.results.glob("*/*"))) == 8)
    assert server.counts("accepted") == dict.fromkeys(numbers.values(), 1)
    begun = server.counts("verifying")
    assert set(begun) == set(numbers.values()) and begun.total() <= 8 + 2, "one verification per kill is begun again"


def test_the_verification_process_ends_with_its_server(server, snapkv):
    """No child is left that verifies the same bundle as the next server."""
    send_to_server(later(snapkv, 1e-3, "root"), server.url, server.admin)

    def children() -> list[str]:
        listed = subprocess.run(["ps", "-o", "pid=,args=", "-A"], capture_output=True, text=True, check=True).stdout
        return [x for x in listed.splitlines() if "leaderboard.server.verifier" in x]

    server.wait(lambda: server.done() == 1)
    before = children()
    server.kill()
    server.wait(lambda: len(children()) < len(before), 20)
    server.start()
