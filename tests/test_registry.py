"""Methods and tasks are found by folder, package and file; what is wrong is said in one line."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import Field

import kvbench.methods
import kvbench.tasks
from kvbench.errors import FEW, MOST, UserError
from kvbench.method import Method, resolved
from kvbench.registry import _find_registered, find_either, find_method, find_scorer, find_task, list_entries, list_ops
from kvbench.settings import configure, jsonable_settings, parse_pairs
from kvbench.task import Task

pytestmark = pytest.mark.usefixtures("cache")

ROOT = Path(__file__).parents[1]
TOYS = ROOT / "tests" / "toys" / "toy.py"
EXAMPLES = [ROOT / "examples" / x for x in ("my_method.py", "merging.py", "stateful_eviction.py")]
MINE = (ROOT / "examples" / "my_method.py").read_text(encoding="utf-8")


def defined(package, base, mark):
    """The classes that importing everything finds."""
    found = set()
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        found |= {
            x for x in vars(module).values()
            if isinstance(x, type) and issubclass(x, base) and x.__module__ == info.name and not inspect.isabstract(x)
            and mark in vars(x)
        }
    return found


@pytest.mark.parametrize(
    ("kind", "package", "base", "mark"),
    [("method", kvbench.methods, Method, "card"), ("task", kvbench.tasks, Task, "name")],
)
def test_parsing_finds_the_same_classes_as_importing(kind, package, base, mark):
    """Compared name by name."""
    entries = [x for x in list_entries(kind) if x.path is not None]
    assert {x.load() for x in entries} == defined(package, base, mark)
    for entry in entries:
        found = entry.load()
        assert entry.name == (found.card.name if kind == "method" else found.name)
        if kind == "method":
            assert entry.facts["budget"] == found.card.budget.value
            assert entry.facts["title"] == found.card.title


def test_the_stages_of_cards_mean_the_same_in_all_families():
    """Eviction while decoding is compression; of evictions, two compute later entries from what they left."""
    cards = [x.load().card for x in list_entries("method")] + [find_method(str(x)).card for x in EXAMPLES]
    for card in cards:
        assert set(card.stages) <= {"generation", "compression", "retrieval", "loading"}, card.name
        computes = card.family in ("prefill", "lossless", "reuse", "diffusion") or card.name in ("locret", "epicache")
        assert ("generation" in card.stages) is (computes and bool(card.stages)), card.name
        assert card.family != "reuse" or not card.stages or "loading" in card.stages, card.name


@pytest.mark.slow
def test_listing_imports_no_torch():
    """Listing names stays fast."""
    code = (
        "import sys; from kvbench.cli import call; [call(['list', x]) for x in ('methods', 'tasks', 'models')]; "
        "call(['run', '--method', 'snapkw', '--task', 'niah', '--model', '.']); "
        "call(['run', '--method', 'snapkv', '--task', 'niah', '--mode', 'x']); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("snapkw", r"unknown method 'snapkw'\. Did you mean 'snapkv'\? See `kvbench list methods`"),
        ("snapkv+", r"method 'snapkv\+' lacks a name beside its '\+'\. Write two"),
        ("+kivi", "lacks a name beside its"),
        ("missing.py", "method file 'missing.py' does not exist"),
        ("no/such/name", "method file 'no/such/name' does not exist"),
        (f"{TOYS}:Lats", r"unknown method class 'Lats'\. Did you mean 'Last'\? Allowed: Inert, Last"),
        (str(TOYS), "defines several methods: Inert, Last. Choose one"),
    ],
)
def test_an_unknown_name_is_refused(name, message):
    """With the nearest name and the allowed names."""
    with pytest.raises(UserError, match=message):
        find_method(name)


@pytest.mark.parametrize("find", [find_task, find_either])
def test_a_file_of_another_kind_is_not_called_missing(find, tmp_path):
    """With the kinds that a task file may have."""
    path = tmp_path / "mine.yml"
    path.write_text("task: mine\n")
    with pytest.raises(UserError, match=r"mine.yml' is not a Python file\. .* path/to/file.toml, or"):
        find(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "defines no method: it needs a subclass of kvbench.method.Method with a `card`"),
        ("x = 1\n\nx = 1 / 0\n", r"cannot be imported \(line 3\): ZeroDivisionError: division by zero"),
        ("x = 1\nx = = 2\n", r"cannot be imported \(line 2\): SyntaxError"),
        ("import nothing_of_this_name\n", r"cannot be imported \(line 1\): ModuleNotFoundError"),
        ("x = 1\nraise SystemExit(3)\n", r"cannot be imported \(line 2\): SystemExit: 3\. Correct the file\."),
        (MINE.replace('name="my-method", title="Small keys", arxiv="2406.11430", ', "").replace('"independent"', "8"),
         r"\(line 21\): Card: name is missing; title is missing; arxiv is missing; heads = 8 should be 'indep"),
        (MINE.replace("window: int", "window: Positive"), "cannot be imported: NameError: name 'Positive'"),
        (MINE.replace('"my-method"', '"snapkv"'),
         r"mine\.py names its method 'snapkv', which is a method of kvbench\. Give it another name\."),
        (MINE.replace('"my-method"', '"snapkv+adakv"'), "names its method 'snapkv\\+adakv', which is a"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, message):
    """With the line of the error."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        find_method(str(path))


