"""A run survives being killed, and a failure never becomes a number."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvbench.engine import session
from kvbench.runs import sample
from kvbench.runs.files import read_file, read_lines
from kvbench.runs.results import Result
from kvbench.runs.spec import RunSpec
from kvbench.techniques.parts import _HASHES, SHIPPED, read_metadata

TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
INERT, LAST = f"{TOYS}:Inert", f"{TOYS}:Last"
BOUND = """
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.method import resolved
from kvbench.methods.eviction.knorm import Knorm

@dataclass(frozen=True)
class Bound(Knorm):
    card = Knorm.card.model_copy(update={"name": "bound"})
    file: str = ""
    found: str | None = resolved(by_bind=True)

    def bind(self, model):
        return replace(self, found=Path(self.file).read_text())
"""
"""A method that takes a hash from a file when it is bound."""
MODES = {
    "visible": ("--mode", "single"),
    "hidden": ("--mode", "single", "--visibility", "hidden", "--chunk", "7"),
    "reference": ("--mode", "multi-turn"),
    "own": ("--mode", "multi-turn", "--history", "own"),
    "hidden turns": ("--mode", "multi-turn", "--visibility", "hidden", "--turns", "2"),
    "recompress": ("--mode", "multi-turn", "--recompress"),
    "requests": ("--mode", "multi-request"),
}
NAMES = {
    "": "schema_version run_id status error suite spec model method task mode visibility history budget n_samples "
    "n_scored n_failed n_questions score scores agreement output memory latency diffusion lossless reuse batch effect "
    "kernels environment",
    "budget": "asked kind resolved",
    "score": "metric higher_is_better mean ci95 interval by_turn partial_mean",
    "output": "tokens stop_reasons truncated reference_tokens",
    "memory": "full_bytes stored_bytes ratio ratio_total read_bytes_per_step spare_bytes host_bytes end_bytes "
    "peak_bytes bytes_per_token end_stored_bytes end_full_bytes distinct_read_bytes_per_step full_read_bytes_per_step "
    "full_16bit_bytes file_bytes host_read_bytes_per_step file_read_bytes_per_step",
    "latency": "timing prefill_s compress_s ttft_s tpot_s tokens_per_s p50 p95 n mixed untimed",
    "environment": "python torch transformers triton kvbench git cpu gpu threads device_map started seconds",
}
"""The names of docs/design.md that outside tools read."""


def only_run(tmp_path: Path, out: str = "runs") -> Path:
    """The folder of the one run."""
    (folder,) = (tmp_path / out).iterdir()
    return folder


def scores(folder: Path) -> list[tuple[object, ...]]:
    """The fields that must not depend on interruptions."""
    lines = read_lines(folder / "samples.jsonl")
    return [(x.index, x.turn, x.prompt_hash, x.ids, x.prediction, x.score, x.error) for x in lines]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODES)
def test_every_mode_runs_to_a_result(kvbench, arguments, tmp_path, name):
    """Turns, bytes and effect are there in every mode, and the file is what was printed."""
    answer = kvbench(*arguments, "--method", LAST, *MODES[name])
    assert answer.code == 0, answer.err
    folder = only_run(tmp_path)
    assert json.loads((folder / "result.json").read_text()) == answer.json
    result = read_file(folder / "result.json", Result)
    turns = {"visible": 1, "hidden": 1, "hidden turns": 2}.get(name, 3)
    assert (result.status, result.n_scored, len(result.score.by_turn)) == ("ok", 4, turns)
    assert result.effect is not None
    assert (result.effect.n_acted, result.effect.n) == (4, 4)
    assert result.memory is not None
    assert 0.2 < result.memory.ratio < 0.3
    assert result.output.tokens <= 4 * turns * 3
    context = {x.tokens.context for x in read_lines(folder / "samples.jsonl") if x.tokens}
    assert context == ({45} if result.visibility != "hidden" else {40})


def test_a_result_has_the_documented_names(kvbench, arguments):
    """The leaderboard and outside tools read these."""
    result = kvbench(*arguments, "--method", LAST).json
    for part, names in NAMES.items():
        assert set((result[part] if part else result).keys()) == set(names.split()), part
    assert {"seed", "split", "batch", "chunk", "generation"} <= result["spec"].keys()
    assert {"id", "revision", "kind", "dtype", "params", "sha256"} <= result["model"].keys()
    assert {"name", "version", "family", "settings", "card"} <= result["method"].keys()
    task = "name version suite length scorer dataset_revision prompt_id chat_template_sha bos truncation stop"
    assert set(task.split()) <= result["task"].keys()
    assert {"kind", "n_acted", "n"} <= result["effect"].keys()


@pytest.mark.parametrize(("scale", "calibration"), [
    ("one", None), ("tensor", "the largest magnitudes, in one pass"),
])
def test_the_card_in_a_result_has_the_calibration_of_its_settings(kvbench, arguments, scale, calibration):
    """Scales of one are not measured."""
    result = kvbench(*arguments, "--method", "fp8", "--set", f"scale={scale}").json
    assert result["method"]["card"]["calibration"] == calibration


def test_visibility_does_not_change_prompts(kvbench, arguments, tmp_path):
    """Prompts are equal in every mode; with a full cache so are the answers."""
    for mode in ("--visibility=visible", "--visibility=hidden"):
        assert kvbench(*arguments, "--method", "full", mode).code == 0
    first, second = (read_lines(x / "samples.jsonl") for x in (tmp_path / "runs").iterdir())
    assert [(x.prompt_hash, x.ids) for x in first] == [(x.prompt_hash, x.ids) for x in second]


def test_the_same_command_reports_the_finished_run(kvbench, arguments, tmp_path):
    """No sample is run twice, and a line says so."""
    first = kvbench(*arguments, "--method", LAST)
    written = (only_run(tmp_path) / "result.json").read_bytes()
    again = kvbench(*arguments, "--method", LAST)
    assert again.code == 0
    assert again.json == first.json
    assert "already finished" in again.err
    assert (only_run(tmp_path) / "result.json").read_bytes() == written
    other = kvbench(*arguments, "--method", LAST, "--seed", "1")
    assert other.json["run_id"] != first.json["run_id"]


def start(command: list[str]) -> subprocess.Popen[str]:
    """Start the real command, slow enough to be interrupted between two samples.

    Tests that a shell started in the background ignore Ctrl-C, and so would their children.
    """
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    return subprocess.Popen(
        [sys.executable, "-c", f"{heard}; from kvbench.cli import main; main()", *command], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "TOY_SLEEP": "0.5", "OMP_NUM_THREADS": "1"},
    )


def strike(processes: dict[signal.Signals, subprocess.Popen[str]], tmp_path: Path) -> dict[signal.Signals, str]:
    """Send each process its signal after its first saved sample; returns their standard errors."""
    waiting = dict(processes)
    deadline = time.monotonic() + 300
    while waiting:
        assert time.monotonic() < deadline
        for how, process in list(waiting.items()):
            assert process.poll() is None, process.communicate()[1]
            if any(x.stat().st_size for x in tmp_path.glob(f"{how.name}/*/samples.jsonl")):
                waiting.pop(how).send_signal(how)
        time.sleep(0.02)
    return {how: process.communicate()[1] for how, process in processes.items()}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_scores(kvbench, arguments, tmp_path):
    """Real processes get signals after their first samples; resumed, they have the scores of an uninterrupted run."""
    command = [*arguments, "--method", LAST, "--mode", "multi-turn"]
    where = command.index("--out") + 1
    commands = {
        how: [*command[:where], str(tmp_path / how.name), *command[where + 1 :]]
        for how in (signal.SIGKILL, signal.SIGINT)
    }
    processes = {how: start(x) for how, x in commands.items()}
    errors = strike(processes, tmp_path)
    assert processes[signal.SIGKILL].returncode == -signal.SIGKILL
    assert processes[signal.SIGINT].returncode == 130
    assert errors[signal.SIGINT].splitlines()[-1].startswith("kvbench: interrupted: ")
    assert "Run the same command to resume." in errors[signal.SIGINT]

    whole = kvbench(*command)
    for how in processes:
        folder = only_run(tmp_path, how.name)
        assert not (folder / "result.json").exists()
        done = len({x.index for x in read_lines(folder / "samples.jsonl")})
        assert 0 < done < 4
        resumed = kvbench(*commands[how])
        assert resumed.code == 0
        assert f"resuming: {done} of 4" in resumed.err
        assert scores(folder) == scores(only_run(tmp_path))
        for part in ("run_id", "score", "scores", "output", "memory", "effect", "n_scored"):
            assert resumed.json[part] == whole.json[part], part


@pytest.mark.slow
def test_times_of_two_machines_are_not_mixed(kvbench, arguments, tmp_path):
    """With half of the samples from another number of threads, no sample is lost and there are no medians."""
    whole = kvbench(*arguments, "--method", LAST).json
    assert (whole["latency"]["n"], whole["latency"]["mixed"]) == (4, None)
    folder = only_run(tmp_path)
    path = folder / "samples.jsonl"
    lines = [x for x in read_lines(path) if x.index < 2]
    threads = lines[0].machine.threads
    assert threads == whole["environment"]["threads"]
    elsewhere = lines[0].machine.model_copy(update={"threads": threads + 1})
    moved = [x.model_copy(update={"machine": elsewhere}) for x in lines]
    for kept, mixed in ((lines, False), (moved, True)):
        path.write_text("".join(f"{x.model_dump_json()}\n" for x in kept))
        (folder / "result.json").unlink()
        answer = kvbench(*arguments, "--method", LAST)
        assert answer.code == 0
        assert answer.json["score"] == whole["score"]
        assert ("the result will have scores but no times" in answer.err) is mixed
        assert ("samples ran on" in answer.out) is mixed
        assert (answer.json["latency"]["mixed"] is not None) is mixed
        times = {x for name, x in answer.json["latency"].items() if name not in ("timing", "mixed", "untimed")}
        assert (times == {None, 0}) is mixed


def test_a_result_written_elsewhere_names_the_machine_of_its_samples(kvbench, arguments, tmp_path):
    """Times belong to the machine that measured them, also if another one writes the result, as after a full disk."""
    whole = kvbench(*arguments, "--method", LAST).json
    folder = only_run(tmp_path)
    path = folder / "samples.jsonl"
    lines = read_lines(path)
    elsewhere = lines[0].machine.model_copy(update={"cpu": "another", "threads": lines[0].machine.threads + 1})
    path.write_text("".join(f"{x.model_copy(update={'machine': elsewhere}).model_dump_json()}\n" for x in lines))
    (folder / "result.json").unlink()
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.json["latency"] == whole["latency"]
    assert {name: answer.json["environment"][name] for name in ("cpu", "gpu", "threads")} == elsewhere.model_dump()
    assert "no times" not in answer.err


@pytest.mark.parametrize("mode", ["single", "multi-turn"])
def test_the_time_of_an_answer_ends_at_its_last_token(kvbench, arguments, tmp_path, monkeypatch, mode):
    """Checks, counts and detokenization come after it, as they do where an answer is decoded for comparison."""
    clock = [0.0]

    def tick(_):
        clock[0] += 1
        return clock[0]

    def slow(function):
        def call(*args, **options):
            clock[0] += 100
            return function(*args, **options)
        return call

    for module in (session, sample):
        monkeypatch.setattr(module, "now", tick)
    monkeypatch.setattr(sample, "read_reply", slow(sample.read_reply))
    monkeypatch.setattr(session.Session, "check_logits", slow(session.Session.check_logits))
    monkeypatch.setattr(session.Session, "credit", slow(session.Session.credit))
    assert kvbench(*arguments, "--method", LAST, "--mode", mode).code == 0
    times = [x.times for x in read_lines(only_run(tmp_path) / "samples.jsonl")]
    assert {x.decode_s for x in times} == {1.0}


def test_a_method_that_does_nothing_fails_its_run(kvbench, arguments):
    """An eviction method that evicts nothing: exit code 1, with the reason in the result."""
    answer = kvbench(*arguments, "--method", INERT)
    assert answer.code == 1
    assert answer.json["status"] == "failed"
    assert "acted in 0 of 4 samples" in answer.json["error"]
    assert kvbench(*arguments, "--method", INERT, "--budget", "100%").code == 0  # there it is no lie


@pytest.mark.few
@pytest.mark.parametrize(("kind", "error"), [
    ("memory", "MemoryError: out of memory (toy.py, line 102)"), ("bug", "ValueError: a bug (toy.py, line 102)"),
])
def test_a_failed_sample_is_not_a_zero(kvbench, arguments, tmp_path, kind, error):
    """The run goes on, its mean is null, and the traceback is kept."""
    answer = kvbench(*arguments, "--method", LAST, "--set", "fails_at=1", "--set", f"kind={kind}")
    assert answer.code == 1
    result = answer.json
    assert (result["status"], result["n_scored"], result["n_failed"]) == ("failed", 3, 1)
    assert result["score"]["mean"] is None
    assert result["score"]["ci95"] is None
    assert 0 < result["score"]["partial_mean"] < 1
    assert "none: 1 of 4 samples failed (mean of the others " in " ".join(answer.out.split())
    assert result["scores"] == {}
    assert error in result["error"]
    lines = read_lines(only_run(tmp_path) / "samples.jsonl")
    assert [x.error for x in lines] == [None, error, None, None]
    assert "Traceback" in (only_run(tmp_path) / "errors.log").read_text()
    assert kvbench(*arguments, "--method", LAST, "--set", "fails_at=1", "--set", f"kind={kind}").code == 1


def test_a_lost_gpu_ends_the_run_and_the_same_command_continues(kvbench, arguments, tmp_path, monkeypatch):
    """The sample that lost it is not recorded as failed, nor are those after it."""
    monkeypatch.setattr("kvbench.runs.lines.is_device_lost", lambda: True)
    asked = (*arguments, "--method", LAST, "--set", "fails_at=1", "--set", "kind=bug")
    answer = kvbench(*asked)
    assert answer.code == 3
    assert "sample 1 of last raised ValueError, and this process cannot use the GPU any more." in answer.err
    assert [x.error for x in read_lines(only_run(tmp_path) / "samples.jsonl")] == [None]
    monkeypatch.undo()
    assert kvbench(*asked).json["n_failed"] == 1  # of the three that are left, the one that it is told


def test_every_sample_failing_is_a_result_too(kvbench, arguments, monkeypatch):
    """No bytes, no times, no division by zero."""
    monkeypatch.setattr("kvbench.runs.sample.Session", None)
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 1
    assert answer.json["n_failed"] == 4
    assert answer.json["memory"] is None
    assert "none: every sample failed" in answer.out
    assert answer.err.count("sample 0 failed: TypeError: ") == 1
    assert answer.err.count("3 more samples failed alike: TypeError: ") == 1
    assert answer.err.count("TypeError") == 2


def test_random_weights_have_no_score(kvbench, arguments, model_folder, tmp_path):
    """Memory and speed only."""
    arguments[arguments.index("--model") + 1] = f"random:{model_folder}"
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 0, answer.err
    assert answer.json["score"]["mean"] is None
    assert answer.json["scores"] == {}
    assert answer.json["memory"]["stored_bytes"] > 0
    assert "none: random weights" in answer.out
    again = kvbench("score", tmp_path / "runs" / answer.json["run_id"], "--task", f"{TOYS}:Toy")
    assert again.code == 2
    assert "used random weights, so its answers have no score." in again.err


@pytest.mark.few
@pytest.mark.parametrize("full_after", [0, 2])
def test_a_full_disk_ends_the_run_and_loses_nothing(kvbench, arguments, tmp_path, monkeypatch, full_after):
    """One clear line and exit code 1; with free space the run resumes and has all scores."""
    synced = 0

    def fsync(descriptor: int) -> None:
        nonlocal synced
        del descriptor
        synced += 1
        if synced > full_after:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvbench.runs.files.os.fsync", fsync)
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 1
    assert "No space left on device" in answer.err.splitlines()[-1]
    assert "Traceback" not in answer.err
    monkeypatch.undo()
    assert len(list((only_run(tmp_path)).glob(".*.part"))) == 0
    again = kvbench(*arguments, "--method", LAST)
    assert again.code == 0
    assert again.json["n_scored"] == 4
    assert len(scores(only_run(tmp_path))) == 4


def test_an_output_folder_that_nobody_may_see_is_refused(kvbench, arguments, tmp_path, monkeypatch):
    """In another user's folder, in one line."""
    there = Path.exists

    def exists(path):
        if path.name == "runs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return there(path)

    monkeypatch.setattr(Path, "exists", exists)
    monkeypatch.setattr("kvbench.runs.request.os.access", lambda path, _: Path(path) != tmp_path)
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 2
    assert f"output folder '{tmp_path / 'runs'}' is not writable. Give another --out." in answer.err


