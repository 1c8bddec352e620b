"""The server: who may do what, what is taken in, and what becomes of it."""

from __future__ import annotations

import pytest

from kvbench.leaderboard.server import intake, submissions
from kvbench.leaderboard.server.tokens import find_token, revoke_token
from kvbench.leaderboard.submission.archive import read_files, write_folder
from kvbench.leaderboard.submission.bundle import open_bundle
from kvbench.leaderboard.submission.records import MANIFEST, VERIFICATION
from kvbench.leaderboard.submission.repository import Repository
from kvbench.leaderboard.verification.verify import verify

from .conftest import edit, later, tar


def test_a_bundle_goes_from_the_queue_to_a_row(house, snapkv):
    answer = house.send(snapkv.files)
    number = answer.json()["id"]
    assert (answer.status_code, answer.json()["status"]) == (202, "queued")
    house.work()
    shown = house.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], shown["level"], shown["submitter"]) == ("accepted", "L0", "ada")
    folder = house.state.results / "ada" / snapkv.bundle.spec.run_id
    assert (folder / VERIFICATION).is_file()
    assert verify(folder, Repository()).level == "L0"
    assert house.events(number) == ["sent", "queued", "verifying", "accepted"]


def test_what_is_refused_is_told_and_not_shown(house, snapkv):
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={"prompt_hash": "0" * 16}))
    number = house.send(files).json()["id"]
    house.work()
    shown = house.client.get(f"/api/submissions/{number}").json()
    assert (shown["status"], shown["checks"][-1]["name"]) == ("refused", "prompts")
    assert not (house.state.results / "ada").exists()


def test_the_same_bundle_twice_is_one_submission(house, snapkv):
    first, again = house.send(snapkv.files), house.send(snapkv.files)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    house.work()
    assert house.send(snapkv.files).json()["status"] == "accepted"
    assert len(submissions.list_submissions(house.database)) == 1


def test_who_may_send(house, snapkv):
    def post(**headers):
        return house.client.post("/api/submissions", content=tar(snapkv.files), headers=headers).status_code

    assert post() == 401
    assert post(Authorization="Bearer kvb_wrong") == 401
    assert post(Authorization=f"Basic {house.tokens['ada']}") == 401
    assert house.send(snapkv.files, "bob").status_code == 403, "the submitter is ada"
    assert house.send(snapkv.files, "root").status_code == 202
    revoke_token(house.database, 1)
    assert house.send(snapkv.files).status_code == 401


def test_tokens_are_kept_as_hashes(house):
    data = b"".join(x.read_bytes() for x in house.state.folder.glob("leaderboard.db*"))
    assert house.tokens["ada"].encode() not in data
    assert house.tokens["ada"].removeprefix("kvb_").encode() not in data
    found = find_token(house.database, house.tokens["ada"])
    assert found is not None and found.name == "ada"


@pytest.mark.parametrize(("content", "status", "detail"), [
    (b"", 422, "files: no readable tar"),
    (b"x" * 1024, 422, "files: no readable tar"),
    (b"\0" * 10240, 422, "files: manifest.json is missing"),
])
def test_what_is_no_bundle_is_refused_at_the_door(house, content, status, detail):
    answer = house.send(content)
    assert (answer.status_code, answer.json()["detail"].startswith(detail)) == (status, True)
    assert list(house.state.uploads.iterdir()) == list((house.state.folder / "bundles").iterdir()) == []


def test_what_is_too_large_is_not_read_to_its_end(house, snapkv, monkeypatch):
    monkeypatch.setattr(intake, "LARGEST_TAR", 1 << 20)
    read = []

    def parts():
        for _ in range(64):
            read.append(1)
            yield b"\0" * (1 << 19)

    for content in (b"\0" * (2 << 20), parts()):
        answer = house.client.post("/api/submissions", content=content, headers=house.head("ada"))
        assert answer.status_code == 413
    assert list(house.state.uploads.iterdir()) == []
    assert house.send(snapkv.files).status_code == 202


def test_no_more_than_so_many_in_an_hour(house, snapkv, monkeypatch):
    monkeypatch.setattr(intake, "MOST_PER_HOUR", 2)
    answers = [house.send(snapkv.files) for _ in range(3)]
    assert [x.status_code for x in answers] == [202, 200, 429]
    assert answers[2].headers["retry-after"]
    assert house.send(edit(snapkv.files, MANIFEST, lambda x: x.update(submitter="bob")), "bob").status_code == 202


def test_what_is_refused_at_the_door_counts_too(house, monkeypatch):
    monkeypatch.setattr(intake, "MOST_PER_HOUR", 2)
    assert [house.send(b"x" * 1024).status_code for _ in range(3)] == [422, 422, 429]


def test_withdrawn_is_gone_and_may_come_again(house, snapkv):
    number = house.send(snapkv.files).json()["id"]
    house.work()
    assert house.withdraw(number, "bob").status_code == 409
    assert house.withdraw(number).json()["status"] == "withdrawn"
    house.work()
    assert not (house.state.results / "ada" / snapkv.bundle.spec.run_id).exists()
    assert house.send(snapkv.files).status_code == 202
    house.work()
    assert house.status(number) == "accepted"
    assert (house.state.results / "ada" / snapkv.bundle.spec.run_id).exists()


