"""Seals: a verifier marks the records that it wrote with a key of its own, so that no others are believed.

The key is a secret of the machine, or of the variable KVBENCH_VERIFIER_KEY where several machines verify and publish.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from kvbench.leaderboard.submission.records import MANIFEST, Verification
from kvbench.registry import HERE
from kvbench.runs.files import saving

KEY = "KVBENCH_VERIFIER_KEY"  # the name of a variable
RESULTS = HERE.parent / "results"
CURATED = frozenset({
    "cpu-2-cores", "cpu-2-cores-decode", "cpu-2-cores-diffusion", "cpu-2-cores-drafts", "cpu-2-cores-reuse",
    "cpu-2-cores-reuse-chunks", "mini-diffusion-prefix", "mini-hybrid", "qwen2.5-coder-1.5b", "smollm2-135m",
    "smollm2-135m-lossless", "smollm2-135m-reuse", "smollm2-135m-tasks", "smollm2-135m-text",
})
"""Folders of kvbench's own results, whose records are trusted like the code; others in RESULTS hold submissions."""


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
    """Whether a folder is a run of kvbench's own results: it lies in a folder of CURATED and has no manifest."""
    parent = folder.resolve().parent
    own = parent.parent == RESULTS.resolve() and parent.name in CURATED
    return own and folder.is_dir() and not os.path.lexists(folder / MANIFEST)


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
