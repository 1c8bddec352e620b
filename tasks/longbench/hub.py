"""Single files of a hub repository, for data sets that `datasets` cannot load without running their code.

LongBench (1 and 2) and InfiniteBench are pinned at the commits that several public repositories name. The commits were
not checked against the hub, which could not be reached when this was written.
"""

from __future__ import annotations

import functools
import zipfile
from dataclasses import replace
from pathlib import Path

from kvbench.errors import UserError, first_line
from kvbench.tasks.records import JsonLines, Source, open_copy


@functools.cache
def open_file(hub: str, revision: str, file: str) -> Source:
    """Open the records of one file.

    Raises:
        UserError: the file cannot be fetched or read.
    """
    path = _fetch(hub, revision, file)
    return replace(open_copy(str(path), hub, revision, None, ""), name=f"{hub} {file}", revision=revision)


@functools.cache
def open_archive(hub: str, revision: str, member: str) -> Source:
    """Open the records of a JSONL file inside `data.zip`.

    Raises:
        UserError: the archive cannot be fetched or read, or lacks the member.
    """
    path = _fetch(hub, revision, "data.zip", then="unpack data.zip, and ")
    try:
        with zipfile.ZipFile(path) as archive:
            lines = archive.read(member).splitlines()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} of {hub} cannot be read: {first_line(error)}. Remove it and try again.") from error
    return Source(JsonLines(lines), f"{hub} {member}", revision)


def _fetch(hub: str, revision: str, file: str, then: str = "") -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(hub, file, repo_type="dataset", revision=revision))
    except Exception as error:  # the hub's client raises many kinds
        raise UserError(
            f"{file} of {hub} at {revision[:12]} cannot be fetched from the hub ({first_line(error)}). On a machine "
            f"with network access, run: hf download {hub} {file} --repo-type dataset --revision {revision} "
            f"--local-dir DIR, {then}give --task-set data=DIR."
        ) from error
