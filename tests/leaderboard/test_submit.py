"""`kvbench submit`: packs, verifies and delivers to a folder, the hub or a server."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvbench.leaderboard.submission.archive import read_files
from kvbench.leaderboard.submission.bundle import open_bundle
from kvbench.leaderboard.submission.deliver import DeliveryError, put_in_folder, send_to_server
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import MANIFEST, RESULT, SAMPLES, SPEC

from .conftest import edit

LINKS = [
    "http://example.org/code", "javascript:alert(1)", "//example.org", "https://ada:secret@example.org",
    "https://example.org:8443/", "https://localhost/", "https://b\u00fccher.de/", "https://example.org/\u202ecod",
    "https://example.org/a b", "https://example.org/'\"><script>", "https://example.org/\n",
    f"https://example.org/{'a' * 200}",
]
"""Addresses that no manifest may have."""
TOKEN = "kvb_it-is-a-secret"


class FakeServer(ThreadingHTTPServer):
    """An HTTP server that records requests and returns prepared replies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.asked: list[tuple[str, str, bytes, str | None]] = []
        self.status, self.answer = 200, {}
        self.known: dict[str, str] = {}
        """Status by id of the submissions that the server has."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Imitates the hub's upload API; returns the prepared reply to all other requests."""
        if "/preupload/" in path:
            modes = {x["path"]: "lfs" if x["path"].endswith(".gz") else "regular" for x in json.loads(body)["files"]}
            return 200, {"files": [{"path": x, "uploadMode": y, "shouldIgnore": False} for x, y in modes.items()]}
        if path.endswith("/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [
                {**x, "actions": {"upload": {"href": f"{self.url}/put/{x['oid']}"}}} for x in objects
            ]}
        if "/commit/" in path:
            return 200, {
                "success": True, "commitOid": "a" * 40, "commitUrl": f"{self.url}/datasets/org/rows/commit/{'a' * 40}",
                "pullRequestUrl": f"{self.url}/datasets/org/rows/discussions/7",
            }
        return self.status, self.answer


