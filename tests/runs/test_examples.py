"""Cached examples equal generated ones, and no content of the cache can change a run."""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.registry import list_entries
from kvbench.runs.examples import make_examples
from kvbench.runs.files import read_lines
from kvbench.runs.job import Job
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.runner import run
from kvbench.task import Example, Task, Turn, encode
from kvbench.text import tokens

TOY = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Toy"
GENERATED = [
    entry.name for entry in list_entries("task")
    if entry.load().examples is Task.examples and "file" not in entry.facts.get("needs", "")
]
SMALL = {"needle-grid": ("lengths=1", "depths=2")}
"""Settings under which few samples suffice."""


@pytest.fixture(scope="session")
def mini():
    """The bundled model."""
    return load_model("mini")


@pytest.fixture
def toy(model_folder, tmp_path) -> Callable[..., Job]:
    """A job of the toy task."""
    return lambda **options: prepare(Request(**{
        "method": "full", "task": TOY, "model": str(model_folder), "samples": 3, "out": tmp_path / "runs",
        "device": "cpu", **options,
    }))


def kept(cache: Path) -> dict[str, bytes]:
    """The files of the cache."""
    return {str(x.relative_to(cache)): x.read_bytes() for x in cache.rglob("*.json.gz")}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", GENERATED)
def test_a_kept_example_is_the_example(name, mini, cache, monkeypatch, tmp_path):
    """For every generated task: fresh, cached and reloaded examples are equal, facts and token ids included."""
    job = prepare(Request(
        method="full", task=name, model="mini", length=2048, samples=2, task_settings=SMALL.get(name, ()), out=tmp_path,
    ), mini)
    first = list(make_examples(job, range(2)))
    assert [x[2] for x in first] == [encode(job.task, x[1], mini.tokenizer) for x in first]
    assert len(kept(cache)) == 2
    monkeypatch.setattr(type(job.task), "generate", None)
    assert list(make_examples(job, range(2))) == first


def test_what_changes_an_example_is_another_file(toy, cache, monkeypatch):
    """Another seed, split, length, number of turns or setting does not find earlier examples; another scorer does."""
    job = toy()
    list(make_examples(job, [0]))
    spec = job.spec
    for change in (
        {"seed": 1}, {"split": "dev"}, {"turns": 2}, {"task": spec.task.model_copy(update={"length": 61})},
        {"task": spec.task.model_copy(update={"settings": {"word": "sea"}})},
        {"task": spec.task.model_copy(update={"prompt_id": "other"})},
        {"sources": spec.sources.model_copy(update={"task": "other"})},
        {"sources": spec.sources.model_copy(update={"harness": "other"})},
        {"model": spec.model.model_copy(update={"tokenizer_sha256": "other"})},
        {"versions": spec.versions.model_copy(update={"transformers": "other"})},
    ):
        before = len(kept(cache))
        list(make_examples(replace(job, spec=spec.model_copy(update=change)), [0]))
        assert len(kept(cache)) == before + 1, change
    before = len(kept(cache))
    list(make_examples(replace(job, frame=replace(job.frame, head="x")), [0]))
    tokenizer = copy.deepcopy(job.model.tokenizer)
    tokenizer.chat_template = "other"
    list(make_examples(replace(job, model=replace(job.model, tokenizer=tokenizer)), [0]))
    assert len(kept(cache)) == before + 2
    same = spec.task.model_copy(update={"scorer": "other", "stop": (1,)})
    list(make_examples(replace(job, spec=spec.model_copy(update={"task": same})), [0]))
    assert len(kept(cache)) == before + 2
    for place in ("platform.python_version", "find_version"):
        with monkeypatch.context() as patch:
            patch.setattr(f"kvbench.runs.examples.{place}", lambda *_: "other")
            list(make_examples(job, [0]))
    assert len(kept(cache)) == before + 4


@pytest.mark.slow
def test_what_changes_no_example_is_the_same_file(toy, cache):
    """Methods, budgets and modes share examples."""
    options = {"mode": "multi-turn"}, {"mode": "multi-request"}, {"mode": "multi-turn", "method": "streaming-llm"}
    for changed in options:
        run(toy(**changed))
    assert len(kept(cache)) == 3


def test_a_changed_source_of_the_task_is_another_file(toy, cache, tmp_path):
    """Examples of other code are not used."""
    path = tmp_path / "mine.py"
    path.write_text(Path(TOY.rpartition(":")[0]).read_text())
    (_, before, _), = make_examples(toy(task=f"{path}:Toy"), [0])
    path.write_text(path.read_text().replace("abcdefgh ", "ijklmnop "))
    (_, after, _), = make_examples(toy(task=f"{path}:Toy"), [0])
    assert not set(before.context) & set(after.context) - {" "}
    assert len(kept(cache)) == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("harm", ["cut", "flipped", "empty", "text", "folder", "foreign", "other number"])
def test_a_broken_or_foreign_file_is_made_again(harm, toy, cache):
    """Damaged files are ignored and replaced."""
    job = toy()
    expected = list(make_examples(job, range(2)))
    files = kept(cache)
    (name, good), (second, other) = sorted(files.items())
    path = cache / name
    if harm == "folder":
        path.unlink()
        path.mkdir()
    elif harm == "foreign":  # whole, but of another seed
        list(make_examples(replace(job, spec=job.spec.model_copy(update={"seed": 1})), [0]))
        (foreign,) = kept(cache).keys() - files.keys()
        shutil.copy(cache / foreign, path)
    else:
        path.write_bytes({
            "cut": good[:-9], "flipped": good[:40] + bytes([good[40] ^ 1]) + good[41:], "empty": b"",
            "text": b"not gzip", "other number": other,
        }[harm])
    assert list(make_examples(job, range(2))) == expected
    if harm != "folder":
        assert list(make_examples(job, range(2))) == expected
        assert kept(cache)[second] == other
        assert path.read_bytes()[10:] == good[10:]  # gzip's head has a time