def test_two_processes_do_not_share_a_run(kvbench, arguments, tmp_path, monkeypatch):
    """The second is refused and does not touch the first."""
    from kvbench.runs.files import locked
    from kvbench.runs.runner import run

    def run_locked(job, progress):
        with locked(job.folder):
            return run(job, progress)

    monkeypatch.setattr("kvbench.runs.runner.run", run_locked)
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 2
    assert "another process is working on" in answer.err
    assert not (only_run(tmp_path) / "samples.jsonl").exists()


def test_a_file_system_without_locks_is_named(kvbench, arguments, monkeypatch):
    """In one line, as some file systems of clusters are mounted."""
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("kvbench.runs.files.fcntl.flock", flock)
    answer = kvbench(*arguments, "--method", LAST)
    assert answer.code == 2
    assert "cannot be locked against other processes: Function not implemented." in answer.err
    assert "Traceback" not in answer.err


def change_code(path: Path, **versions: str) -> None:
    """Rewrite the spec in a file of a run as if another harness and these packages had computed it."""
    document = json.loads(path.read_text())
    spec = document.get("spec", document)
    spec["sources"]["harness"] = "0" * 64
    spec["versions"] |= versions
    path.write_text(json.dumps(document))


def test_a_finished_run_of_other_code_is_reported_with_the_difference(kvbench, arguments, tmp_path):
    """The id is the same; one line names the parts that differ and how to run again."""
    first = kvbench(*arguments, "--method", LAST)
    change_code(only_run(tmp_path) / "result.json", torch="1.0")
    again = kvbench(*arguments, "--method", LAST)
    assert again.json["run_id"] == first.json["run_id"]
    (line,) = [x for x in again.err.splitlines() if "already finished" in x]
    assert "source of the harness; torch 1.0, now " in line
    assert "Delete the folder" in line