class FakeHandler(BaseHTTPRequestHandler):
    """Its request handler."""

    server: FakeServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.asked.append((self.command, self.path, body, self.headers.get("authorization")))
        status, document = self.server.reply(self.path, body)
        data = json.dumps(document).encode()
        self.send_response(status)
        if status == 307:
            self.send_header("location", f"{self.server.url}/elsewhere")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PUT = do_POST  # noqa: N815  # as http.server calls it

    def do_GET(self) -> None:
        number = self.path.rpartition("/")[2]
        if self.path != f"/api/submissions/{number}":
            self.do_POST()
        elif number in self.server.known:
            data = json.dumps({"id": number, "status": self.server.known[number]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    """A running server."""
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def git(folder: Path, *words: str) -> str:
    """Run git and return its output."""
    names = ("-c", "user.name=ada", "-c", "user.email=ada@example.org")
    done = subprocess.run(["git", "-C", str(folder), *names, *words], check=True, capture_output=True, text=True)
    return done.stdout


def test_submission_to_a_folder(kvbench, snapkv, tmp_path):
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", tmp_path, "--tuned-on", "niah:dev", "--json")
    folder = tmp_path / "ada" / snapkv.bundle.spec.run_id
    assert (done.code, done.json["level"], done.json["delivered"]) == (0, "L0", {"folder": str(folder)})
    assert sorted(x.name for x in folder.iterdir()) == sorted([SPEC, SAMPLES, RESULT, MANIFEST])
    bundle = open_bundle(read_files(folder))
    assert bundle.manifest is not None and bundle.manifest.tuned_on == ("niah:dev",)
    assert bundle.lines == snapkv.bundle.lines
    assert kvbench("leaderboard", "verify", tmp_path).code == 0


def test_submitting_twice_is_idempotent_and_another_bundle_is_refused(kvbench, snapkv, tmp_path):
    arguments = ("submit", snapkv.folder, "--submitter", "ada", "--to", tmp_path)
    first, again = kvbench(*arguments), kvbench(*arguments)
    assert (first.code, again.code) == (0, 0)
    assert ("it is left as it is" in first.err, "it is left as it is. Remove it first" in again.err) == (False, True)
    (tmp_path / "ada" / snapkv.bundle.spec.run_id / RESULT).write_text("{}")
    done = kvbench(*arguments)
    assert (done.code, "holds another bundle of this run" in done.err) == (2, True)


def test_a_file_is_no_folder_to_submit_to(kvbench, snapkv, tmp_path):
    """It is refused before the verification, as bad input."""
    (tmp_path / "file").write_text("x")
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", tmp_path / "file")
    assert (done.code, done.out) == (2, "")
    assert "file is not a folder. Give a folder, which may be new." in done.err


def test_other_tuning_data_do_not_replace_a_bundle(kvbench, snapkv, tmp_path):
    arguments = ("submit", snapkv.folder, "--submitter", "ada", "--to", tmp_path)
    assert kvbench(*arguments).code == 0
    done = kvbench(*arguments, "--tuned-on", "niah:dev")
    expected = "settings tuned on nothing; this one has settings tuned on niah:dev. Remove it"
    assert (done.code, expected in done.err) == (2, True)


def test_other_links_do_not_replace_a_bundle(kvbench, snapkv, tmp_path):
    """They are in the manifest, and a bundle without them is another one."""
    arguments = ("submit", snapkv.folder, "--submitter", "ada", "--to", tmp_path)
    links = ("--code-url", "https://example.org/code", "--paper-url", "https://example.org/paper.pdf")
    assert kvbench(*arguments, *links).code == 0
    manifest = open_bundle(read_files(tmp_path / "ada" / snapkv.bundle.spec.run_id)).manifest
    assert manifest.links == [("code", links[1]), ("paper", links[3])]
    done = kvbench(*arguments)
    assert done.code == 2
    assert f"tuned on nothing, code at {links[1]}, paper at {links[3]}; this one has settings tuned on" in done.err


@pytest.mark.parametrize("url", LINKS)
def test_only_plain_https_links_are_packed(kvbench, snapkv, tmp_path, url):
    """Nothing is written, and the message names the option and the rule."""
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", tmp_path, "--code-url", url)
    assert (done.code, list(tmp_path.iterdir())) == (2, [])
    assert "--code-url" in done.err and "A link is an https:// address of at most 200 characters" in done.err


@pytest.mark.parametrize("url", LINKS)
def test_a_manifest_with_another_link_is_refused(snapkv, url):
    """By the verifier and the site, if the manifest was written by hand."""
    files = edit(snapkv.files, MANIFEST, lambda x: x.update(paper_url=url))
    with pytest.raises(RefusedError, match="paper_url"):
        open_bundle(files)


def test_a_folder_of_runs_is_submitted_at_once(kvbench, runs, snapkv, tmp_path):
    """The runs are the baselines of one another, and a run that is refused does not keep back the others."""
    out = snapkv.folder.parent
    done = kvbench("submit", out, "--submitter", "ada", "--to", tmp_path, "--json")
    assert done.code == 0
    assert sorted(x["run_id"] for x in done.json) == sorted(x.bundle.spec.run_id for x in runs.values())
    assert {y["outcome"] for x in done.json for y in x["checks"] if y["name"] == "baseline"} == {"ok"}
    forged = tmp_path / "forged"
    shutil.copytree(snapkv.folder, forged)
    journal = forged / "samples.jsonl"
    journal.write_text(journal.read_text().replace('"prompt_hash":"', '"prompt_hash":"0'))
    done = kvbench("submit", forged, runs["full"].folder, "--submitter", "bob", "--to", tmp_path / "b", "--json")
    assert (done.code, [x["delivered"] is None for x in done.json]) == (1, [True, False])
    assert "1 of 2 submissions would be refused" in done.err
    journal.unlink()
    done = kvbench("submit", runs["full"].folder, forged, "--submitter", "eve", "--to", tmp_path / "e")
    assert (done.code, "Nothing was delivered" in done.err, (tmp_path / "e").exists()) == (2, True, False)


def test_a_failed_write_leaves_no_files(snapkv, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Exception, match="No space left"):
        put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    assert [x for x in tmp_path.rglob("*") if x.is_file()] == []


def test_submission_by_pull_request(kvbench, snapkv, runs, tmp_path):
    """The workflow of docs/submitting.md: branch and push; the maintainer fetches, verifies and merges."""
    central, mine, theirs = (tmp_path / x for x in ("central.git", "mine", "theirs"))
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(central))
    git(tmp_path, "clone", "-q", str(central), str(mine))
    git(mine, "switch", "-q", "-c", "main")
    put_in_folder(runs["full"].files, runs["full"].bundle.manifest, mine)
    git(mine, "add", ".")
    git(mine, "commit", "-q", "-m", "rows")
    git(mine, "push", "-q", "origin", "main")
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", mine / "new rows")
    assert done.code == 0
    for line in done.out.split("for a pull request")[1].splitlines()[1:]:
        git(mine, *shlex.split(line)[1:])
    git(tmp_path, "clone", "-q", str(central), str(theirs))
    branch = f"ada/{snapkv.bundle.spec.run_id}"
    assert git(theirs, "diff", "--name-only", f"main...origin/{branch}").splitlines() == [
        f"new rows/{branch}/{x}" for x in sorted([MANIFEST, RESULT, SAMPLES, SPEC])
    ]
    git(theirs, "switch", "-q", "--detach", f"origin/{branch}")
    done = kvbench("leaderboard", "verify", theirs / "new rows" / branch, "--results", theirs, "--json")
    assert (done.code, done.json[0]["level"], done.json[0]["submitter"]) == (0, "L0", "ada")
    assert {x["name"]: x["outcome"] for x in done.json[0]["checks"]}["baseline"] == "ok"


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of the hub's client
def test_submission_to_the_hub(kvbench, snapkv, fake_server, monkeypatch):
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", fake_server.url), ("HF_HUB_DISABLE_XET", True)):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", "hf:org/rows", "--json")
    assert done.code == 0, done.err
    assert done.json["delivered"] == {"pull_request": f"{fake_server.url}/datasets/org/rows/discussions/7"}
    asked = [x for x in fake_server.asked if "/org/rows" in x[1] or x[0] == "PUT"]
    assert [(method, path.partition("?")[2]) for method, path, _, _ in asked] == [
        ("POST", "create_pr=1"), ("POST", ""), ("PUT", ""), ("POST", "create_pr=1"),
    ]
    assert asked[2][2] == snapkv.files[SAMPLES]
    header, *rest = [json.loads(x) for x in asked[3][2].splitlines()]
    place = f"ada/{snapkv.bundle.spec.run_id}"
    assert header["value"]["summary"] == f"{snapkv.bundle.spec.run_id} by ada"
    assert sorted(x["value"]["path"] for x in rest) == [f"{place}/{x}" for x in sorted(snapkv.files)]
    assert "hf_secret" not in done.out + done.err


