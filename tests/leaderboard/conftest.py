"""Fixtures: two finished runs on the bundled model, and functions that tamper with their files."""

from __future__ import annotations

import gzip
import io
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.leaderboard.submission.archive import write_tar
from kvbench.leaderboard.submission.bundle import Bundle, _list, open_bundle, pack_run
from kvbench.leaderboard.submission.records import MANIFEST, METHOD, RESULT, SAMPLES, SPEC
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify
from kvbench.runs import environment
from kvbench.runs.job import Job
from kvbench.runs.journal import Line
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.provenance import hash_contents
from kvbench.runs.results import Git
from kvbench.runs.runner import run
from kvbench.runs.spec import RunSpec
from kvbench.runs.summary import summarize

if TYPE_CHECKING:
    from .local_server import LocalServer


GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Done:
    """A finished run and its folder."""

    job: Job
    folder: Path

    @cached_property
    def _packed(self) -> dict[str, bytes]:
        return pack_run(self.folder, "ada", ())

    @property
    def files(self) -> dict[str, bytes]:
        """The packed files, cached because a manifest holds the time of packing."""
        return dict(self._packed)

    @property
    def bundle(self) -> Bundle:
        """The parsed bundle."""
        return open_bundle(self.files)

    def with_lines(self, edit: Callable[[int, Line], Line]) -> dict[str, bytes]:
        """A bundle with edited lines and a matching result and manifest, as a careful forger would make it."""
        lines = [edit(number, line) for number, line in enumerate(self.bundle.lines)]
        files = self.files
        return repack(files, {
            SAMPLES: gzip.compress("".join(f"{x.model_dump_json()}\n" for x in lines).encode(), mtime=0),
            RESULT: summarize(self.job, lines, self.bundle.result.environment).model_dump_json().encode(),
        })


@pytest.fixture(scope="session", autouse=True)
def _clean_tree():
    """Make all runs of these tests come from a clean commit, whatever the checkout's state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_ask_git", lambda: Git(commit="c" * 40, dirty=False))
        environment.find_git.cache_clear()
        yield
    environment.find_git.cache_clear()


def make_run(out: Path, method: str, **options: Any) -> Done:
    """Make a run of four contexts with two questions each."""
    asked = Request(
        method, "niah", samples=4, length=384, turns=2, mode="multi-turn", visibility="hidden", device="cpu", out=out,
    )
    job = prepare(Request(**{**vars(asked), **options}))
    return Done(job, run(job).folder)


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> dict[str, Done]:
    """Finished runs by method."""
    out = tmp_path_factory.mktemp("runs")
    return {name: make_run(out, name) for name in ("snapkv", "full")}


@pytest.fixture
def snapkv(runs) -> Done:
    """A run with some wrong answers."""
    return runs["snapkv"]


@pytest.fixture
def check(runs):
    """Returns outcomes by check name, against an empty repository by default; the first refusal is `refused`."""

    def found(files: dict[str, bytes], repository: Repository | None = None) -> dict[str, str]:
        record = verify(files, repository or Repository()).conclude()
        by_name = {x.name: x.outcome for x in record.checks}
        refused = [f"{x.name}: {x.reason}" for x in record.checks if x.outcome == "refused"]
        return {**by_name, "level": record.level, "refused": refused[0] if refused else ""}

    return found


def repack(files: dict[str, bytes], changed: dict[str, bytes]) -> dict[str, bytes]:
    """Replace files and update the manifest."""
    files = {**files, **changed}
    manifest = json.loads(files[MANIFEST])
    listed = _list({name: data for name, data in files.items() if name != MANIFEST})
    manifest["files"] = {name: x.model_dump() for name, x in listed.items()}
    return {**files, MANIFEST: json.dumps(manifest).encode()}


def edit(files: dict[str, bytes], name: str, change: Callable[[Any], object]) -> dict[str, bytes]:
    """Edit a JSON file and update the manifest."""
    document = json.loads(files[name])
    change(document)
    return repack(files, {name: json.dumps(document).encode()})


def edit_spec(files: dict[str, bytes], change: Callable[[Any], object]) -> dict[str, bytes]:
    """Edit the spec in all files and update the run id: a consistent forgery."""
    spec = json.loads(files[SPEC])
    change(spec)
    run_id = RunSpec.model_validate(spec).run_id

    def follow(result: Any) -> None:
        result.update({"spec": spec, "run_id": run_id, "model": spec["model"], "task": spec["task"]})
        result["method"].update(spec["method"])
        result.update({key: spec[key] for key in ("mode", "visibility", "history", "suite")})
        result["budget"]["asked"], result["n_samples"] = spec["budget"], spec["samples"]

    files = edit(repack(files, {SPEC: json.dumps(spec).encode()}), RESULT, follow)
    return edit(files, MANIFEST, lambda x: x.update(run_id=run_id))


def as_own_method(files: dict[str, bytes], content: bytes = b"# mine", name: str = "mine") -> dict[str, bytes]:
    """The run as if its method were the submitter's own file mine.py."""
    code = hash_contents([("mine.py", content)])
    files = edit_spec(files, lambda x: x["method"].update(name=name, code=code))
    files = edit(files, RESULT, lambda x: x["method"]["card"].update(name=name))
    return edit(repack(files, {METHOD: content}), MANIFEST, lambda x: x.update(source="mine.py"))


def tar(files: dict[str, bytes]) -> bytes:
    """The bundle as an uploaded tar."""
    out = io.BytesIO()
    write_tar(files, out)
    return out.getvalue()


def scale_times(line: Line, factor: float) -> Line:
    """The line with all times multiplied by a factor."""
    assert line.times is not None
    names = ("prefill_s", "compress_s", "ttft_s", "decode_s")
    times = {name: x * factor for name in names if (x := getattr(line.times, name)) is not None}
    return line.model_copy(update={
        "times": line.times.model_copy(update=times), "seconds": line.seconds * factor + 1e-3,
    })


def later(done: Done, seconds: float, submitter: str = "ada") -> dict[str, bytes]:
    """The same run with other times, which makes another bundle."""

    def change(_: int, line: Line) -> Line:
        return scale_times(line, 1 - (0.02 + seconds) * (1 + line.index + line.turn))

    return edit(done.with_lines(change), MANIFEST, lambda x: x.update(submitter=submitter))


def on_gpu(done: Done) -> dict[str, bytes]:
    """The run as if it had been made on a GPU, in all files."""
    lines = [json.loads(x) for x in gzip.decompress(done.files[SAMPLES]).splitlines()]
    for line in lines:
        line["machine"] = line["machine"] and {**line["machine"], "gpu": GPU}
    files = repack(done.files, {SAMPLES: gzip.compress("".join(f"{json.dumps(x)}\n" for x in lines).encode(), mtime=0)})
    return edit(edit_spec(files, lambda x: x.update(device="cuda")), RESULT, lambda x: x["environment"].update(gpu=GPU))


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A running PostgreSQL."""
    from .cluster import run_cluster

    with run_cluster() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def db(request) -> str | None:
    """The URL of a new database; None for the default, SQLite in the server's folder."""
    if request.param == "sqlite":
        return None
    from .cluster import create_database

    return create_database(request.getfixturevalue("cluster"), f"kvbench-{uuid.uuid4().hex}")


@pytest.fixture
def server(tmp_path, db) -> Iterator[LocalServer]:
    """A server without its background threads."""
    from .local_server import LocalServer

    server = LocalServer(tmp_path, db)
    yield server
    server.database.close()
