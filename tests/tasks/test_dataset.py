"""Tasks that are data sets: records of the hub or of a local copy, contexts cut in the middle, and what is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import ClassVar

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Example, Mode, Scorer, Split, Turn, encode, prompt_tokens
from kvbench.tasks import records as sources
from kvbench.tasks.dataset import DatasetTask, cut_middle

REVISION = "283310bb8c5ba6909dd9a6b1be087d2937f76f6d"
OTHER = "0" * 40


@dataclass(frozen=True)
class Books(DatasetTask):
    """Asks for the color of a book."""

    name: ClassVar[str] = "books"
    version: ClassVar[str] = "1"
    suite: ClassVar[str] = "test"
    summary: ClassVar[str] = "the colour of a book"
    scorers: ClassVar[tuple[Scorer, ...]] = (Scorer("same@1", "same", lambda said, known: float(said == known[0])),)
    hub: ClassVar[str] = "people/Library"
    revision: ClassVar[str] = REVISION
    config: ClassVar[str | None] = "books"
    columns: ClassVar = {"context": str, "answers": list, "pages": (int, float)}
    prompt_id: ClassVar[str] = "books@1"

    def compose(self, record, *, mode, turns, frame):
        del mode, frame
        made = tuple(Turn("Which colour?", "", f" {x}", (x,), 5) for x in record["answers"][:turns])
        return Example("", record["context"], made, {"pages": record["pages"]})


def book(i: int = 0, **changes: object) -> dict[str, object]:
    return {"context": f"Book {i} is red.", "answers": ["red", "blue"], "pages": i} | changes


def write(path, *found: object):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(found)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(found))
    else:
        path.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in found))
    return path


def make(task: DatasetTask, tokenizer, **changes: object) -> list[Example]:
    asked = {"seed": 0, "split": Split.TEST, "n": 1, "length": 100, "turns": 2, "mode": Mode.MULTI_TURN}
    return list(task.examples(**asked | changes, tokenizer=tokenizer))


def refusal(task: DatasetTask, tokenizer, **changes: object) -> str:
    with pytest.raises(UserError) as caught:
        make(task, tokenizer, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["books.jsonl", "records.json", "x.parquet"])
def test_records_come_from_a_file(tmp_path, chars, name):
    """A file of each kind gives its records in order, named by their place, and the file's sha256 names the data."""
    path = write(tmp_path / name, book(0), book(1))
    task = Books(data=str(path))
    one, two = make(task, chars, n=2)
    assert (one.id, one.context, one.facts) == ("row-0", "Book 0 is red.", {"pages": 0, "cut_tokens": 0})
    assert (two.id, two.context, len(two.turns)) == ("row-1", "Book 1 is red.", 2)
    assert task.dataset_revision == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


@pytest.mark.parametrize(
    "files",
    [
        ["books.jsonl"],
        ["data/books.jsonl", "data/films.jsonl", "README.json"],
        ["books/test-00000-of-00001.parquet", "books/train-00000-of-00001.parquet"],
        ["data/books-test-00000-of-00001.parquet", "data/books-dev.parquet", "data/books_e.parquet"],
        ["books/test/0000.parquet", "books/train/0000.parquet", ".cache/books/test.parquet"],
    ],
)
def test_records_come_from_a_folder_as_the_hub_has_them(tmp_path, files):
    """The first of these files is the part and split that is asked for; others say other names."""
    for i, name in enumerate(files):
        write(tmp_path / name, book(i))
    assert Books(data=str(tmp_path)).record(0)["pages"] == 0


def test_a_lone_file_in_a_folder_of_the_parts_name(tmp_path):
    """A folder that is named after the part may hold it under any name."""
    write(tmp_path / "books" / "part.jsonl", book(3))
    assert Books(data=str(tmp_path / "books")).record(0)["pages"] == 3


def test_shards_are_read_in_order(tmp_path):
    """Two files of one split are one list, hashed together."""
    paths = [write(tmp_path / "books" / f"test-0000{i}-of-00002.parquet", book(i)) for i in range(2)]
    task = Books(data=str(tmp_path))
    assert [task.record(i)["pages"] for i in range(2)] == [0, 1]
    both = b"".join(x.read_bytes() for x in paths)
    assert task.dataset_revision == f"sha256:{hashlib.sha256(both).hexdigest()}"


