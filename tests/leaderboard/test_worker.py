"""Behind the server: one worker per submission, whatever dies, and folders that follow the database."""

from __future__ import annotations

import json
import threading
import time

from kvbench.leaderboard.server import submissions
from kvbench.leaderboard.server.judge import judge
from kvbench.leaderboard.server.publisher import Publisher, follow
from kvbench.leaderboard.server.submissions import claim, conclude, fail, release, renew
from kvbench.leaderboard.server.tables import Status
from kvbench.leaderboard.server.worker import Worker
from kvbench.leaderboard.submission.repository import Repository
from kvbench.leaderboard.verification.verify import verify

PATIENCE_S = 120
"""Most seconds that a test waits for a thread: only a failure takes so long, on a busy machine too."""


def test_a_submission_is_one_workers_until_that_is_dead(house, snapkv, monkeypatch):
    number = house.send(snapkv.files).json()["id"]
    assert claim(house.database, "a").id == number
    assert claim(house.database, "b") is None
    assert renew(house.database, "a", number) and not renew(house.database, "b", number)
    late = time.time() + 2 * submissions.LEASE_S
    monkeypatch.setattr(submissions.time, "time", lambda: late)
    assert claim(house.database, "b").id == number
    record = verify(snapkv.files, Repository()).conclude()
    assert not conclude(house.database, "a", number, record), "the one that counted as dead comes too late"
    assert conclude(house.database, "b", number, record)
    assert house.events(number).count("accepted") == 1


def test_a_verification_that_ends_every_server_is_given_up(house, snapkv, monkeypatch):
    number = house.send(snapkv.files).json()["id"]
    clock = time.time()
    for attempt in range(submissions.MOST_ATTEMPTS + 1):
        monkeypatch.setattr(submissions.time, "time", lambda x=attempt: clock + 100 * x)
        claim(house.database, f"w{attempt}")
    shown = house.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], shown["error"]) == ("failed", "its verification ended 3 times without a result")


def test_what_is_withdrawn_while_it_is_verified_stays_withdrawn(house, snapkv):
    number = house.send(snapkv.files).json()["id"]
    claim(house.database, "a")
    house.withdraw(number)
    assert not renew(house.database, "a", number)
    assert not conclude(house.database, "a", number, verify(snapkv.files, Repository()).conclude())
    assert not fail(house.database, "a", number, "x")
    assert house.status(number) == "withdrawn"


def test_a_stopped_worker_gives_back_what_it_has(house, snapkv):
    number = house.send(snapkv.files).json()["id"]
    claim(house.database, "a")
    release(house.database, "a", number)
    found = claim(house.database, "b")
    assert (found.id, found.attempts) == (number, 1)


def test_folders_follow_the_database_after_a_crash(house, snapkv):
    """Published by half, or not at all, when the lights went out."""
    number = house.send(snapkv.files).json()["id"]
    found = claim(house.database, "a")
    conclude(house.database, "a", number, verify(house.state.bundle(found.id), Repository()).conclude())
    folder = house.state.results / "ada" / snapkv.bundle.spec.run_id
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text("{")
    follow(house.database, house.state)
    assert verify(folder, Repository()).level == "L0"
    before = folder.stat().st_ino
    follow(house.database, house.state)
    assert folder.stat().st_ino == before, "what is right is left alone"


def test_the_worker_asks_its_process_and_concludes(house, snapkv, monkeypatch):
    """The process itself runs in the slow tests; here its answer is given by the same function."""
    concluded = threading.Event()
    worker = Worker(house.database, house.state, concluded.set)
    monkeypatch.setattr(worker, "_ask", lambda x: json.loads(judge(house.state.bundle(x.id), house.state.results)))
    worker.start()
    number = house.send(snapkv.files).json()["id"]
    worker.wake()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    assert house.status(number) == Status.ACCEPTED


def test_a_process_that_ends_is_a_failed_verification(house, snapkv, monkeypatch):
    concluded = threading.Event()
    worker = Worker(house.database, house.state, concluded.set)
    monkeypatch.setattr("kvbench.leaderboard.server.worker.JUDGE", ("-c", "raise SystemExit(9)"))
    number = house.send(snapkv.files).json()["id"]
    worker.start()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    shown = house.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], "ended without a result" in shown["error"]) == ("failed", True)


def test_a_process_that_takes_too_long_is_stopped(house, snapkv, monkeypatch):
    concluded = threading.Event()
    worker = Worker(house.database, house.state, concluded.set)
    monkeypatch.setattr("kvbench.leaderboard.server.worker.JUDGE", ("-c", "import time; time.sleep(99)"))
    monkeypatch.setattr("kvbench.leaderboard.server.worker.LIMIT_S", 0.1)
    monkeypatch.setattr("kvbench.leaderboard.server.worker.IDLE_S", 0.1)
    number = house.send(snapkv.files).json()["id"]
    worker.start()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    assert house.client.get(f"/api/submissions/{number}").json()["error"] == "the verification took more than 0 s"


def test_a_site_that_cannot_be_built_ends_nothing(house, monkeypatch, capsys):
    monkeypatch.setattr("kvbench.leaderboard.server.publisher.BUILD", "raise SystemExit('no disk')")
    publisher = Publisher(house.database, house.state)
    publisher.start()
    deadline = time.monotonic() + PATIENCE_S
    while "no disk" not in capsys.readouterr().err and time.monotonic() < deadline:
        time.sleep(0.05)
    assert publisher.is_alive() and time.monotonic() < deadline
    publisher.stop()


