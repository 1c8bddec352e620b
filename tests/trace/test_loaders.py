"""Trace files: what is read, and the one line that a bad one gets."""

from __future__ import annotations

import contextlib
import gzip
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.trace.loaders import load
from kvbench.trace.sources import SOURCES, add_trace, find_folder, find_trace

GOOD = {"timestamp": 1000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}


def write(path, *records):
    """JSON lines."""
    path.write_text("".join(f"{json.dumps(x)}\n" for x in records))
    return path


@pytest.mark.parametrize(("change", "message"), [
    ({"timestamp": -1}, "line 2: timestamp must be 0 or more, got -1"),
    ({"timestamp": "x"}, "line 2: timestamp must be a number, got 'x'"),
    ({"timestamp": 0}, "line 2: its time 0 s is before the 1 s"),
    ({"input_length": 1.5}, "line 2: input_length must be a whole number, got 1.5"),
    ({"input_length": True}, "line 2: input_length must be a number, got True"),
    ({"hash_ids": "12"}, "line 2: hash_ids must be a list of ids, got '12'"),
    ({"hash_ids": [1, None]}, r"line 2: hash_ids must be a list of ids"),
])
def test_a_bad_line_is_refused_with_its_number_and_field(tmp_path, change, message):
    """The first bad value stops the file."""
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "t.jsonl", GOOD, {**GOOD, **change}))


def test_a_cut_line_is_refused(tmp_path):
    """Half a line is not JSON."""
    path = write(tmp_path / "t.jsonl", GOOD, GOOD)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match="line 2: not JSON"):
        load(path)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="this system has no tzset")
@pytest.mark.parametrize("stamps", [
    ("2024-05-10 00:00:00.500000+00:00", "2024-05-10 00:00:02+00:00", "2024-05-10 00:00:03.500000+00:00"),
    ("2023-11-05 01:59:58.5000000", "2023-11-05 02:00:00.0000000", "2023-11-05 02:00:01.5000000"),
])
def test_times_of_azure_do_not_depend_on_the_time_zone_of_the_machine(tmp_path, monkeypatch, stamps):
    """Neither with time zones, where whole seconds have no fraction, nor without, where local clocks are put back."""
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{x},1,2\n" for x in stamps))
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert [x.time for x in load(path).requests] == [0, 1.5, 3]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path):
    """Spreadsheets write one."""
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,10,5\n", encoding="utf-8-sig")
    assert load(path).requests[0].input_tokens == 10


@pytest.mark.parametrize(("text", "message"), [
    ("", "holds no request"), (" \n", "holds no request"), ("hello\n", "the format of .* is not known"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", "line 2: TIMESTAMP must be a date and time, got 'never'"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    (f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'1' * 200_000}\n", r"not CSV \(field larger than field limit"),
])
def test_foreign_files_are_refused(tmp_path, text, message):
    """A file is a trace or a wrong request."""
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load(path)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_trace_or_one_line(tmp_path_factory, data):
    """No bytes end in anything but a trace or a UserError."""
    path = tmp_path_factory.mktemp("any") / "t"
    path.write_bytes(b'{"input_length"' + data)
    with pytest.raises(UserError):
        load(path)


SESSION = {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": [
    {"t": 0, "in": 64, "out": 5, "hash_ids": [0], "stop": "tool_use"},
    {"t": 9, "in": 128, "out": 5, "hash_ids": [0, 1], "think_time": 2.5},
]}