@pytest.mark.parametrize(("kind", "text", "missing"), [
    ("method", MINE.replace("def score(", "def scores("), "MyMethod does not define score, which its base"),
    ("task", "from kvbench.task import Task\nclass Mine(Task):\n    name = 'mine'\n",
     "Mine does not define minimum_length, prompt_id, which its base"),
])
def test_a_class_without_a_function_that_it_must_define_is_refused(tmp_path, kind, text, missing):
    """Before a run, and not by a sample that gets None."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(UserError, match=missing):
        (find_method if kind == "method" else find_task)(str(path))


@pytest.mark.parametrize("find", [find_task, find_either])
def test_a_task_that_keeps_the_name_of_its_base_is_refused(find, tmp_path):
    """Its results would be taken for those of kvbench's task."""
    path = tmp_path / "mine.py"
    path.write_text("from kvbench.tasks.ruler import niah\n\nclass Mine(niah.NiahMultikey1):\n    margin = 3\n")
    with pytest.raises(UserError, match=r"mine\.py names its task '.*', which is a task of kvbench\. Give it another"):
        find(str(path))


def test_a_class_of_either_kind_is_told_the_page_of_its_own(tmp_path):
    """Where a file may define a method or a task."""
    path = tmp_path / "mine.py"
    path.write_text("from kvbench.task import Task\nclass Mine(Task):\n    name = 'mine'\n")
    with pytest.raises(UserError, match=r"See docs/adding_a_task\.md"):
        find_either(str(path))


def test_kvbenchs_own_file_keeps_its_name():
    """Given by its path, too."""
    assert find_method(f"{ROOT / 'methods/eviction/snapkv.py'}:SnapKV").card.name == "snapkv"
    assert find_task(f"{ROOT / 'tasks/ruler/niah.py'}:NiahMultikey1").aliases == ("niah",)


def test_the_class_may_be_left_out_where_there_is_one():
    """`path/to/file.py` is enough."""
    assert find_task(str(TOYS)).name == "toy"


def test_methods_and_tasks_are_found_by_one_call():
    """By a name or a file; for a file with both the class must be given."""
    for name, expected in (
        ("snapkv", "SnapKV"), ("snapkv+adakv", "snapkv+adakv"), ("niah", "NiahMultikey1"), (f"{TOYS}:Toy", "Toy"),
        (f"{TOYS}:Last", "Last"),
    ):
        assert find_either(name).__name__ == expected
    with pytest.raises(UserError, match="defines several methods and tasks: Inert, Last, Toy"):
        find_either(str(TOYS))