@pytest.mark.slow
def test_samples_of_other_code_are_not_continued(kvbench, arguments, tmp_path):
    """An unfinished journal is refused with the next step; a folder without samples is taken over."""
    kvbench(*arguments, "--method", LAST)
    folder = only_run(tmp_path)
    (folder / "result.json").unlink()
    change_code(folder / "spec.json")
    refused = kvbench(*arguments, "--method", LAST)
    assert refused.code == 2
    assert "source of the harness" in refused.err
    assert "--out" in refused.err
    (folder / "samples.jsonl").unlink()
    assert kvbench(*arguments, "--method", LAST).code == 0


def test_samples_of_unknown_code_are_not_continued(kvbench, arguments, tmp_path):
    """Without spec.json nothing says which code computed them."""
    kvbench(*arguments, "--method", LAST)
    folder = only_run(tmp_path)
    for name in ("result.json", "spec.json"):
        (folder / name).unlink()
    refused = kvbench(*arguments, "--method", LAST)
    assert refused.code == 2
    assert "holds samples without spec.json" in refused.err
    assert not (folder / "spec.json").exists()
    (folder / "samples.jsonl").unlink()
    assert kvbench(*arguments, "--method", LAST).code == 0


def test_samples_of_other_values_on_the_model_are_not_continued(kvbench, arguments, tmp_path):
    """A method that found another hash on the model than it did for the saved samples is refused, in one line.

    The line that shows a finished run says so, too.
    """
    found, code = tmp_path / "found", tmp_path / "bound.py"
    found.write_text("a" * 64)
    code.write_text(BOUND)
    method = "--method", f"{code}:Bound", "--set", f"file={found}"
    first = kvbench(*arguments, *method)
    assert first.json["spec"]["bound"] == {"found": "a" * 64}
    folder = only_run(tmp_path)
    found.write_text("b" * 64)
    shown = kvbench(*arguments, *method).err
    assert f"Its method had found other values on the model (found {'a' * 12}, now {'b' * 12})." in shown
    (folder / "result.json").unlink()
    refused = kvbench(*arguments, *method)
    assert refused.code == 2
    (line,) = [x for x in refused.err.splitlines() if "one result cannot mix them" in x]
    assert f"found {'a' * 12}, now {'b' * 12}" in line
    assert "--out" in line
    assert not (folder / "result.json").exists()
    found.write_text("a" * 64)
    assert kvbench(*arguments, *method).json["run_id"] == first.json["run_id"]