@pytest.mark.parametrize(("change", "message"), [
    ({"requests": [5]}, r"t\.json: requests must be a list of objects, got \[5\]"),
    ({"requests": {}}, r"requests must be a list of objects, got \{\}"),
    ({"requests": {"t": 0}}, "requests must be a list of objects"),
    ({"requests": 5}, "requests must be a list of objects, got 5"),
    ({"requests": None}, "requests must be a list of objects, got None"),
    ({"requests": [SESSION["requests"][0], {**SESSION["requests"][1], "think_time": "soon"}]},
     r"t\.json request 1: think_time must be a number, got 'soon'"),
    ({"block_size": 0}, r"t\.json: block_size must be 1 or more, got 0"),
    ({"block_size": -64}, "block_size must be 1 or more"), ({"block_size": 1.5}, "block_size must be a whole number"),
    ({"block_size": None}, "block_size must be a number, got None"),
    ({"block_size": 10**400}, "block_size must be a number, got 1000"),
])
def test_a_bad_session_is_refused_with_its_field(tmp_path, change, message):
    """A session of kv-cache-tester: its fields, and those of its requests."""
    path = write(tmp_path / "t.json", SESSION)
    assert [x.tool_seconds for x in load(path).requests] == [2.5, None]
    with pytest.raises(UserError, match=message):
        load(write(path, {**SESSION, **change}))


def test_a_corrupt_gzip_is_refused(tmp_path):
    """Each byte of it broken in turn, as a trace and as a copy of a public one."""
    whole = gzip.compress(json.dumps(GOOD).encode())
    path = tmp_path / "mooncake_conversation.jsonl.gz"
    for place in range(2, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1:])
        for read in (load, lambda x: add_trace("mooncake-conversation", x.parent)):
            with contextlib.suppress(UserError):
                read(path)
    path.write_bytes(whole[:12] + b"\xff" + whole[13:])
    with pytest.raises(UserError, match=r"trace .* cannot be read: .* Give the path of a trace file"):
        load(path)
    with pytest.raises(UserError, match=r"cannot be unpacked: .* Fetch it again"):
        add_trace("mooncake-conversation", tmp_path)


def test_token_ids_share_whole_blocks_only(tmp_path):
    """Sixteen equal tokens are a shared block; fewer are none."""
    first, second = list(range(40)), [*range(35), 99]
    path = write(tmp_path / "t.jsonl", {"tokens": first, "time": 0}, {"tokens": second, "time": 1})
    trace = load(path)
    assert [len(x.blocks) for x in trace.requests] == [2, 2]
    assert trace.requests[0].blocks == trace.requests[1].blocks


def test_equal_ids_after_different_prefixes_are_different_blocks(tmp_path):
    """A block is its prefix, too."""
    trace = load(write(tmp_path / "t.jsonl", {**GOOD, "hash_ids": [1, 2]}, {**GOOD, "hash_ids": [3, 2]}))
    assert len(trace.parents) == 4


def test_bailian_conversations_have_one_session(tmp_path):
    """A turn whose parent is known belongs to its conversation."""
    turn = {"timestamp": 0.5, "input_length": 16, "output_length": 1, "type": "text", "hash_ids": [1]}
    path = write(tmp_path / "t.jsonl", {**turn, "chat_id": 7, "parent_chat_id": -1},
                 {**turn, "chat_id": 8, "parent_chat_id": 7}, {**turn, "chat_id": 9, "parent_chat_id": 8})
    assert {x.session for x in load(path).requests} == {"7"}


def test_a_copy_with_another_hash_is_not_added(tmp_path, monkeypatch):
    """Nothing is left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / "mooncake_conversation.jsonl.gz").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    with pytest.raises(UserError, match=r"has the hash .* is recorded\. Nothing was added"):
        add_trace("mooncake-conversation", folder)
    assert not find_folder().exists() or not list(find_folder().iterdir())
    with pytest.raises(UserError, match="Run `kvbench trace add mooncake-conversation` first"):
        find_trace("mooncake-conversation")


@pytest.mark.slow
def test_public_traces_are_added_and_whole(shared_traces, tmp_path, monkeypatch):
    """Every source has a copy with its recorded hash, and as many requests as it says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counts = {}
    for name in SOURCES:
        add_trace(name, shared_traces)
        counts[name] = len(find_trace(name).requests)
    assert counts["mooncake-conversation"] == 12_031 and counts["mooncake-synthetic"] == 3_993
    assert counts["azure-2023-conv"] == 19_366 and counts["azure-2023-code"] == 8_819
