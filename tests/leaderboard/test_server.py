"""The HTTP API: permissions, uploads, and the life cycle of submissions."""

from __future__ import annotations

import logging
import socket
import threading
import time

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import select

from kvbench.leaderboard.server import submissions, tables, upload
from kvbench.leaderboard.server.submissions import claim, conclude
from kvbench.leaderboard.server.tables import Event, Token
from kvbench.leaderboard.server.tokens import create_token, find_token, revoke_token
from kvbench.leaderboard.submission.archive import read_files, write_folder
from kvbench.leaderboard.submission.bundle import open_bundle
from kvbench.leaderboard.submission.records import MANIFEST, VERIFICATION
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify

from .conftest import edit, edit_spec, later, tar


def test_a_queued_bundle_is_verified_and_published(server, snapkv):
    answer = server.send(snapkv.files)
    number = answer.json()["id"]
    assert (answer.status_code, answer.json()["status"]) == (202, "queued")
    server.work()
    shown = server.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], shown["level"], shown["submitter"]) == ("accepted", "L0", "ada")
    folder = server.state.results / "ada" / snapkv.bundle.spec.run_id
    assert (folder / VERIFICATION).is_file()
    assert verify(folder, Repository()).level == "L0"
    assert server.events(number) == ["sent", "queued", "verifying", "accepted"]


def test_a_refused_bundle_is_reported_and_not_published(server, snapkv):
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={"prompt_hash": "0" * 16}))
    number = server.send(files).json()["id"]
    server.work()
    shown = server.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], shown["checks"][-1]["name"]) == ("refused", "prompts")
    assert not (server.state.results / "ada").exists()


def test_the_same_bundle_twice_is_one_submission(server, snapkv):
    first, again = server.send(snapkv.files), server.send(snapkv.files)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    server.work()
    assert server.send(snapkv.files).json()["status"] == "accepted"
    assert len(submissions.list_submissions(server.database)) == 1


def test_only_the_submitters_token_may_send(server, snapkv):
    def post(**headers):
        return server.client.post("/api/submissions", content=tar(snapkv.files), headers=headers).status_code

    assert post() == 401
    assert post(Authorization="Bearer kvb_wrong") == 401
    assert post(Authorization=f"Basic {server.tokens['ada']}") == 401
    assert server.send(snapkv.files, "bob").status_code == 403, "the submitter is ada"
    assert server.send(snapkv.files, "root").status_code == 202
    revoke_token(server.database, 1)
    assert server.send(snapkv.files).status_code == 401


def test_tokens_are_kept_as_hashes(server):
    with server.database.read() as session:
        kept = repr([session.execute(select(x.__table__)).all() for x in (Token, Event)])
    assert "ada" in kept
    assert server.tokens["ada"].removeprefix("kvb_") not in kept
    found = find_token(server.database, server.tokens["ada"])
    assert found is not None and found.name == "ada"


@pytest.mark.parametrize(("content", "status", "detail"), [
    (b"", 422, "files: not a readable tar"),
    (b"x" * 1024, 422, "files: not a readable tar"),
    (b"\0" * 10240, 422, "files: manifest.json is missing"),
])
def test_an_invalid_upload_is_refused_at_once(server, content, status, detail):
    answer = server.send(content)
    assert (answer.status_code, answer.json()["detail"].startswith(detail)) == (status, True)
    assert list(server.state.uploads.iterdir()) == list((server.state.folder / "bundles").iterdir()) == []


def test_a_large_upload_is_not_read_to_its_end(server, snapkv, monkeypatch):
    monkeypatch.setattr(upload, "MAX_TAR_BYTES", 1 << 20)
    read = []

    def parts():
        for _ in range(64):
            read.append(1)
            yield b"\0" * (1 << 19)

    for content in (b"\0" * (2 << 20), parts()):
        answer = server.client.post("/api/submissions", content=content, headers=server.head("ada"))
        assert answer.status_code == 413
    assert list(server.state.uploads.iterdir()) == []
    assert server.send(snapkv.files).status_code == 202


