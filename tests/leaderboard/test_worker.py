"""Worker and publisher: one worker per submission, also after crashes; folders follow the database."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from types import SimpleNamespace

from kvbench.leaderboard.server import submissions
from kvbench.leaderboard.server.publisher import Publisher, publish_accepted
from kvbench.leaderboard.server.submissions import claim, conclude, fail, release, renew
from kvbench.leaderboard.server.tables import Status
from kvbench.leaderboard.server.verifier import verify_bundle
from kvbench.leaderboard.server.worker import Worker
from kvbench.leaderboard.submission.records import MANIFEST
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify

from .conftest import edit, edit_spec, later

PATIENCE_S = 120
"""Maximum seconds to wait for a thread; reached only on failure."""


def test_a_claim_passes_on_after_its_lease(server, snapkv, monkeypatch):
    number = server.send(snapkv.files).json()["id"]
    assert claim(server.database, "a").id == number
    assert claim(server.database, "b") is None
    assert renew(server.database, "a", number) and not renew(server.database, "b", number)
    late = time.time() + 2 * submissions.LEASE_S
    monkeypatch.setattr(submissions.time, "time", lambda: late)
    assert claim(server.database, "b").id == number
    record = verify(snapkv.files, Repository()).conclude()
    assert not conclude(server.database, "a", number, record), "the one that counted as dead comes too late"
    assert conclude(server.database, "b", number, record)
    assert server.events(number).count("accepted") == 1


def test_a_submission_fails_after_max_attempts(server, snapkv, monkeypatch):
    number = server.send(snapkv.files).json()["id"]
    clock = time.time()
    for attempt in range(submissions.MAX_ATTEMPTS + 1):
        monkeypatch.setattr(submissions.time, "time", lambda x=attempt: clock + 100 * x)
        claim(server.database, f"w{attempt}")
    shown = server.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], shown["error"]) == ("failed", "its verification ended 3 times without a result")


def test_withdrawal_during_verification_holds(server, snapkv):
    number = server.send(snapkv.files).json()["id"]
    claim(server.database, "a")
    server.withdraw(number)
    assert not renew(server.database, "a", number)
    assert not conclude(server.database, "a", number, verify(snapkv.files, Repository()).conclude())
    assert not fail(server.database, "a", number, "x")
    assert server.status(number) == "withdrawn"


def test_a_stopped_worker_releases_its_claim(server, snapkv):
    number = server.send(snapkv.files).json()["id"]
    claim(server.database, "a")
    release(server.database, "a", number)
    found = claim(server.database, "b")
    assert (found.id, found.attempts) == (number, 1)


def test_submitters_take_turns(server, snapkv):
    """Three submissions of ada are queued before the first of bob and of root; these wait for one of ada's only."""
    numbers = {}
    for seed, name in enumerate(["ada", "ada", "ada", "bob", "root"]):
        files = edit_spec(later(snapkv, 0.0, name), lambda spec, seed=seed: spec.update(seed=seed))
        numbers[server.send(files, name).json()["id"]] = name
    record = verify(snapkv.files, Repository()).conclude()
    served = []
    while (found := claim(server.database, "a")) is not None:
        served.append(numbers[found.id])
        conclude(server.database, "a", found.id, record)
    assert served == ["ada", "bob", "root", "ada", "ada"]


def test_published_folders_are_repaired_from_the_database(server, snapkv):
    """After a crash in the middle of publishing."""
    number = server.send(snapkv.files).json()["id"]
    found = claim(server.database, "a")
    conclude(server.database, "a", number, verify(server.state.bundle(found.id), Repository()).conclude())
    folder = server.state.results / "ada" / snapkv.bundle.spec.run_id
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text("{")
    publish_accepted(server.database, server.state)
    assert verify(folder, Repository()).level == "L0"
    before = folder.stat().st_ino
    publish_accepted(server.database, server.state)
    assert folder.stat().st_ino == before, "what is right is left alone"


def test_a_damaged_bundle_does_not_keep_back_the_others(server, runs, snapkv, capsys):
    """Its row is missing, and every other one is published."""
    damaged, whole = (server.send(x.files).json()["id"] for x in (snapkv, runs["full"]))
    server.work()
    folders = [server.state.results / "ada" / x.bundle.spec.run_id for x in (snapkv, runs["full"])]
    for folder in folders:
        shutil.rmtree(folder)
    (server.state.bundle(damaged) / "spec.json").unlink()
    publish_accepted(server.database, server.state)
    assert [x.exists() for x in folders] == [False, True]
    assert f"submission {damaged} is not shown: its bundle is damaged: spec.json is missing" in capsys.readouterr().err
    assert [server.status(x) for x in (damaged, whole)] == ["accepted", "accepted"]


def test_a_file_in_the_place_of_a_submitter_does_not_keep_back_the_others(server, snapkv, capsys):
    """A submitter may have the name of a file that stands next to the runs."""
    number = server.send(snapkv.files).json()["id"]
    server.state.results.mkdir(exist_ok=True)
    (server.state.results / "ada").write_text("not a folder")
    server.work()
    publish_accepted(server.database, server.state)
    assert f"submission {number} is not shown: " in capsys.readouterr().err