def test_scorers_are_found_with_their_tasks(monkeypatch):
    """A task that cannot be imported does not hide the others."""
    entries = list_entries("task")
    broken = dataclasses.replace(entries[0], name="broken", module="nothing_of_this_name")
    monkeypatch.setattr("kvbench.registry.list_entries", lambda kind: [broken, *entries])
    scorer, task = find_scorer("ruler-string-match-all@1")
    assert scorer.id == "ruler-string-match-all@1"
    assert scorer in task.scorers
    message = r"unknown scorer 'own@2'\. Did you mean 'own@1'\? .*lists those of a task"
    with pytest.raises(UserError, match=message) as caught:
        find_scorer("own@2", ["own@1"])
    assert len(str(caught.value).partition("such as ")[2].partition(". ")[0].split(", ")) <= FEW


def test_other_packages_are_found_by_their_entry_points(monkeypatch):
    """They are refused if their name is already taken."""
    points = [importlib.metadata.EntryPoint("theirs", "kvbench.methods.baseline.full:Full", "kvbench.methods")]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [x for x in points if x.group == group]
    )
    for cached in (list_entries, _find_registered):
        monkeypatch.setattr(f"kvbench.registry.{cached.__name__}", cached.__wrapped__)
    assert find_method("theirs").card.name == "full"
    points.append(importlib.metadata.EntryPoint("snapkv", "elsewhere:SnapKV", "kvbench.methods"))
    with pytest.raises(UserError, match="two methods are called 'snapkv'"):
        find_method("snapkv")
    points[1] = importlib.metadata.EntryPoint("broken", "nothing_of_this_name:X", "kvbench.methods")
    with pytest.raises(UserError, match="method 'broken' cannot be imported: ModuleNotFoundError"):
        find_method("broken")


def test_every_operation_has_an_implementation():
    """`--kernels` and the verification of runs check against this list."""
    kernels = Path(__file__).parents[1] / "kernels"
    assert set(list_ops()) == {x.parent.name for x in kernels.glob("*/__init__.py") if "operation(" in x.read_text()}
    assert all("torch" in found for found in list_ops().values())


@dataclass(frozen=True)
class Settings(Method):
    """A method with a setting of every kind."""

    window: Annotated[int, Field(ge=1)] = 32
    share: float | None = None
    pool: Literal["max", "avg"] = "max"
    flag: bool = False
    layers: tuple[int, ...] = ()
    table: str | None = resolved()
    count: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.share is not None and self.share > 1:
            raise UserError(f"share {self.share} is above 1.")
        if self.window == 13:
            raise ValueError("13 is unlucky")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {}),
        (["window=7"], {"window": 7}),
        (["share=0.5", "flag=true"], {"share": 0.5, "flag": True}),
        (["share=none", "pool=avg"], {"share": None, "pool": "avg"}),
        (["share=None"], {"share": None}),
        (["share=null"], {"share": None}),
        (["layers=[1, 2]"], {"layers": (1, 2)}),
        (["layers=1,2"], {"layers": (1, 2)}),
    ],
)
def test_settings_are_read_by_their_types(given, expected):
    """Text is converted to the types of the dataclass."""
    made = configure(Settings, parse_pairs(given, "--set"), "--set", "x")
    assert {key: getattr(made, key) for key in expected} == expected
    written = jsonable_settings(made)
    assert set(written) == {"window", "share", "pool", "flag", "layers"}
    assert written["layers"] == list(made.layers)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["windw=7"], r"setting of x 'windw'\. Did you mean 'window'\? Allowed: flag, layers, pool, share, window"),
        (["rows=7"], r"^unknown setting of x 'rows'\. Allowed: .*\. See `kvbench show x`\.$"),
        (["table=7"], "unknown setting of x 'table'"),
        (["count=7"], "unknown setting of x 'count'"),
        (["window=seven"], "x: window must be a whole number, 1 or more, got seven"),
        (["window=true"], "x: window must be a whole number, 1 or more, got true"),
        (["share=false"], "x: share must be .* got false"),
        (["window=0"], "x: window must be 1 or more, got 0"),
        (["window=1.5"], "window must be .* got 1.5"),
        (["pool=min"], "pool must be one of max, avg, got min"),
        (["share=inf"], "share must be a number, got inf"),
        (["share=nan"], "share must be .* got nan"),
        (["share=-Infinity"], "share must be .* got -Infinity"),
        (["share=2"], r"^share 2\.0 is above 1\.$"),
        (["window=13"], r"^--set window=13: 13 is unlucky\. See `kvbench show x`\.$"),
        (["window"], "--set 'window' is not key=value"),
        (["=1"], "is not key=value"),
        ([" =1"], "is not key=value"),
        (["window=1", "window =2"], "--set window is given twice"),
    ],
)
def test_a_wrong_setting_is_refused(given, message):
    """Unknown, of the wrong type, out of range, or twice."""
    with pytest.raises(UserError, match=message):
        configure(Settings, parse_pairs(given, "--set"), "--set", "x")