def test_uploads_per_hour_are_limited(server, snapkv, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_PER_HOUR", 2)
    answers = [server.send(snapkv.files) for _ in range(3)]
    assert [x.status_code for x in answers] == [202, 200, 429]
    assert answers[2].headers["retry-after"]
    assert server.send(edit(snapkv.files, MANIFEST, lambda x: x.update(submitter="bob")), "bob").status_code == 202


def test_refused_uploads_count_toward_the_limit(server, monkeypatch):
    monkeypatch.setattr(submissions, "MAX_PER_HOUR", 2)
    assert [server.send(b"x" * 1024).status_code for _ in range(3)] == [422, 422, 429]


def test_the_limit_holds_over_all_tokens_of_a_submitter(server, monkeypatch):
    """A second token, or a new one after a revocation, allows no further uploads."""
    monkeypatch.setattr(submissions, "MAX_PER_HOUR", 2)
    codes = [server.send(b"x" * 1024).status_code]
    server.tokens["ada"] = create_token(server.database, "ada", "submit")
    codes += [server.send(b"x" * 1024).status_code for _ in range(2)]
    assert codes == [422, 422, 429]
    assert server.send(b"x" * 1024, "bob").status_code == 422


def test_a_refused_upload_leaves_the_bundle_of_an_equal_one(server, snapkv, monkeypatch):
    """Which is sent while the other is being refused."""
    answers = []
    equal = threading.Thread(target=lambda: answers.append(server.send(snapkv.files)))

    def find(database, number):
        found = submissions.find(database, number)
        if equal.ident is None:
            equal.start()
            equal.join(2)
        return found

    monkeypatch.setattr("kvbench.leaderboard.server.upload.find", find)
    refused = server.send(snapkv.files, supersedes="0" * 64)
    equal.join()
    assert (refused.status_code, answers[0].status_code) == (409, 202)
    assert server.state.bundle(answers[0].json()["id"]).exists()


def test_waiting_submissions_per_submitter_are_limited(server, runs, monkeypatch):
    """Bundles that did not fit can be sent after the others were verified; other submitters have their own limit."""
    monkeypatch.setattr(submissions, "MAX_WAITING", 1)
    assert server.send(runs["full"].files).status_code == 202
    answer = server.send(runs["snapkv"].files)
    assert (answer.status_code, answer.json()["detail"]) == (
        429, "1 submissions of ada wait for verification: try again later"
    )
    assert [x.name for x in server.state.bundles.iterdir()] == [runs["full"].bundle.manifest.identity]
    other = edit(runs["snapkv"].files, MANIFEST, lambda x: x.update(submitter="bob"))
    assert server.send(other, "bob").status_code == 202
    server.work()
    assert server.send(runs["snapkv"].files).status_code == 202


@pytest.mark.slow
def test_a_full_queue_of_one_submitter_delays_others_by_one_submission(server, snapkv, monkeypatch):
    """The limit that is served. Each upload beyond it is refused, and each place that becomes free can be taken."""
    record = verify(snapkv.files, Repository()).conclude()
    monkeypatch.setattr(submissions, "MAX_PER_HOUR", 10 * submissions.MAX_WAITING)

    def send(seed, name="ada"):
        return server.send(edit_spec(later(snapkv, 0.0, name), lambda spec: spec.update(seed=seed)), name)

    def serve():
        found = claim(server.database, "w")
        conclude(server.database, "w", found.id, record)
        return found.submitter

    sent = [send(seed) for seed in range(submissions.MAX_WAITING)]
    assert [x.status_code for x in sent] == [202] * 60
    refused = send(60)
    assert (refused.status_code, refused.json()["detail"]) == (
        429, "60 submissions of ada wait for verification: try again later"
    )
    assert [send(seed, name).status_code for seed, name in ((0, "bob"), (1, "bob"), (0, "root"))] == [202] * 3
    assert [serve() for _ in range(6)] == ["ada", "bob", "root", "ada", "bob", "ada"]
    assert [send(seed).status_code for seed in (60, 61, 62, 63)] == [202, 202, 202, 429]
    waiting = [x for x in sent if server.status(x.json()["id"]) == "queued"]
    assert len(waiting) == submissions.MAX_WAITING - 3


def test_reads_do_not_wait_for_a_writer(server, snapkv, monkeypatch):
    """While a transaction that writes is open, every call that only reads answers."""
    number = server.send(snapkv.files).json()["id"]
    with server.database.write() as session:
        session.add(Event(time="", actor="a", action="b", subject=None, detail=""))
        session.flush()
        begun = time.monotonic()
        paths = ("health", "submissions", f"submissions/{number}", "audit", "submissions/x")
        codes = [server.client.get(f"/api/{x}", headers=server.head("root")).status_code for x in paths]
        assert codes == [200, 200, 200, 200, 404]
        assert time.monotonic() - begun < tables.BUSY_S / 2


def test_writers_wait_for_one_another(server):
    """So two uploads at the same time cannot both pass a limit."""
    order, inside = [], threading.Event()

    def write():
        inside.wait()
        with server.database.write() as session:
            session.execute(select(1))
            order.append("second")

    thread = threading.Thread(target=write)
    thread.start()
    with server.database.write() as session:
        session.execute(select(1))
        inside.set()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_withdrawn_submission_can_be_sent_again(server, snapkv):
    number = server.send(snapkv.files).json()["id"]
    server.work()
    assert server.withdraw(number, "bob").status_code == 409
    assert server.withdraw(number).json()["status"] == "withdrawn"
    assert not (server.state.results / "ada" / snapkv.bundle.spec.run_id).exists()
    assert server.send(snapkv.files).status_code == 202
    server.work()
    assert server.status(number) == "accepted"
    assert (server.state.results / "ada" / snapkv.bundle.spec.run_id).exists()


def test_another_bundle_of_a_run_needs_supersedes(server, snapkv):
    first = server.send(snapkv.files).json()["id"]
    server.work()
    other = later(snapkv, 0.001)
    answer = server.send(other)
    assert answer.status_code == 409
    assert f"POST /api/submissions/{first}/withdraw" in answer.json()["detail"]
    assert f"/api/submissions?supersedes={first}" in answer.json()["detail"]
    assert [server.send(other, supersedes=x).status_code for x in ("nothing", "\0")] == [409, 409]
    second = server.send(other, supersedes=first).json()["id"]
    server.work()
    assert (server.status(first), server.status(second)) == ("superseded", "accepted")
    folder = server.state.results / "ada" / snapkv.bundle.spec.run_id
    assert verify(folder, Repository()).bundle.content == open_bundle(other).content


def test_other_tuning_data_make_another_bundle(server, snapkv):
    first = server.send(snapkv.files).json()["id"]
    server.work()
    other = edit(snapkv.files, MANIFEST, lambda x: x.update(tuned_on=["niah:dev"]))
    answer = server.send(other)
    assert (answer.status_code, first in answer.json()["detail"]) == (409, True)
    second = server.send(other, supersedes=first).json()["id"]
    folder = server.state.results / "ada" / snapkv.bundle.spec.run_id
    for _ in range(2):
        server.work()
        assert (server.status(first), server.status(second)) == ("superseded", "accepted")
        assert verify(folder, Repository()).bundle.manifest.tuned_on == ("niah:dev",)


def test_a_submission_is_superseded_once_and_not_by_itself(server, snapkv):
    first = server.send(snapkv.files).json()["id"]
    server.work()
    second = server.send(later(snapkv, 0.001), supersedes=first).json()["id"]
    answer = server.send(later(snapkv, 0.002), supersedes=first)
    assert (answer.status_code, second in answer.json()["detail"]) == (409, True)
    server.work()
    assert (server.status(first), server.status(second)) == ("superseded", "accepted")
    server.withdraw(second)
    answer = server.send(later(snapkv, 0.001), supersedes=second)
    assert (answer.status_code, "without ?supersedes=" in answer.json()["detail"]) == (409, True)
    assert server.send(later(snapkv, 0.001)).status_code == 202
    server.work()
    assert server.status(second) == "accepted"


def test_curated_runs_are_never_replaced(server, snapkv):
    folder = server.state.results / "ada" / snapkv.bundle.spec.run_id
    curated = {name: data for name, data in later(snapkv, 0.001).items() if name != MANIFEST}
    write_folder(curated, folder)
    server.send(snapkv.files)
    server.work()
    assert read_files(folder) == curated


def test_a_refused_bundle_supersedes_nothing(server, snapkv):
    first = server.send(snapkv.files).json()["id"]
    server.work()
    forged = snapkv.with_lines(lambda _, x: x.model_copy(update={"references": ("",)}))
    second = server.send(forged, supersedes=first).json()["id"]
    server.work()
    assert (server.status(first), server.status(second)) == ("accepted", "refused")


def test_only_administrators_see_the_log_and_all_submissions(server, snapkv):
    server.send(snapkv.files)
    assert server.client.get("/api/audit", headers=server.head("ada")).status_code == 403
    assert server.client.get("/api/audit").status_code == 401
    seen = {
        name: len(server.client.get("/api/submissions", headers=server.head(name)).json()) for name in server.tokens
    }
    assert seen == {"ada": 1, "bob": 0, "root": 1}
    for unknown in ("nothing", "%00", "a%00b", "%ff", "\u0430"):
        assert server.client.get(f"/api/submissions/{unknown}").status_code == 404


def test_the_openapi_document(server):
    document = server.client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/api/health", "/api/submissions", "/api/submissions/{number}", "/api/submissions/{number}/withdraw",
        "/api/audit",
    }
    post = document["paths"]["/api/submissions"]["post"]
    assert list(post["requestBody"]["content"]) == ["application/x-tar"]
    assert post["security"] == [{"HTTPBearer": []}]