def test_a_refusal_by_the_hub_is_reported(kvbench, snapkv, fake_server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", "hf:org/rows")
    assert done.code == 1
    assert "the hub did not accept it for org/rows" in done.err


def test_submission_to_a_server(kvbench, snapkv, fake_server, monkeypatch, tmp_path):
    fake_server.status, fake_server.answer = 202, {"id": "abc", "status": "queued"}
    monkeypatch.setenv("KVBENCH_TOKEN", TOKEN)
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", f"{fake_server.url}/", "--json")
    assert (done.code, done.json["delivered"]) == (0, fake_server.answer)
    assert "The same command shows the state again." in done.out
    (method, path, body, token), = fake_server.asked
    assert (method, path, token) == ("POST", "/api/submissions", f"Bearer {TOKEN}")
    (tmp_path / "x.tar").write_bytes(body)
    sent = open_bundle(read_files(tmp_path / "x.tar"))
    assert (sent.content, sent.submitter) == (snapkv.bundle.content, "ada")
    assert TOKEN not in done.out + done.err


@pytest.mark.parametrize(("status", "sent"), [
    ("queued", 1), ("accepted", 1), ("refused", 1), ("withdrawn", 2), ("failed", 2),
])
def test_what_a_server_has_is_not_sent_again(kvbench, runs, snapkv, fake_server, monkeypatch, tmp_path, status, sent):
    """So the same command goes on where a server's limit of uploads per hour stopped it."""
    for x in runs.values():
        shutil.copytree(x.folder, tmp_path / "runs" / x.bundle.spec.run_id)
    monkeypatch.setenv("KVBENCH_TOKEN", TOKEN)
    arguments = ("submit", tmp_path / "runs", "--submitter", "ada", "--to", fake_server.url)
    fake_server.answer = {"id": "abc", "status": "queued"}
    assert kvbench(*arguments).code == 0
    packed, fake_server.asked = fake_server.asked, []
    (tmp_path / "first.tar").write_bytes(packed[0][2])
    manifest = open_bundle(read_files(tmp_path / "first.tar")).manifest
    assert manifest is not None
    fake_server.known = {manifest.identity: status}
    done = kvbench(*arguments)
    assert (done.code, len(packed), len(fake_server.asked)) == (int(status == "refused"), 2, sent)
    assert (f"{status} as {manifest.identity}" in done.out) is (sent == 1)


def test_a_token_is_read_from_a_file(kvbench, snapkv, fake_server, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", fake_server.url, "--token-file", tmp_path / "token")
    assert fake_server.asked[0][3] == f"Bearer {TOKEN}"


def test_a_token_does_not_follow_a_redirect(kvbench, snapkv, fake_server, monkeypatch):
    fake_server.status = 307
    monkeypatch.setenv("KVBENCH_TOKEN", TOKEN)
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", fake_server.url)
    assert (done.code, len(fake_server.asked)) == (1, 1)
    assert TOKEN not in done.err


@pytest.mark.parametrize(("status", "detail", "hint"), [
    (401, "unknown token", ". Check KVBENCH_TOKEN or --token-file"), (413, "too large", ""), (429, "too many", ""),
])
def test_the_servers_reason_is_reported(kvbench, snapkv, fake_server, monkeypatch, status, detail, hint):
    fake_server.status, fake_server.answer = status, {"detail": detail}
    monkeypatch.setenv("KVBENCH_TOKEN", TOKEN)
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", fake_server.url)
    last = f"kvbench: {fake_server.url} did not accept it ({status}): {detail}{hint}"
    assert (done.code, done.err.splitlines()[-1]) == (1, last)


def test_an_unreachable_server_is_reported(kvbench, snapkv, monkeypatch):
    monkeypatch.setenv("KVBENCH_TOKEN", TOKEN)
    done = kvbench("submit", snapkv.folder, "--submitter", "ada", "--to", "http://127.0.0.1:1")
    assert (done.code, "cannot be reached: [Errno 111] Connection refused" in done.err) == (1, True)


def test_a_server_of_another_protocol_is_reported():
    """As a port of SSH, which speaks first."""
    def speak(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            while client.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(DeliveryError, match=r"as a web server does: SSH-2.0-OpenSSH_9.6 \(BadStatusLine\)"):
            send_to_server({}, url, TOKEN)


@pytest.mark.parametrize(("url", "warned"), [
    ("http://localhost:1", False), ("http://LOCALHOST:1/board", False), ("http://127.0.0.1:1", False),
    ("http://[::1]:1", False), ("http://localhost.example.invalid:1", True), ("http://127.0.0.1.example.invalid", True),
    ("https://example.invalid", False),
])
def test_an_address_without_encryption_is_warned_of(url, warned, monkeypatch, capsys):
    """Except on this machine, which the whole host name says and not its beginning."""
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr("urllib.request.OpenerDirector.open", refuse)
    with pytest.raises(DeliveryError):
        send_to_server({}, url, TOKEN)
    assert ("is not encrypted" in capsys.readouterr().err) is warned


def test_a_run_that_would_be_refused_is_not_sent(kvbench, snapkv, fake_server, monkeypatch, tmp_path):
    for name in ("spec.json", "samples.jsonl", "result.json"):
        (tmp_path / name).write_bytes((snapkv.folder / name).read_bytes())
    document = json.loads((tmp_path / "result.json").read_text())
    document["score"]["mean"] = 1.0
    (tmp_path / "result.json").write_text(json.dumps(document))
    monkeypatch.setenv("KVBENCH_TOKEN", TOKEN)
    done = kvbench("submit", tmp_path, "--submitter", "ada", "--to", fake_server.url)
    assert (done.code, fake_server.asked) == (1, [])
    assert "not delivered: the submission would be refused" in done.err


@pytest.mark.parametrize(("options", "reason"), [
    (["--submitter", "a b"], "--submitter 'a b' is not allowed in a manifest"),
    (["--submitter", "a.lock"], "no '.lock' at the end"), (["--submitter", "-a"], "begins and ends with a letter"),
    (["--submitter", "a" * 65], "at most 64 ASCII letters"),
    (["--submitter", "ada", "--tuned-on", "a b"], "--tuned-on 'a b' is not allowed in a manifest"),
    *((["--submitter", "ada", "--to", url], f"--to {url!r} is not the address of a leaderboard") for url in (
        "ftp://x", "https://", "http:///path", "http://[::1", "http://x:99999", "http://x:port", "https://x y",
        "https://x\ny", "https://ada:secret@x", "https://x?a=b", "https://b\u00fccher", "://x",
        "hf:", "hf:rows", "hf:a/b/c", "hf://a/b",
    )),
    (["--submitter", "ada", "--to", "https://x"], "Set KVBENCH_TOKEN, or give --token-file."),
    (["--submitter", "ada", "--to", "https://x", "--token-file", "/no"], "--token-file /no cannot be read: No such"),
    (["--submitter", "ada", "--to", "https://x", "--token-file", "/dev/null"], "--token-file /dev/null holds no token"),
])
def test_invalid_options_are_user_errors(kvbench, snapkv, monkeypatch, options, reason):
    monkeypatch.delenv("KVBENCH_TOKEN", raising=False)
    done = kvbench("submit", snapkv.folder, *options)
    assert (done.code, reason in done.err) == (2, True)
