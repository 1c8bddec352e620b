"""Seals: a verifier marks the records that it wrote with a key of its own, so that no others are believed.

The key is a secret of the machine, or of the variable KVBENCH_VERIFIER_KEY where several machines verify and publish.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from kvbench.leaderboard.submission.archive import read_regular
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import MANIFEST, VERIFICATION, Verification
from kvbench.registry import HERE
from kvbench.runs.files import saving

KEY = "KVBENCH_VERIFIER_KEY"  # the name of a variable
RESULTS = HERE.parent / "results"
CURATED = "CURATED"
"""File in RESULTS with the SHA-256 of each curated run's record, as sha256sum writes it; `make curated` writes it."""


def seal(record: Verification) -> Verification:
    """The record with this verifier's seal.

    Raises:
        SaveError: there is no key, and none can be written.
    """
    return record.model_copy(update={"seal": _compute(record, _read_key() or _make_key())})


def is_believed(record: Verification, folder: Path) -> bool:
    """Whether this verifier wrote the record, or it belongs to a curated run."""
    if is_curated(folder):
        return True
    key = _read_key()
    return record.seal is not None and key is not None and hmac.compare_digest(record.seal, _compute(record, key))


def is_curated(folder: Path) -> bool:
    """Whether a folder is a run of kvbench's own results: CURATED lists its record, and it has no manifest.

    The list is committed with the code and trusted like it.
    """
    path, results = folder.resolve() / VERIFICATION, RESULTS.resolve()
    if not path.is_relative_to(results) or os.path.lexists(folder / MANIFEST):
        return False
    stated = _read_curated(results / CURATED).get(path.relative_to(results).as_posix())
    try:
        return stated is not None and hashlib.sha256(read_regular(path)).hexdigest() == stated
    except RefusedError:
        return False


@functools.cache
def _read_curated(path: Path) -> dict[str, str]:
    """Hashes by place below the results; none where kvbench is installed without its results."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    return {place: digest for digest, _, place in (x.partition("  ") for x in lines)}


def _compute(record: Verification, key: bytes) -> str:
    """Fields at their defaults do not count, so that a later kvbench may add some."""
    text = record.model_dump_json(exclude={"seal"}, exclude_defaults=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _place() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "kvbench" / "verifier.key"


def _read_key() -> bytes | None:
    """The key; None: this machine has verified nothing yet."""
    if text := os.environ.get(KEY, "").strip():
        return text.encode()
    try:
        return _place().read_bytes()
    except OSError:
        return None


def _make_key() -> bytes:
    """Write a new key that only this user can read; if another process was faster, its key."""
    path = _place()
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        part.touch(mode=0o600)
        part.write_text(secrets.token_hex(32))
        try:
            os.link(part, path)  # atomic, and fails where a key exists
        except FileExistsError:
            pass
        finally:
            part.unlink()
    return path.read_bytes()