def test_only_the_site_is_served(server):
    assert server.client.get("/").status_code == 503
    server.state.site.mkdir()
    (server.state.site / "index.html").write_text("<h1>rows</h1>")
    assert server.client.get("/").text == "<h1>rows</h1>"
    assert server.client.get("/").headers["x-content-type-options"] == "nosniff"
    for path in ("/../leaderboard.db", "/%2e%2e/leaderboard.db", "/..%2fleaderboard.db", "//etc/passwd"):
        assert server.client.get(path).status_code == 404


def test_tokens_on_the_command_line(kvbench, tmp_path):
    state = ("--state", tmp_path / "s")
    for arguments in (("list",), ("revoke", "1")):
        done = kvbench("leaderboard", "token", *arguments, *state)
        assert (done.code, "has no database of a server" in done.err, (tmp_path / "s").exists()) == (2, True, False)
    made = kvbench("leaderboard", "token", "create", "ada", *state, "--json")
    assert made.out.splitlines()[0] == made.json["token"]
    listed = kvbench("leaderboard", "token", "list", *state, "--json")
    assert [(x["name"], x["scope"], x["revoked"]) for x in listed.json] == [("ada", "submit", None)]
    assert made.json["token"] not in listed.out
    assert kvbench("leaderboard", "token", "revoke", 1, *state).out == "token 1 of ada was revoked.\n"
    assert kvbench("leaderboard", "token", "list", *state, "--json").json[0]["revoked"]
    for arguments, reason in (
        (("revoke", "7"), "there is no token 7"), (("create", "a b"), "'a b' is not a valid submitter"),
        (("create", "a..b"), "'a..b' is not a valid submitter"), (("create", "a.lock"), "which git refuses"),
        (("create", "ada", "--scope", "all"), "unknown scope 'all'"),
    ):
        done = kvbench("leaderboard", "token", *arguments, *state)
        assert (done.code, reason in done.err) == (2, True)
    done = kvbench("leaderboard", "token", "list", *state, "--db", "nothing://x")
    assert (done.code, "--db cannot be opened" in done.err) == (2, True)


def test_the_command_serves_results_and_keeps_submissions(kvbench, tmp_path, monkeypatch):
    served = []

    def run(self, sockets):
        self.started = True
        served.append((self.config.app, [x.getsockname() for x in sockets]))

    monkeypatch.setattr("uvicorn.Server.run", run)
    closed = []
    handler = logging.NullHandler()
    monkeypatch.setattr(handler, "close", lambda: closed.append(handler))
    place = ("--state", tmp_path / "state", "--results", tmp_path / "results")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert kvbench("leaderboard", "serve", *place, "--port", port).code == 0
    ((app, addresses),) = served
    assert addresses == [("127.0.0.1", port)]
    assert TestClient(app).get("/api/health").status_code == 200
    assert (tmp_path / "results").is_dir() and (tmp_path / "state").is_dir()
    assert closed == []  # logging belongs to the process: absl's handler closes the stream that it was made with