def test_a_folder_without_the_part_is_refused(tmp_path, chars):
    """Another part or another split is never taken for the one that is asked for."""
    write(tmp_path / "films.jsonl", book())
    write(tmp_path / "books" / "train.jsonl", book())
    said = refusal(Books(data=str(tmp_path)), chars)
    assert "has no file of books, split test; it has books/train.jsonl, films.jsonl" in said


def test_a_file_of_two_kinds_is_refused(tmp_path, chars):
    """The same part as .parquet and .jsonl would be counted twice."""
    write(tmp_path / "books.jsonl", book())
    write(tmp_path / "books.parquet", book())
    assert "give files of one kind" in refusal(Books(data=str(tmp_path)), chars)


def test_a_snapshot_of_the_hub_has_its_commits_name(tmp_path, chars):
    """A folder named after the pinned commit is that commit; its files may be links to files without a suffix."""
    blob = write(tmp_path / "blobs" / "1234", book())
    link = tmp_path / "snapshots" / REVISION / "books.jsonl"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    task = Books(data=str(link.parent))
    assert (len(make(task, chars)), task.dataset_revision) == (1, REVISION)
    assert make(Books(data=str(link)), chars)[0].context == "Book 0 is red."


def test_a_snapshot_of_another_commit_is_refused(tmp_path, chars):
    """Both commits are named."""
    write(tmp_path / OTHER / "books.jsonl", book())
    said = refusal(Books(data=str(tmp_path / OTHER)), chars)
    assert f"is commit {OTHER}, but people/Library is pinned at {REVISION}" in said


