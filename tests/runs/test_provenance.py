"""The sources of a run cover the code that it runs, and no other code."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import kvbench
from kvbench.registry import find_method, find_task
from kvbench.runs import provenance as sources
from kvbench.runs.provenance import IGNORED, RUN, find_sources

ROOT = Path(__file__).parent.parent.parent
TOYS = Path(__file__).parents[1] / "toys" / "toy.py"
PARTS = ("method", "task", "kernels", "harness")
NEW = ("new.py", "methods/eviction/new.py", "kernels/new/__init__.py", "kernels/window_scores/fast.py")
SHOWN = (
    "kvbench.cli", "kvbench.runs.progress", "kvbench.analysis", "kvbench.integrations",
    "kvbench.sweep", "kvbench.report", "kvbench.toml", "kvbench.custom", "kvbench.text.scorers", "kvbench.runs.options",
    "kvbench.runs.request", "kvbench.runs.prepare", "kvbench.runs.protocol", "kvbench.runs.generation",
    "kvbench.runs.provenance", "kvbench.runs.pooling",
)
"""Modules that read options, print results, or resolve options to a spec, which records what they found."""


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of kvbench's code that tests may change; sources are looked up there."""
    folder = tmp_path / "kvbench"
    shutil.copytree(ROOT / "kvbench", folder, ignore=shutil.ignore_patterns("models", "__pycache__"))
    for name in ("snapkv", "h2o", "full-int8", "knorm+adakv"):
        find_method(name)  # loaded from the real place
    find_task("niah")
    monkeypatch.setattr(kvbench, "__path__", [str(folder)])
    return folder


def changed(method: str, task: str, change: Callable[[], object]) -> set[str]:
    """The components whose hashes a change alters."""
    before = find_sources(find_method(method), find_task(task))
    change()
    after = find_sources(find_method(method), find_task(task))
    return {x for x in PARTS if getattr(before, x) != getattr(after, x)}


def extend(path: Path) -> Callable[[], object]:
    """Append to a file, or create it."""
    return lambda: path.write_text((path.read_text() if path.exists() else "") + "\n# changed\n")


@pytest.mark.few(5)
@pytest.mark.parametrize(("method", "path", "expected"), [
    ("snapkv", "methods/eviction/snapkv.py", {"method"}),
    ("snapkv", "selection.py", {"method"}),
    ("snapkv", "kernels/window_scores/torch.py", {"kernels"}),
    ("snapkv", "kernels/dense_attention/torch.py", {"kernels"}),
    ("snapkv", "store/layer.py", {"harness"}),
    ("snapkv", "hf/adapter.py", {"harness"}),
    ("snapkv", "engine/autoregressive.py", {"harness"}),
    ("snapkv", "__init__.py", {"harness"}),
    ("snapkv", "tasks/ruler/niah.py", {"task"}),
    ("snapkv", "tasks/words.py", {"task"}),
    ("snapkv", "kernels/int8_attention/torch.py", set()),
    ("snapkv", "store/int8.py", set()),
    ("snapkv", "methods/eviction/h2o.py", set()),
    ("snapkv", "tasks/scbench/kv.py", set()),
    ("full-int8", "kernels/int8_attention/torch.py", {"kernels"}),
    ("full-int8", "store/int8.py", {"method"}),
    ("full-int8", "selection.py", set()),
    ("knorm+adakv", "methods/eviction/knorm.py", {"method"}),
    ("knorm+adakv", "methods/allocation/adakv.py", {"method"}),
    ("snapkv", "analysis/compare.py", set()),
    ("snapkv", "cli/run.py", set()),
    ("snapkv", "sweep/local.py", set()),
    ("snapkv", "errors.py", set()),
    ("snapkv", "new.py", set()),
    ("snapkv", "methods/eviction/new.py", set()),
    ("snapkv", "kernels/new/__init__.py", set()),
    ("snapkv", "kernels/window_scores/fast.py", {"kernels"}),
])
def test_a_changed_file_alters_its_component(copy: Path, method: str, path: str, expected: set[str]) -> None:
    """A file that no component imports alters no hash."""
    assert (copy / path).exists() or path in NEW
    (copy / path).parent.mkdir(exist_ok=True)
    assert changed(method, "niah", extend(copy / path)) == expected