def test_a_setting_is_split_at_its_first_equals_sign():
    """Spaces around key and value are left out."""
    assert parse_pairs([" haystack = a=b ", "window=1"], "--set") == {"haystack": "a=b", "window": "1"}


def test_a_method_without_settings_says_so():
    with pytest.raises(UserError, match=r"^unknown setting of x 'window'\. x has no settings: leave --set out\.$"):
        configure(make_dataclass("Bare", []), {"window": "1"}, "--set", "x")


def test_a_whole_number_has_at_most_31_bits():
    """Positive or negative."""
    kind = make_dataclass("Shifted", [("by", int)])
    for most in (-MOST, MOST):
        assert configure(kind, {"by": str(most)}, "--set", "x").by == most
    for beyond, word in ((-MOST - 1, "more"), (MOST + 1, "less")):
        with pytest.raises(UserError, match=f"^x: by {beyond} must be .* or {word}"):
            configure(kind, {"by": str(beyond)}, "--set", "x")


@pytest.mark.parametrize(("text", "value"), [
    ("none", None), ("None", None), ("null", None), ('"a"', '"a"'), ("7", "7"),
])
def test_a_text_is_read_as_it_is_unless_it_says_none(text, value):
    """Quotation marks are part of it."""
    assert configure(make_dataclass("Named", [("name", str | None)]), {"name": text}, "--set", "x").name == value


@pytest.mark.parametrize("kind", [list[float], tuple[float, ...], set[float], frozenset[float], dict[str, list[float]]])
@pytest.mark.parametrize("number", ["Infinity", "NaN"])
def test_no_number_within_a_setting_is_infinite(kind, number):
    """A result could not be written: JSON has no such number."""
    made = make_dataclass("Held", [("values", kind)])
    text = '{"a": [1], "b": [2, 3]}' if kind == dict[str, list[float]] else "[2, 3]"
    configure(made, {"values": text}, "--set", "x")
    with pytest.raises(UserError, match=r"^x: values must be "):
        configure(made, {"values": text.replace("3", number)}, "--set", "x")


def test_a_setting_without_a_default_is_named(tmp_path):
    """The author is told, not shown the constructor's complaint; a value given makes up for it."""
    path = tmp_path / "mine.py"
    path.write_text(MINE.replace("window: int = 32", "window: int"))
    found = find_method(str(path))
    with pytest.raises(UserError, match=r"mine\.py: setting 'window' has no default\. Give it one\."):
        configure(found, {}, "--set", str(path))
    assert configure(found, {"window": "8"}, "--set", str(path)).settings == {"window": 8}
    assert configure(make_dataclass("Made", [("rows", list, field(default_factory=list))]), {}, "--set", "x").rows == []


@pytest.mark.parametrize(("error", "message"), [
    (KeyError("no such layer"), r"KeyError: 'no such layer'"), (TypeError("no number"), "no number"),
])
def test_a_constructor_that_fails_is_refused(error, message):
    """The file is the user's, and may raise anything."""

    @dataclass(frozen=True)
    class Fails:
        window: int = 32

        def __post_init__(self):
            raise error

    with pytest.raises(UserError, match=rf"^mine: {message}\. See `kvbench show mine`\.$"):
        configure(Fails, {}, "--set", "mine")
    with pytest.raises(UserError, match=f"^--set window=8: {message}"):
        configure(Fails, {"window": "8"}, "--set", "mine")