def test_another_bundle_of_a_run_must_say_that_it_replaces_the_first(house, snapkv):
    first = house.send(snapkv.files).json()["id"]
    house.work()
    other = later(snapkv, 0.001)
    answer = house.send(other)
    assert (answer.status_code, first in answer.json()["detail"]) == (409, True)
    assert house.send(other, supersedes="nothing").status_code == 409
    second = house.send(other, supersedes=first).json()["id"]
    house.work()
    assert (house.status(first), house.status(second)) == ("superseded", "accepted")
    folder = house.state.results / "ada" / snapkv.bundle.spec.run_id
    assert verify(folder, Repository()).bundle.content == open_bundle(other).content


def test_a_run_with_another_word_on_what_it_was_tuned_on_is_another_bundle(house, snapkv):
    first = house.send(snapkv.files).json()["id"]
    house.work()
    other = edit(snapkv.files, MANIFEST, lambda x: x.update(tuned_on=["niah:dev"]))
    answer = house.send(other)
    assert (answer.status_code, first in answer.json()["detail"]) == (409, True)
    second = house.send(other, supersedes=first).json()["id"]
    folder = house.state.results / "ada" / snapkv.bundle.spec.run_id
    for _ in range(2):
        house.work()
        assert (house.status(first), house.status(second)) == ("superseded", "accepted")
        assert verify(folder, Repository()).bundle.manifest.tuned_on == ("niah:dev",)


def test_a_row_is_replaced_by_one_bundle_and_never_by_itself(house, snapkv):
    first = house.send(snapkv.files).json()["id"]
    house.work()
    second = house.send(later(snapkv, 0.001), supersedes=first).json()["id"]
    answer = house.send(later(snapkv, 0.002), supersedes=first)
    assert (answer.status_code, second in answer.json()["detail"]) == (409, True)
    house.work()
    assert (house.status(first), house.status(second)) == ("superseded", "accepted")
    house.withdraw(second)
    answer = house.send(later(snapkv, 0.001), supersedes=second)
    assert (answer.status_code, "without ?supersedes=" in answer.json()["detail"]) == (409, True)
    assert house.send(later(snapkv, 0.001)).status_code == 202
    house.work()
    assert house.status(second) == "accepted"


def test_a_submitter_called_as_a_folder_of_curated_runs_replaces_none_of_them(house, snapkv):
    folder = house.state.results / "ada" / snapkv.bundle.spec.run_id
    curated = {name: data for name, data in later(snapkv, 0.001).items() if name != MANIFEST}
    write_folder(curated, folder)
    house.send(snapkv.files)
    house.work()
    assert read_files(folder) == curated


def test_what_is_refused_replaces_nothing(house, snapkv):
    first = house.send(snapkv.files).json()["id"]
    house.work()
    forged = snapkv.with_lines(lambda _, x: x.model_copy(update={"references": ("",)}))
    second = house.send(forged, supersedes=first).json()["id"]
    house.work()
    assert (house.status(first), house.status(second)) == ("accepted", "refused")


def test_only_administrators_read_the_log_and_everybody_only_their_own(house, snapkv):
    house.send(snapkv.files)
    assert house.client.get("/api/audit", headers=house.head("ada")).status_code == 403
    assert house.client.get("/api/audit").status_code == 401
    seen = {name: len(house.client.get("/api/submissions", headers=house.head(name)).json()) for name in house.tokens}
    assert seen == {"ada": 1, "bob": 0, "root": 1}
    assert house.client.get("/api/submissions/nothing").status_code == 404


def test_the_api_describes_itself(house):
    document = house.client.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/api/health", "/api/submissions", "/api/submissions/{number}", "/api/submissions/{number}/withdraw",
        "/api/audit",
    }
    post = document["paths"]["/api/submissions"]["post"]
    assert list(post["requestBody"]["content"]) == ["application/x-tar"]
    assert post["security"] == [{"HTTPBearer": []}]


def test_the_site_is_served_and_nothing_beside_it(house):
    assert house.client.get("/").status_code == 503
    house.state.site.mkdir()
    (house.state.site / "index.html").write_text("<h1>rows</h1>")
    assert house.client.get("/").text == "<h1>rows</h1>"
    assert house.client.get("/").headers["x-content-type-options"] == "nosniff"
    for path in ("/../leaderboard.db", "/%2e%2e/leaderboard.db", "/..%2fleaderboard.db", "//etc/passwd"):
        assert house.client.get(path).status_code == 404


def test_tokens_on_the_command_line(kvbench, tmp_path):
    state = ("--state", tmp_path / "s")
    made = kvbench("leaderboard", "token", "create", "ada", *state, "--json")
    assert made.out.splitlines()[0] == made.json["token"]
    listed = kvbench("leaderboard", "token", "list", *state, "--json")
    assert [(x["name"], x["scope"], x["revoked"]) for x in listed.json] == [("ada", "submit", None)]
    assert made.json["token"] not in listed.out
    assert kvbench("leaderboard", "token", "revoke", 1, *state).out == "token 1 of ada is revoked.\n"
    assert kvbench("leaderboard", "token", "list", *state, "--json").json[0]["revoked"]
    for arguments, reason in (
        (("revoke", "7"), "there is no token 7"), (("create", "a b"), "'a b' cannot be a submitter"),
        (("create", "ada", "--scope", "all"), "unknown scope 'all'"),
    ):
        done = kvbench("leaderboard", "token", *arguments, *state)
        assert (done.code, reason in done.err) == (2, True)
    done = kvbench("leaderboard", "token", "list", *state, "--db", "nothing://x")
    assert (done.code, "--db cannot be opened" in done.err) == (2, True)