def test_the_hub_is_asked_for_the_pinned_commit(monkeypatch, chars):
    """load_dataset gets the repository, its part, the split and the commit, and nothing else; once."""
    sources.open_hub.cache_clear()
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return datasets.Dataset.from_list([book(0), book(1)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = Books()
    assert [x.context for x in make(task, chars, n=2)] == ["Book 0 is red.", "Book 1 is red."]
    assert task.dataset_revision == REVISION
    assert asked == [(("people/Library", "books"), {"split": "test", "revision": REVISION})]
    sources.open_hub.cache_clear()


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch, chars):
    """The reason in one line, and what to do where there is no network."""

    def fail(*_, **__):
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    said = refusal(Books(), chars)
    assert "people/Library books at 283310bb8c5b cannot be fetched from the hub (no route to the hub)" in said
    assert f"hf download people/Library --repo-type dataset --revision {REVISION} --local-dir DIR" in said
    assert "--task-set data=DIR" in said


def test_a_missing_package_is_named(monkeypatch, chars):
    """Without `datasets` the error says how to install it."""
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert "pip install 'kvbench[data]'" in refusal(Books(), chars)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"context": "x", "pages": 1},
            "no column answers; it has context, pages, and needs context (str), answers (list), pages (int or float).",
        ),
        ({}, "has no column context, answers, pages; it has none"),
        (book(context=7), "record 0 of {data}: column context is int, not str."),
        (book(pages="7"), "column pages is str, not int or float."),
        (book(pages=True), "column pages is bool, not int or float."),
        (book(answers=None), "column answers is NoneType, not list."),
        (book(context=" \n"), "column context is empty."),
        ([1], "record 0 of {data} is list, not an object."),
    ],
)
def test_a_wrong_record_is_refused(tmp_path, chars, record, said):
    """By its number and file, with what is there and what the task reads."""
    path = write(tmp_path / "books.jsonl", record)
    found = refusal(Books(data=str(path)), chars)
    assert said.format(data=path) in found
    assert "Give books the data of people/Library, --task-set data=PATH, or leave data out for the hub." in found


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b"", "has no records in x.jsonl"),
        ("x.jsonl", b'{"context": \n', "record 0 of "),
        ("x.jsonl", b"[" * 100_000, "cannot be read"),
        ("x.jsonl", b'{"context": "half a character: \\ud83d"}', "surrogates not allowed"),
        ("x.json", b'{"context": "x"}', "must hold one list of records"),
        ("x.json", b"\xff\xfe", "cannot be read"),
        ("x.parquet", b"PAR1 no parquet", "cannot be read"),
        ("x.csv", b"context\n", "give files of one kind, .parquet, .jsonl, .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, chars, name, content, said):
    """Broken, empty or of another kind: one line, whatever it holds."""
    path = tmp_path / name
    path.write_bytes(content)
    found = refusal(Books(data=str(path)), chars)
    assert said in found
    assert ".. " not in found


def test_a_missing_path_is_refused(tmp_path, chars):
    """A path that is not there is not looked for on the hub."""
    assert "does not exist" in refusal(Books(data=str(tmp_path / "nothing")), chars)


def test_too_many_samples_are_refused(tmp_path, chars):
    """Before the first example, with the number of records."""
    path = write(tmp_path / "books.jsonl", book(0), book(1))
    assert refusal(Books(data=str(path)), chars, n=3) == "books has 2 records: use --samples 2 or fewer."


def test_dev_is_refused(tmp_path, chars):
    """A data set of one split is not what settings are chosen on."""
    path = write(tmp_path / "books.jsonl", book())
    assert "books has only a test split" in refusal(Books(data=str(path)), chars, split=Split.DEV)


def test_a_seed_is_an_order(tmp_path, chars):
    """Seed 0 is the file's order; another is a permutation of its own, and a longer request begins with a shorter."""
    path = write(tmp_path / "books.jsonl", *map(book, range(30)))
    task = Books(data=str(path))
    ids = {seed: [x.id for x in make(task, chars, n=30, seed=seed)] for seed in (0, 1, 2)}
    assert ids[0] == [f"row-{i}" for i in range(30)]
    assert ids[1] != ids[2] != ids[0] and sorted(ids[1]) == sorted(ids[2]) == sorted(ids[0])
    some = make(task, chars, n=5, seed=1)
    assert [x.id for x in some] == ids[1][:5]
    assert [x.context for x in some] == [f"Book {x.id[4:]} is red." for x in some]


def test_a_long_context_loses_its_middle(tmp_path, chars):
    """Both ends stay: of 40 characters 8 fit next to 1 + 13 of the question and 5 of the answer in a length of 27."""
    path = write(tmp_path / "books.jsonl", book(context="abcdefghijklmnopqrstuvwxyzabcdefghijKLMN"))
    (example,) = make(Books(data=str(path)), chars, length=27)
    assert (example.context, example.facts["cut_tokens"]) == ("abcdKLMN", 32)
    (example,) = make(Books(data=str(path)), chars, length=28)
    assert (example.context, example.facts["cut_tokens"]) == ("abcdeKLMN", 31)


def test_a_length_without_room_for_the_context_is_refused(tmp_path, chars):
    """The least length is that of one token of context."""
    path = write(tmp_path / "books.jsonl", book())
    task = Books(data=str(path))
    assert task.minimum_length(2, chars) == 1 + 13 + 5 + 1
    assert len(make(task, chars, length=20)[0].context) == 1
    assert "record 0 of books: the first question and 5 tokens of generation" in refusal(task, chars, length=19)


TEXT = st.text(st.sampled_from("abc é中文🙂\n ,.=XY"), max_size=80)


@settings(max_examples=200, deadline=None)
@given(text=TEXT, most=st.integers(0, 60))
def test_what_is_cut_fits_and_keeps_both_ends(mini_tokenizer, text, most):
    """The cut text never takes more tokens than allowed, and is untouched exactly where the whole one fits."""
    kept, cut = cut_middle(mini_tokenizer, text, most)
    ids = mini_tokenizer(text).input_ids
    assert len(mini_tokenizer(kept).input_ids) <= most
    if len(ids) <= most:
        assert (kept, cut) == (text, 0)
    elif kept:
        keep = len(ids) - cut
        first = (keep + 1) // 2
        last = keep - first
        assert cut > 0
        assert kept == mini_tokenizer.decode(ids[:first]) + mini_tokenizer.decode(ids[len(ids) - last :])


@settings(max_examples=60, deadline=None)
@given(words=st.integers(0, 300), length=st.integers(60, 400))
def test_the_first_prompt_and_its_generation_fit(tmp_path_factory, mini_tokenizer, words, length):
    """For all contexts and lengths, and the length is used up where something was cut."""
    path = write(tmp_path_factory.mktemp("data") / "books.jsonl", book(context="Start " + "pages of text " * words))
    task = Books(data=str(path))
    (example,) = make(task, mini_tokenizer, length=length)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + 5
    assert used <= length
    if example.facts["cut_tokens"]:
        assert used >= length - 3