def test_a_cache_that_cannot_be_written_costs_only_time(toy, cache):
    """The cache folder is a file."""
    (cache / "kvbench").mkdir(exist_ok=True)
    (cache / "kvbench" / "examples").write_text("")
    assert [x[0] for x in make_examples(toy(), range(3))] == [0, 1, 2]


def test_facts_that_json_does_not_hold_are_not_kept(toy, cache, monkeypatch):
    """A tuple would be read back as a list, so such an example is not cached."""
    job = toy()
    shutil.rmtree(cache / "kvbench" / "examples")
    make = type(job.task).example
    monkeypatch.setattr(type(job.task), "example", lambda *args, **kw: replace(make(*args, **kw), facts={"x": (1, 2)}))
    for _ in range(2):
        assert next(make_examples(job, [0]))[1].facts == {"x": (1, 2)}
    assert kept(cache) == {}


def _make(job: Job, results: multiprocessing.Queue) -> None:
    results.put([(i, e.context, ids.context) for _ in range(20) for i, e, ids in make_examples(job, range(8))][-8:])


def test_two_processes_make_the_same_examples_at_once(toy, cache):
    """Both read complete examples, and the files are complete."""
    job = toy(samples=8)
    shutil.rmtree(cache / "kvbench" / "examples")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_make, args=(job, results)) for _ in range(2)]
    for x in processes:
        x.start()
    found = [results.get(timeout=300) for _ in processes]
    for x in processes:
        x.join()
    assert found[0] == found[1] == [(i, e.context, ids.context) for i, e, ids in make_examples(job, range(8))]
    folder = next((cache / "kvbench" / "examples").iterdir())
    assert sorted(x.name for x in folder.iterdir()) == sorted(f"{i}.json.gz" for i in range(8))


def test_examples_of_long_ago_are_removed(toy, cache):
    """Only folders without a new file for a month, when another folder is written."""
    folders = [cache / "kvbench" / "examples" / x for x in ("old", "new")]
    for folder, days in zip(folders, (31, 29), strict=True):
        folder.mkdir(parents=True)
        stamp = time.time() - days * 24 * 3600
        os.utime(folder, (stamp, stamp))
    list(make_examples(toy(), [0]))
    assert [x.exists() for x in folders] == [False, True]


def test_a_resumed_run_makes_only_what_is_missing(toy, cache, monkeypatch):
    """Finished samples are not generated again."""
    job = toy(samples=5)
    folder = run(job).folder
    (folder / "result.json").unlink()
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[:3] + lines[4:]))
    shutil.rmtree(cache / "kvbench" / "examples")
    made, generate = [], Task.generate
    monkeypatch.setattr(Task, "generate", lambda self, index, **kw: made.append(index) or generate(self, index, **kw))
    run(job)
    assert made == [3]
    assert sorted(x.index for x in read_lines(folder / "samples.jsonl")) == [0, 1, 2, 3, 4]


def test_a_context_is_tokenized_once(model_folder):
    """The second call returns the cached ids."""
    tokenizer = load_model(str(model_folder)).tokenizer
    calls = []

    class Counting:
        def __call__(self, text, **options):
            calls.append(text)
            return tokenizer(text, **options)

    counting = Counting()
    for text in ("abc", "abd", "abc"):
        ids = tokens.tokenize(counting, text, special=False)
        assert ids == tuple(tokenizer(text, add_special_tokens=False).input_ids)
    assert calls == ["abc", "abd"]
    assert tokens.tokenize(counting, "", special=True) == ()


def test_what_is_kept_of_contexts_is_bounded(model_folder, monkeypatch):
    """By ids and by texts."""
    tokenizer = load_model(str(model_folder)).tokenizer
    for name, bound, left in (("KEPT_IDS", 10, 3), ("KEPT_TEXTS", 2, 2)):  # three ids for each of these texts
        monkeypatch.setattr(tokens, name, bound)
        for i in range(10, 20):
            tokens.tokenize(tokenizer, f"x{i}", special=False)
        assert [x.tolist() for x in tokens._kept[tokenizer].values()] == [
            tokenizer(f"x{i}").input_ids for i in range(20 - left, 20)
        ]
        monkeypatch.undo()


@dataclass(frozen=True)
class Rows(Task):
    """Three records."""

    name: ClassVar[str] = "rows"
    prompt_id: ClassVar[str] = "rows@1"

    def minimum_length(self, turns, tokenizer):
        return 1

    def examples(self, *, n, **_):
        turn = Turn("?", "", " a", ("a",), 1)
        return iter([Example(str(i), f"row {i}", (turn,)) for i in range(3)][:n])


def test_a_data_set_gives_what_is_wanted_of_it(toy, cache):
    """Its examples are not cached; more samples than records are refused with the number."""
    job = replace(toy(), task=Rows())
    shutil.rmtree(cache / "kvbench" / "examples")
    assert [(i, x.context, ids.context[-1]) for i, x, ids in make_examples(job, {2, 0})] == [
        (0, "row 0", 16), (2, "row 2", 18),  # a byte is a token, and its number counts printable characters
    ]
    assert kept(cache) == {}
    assert list(make_examples(job, [])) == []
    with pytest.raises(UserError, match=r"rows has 3 examples, not 5\. Use --samples 3 or fewer\."):
        list(make_examples(replace(job, spec=job.spec.model_copy(update={"samples": 5})), range(5)))
