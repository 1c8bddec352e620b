"""Readers of public trace formats. A bad line is refused with its number and field."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, first_line, unknown
from kvbench.trace.requests import PrefixTree, Trace, TraceRequest

MOST_BYTES = 1 << 30
"""Bytes of an unpacked trace file that are read."""
TOKEN_BLOCK = 16
"""Tokens of a block where a trace has token ids."""


class _Line:
    """One record of a trace file, with checked fields."""

    def __init__(self, where: str, record: Mapping[str, Any]) -> None:
        self.where, self.record = where, record

    def number(self, name: str, *, least: float = 0.0) -> float:
        """A finite number.

        Raises:
            UserError: it is absent, no number, or too small.
        """
        value = self.record.get(name)
        try:
            if isinstance(value, bool) or value is None:
                raise ValueError
            found = float(value)
        except (TypeError, ValueError, OverflowError):
            raise UserError(f"{self.where}: {name} must be a number, got {_shown(value)}.") from None
        if not math.isfinite(found) or found < least:
            raise UserError(f"{self.where}: {name} must be {least:g} or more, got {_shown(value)}.")
        return found

    def count(self, name: str, *, least: int = 0) -> int:
        """A whole number from `least` on."""
        found = self.number(name, least=least)
        if found != int(found):
            raise UserError(f"{self.where}: {name} must be a whole number, got {_shown(self.record[name])}.")
        return int(found)

    def ids(self, name: str) -> list[int | str]:
        """A list of block or token ids."""
        value = self.record.get(name)
        if not isinstance(value, list) or not all(type(x) in (int, str) for x in value):
            raise UserError(f"{self.where}: {name} must be a list of ids, got {_shown(value)}.")
        return value

    def text(self, name: str) -> str | None:
        """A name, or None where there is none."""
        value = self.record.get(name)
        return None if value is None or value == "" else str(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def load(path: Path, kind: str | None = None) -> Trace:
    """Read a trace file.

    Args:
        path: plain or gzip.
        kind: a name of FORMATS; None: told from the first record.

    Raises:
        UserError: the file cannot be read, a line is broken (with its number and field), or times decrease.
    """
    if kind is not None and kind not in FORMATS:
        raise unknown("trace format", kind, FORMATS)
    data = _read(path)
    tree = PrefixTree()
    size, requests = FORMATS[kind or _recognize(path, data)](path, data, tree) if data.strip() else (None, [])
    if not requests:
        raise UserError(f"{path} holds no request. Give a trace in one of the formats {', '.join(FORMATS)}.")
    name = path.name.removesuffix(".gz").partition(".")[0].replace("_", "-")
    return Trace(name, tuple(requests), size, tuple(tree.parents))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"trace {path} cannot be read: {error}. Give the path of a trace file.") from error
    if len(data) > MOST_BYTES:
        raise UserError(f"trace {path} has more than {MOST_BYTES >> 30} GiB. Give a shorter one.")
    return data


def _recognize(path: Path, data: bytes) -> str:
    """The format of a file by its first record."""
    if data[257:262] == b"ustar":
        return "coding-agents"
    head = data[:65536].split(b"\n", 1)[0].decode("utf-8-sig", errors="replace")
    if head.startswith("TIMESTAMP,"):
        return "azure"
    if head.startswith("Timestamp,"):
        return "burstgpt"
    for kind, mark in (
        ("bailian", '"chat_id"'), ("mooncake", '"input_length"'), ("coding-agents", '"hash_id_scope"'),
        ("tokens", '"input_toks"'), ("tokens", '"tokens"'),
    ):
        if mark in head or (kind == "coding-agents" and mark.encode() in data[:4096]):
            return kind
    raise UserError(f"the format of {path} is not known. Say it with --format: {', '.join(FORMATS)}.")


def _json_lines(path: Path, data: bytes) -> Iterator[_Line]:
    for number, part in enumerate(data.split(b"\n"), 1):
        if not part.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = json.loads(part)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON ({first_line(error)}). Is the file cut off?") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: must be an object, got {_shown(record)}.")
        yield _Line(where, record)


def _csv_lines(path: Path, data: bytes) -> Iterator[_Line]:
    text = io.StringIO(data.decode("utf-8-sig", errors="replace"))
    try:
        for number, record in enumerate(csv.DictReader(text), 2):
            yield _Line(f"{path} line {number}", record)
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error}). Is it the right file?") from error


def _in_order(requests: Iterable[tuple[_Line, TraceRequest]]) -> list[TraceRequest]:
    """Requests with times from the first one on.

    Raises:
        UserError: a request is earlier than the one before it.
    """
    found: list[TraceRequest] = []
    start = before = 0.0
    for line, request in requests:
        if not found:
            start = before = request.time
        if request.time < before:
            raise UserError(
                f"{line.where}: its time {request.time:g} s is before the {before:g} s of the request above. "
                "Sort the trace."
            )
        before = request.time
        found.append(replace(request, time=request.time - start))
    return found


def read_mooncake(path: Path, data: bytes, tree: PrefixTree) -> tuple[int | None, list[TraceRequest]]:
    """Mooncake's JSON lines: timestamp (ms), input_length, output_length, hash_ids of 512-token blocks."""
    return 512, _in_order((line, TraceRequest(
        time=line.number("timestamp") / 1000, blocks=tree.add(line.ids("hash_ids")),
        input_tokens=line.count("input_length"), output_tokens=line.count("output_length"),
    )) for line in _json_lines(path, data))