def test_the_worker_stores_the_verifiers_reply(server, snapkv, monkeypatch):
    """The child process runs in the slow tests; here the same function replies."""
    concluded = threading.Event()
    worker = Worker(server.database, server.state, concluded.set)
    state = server.state
    monkeypatch.setattr(worker, "_ask", lambda x: json.loads(verify_bundle(state.bundle(x.id), state.results)))
    worker.start()
    number = server.send(snapkv.files).json()["id"]
    worker.wake()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    assert server.status(number) == Status.ACCEPTED


def test_a_copy_that_waits_behind_its_original_is_refused(server, snapkv, monkeypatch):
    """Also while the site is built, when the publisher copies nothing."""
    worker, state = server.app.state.services.worker, server.state
    monkeypatch.setattr(worker, "_ask", lambda x: json.loads(verify_bundle(state.bundle(x.id), state.results)))
    copied = edit(snapkv.files, MANIFEST, lambda x: x.update(submitter="bob"))
    original, copy = (server.send(*x).json()["id"] for x in ((snapkv.files, "ada"), (copied, "bob")))
    worker.start()
    deadline = time.monotonic() + PATIENCE_S
    while server.status(copy) in ("queued", "verifying") and time.monotonic() < deadline:
        time.sleep(0.05)
    worker.stop()
    assert [server.status(x) for x in (original, copy)] == ["accepted", "refused"]


def test_a_crashed_verifier_fails_the_submission(server, snapkv, monkeypatch):
    concluded = threading.Event()
    worker = Worker(server.database, server.state, concluded.set)
    monkeypatch.setattr("kvbench.leaderboard.server.worker.VERIFIER", ("-c", "raise SystemExit(9)"))
    number = server.send(snapkv.files).json()["id"]
    worker.start()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    shown = server.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], "ended without a result" in shown["error"]) == ("failed", True)


def test_a_slow_verifier_is_stopped(server, snapkv, monkeypatch):
    concluded = threading.Event()
    worker = Worker(server.database, server.state, concluded.set)
    monkeypatch.setattr("kvbench.leaderboard.server.worker.VERIFIER", ("-c", "import time; time.sleep(99)"))
    monkeypatch.setattr("kvbench.leaderboard.server.worker.LIMIT_S", 0.1)
    monkeypatch.setattr("kvbench.leaderboard.server.worker.IDLE_S", 0.1)
    number = server.send(snapkv.files).json()["id"]
    worker.start()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    assert server.client.get(f"/api/submissions/{number}").json()["error"] == "the verification took more than 0 s"


def test_a_late_reply_is_not_that_of_the_next_submission(server, runs, monkeypatch):
    """The database fails while a submission is verified; the verifier replies when the next one was claimed."""
    reply = "print(json.dumps({'error': os.path.basename(json.loads(line)[0])}), flush=True)"
    slow = f"import json, os, sys, time\nfor line in sys.stdin: time.sleep(1); {reply}"
    monkeypatch.setattr("kvbench.leaderboard.server.worker.VERIFIER", ("-c", slow))
    monkeypatch.setattr("kvbench.leaderboard.server.worker.IDLE_S", 0.1)
    failed, concluded = threading.Event(), threading.Event()

    def renew(*claimed):
        if not failed.is_set():
            failed.set()
            raise OSError("the database is gone")
        return submissions.renew(*claimed)

    monkeypatch.setattr("kvbench.leaderboard.server.worker.submissions", SimpleNamespace(**{
        **vars(submissions), "renew": renew,
    }))
    first, second = (server.send(x.files).json()["id"] for x in (runs["snapkv"], runs["full"]))
    worker = Worker(server.database, server.state, concluded.set)
    worker.start()
    assert concluded.wait(PATIENCE_S)
    worker.stop()
    assert server.status(first) == "verifying", "its claim passes on after its lease"
    assert server.client.get(f"/api/submissions/{second}").json()["error"] == second


def test_a_failed_site_build_does_not_stop_the_publisher(server, monkeypatch, capsys):
    monkeypatch.setattr("kvbench.leaderboard.server.publisher.BUILD", "raise SystemExit('no disk')")
    publisher = Publisher(server.database, server.state)
    publisher.start()
    deadline = time.monotonic() + PATIENCE_S
    while "no disk" not in capsys.readouterr().err and time.monotonic() < deadline:
        time.sleep(0.05)
    assert publisher.is_alive() and time.monotonic() < deadline
    publisher.stop()




def test_ctrl_c_at_the_server_does_not_reach_its_processes(server, monkeypatch, capfd):
    show_group = "import os, sys; sys.exit(f'group {os.getpgrp()}.')"
    monkeypatch.setattr("kvbench.leaderboard.server.worker.VERIFIER", ("-c", show_group))
    monkeypatch.setattr("kvbench.leaderboard.server.publisher.BUILD", show_group)
    Worker(server.database, server.state, lambda: None)._start().communicate()
    Publisher(server.database, server.state)._build_site()
    shown = capfd.readouterr().err
    assert shown.count("group ") == 2
    assert f"group {os.getpgrp()}." not in shown, "Ctrl-C is sent to the group of the server"