def test_imports_are_followed(copy: Path) -> None:
    """Also inside a function, and through another file; not for types only."""
    snapkv, between, new = copy / "methods" / "eviction" / "snapkv.py", copy / "between.py", copy / "new.py"
    for path in (between, new):
        path.write_text("")
    text = snapkv.read_text()
    snapkv.write_text(text + "\nif TYPE_CHECKING:\n    from kvbench.between import x\n")
    assert changed("snapkv", "niah", extend(between)) == set()
    snapkv.write_text(text + "\ndef f():\n    try:\n        from kvbench import between\n    finally:\n        pass\n")
    assert changed("snapkv", "niah", extend(between)) == {"method"}
    between.write_text("import kvbench.new\n")
    assert changed("snapkv", "niah", extend(new)) == {"method"}
    between.write_text("class Layer:\n    import kvbench.kernels.int8_attention.torch\n")
    assert changed("snapkv", "niah", extend(copy / "kernels" / "int8_attention" / "naive.py")) == {"kernels"}


def test_a_file_counts_by_content_and_name(copy: Path, tmp_path: Path) -> None:
    """By its content and its own name, with what it imports from kvbench."""
    here, there = tmp_path / "mine.py", tmp_path / "elsewhere" / "mine.py"
    here.write_text(TOYS.read_text())
    there.parent.mkdir()
    shutil.copy(here, there)
    one, other = (find_sources(find_method(f"{x}:Last"), find_task(f"{x}:Toy")) for x in (here, there))
    assert one == other
    assert changed(f"{here}:Last", f"{here}:Toy", extend(here)) == {"method", "task"}
    assert changed(f"{here}:Last", f"{here}:Toy", extend(copy / "selection.py")) == set()
    here.write_text(here.read_text() + "\nimport kvbench.selection\n")
    assert changed(f"{here}:Last", f"{there}:Toy", extend(copy / "selection.py")) == {"method"}


def test_an_edit_while_a_process_runs_changes_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process runs kvbench's code as it imported it; a user's file is imported again for every run."""
    own, users = tmp_path / "own" / "x.py", tmp_path / "mine.py"
    own.parent.mkdir()
    monkeypatch.setattr(sources, "OWN", own.parent)
    found = []
    for text in ("1", "2"):
        for path in (own, users):
            path.write_text(text)
        found.append([sources._read(x) for x in (own, users)])
    assert found == [[b"1", b"1"], [b"1", b"2"]]


def test_a_helper_next_to_a_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported by its plain name, also late, also from another helper; what is installed does not count."""
    monkeypatch.syspath_prepend(tmp_path)
    path, helper, late = (tmp_path / f"{x}.py" for x in ("mine", "a_helper_of_mine", "a_late_helper"))
    path.write_text(TOYS.read_text() + "\nimport pytest\nimport a_helper_of_mine\n")
    helper.write_text("def f():\n    import a_late_helper\n")
    late.write_text("x = 1\n")
    for file in (helper, late):
        assert changed(f"{path}:Last", "niah", extend(file)) == {"method"}
    assert set(sources._follow([find_method(f"{path}:Last").__module__])) & {"pytest", "torch", "json"} == set()


def test_a_package_counts_with_its_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports within the package of an entry point are followed; other packages count by their versions."""
    package = tmp_path / "their_methods"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/__init__.py", "inner/helper.py", "unused.py"):
        (package / name).write_text("x = 1\n")
    (package / "last.py").write_text(TOYS.read_text() + "\nimport json\nfrom .inner.helper import x\n")
    (package / "inner" / "helper.py").write_text("from ..inner import x\n")
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("their_methods.last").Last

    def hashed() -> str:
        return find_sources(method, find_task("niah")).method

    seen = [hashed()]
    for name in ("last.py", "inner/helper.py", "inner/__init__.py", "__init__.py"):
        extend(package / name)()
        seen.append(hashed())
    assert len(set(seen)) == 5
    extend(package / "unused.py")()
    assert hashed() == seen[-1]


def test_a_composed_method_includes_its_inner_method(copy: Path) -> None:
    """The outer method has the inner one as a class attribute."""
    inner = find_method("h2o")
    outer = type("Outer", (find_method("snapkv"),), {"inner": inner})
    before = find_sources(outer, find_task("niah")).method
    extend(copy / "methods" / "eviction" / "h2o.py")()
    assert find_sources(outer, find_task("niah")).method != before


@pytest.mark.slow
def test_a_real_run_loads_nothing_that_was_not_followed(arguments: list[str]) -> None:
    """Compared with `sys.modules` in a process that only makes this run."""
    code = textwrap.dedent("""
        import sys
        from kvbench.cli import call
        assert call(sys.argv[1:]) == 0
        print(*(x for x in sys.modules if x.split(".")[0] == "kvbench"))
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--method", "snapkv", "--set", "window=4"], check=True, text=True,
        capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert RUN in loaded
    followed = sources._follow([RUN, *sources._modules(find_method("snapkv"))])
    unseen = loaded - followed.keys() - IGNORED
    assert {x for x in unseen if not x.startswith(SHOWN)} == set()