def read_bailian(path: Path, data: bytes, tree: PrefixTree) -> tuple[int | None, list[TraceRequest]]:
    """Qwen-Bailian's JSON lines: chat_id, parent_chat_id, timestamp (s), lengths, type, hash_ids of 16-token blocks."""
    def read() -> Iterator[tuple[_Line, TraceRequest]]:
        roots: dict[str, str] = {}
        for line in _json_lines(path, data):
            chat, parent = line.text("chat_id") or "", line.text("parent_chat_id") or ""
            session = roots[chat] = roots.get(parent, chat)
            yield line, TraceRequest(
                time=line.number("timestamp"), blocks=tree.add(line.ids("hash_ids")),
                input_tokens=line.count("input_length"), output_tokens=line.count("output_length"),
                session=session,
            )
    return 16, _in_order(read())


def read_burstgpt(path: Path, data: bytes, tree: PrefixTree) -> tuple[int | None, list[TraceRequest]]:
    """BurstGPT's CSV: Timestamp (s), Session ID, Model, Request tokens, Response tokens. Lengths only."""
    del tree
    return None, _in_order((line, TraceRequest(
        time=line.number("Timestamp"), blocks=(), input_tokens=line.count("Request tokens"),
        output_tokens=line.count("Response tokens"), session=line.text("Session ID"),
    )) for line in _csv_lines(path, data))


def read_azure(path: Path, data: bytes, tree: PrefixTree) -> tuple[int | None, list[TraceRequest]]:
    """Azure 2023's CSV: TIMESTAMP, ContextTokens, GeneratedTokens. Lengths only."""
    del tree

    def moment(line: _Line) -> float:
        text = line.text("TIMESTAMP") or ""
        try:
            found = datetime.fromisoformat(text)
            return (found.replace(tzinfo=UTC) if found.tzinfo is None else found).timestamp()
        except ValueError:
            raise UserError(f"{line.where}: TIMESTAMP must be a date and time, got {_shown(text)}.") from None

    return None, _in_order((line, TraceRequest(
        time=moment(line), blocks=(), input_tokens=line.count("ContextTokens"),
        output_tokens=line.count("GeneratedTokens"),
    )) for line in _csv_lines(path, data))


def read_tokens(path: Path, data: bytes, tree: PrefixTree) -> tuple[int | None, list[TraceRequest]]:
    """JSON lines with token ids: `tokens` or `input_tok_ids`; whole blocks of 16 tokens are shared by prefix."""
    def read() -> Iterator[tuple[_Line, TraceRequest]]:
        for line in _json_lines(path, data):
            name = "input_tok_ids" if "input_tok_ids" in line.record else "tokens"
            ids = line.ids(name)
            whole = [tuple(ids[i : i + TOKEN_BLOCK]) for i in range(0, len(ids) - TOKEN_BLOCK + 1, TOKEN_BLOCK)]
            if "arrival_time_ns" in line.record:
                time = line.number("arrival_time_ns") / 1e9
            else:
                time = line.number("time") if "time" in line.record else 0.0
            out = next((x for x in ("output_toks", "output_tokens") if x in line.record), None)
            yield line, TraceRequest(
                time=time, blocks=tree.add(whole), input_tokens=len(ids),
                output_tokens=0 if out is None else line.count(out), session=line.text("session"),
                user=line.text("user"),
            )
    return TOKEN_BLOCK, _in_order(read())


def read_coding_agents(path: Path, data: bytes, tree: PrefixTree) -> tuple[int | None, list[TraceRequest]]:
    """callanjfox/kv-cache-tester: one JSON file a session (or a tar of them), 64-token ids local to the session."""
    found: list[tuple[_Line, TraceRequest]] = []
    sizes: set[int] = set()
    for name, text in _members(path, data):
        where = f"{path}" if name is None else f"{path} {name}"
        try:
            session = json.loads(text)
            turns, session_id = session["requests"], str(session["id"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{where}: no session of kv-cache-tester ({error!r}).") from None
        sizes.add(_Line(where, session).count("block_size", least=1))
        if not isinstance(turns, list) or not all(isinstance(x, dict) for x in turns):
            raise UserError(f"{where}: requests must be a list of objects, got {_shown(turns)}.")
        lines = [_Line(f"{where} request {i}", x) for i, x in enumerate(turns)]
        for line, later in zip(lines, [*lines[1:], None], strict=True):
            record, is_tool = line.record, line.record.get("stop") == "tool_use"
            waits = is_tool and later is not None and later.record.get("think_time") is not None
            found.append((line, TraceRequest(
                time=line.number("t"), blocks=tree.add([(session_id, x) for x in line.ids("hash_ids")]),
                input_tokens=line.count("in"), output_tokens=line.count("out"), session=session_id,
                tool="tool" if is_tool else None,
                tool_seconds=later.number("think_time") if waits and later is not None else None,
                seconds=line.number("api_time") if record.get("api_time") is not None else None,
            )))
    if len(sizes) > 1:
        raise UserError(f"{path}: sessions have blocks of {sorted(sizes)} tokens. Give sessions of one size.")
    found.sort(key=lambda x: x[1].time)
    return next(iter(sizes), None), _in_order(found)


def _members(path: Path, data: bytes) -> Iterator[tuple[str | None, bytes]]:
    if data[257:262] != b"ustar":
        yield None, data
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in sorted((x for x in tar if x.isfile()), key=lambda x: x.name):
                file = tar.extractfile(member)
                yield member.name, b"" if file is None else file.read()
    except tarfile.TarError as error:
        raise UserError(f"{path} is not a readable tar: {error}.") from error


Reader = Callable[[Path, bytes, PrefixTree], tuple[int | None, list[TraceRequest]]]
FORMATS: dict[str, Reader] = {
    "mooncake": read_mooncake, "bailian": read_bailian, "burstgpt": read_burstgpt, "azure": read_azure,
    "tokens": read_tokens, "coding-agents": read_coding_agents,
}
