"""Records of a data set, read from the hub at a pinned commit or from a local copy.

A local copy is a folder as `hf download` leaves it, or one file (.parquet, .jsonl, .json).
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvbench.errors import UserError, first_line
from kvbench.machine import load_extra

Record = Mapping[str, Any]
Columns = Mapping[str, type | tuple[type, ...]]
"""Column names and their types."""
SUFFIXES = (".parquet", ".jsonl", ".json")
SPLITS = {"train", "validation", "dev", "test"}
"""Names of splits. A file named after another split is never read."""
SHARD = re.compile(r"-\d{5}-of-\d{5}$")
BLOCK = 2**20
SURROGATE = re.compile(rb"\\u[dD]")
COMMIT = re.compile(r"[0-9a-f]{40}")


class Records(Protocol):
    """Records by index, read when they are accessed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Record: ...


@dataclass(frozen=True)
class Source:
    """Records, the name of their source, and the commit or hash that identifies their content."""

    records: Records
    name: str
    revision: str


@functools.cache
def open_hub(hub: str, revision: str, config: str | None, split: str) -> Source:
    """Open the data at the pinned commit, from the hub or from its local cache.

    Raises:
        UserError: the package `datasets` is missing, or the hub cannot be reached or lacks the data.
    """
    name = hub if config is None else f"{hub} {config}"
    load = load_extra("datasets", extra="data", what=f"data set {name}").load_dataset
    try:
        return Source(load(hub, config, split=split, revision=revision), name, revision)
    except Exception as error:  # the hub's clients raise many kinds
        raise UserError(
            f"data set {name} at {revision[:12]} cannot be fetched from the hub ({first_line(error)}). On a machine "
            f"with network access, run: hf download {hub} --repo-type dataset --revision {revision} --local-dir DIR. "
            "Then give --task-set data=DIR."
        ) from error


@functools.cache
def open_copy(data: str, hub: str, revision: str, config: str | None, split: str) -> Source:
    """Open the data in a local folder or file.

    Raises:
        UserError: the path does not exist or cannot be read, or has another commit or lacks this part of the data.
    """
    place = Path(data).expanduser().absolute()  # links are not resolved: in the hub's cache they lead to hashed names
    if not place.exists():
        raise UserError(f"data '{data}' does not exist. Give a local copy of {hub}, or leave data out for the hub.")
    named = place.name if place.is_dir() and COMMIT.fullmatch(place.name) else None
    if named not in (None, revision):
        raise UserError(f"data '{data}' is commit {named}, but {hub} is pinned at {revision}. Download that one.")
    files = find_files(place, config, split) if place.is_dir() else [place]
    if files[0].suffix not in SUFFIXES or len({x.suffix for x in files}) > 1:
        raise UserError(f"data '{data}' is {_list(files, place)}: give files of one kind, {', '.join(SUFFIXES)}.")
    try:
        total = hashlib.sha256()
        for path in files:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    total.update(block)
        records = _read(files)
    except (OSError, ValueError, RecursionError) as error:  # pyarrow's errors derive from the first two
        raise UserError(f"data '{data}' cannot be read: {first_line(error)}. Download it again.") from error
    if not len(records):
        raise UserError(f"data '{data}' has no records in {_list(files, place)}. Download it again.")
    return Source(records, data, named or f"sha256:{total.hexdigest()}")


def find_files(folder: Path, config: str | None, split: str) -> list[Path]:
    """Find the files of a config and split by the hub's conventions for file and folder names.

    A file belongs to a config or split if a folder, its whole stem or a part of its stem between hyphens has that name:
    `scbench_kv/test-00000-of-00001.parquet` and `scbench_kv.jsonl` both belong to `scbench_kv`. If there is no config,
    or the folder is named after it, a single file may have any name.

    Raises:
        UserError: no file matches.
    """
    files = sorted(
        x for x in folder.rglob("*")
        if x.suffix in SUFFIXES and not any(y.startswith(".") for y in x.relative_to(folder).parts)
    )

    def words(path: Path) -> set[str]:
        stem = SHARD.sub("", path.stem)
        return {*path.relative_to(folder).parts[:-1], stem, *stem.split("-")}

    named = {x: words(x) for x in files if not words(x) & SPLITS - {split}}
    part = {config} - {None, folder.name}
    for wanted in (part | {split}, part):
        found = [x for x, said in named.items() if wanted <= said]
        if found and (wanted or len(found) == 1):
            return found
    what = f"split {split}" if config is None else f"{config}, split {split}"
    raise UserError(
        f"data folder '{folder}' has no file of {what}; it has {_list(files, folder)}. Give the file itself, "
        "--task-set data=FILE, or download the data again."
    )


def _read(files: Sequence[Path]) -> Records:
    if files[0].suffix == ".parquet":
        parquet = load_extra("pyarrow.parquet", extra="data", what=f"data file {files[0].name}")
        return ArrowRecords(parquet.read_table(files, memory_map=True, partitioning=None))
    if files[0].suffix == ".jsonl":
        return JsonLines([x for path in files for x in path.read_bytes().splitlines() if x.strip()])
    found = [parse(x.read_bytes()) for x in files]
    if not all(isinstance(x, list) for x in found):
        raise ValueError("a .json file must hold one list of records")
    return [record for records in found for record in records]


def parse(text: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, or holds half of a surrogate pair, which cannot be encoded.
    """
    found = json.loads(text)
    if SURROGATE.search(text):
        json.dumps(found, ensure_ascii=False).encode()
    return found


@dataclass(frozen=True)
class JsonLines:
    """Records of JSON lines."""

    lines: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Record:
        found: Record = parse(self.lines[index])
        return found


@dataclass(frozen=True)
class ArrowRecords:
    """Records of a pyarrow table, memory-mapped from its files."""

    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> Record:
        found: Record = self.table.slice(index, 1).to_pylist()[0]
        return found


def _list(files: Sequence[Path], folder: Path) -> str:
    """The names of the first files, for an error message."""
    names = [str(x.relative_to(folder)) if x != folder else x.name for x in files[:5]]
    return ", ".join(names + ["..."] * (len(files) > len(names))) or "no .parquet, .jsonl or .json file"


def check_columns(record: object, columns: Columns, where: str, hint: str) -> None:
    """Check that a record has these columns with values of these types.

    where: the record's place in its source, for the error.

    Raises:
        UserError: a column is missing or of another type; names the place, the columns needed and those found.
    """
    if not isinstance(record, Mapping):
        raise UserError(f"{where} is {type(record).__name__}, not an object. {hint}")
    kinds = {name: kind if isinstance(kind, tuple) else (kind,) for name, kind in columns.items()}
    wanted = {name: " or ".join(x.__name__ for x in kind) for name, kind in kinds.items()}
    if missing := ", ".join(name for name in columns if name not in record):
        needs = ", ".join(f"{name} ({kind})" for name, kind in wanted.items())
        has = ", ".join(list(record)[:20]) or "none"
        raise UserError(f"{where} has no column {missing}; it has {has}, and needs {needs}. {hint}")
    for name, kind in columns.items():
        if not isinstance(record[name], kind) or (isinstance(record[name], bool) and bool not in kinds[name]):
            raise UserError(f"{where}: column {name} is {type(record[name]).__name__}, not {wanted[name]}. {hint}")
