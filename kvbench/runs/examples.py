"""The examples of a run with their token ids. Generated examples are cached on disk for other runs.

A cache file is named by a hash of everything that the example depends on, code included, and holds a hash of its
content: a damaged file counts as absent. Several processes may write the same file.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from kvbench.errors import UserError
from kvbench.machine import cache_folder, find_version
from kvbench.task import Encoded, Example, Split, Task, encode

if TYPE_CHECKING:
    from kvbench.runs.job import Job

Made = tuple[Example, Encoded]
FORM: TypeAdapter[Made] = TypeAdapter(Made)
PACKAGES = ("tokenizers", "wonderwords")
"""Packages that prompts depend on, in addition to those in the spec."""
DAYS = 30
"""Cached examples older than this are removed when a new folder is written."""


def make_examples(job: Job, wanted: Collection[int]) -> Iterator[tuple[int, Example, Encoded]]:
    """Yield the wanted examples of a run by index, in order, with their contexts cut into parts if the run asks for it.

    Raises:
        UserError: the data set has fewer examples.
    """
    for index, example, encoded in _make_whole(job, wanted):
        yield index, example, encoded if job.spec.parts is None else cut_parts(encoded, job.spec.parts)


def cut_parts(encoded: Encoded, size: int) -> Encoded:
    """The same tokens in parts: the first, then `size` each, which two earlier prompts had in other orders."""
    ids = encoded.context
    first, *parts = (ids[:1], *(ids[i : i + size] for i in range(1, len(ids), size)))
    turned, moved = (first, *parts[::-1]), (first, *parts[1:], *parts[:1])
    return replace(encoded, parts=(first, *parts), earlier=(turned, moved))


def _make_whole(job: Job, wanted: Collection[int]) -> Iterator[tuple[int, Example, Encoded]]:
    spec, task, tokenizer = job.spec, job.task, job.model.tokenizer
    split, length = Split(spec.split), spec.task.length
    if type(task).examples is Task.examples:
        key = _key(job)
        for index in sorted(wanted):
            made = _read(key, index)
            if made is None:
                example = task.generate(
                    index, seed=spec.seed, split=split, length=length, turns=spec.turns, tokenizer=tokenizer
                )
                made = example, encode(task, example, tokenizer, job.frame)
                _write(key, index, made)
            yield index, *made
        return
    left = set(wanted)
    found = task.examples(
        seed=spec.seed, split=split, n=spec.samples, length=length, turns=spec.turns, mode=spec.mode,
        tokenizer=tokenizer,
    )
    number = 0
    for index, example in enumerate(found):
        number += 1
        if index in left:
            left.remove(index)
            yield index, example, encode(task, example, tokenizer, job.frame)
        if not left:
            return
    raise UserError(f"{task.name} has {number} examples, not {spec.samples}. Use --samples {number} or fewer.")


def _key(job: Job) -> str:
    """Hash of everything that an example and its ids depend on, except its index."""
    parts = job.spec.model_dump(mode="json", include={
        "task": True, "split": True, "seed": True, "turns": True, "versions": True,
        "model": {"tokenizer_sha256"}, "sources": {"task", "harness"},
    })
    del parts["task"]["scorer"], parts["task"]["stop"]
    packages = {name: find_version(name) for name in PACKAGES}
    whole = [parts, asdict(job.frame), job.model.tokenizer.chat_template, platform.python_version(), packages]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def _folder() -> Path:
    return cache_folder() / "examples"


def _read(key: str, index: int) -> Made | None:
    try:
        seal, _, content = gzip.decompress((_folder() / key / f"{index}.json.gz").read_bytes()).partition(b"\n")
        return FORM.validate_json(content) if seal == _seal(key, index, content) else None
    except (OSError, EOFError, zlib.error, ValueError):
        return None


def _write(key: str, index: int, made: Made) -> None:
    """Cache an example if it can be read back unchanged. If the cache is not writable, it is generated again later."""
    folder = _folder() / key
    with contextlib.suppress(OSError, ValueError):
        content = FORM.dump_json(made)
        if FORM.validate_json(content) != made:
            return
        if not folder.exists():
            _clean()
            folder.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(gzip.compress(_seal(key, index, content) + b"\n" + content, 1))
            Path(part).replace(folder / f"{index}.json.gz")
        except OSError:
            Path(part).unlink()
            raise


def _clean() -> None:
    oldest = time.time() - DAYS * 24 * 3600
    for folder in _folder().glob("*"):
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)


def _seal(key: str, index: int, content: bytes) -> bytes:
    return hashlib.sha256(f"{key}/{index}\n".encode() + content).hexdigest().encode()
