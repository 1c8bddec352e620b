"""Packing and reading bundles; invalid folders and tars are refused in one line and write nothing."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile

import pytest

from kvbench.errors import UserError
from kvbench.leaderboard.submission import archive
from kvbench.leaderboard.submission import bundle as bundles
from kvbench.leaderboard.submission.archive import SCORES, find_bundles, read_files, write_tar
from kvbench.leaderboard.submission.bundle import open_bundle, pack_run
from kvbench.leaderboard.submission.deliver import put_in_folder
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import MANIFEST, RESULT, SAMPLES, SPEC

from .conftest import edit, edit_spec, repack


def refusal(act) -> str:
    """The one-line reason of a refusal."""
    with pytest.raises(RefusedError) as raised:
        act()
    reason = raised.value.check.reason
    assert reason.isascii() and "\n" not in reason
    return f"{raised.value.check.name}: {reason}"


@pytest.fixture
def folder(snapkv, tmp_path):
    """A bundle as a folder."""
    return put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)


@pytest.fixture
def tar(tmp_path):
    """Writes members to a tar."""

    def write(*members: tuple[tarfile.TarInfo | str, bytes]):
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w") as out:
            for name, data in members:
                member = tarfile.TarInfo(name) if isinstance(name, str) else name
                member.size = len(data)
                out.addfile(member, io.BytesIO(data))
        return path

    return write


@pytest.mark.slow
def test_folder_and_tar_give_the_same_bundle(snapkv, folder, tmp_path):
    path = tmp_path / "bundle.tar"
    with path.open("wb") as out:
        write_tar(snapkv.files, out)
    assert dict(read_files(folder)) == dict(read_files(path))
    assert open_bundle(read_files(path)).lines == snapkv.bundle.lines


def test_packing_twice_gives_the_same_content_hash(snapkv):
    first, other = pack_run(snapkv.folder, "ada", ()), pack_run(snapkv.folder, "bob", ("niah:dev",))
    assert open_bundle(first).content == open_bundle(other).content


@pytest.mark.parametrize("name", ["", "b\u00f6se", "\u0430da", "a/b", "..", "<b>", "a" * 65, "a\n"])
def test_invalid_submitter_names_are_user_errors(snapkv, name):
    with pytest.raises(UserError, match="--submitter"):
        pack_run(snapkv.folder, name, ())


def test_extra_files_in_a_folder_are_refused(folder):
    (folder / "setup.py").write_text("boom")
    assert refusal(lambda: read_files(folder)) == "files: 'setup.py' is not a file of a bundle"


def test_scoring_a_bundle_again_does_not_spoil_it(folder, kvbench):
    """The scores stand in a folder of their own, which is not read."""
    before = read_files(folder)
    assert kvbench("score", folder).code == 0
    assert (folder / SCORES).is_dir()
    assert read_files(folder) == before


def test_a_link_is_refused(folder, tmp_path):
    (tmp_path / "secret").write_bytes((folder / SPEC).read_bytes())
    (folder / SPEC).unlink()
    (folder / SPEC).symlink_to(tmp_path / "secret")
    assert refusal(lambda: read_files(folder)) == "files: spec.json is a link, or cannot be read"


def test_a_pipe_is_refused_without_reading(folder):
    (folder / SPEC).unlink()
    os.mkfifo(folder / SPEC)
    assert refusal(lambda: read_files(folder)) == "files: spec.json is not a regular file"


def test_links_to_folders_are_not_followed(folder, tmp_path):
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "link").symlink_to(folder)
    assert list(find_bundles(tmp_path / "repository")) == []


@pytest.mark.parametrize("name", [SPEC, SAMPLES, RESULT])
def test_the_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert refusal(lambda: read_files(folder)).endswith("is missing")


@pytest.mark.parametrize("name", ["../spec.json", "/etc/passwd", "a/spec.json", "spec.json/..", "SPEC.JSON", "a" * 300])
def test_unknown_names_in_a_tar_are_refused(tar, name):
    path = tar((name, b"{}"))
    before = sorted(path.parent.rglob("*"))
    assert "is not a file of a bundle" in refusal(lambda: read_files(path))
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_special_files_in_a_tar_are_refused(tar, kind):
    member = tarfile.TarInfo(SPEC)
    member.type, member.linkname = kind, "/etc/passwd"
    assert refusal(lambda: read_files(tar((member, b"")))) == "files: spec.json is not a regular file"


def test_repeated_names_in_a_tar_are_refused(tar):
    assert "occurs twice" in refusal(lambda: read_files(tar((SPEC, b"{}"), (SPEC, b"{}"))))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_a_tar_that_another_program_made_is_read(snapkv, tmp_path, form):
    """With times in fractions of a second, for which some write an extended header."""
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as out:
        for name, data in snapkv.files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5
            out.addfile(member, io.BytesIO(data))
    assert read_files(tmp_path / "x.tar") == snapkv.files


def test_nothing_in_an_extended_tar_header_is_read(tmp_path):
    """Thousands, of which each announces the next one, and a map of a sparse file."""
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": SPEC, "GNU.sparse.realsize": "9"}
    member = tarfile.TarInfo(SPEC)
    member.pax_headers = sparse
    (tmp_path / "x.tar").write_bytes(5000 * member.create_pax_global_header(sparse) + member.tobuf(tarfile.PAX_FORMAT))
    assert refusal(lambda: read_files(tmp_path / "x.tar")) == "files: manifest.json is missing"


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("size", [2**62, 2**80])
def test_an_extended_tar_header_of_an_impossible_size_is_refused(tmp_path, kind, size):
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, size
    (tmp_path / "huge.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT))
    assert refusal(lambda: read_files(tmp_path / "huge.tar")).startswith("files: not a readable tar: ")


def test_a_truncated_tar_member_is_refused(tar):
    path = tar((SPEC, b"{}"))
    data = bytearray(path.read_bytes())
    member = tarfile.TarInfo(SPEC)
    member.size = 10 << 30
    data[:512] = member.tobuf()
    path.write_bytes(data)
    assert refusal(lambda: read_files(path)).startswith("files: ")


def test_a_gzip_bomb_is_refused(snapkv, monkeypatch):
    monkeypatch.setitem(archive.MAX_BYTES, archive.JOURNAL, 1 << 20)
    files = repack(snapkv.files, {SAMPLES: gzip.compress(b"\n" * (64 << 20))})
    assert refusal(lambda: open_bundle(files)) == "files: samples.jsonl is larger than 1 MiB"


def test_a_large_file_is_refused(folder):
    with (folder / SPEC).open("r+b") as file:
        file.truncate(10 << 30)
    assert refusal(lambda: read_files(folder)) == "files: spec.json is larger than 1 MiB"


def test_a_manifest_with_wrong_hashes_is_refused(snapkv):
    files = snapkv.files
    changed = {**files, SPEC: files[SPEC].replace(b'"seed": 0', b'"seed": 1')}
    assert refusal(lambda: open_bundle(changed)) == (
        "manifest: the manifest does not match the files: 'spec.json' differs"
    )


@pytest.mark.parametrize(("name", "value"), [("samples", 10**9), ("turns", 10_000), ("samples", 0), ("samples", -4)])
def test_spec_limits_are_enforced(snapkv, name, value):
    files = edit_spec(snapkv.files, lambda x: x.update({name: value}))
    assert refusal(lambda: open_bundle(files)).startswith(f"schema: spec.json: {name} {value} is not between 1 and")


def test_repeated_missing_and_incomplete_lines_are_refused(snapkv):
    lines = gzip.decompress(snapkv.files[SAMPLES]).splitlines(keepends=True)

    def reason(some):
        return refusal(lambda: open_bundle(repack(snapkv.files, {SAMPLES: gzip.compress(b"".join(some))})))

    assert reason([*lines, lines[0]]).startswith("journal: sample 0 turn 0 occurs twice")
    assert reason(lines[1:]) == "journal: sample 0 is missing, or lacks some of its turns"
    assert reason([*lines[:-1], lines[-1][:-1]]).startswith("journal: its last line is incomplete")
    assert reason([*lines, b'{"schema_version": 2}\n']).startswith(
        f"schema: samples.jsonl line {len(lines) + 1}: 'sample': "
    )


@pytest.mark.parametrize("name", [SPEC, RESULT, MANIFEST])
def test_a_file_without_schema_version_is_refused(snapkv, name):
    """Commands that read the files of a run refuse it, too."""
    files = edit(snapkv.files, name, lambda x: x.pop("schema_version"))
    assert refusal(lambda: open_bundle(files)) == f"schema: {name}: no schema_version"


def test_lines_without_schema_version_are_refused(snapkv):
    """Comparisons skip such lines, and the answers of the others may be better."""
    lines = [json.loads(x) for x in gzip.decompress(snapkv.files[SAMPLES]).splitlines()]
    for x in lines:
        if x["score"] == 0:
            del x["schema_version"]
    journal = gzip.compress("".join(f"{json.dumps(x)}\n" for x in lines).encode())
    found = refusal(lambda: open_bundle(repack(snapkv.files, {SAMPLES: journal})))
    assert found.startswith("schema: samples.jsonl line ") and found.endswith(": no schema_version")


def test_too_many_lines_are_refused(snapkv, monkeypatch):
    monkeypatch.setattr(bundles, "MAX_LINES", 7)
    assert refusal(lambda: snapkv.bundle).startswith("journal: its last line is incomplete, or it has more than 7")


def test_a_long_line_is_refused_before_parsing(snapkv, monkeypatch):
    """Compressed it is small."""
    monkeypatch.setattr(bundles, "MAX_LINE_BYTES", 1 << 16)
    files = repack(snapkv.files, {SAMPLES: gzip.compress(b'{"x": [' + b"{}," * (1 << 16) + b"{}]}\n")})
    assert refusal(lambda: open_bundle(files)) == "journal: a line has 196,619 bytes; the limit is 65,536"


def test_negative_amounts_are_refused(snapkv):
    def below(_, line):
        return line.model_copy(update={"times": line.times.model_copy(update={"decode_s": -1.0})})

    files = snapkv.with_lines(below)
    assert refusal(lambda: open_bundle(files)) == "journal: sample 0 turn 0 has a negative amount, -1"


def test_submitted_values_are_quoted_short_and_in_ascii(snapkv):
    manifest = json.loads(snapkv.files[MANIFEST])
    manifest["files"]["\x1b[2J<script>" + "\u044f" * 999] = manifest["files"][SPEC]
    reason = refusal(lambda: open_bundle({**snapkv.files, MANIFEST: json.dumps(manifest).encode()}))
    assert "\\x1b[2J<script>\\u044f" in reason and len(reason) < 200


def test_curated_runs_are_read(snapkv, tmp_path):
    """A folder without a manifest is a run, compressed or not."""
    for name in (SPEC, RESULT):
        (tmp_path / name).write_bytes(snapkv.files[name])
    (tmp_path / SAMPLES).write_bytes(snapkv.files[SAMPLES])
    assert open_bundle(read_files(tmp_path)).submitter is None
    assert json.loads(read_files(snapkv.folder)[SPEC]) == json.loads(snapkv.files[SPEC])