def test_weights_of_other_contents_are_another_run(kvbench, arguments, tmp_path):
    """The path of a file says nothing of its contents, so their hash is part of the run id. A run without has none."""
    arguments[arguments.index("--model") + 1] = "mini"
    part, ids = tmp_path / "part.safetensors", []
    shipped = SHIPPED / "reasoncache-mini.safetensors"
    weights = load_file(shipped)
    for scale in (1.0, 2.0):
        save_file({name: x * scale for name, x in weights.items()}, part, metadata=read_metadata(shipped))
        _HASHES.clear()  # as in a new process
        answer = kvbench(*arguments, "--method", "reasoncache", "--set", f"weights={part}")
        assert answer.json["spec"]["weights_sha256"] == answer.json["budget"]["resolved"]["part"]
        ids.append(answer.json["run_id"])
    assert len(set(ids)) == 2
    spec = read_file(tmp_path / "runs" / ids[0] / "spec.json", RunSpec)
    assert spec.model_copy(update={"weights_sha256": None}).run_id not in ids
    assert kvbench(*arguments, "--method", "reasoncache").json["spec"]["weights_sha256"] is None


def test_an_edited_file_is_a_new_run(kvbench, arguments, tmp_path):
    """A user's own file has no maintained version: its source is part of the run id. A registered method's is not."""
    file = tmp_path / "mine.py"
    file.write_text(TOYS.read_text())
    ids = []
    for _ in range(2):
        answer = kvbench(*arguments, "--method", f"{file}:Last")
        ids.append(answer.json["run_id"])
        assert answer.json["spec"]["method"]["code"] is not None
        file.write_text(file.read_text() + "\n# edited\n")
    assert len(set(ids)) == 2
    full = kvbench(*arguments, "--method", "full").json["spec"]
    assert full["method"]["code"] is None
    assert full["task"]["code"] is not None
