"""The layout is that of docs/design.md: which package may import which, and the symbolic links."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKS = ("kernels", "methods", "tasks")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module once, by its path in the repository."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("kvbench", *LINKS)
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.is_relative_to(ROOT / "kvbench" / link) for link in LINKS)
    }


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement that runs: nothing under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):  # it holds no import
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (x for part in node.orelse for x in (part, *runtime_nodes(part)))
        else:
            yield node
            yield from runtime_nodes(node)


@functools.cache
def imports(tree: ast.AST) -> set[str]:
    """Full names that a module imports when it runs, also inside functions."""
    names: set[str] = set()
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name lies in one of the packages."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offenders(folder: str, *packages: str, allow: tuple[str, ...] = ()) -> list[str]:
    """Imports of the packages in a folder, but for what is allowed."""
    return [
        f"{path} imports {name}"
        for path, tree in modules().items()
        if path.startswith(f"{folder}/")
        for name in sorted(imports(tree))
        if within(name, *packages) and not within(name, *allow)
    ]


@pytest.mark.slow
def test_modules_are_found():
    """The other tests look at something: every folder holds modules, and no module is read twice through a link."""
    for folder in ("kvbench", *LINKS):
        assert any(path.startswith(f"{folder}/") for path in modules()), folder
    assert not any(path.startswith("kvbench/methods/") for path in modules())


def test_planted_imports_are_seen():
    """An import inside a function counts, one for types only does not."""
    types = "if TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
    inside = "def f():\n    from c import d\n"
    assert imports(ast.parse(types + inside + types.replace("b", "e"))) == {"b", "c.d", "e"}


def test_kernels_import_nothing_of_ours():
    """A kernel knows tensors and other kernels."""
    assert offenders("kernels", "kvbench", allow=("kvbench.kernels",)) == []


@pytest.mark.parametrize("folder", ["methods", "tasks"])
def test_methods_and_tasks_do_not_import_each_other(folder):
    """A method knows the harness and kernels, never a task; a task never a method."""
    other = {"methods": "kvbench.tasks", "tasks": "kvbench.methods"}[folder]
    assert offenders(folder, other) == []


def test_the_harness_knows_no_method_or_task():
    """kvbench/ finds methods and tasks by name and imports none."""
    assert offenders("kvbench", "kvbench.methods", "kvbench.tasks") == []


def test_only_the_store_calls_kernels():
    """kvbench/ reaches kernels through its stores alone; a run says which implementations they are."""
    found = offenders("kvbench", "kvbench.kernels", allow=("kvbench.kernels.choice",))
    assert [x for x in found if not x.startswith("kvbench/store/")] == []


def test_no_bare_imports_of_the_folders():
    """Hugging Face has a package called kernels: ours are kvbench.kernels, kvbench.methods, kvbench.tasks."""
    assert [x for folder in ("kvbench", *LINKS) for x in offenders(folder, *LINKS)] == []


def test_imports_are_absolute():
    """Relative imports would hide from the tests above."""
    assert [x for x, tree in modules().items() if any(name.startswith(".") for name in imports(tree))] == []


def test_transformers_stays_in_its_adapter():
    """Only kvbench/hf imports transformers; others may name its types."""
    found = [x for folder in ("kvbench", *LINKS) for x in offenders(folder, "transformers")]
    assert [x for x in found if not x.startswith("kvbench/hf/")] == []


def method_classes() -> set[str]:
    """Names of Method and of every class that derives from it, wherever it stands."""
    bases = {
        node.name: {ast.unparse(base).split(".")[-1].split("[")[0] for base in node.bases}
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"Method"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found


def test_nobody_asks_which_method_it_is():
    """An isinstance(x, SnapKV) outside methods/ would make the harness know a method by name."""
    classes = method_classes()
    assert {"Method", "ScoredMethod", "SnapKV"} <= classes
    found = [
        f"{path}:{node.lineno}"
        for path, tree in modules().items()
        if not path.startswith("methods/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        and {x.id for x in ast.walk(node.args[1]) if isinstance(x, ast.Name)} & classes
    ]
    assert found == []


def test_no_two_classes_share_a_name():
    """One noun stands for one thing."""
    names = [node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(names) > 700
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_drawer_for_odds_and_ends():
    """A module is named after what it holds."""
    assert [path for path in modules() if Path(path).stem in {"utils", "util", "helpers", "misc", "common"}] == []


@pytest.mark.parametrize("name", LINKS)
def test_folders_are_linked_into_the_package(name):
    """The folders in the root are parts of one import package."""
    link = ROOT / "kvbench" / name
    assert link.is_symlink() and link.readlink() == Path("..") / name


@pytest.mark.slow
def test_kernels_folder_does_not_harm_transformers():
    """Started in the root, Python finds our folder by the name of another package, which must count as absent."""
    code = "from transformers.utils import is_kernels_available as f; import kernels; print(f(), kernels.__version__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0.0.0"]


SDPA = ("scaled_dot_product_attention", "grouped_sdpa")


def unnamed_sdpa(tree: ast.AST, *, named: bool = False) -> list[int]:
    """Lines that call SDPA, or `grouped_sdpa`, which leaves the choice to its caller, without naming the kernels."""
    found = []
    for node in ast.iter_child_nodes(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", None)) in SDPA and not named:
            found.append(node.lineno)
        names = isinstance(node, ast.With) and any("sdpa_kernel(" in ast.unparse(x) for x in node.items)
        hosts = isinstance(node, ast.If) and "has_cudnn(" in ast.unparse(node.test)
        inside = isinstance(node, ast.FunctionDef) and node.name == "grouped_sdpa"
        found += unnamed_sdpa(node, named=named or names or hosts or inside)
    return found


def test_every_call_of_sdpa_names_its_kernels():
    """Otherwise cuDNN takes it on a GPU, builds a plan for every new length, and may refuse a mask."""
    assert {path: lines for path, tree in modules().items() if (lines := unnamed_sdpa(tree))} == {}


def test_a_planted_call_of_sdpa_is_seen():
    """Next to the block that names kernels, not in it."""
    text = "with sdpa_kernel(x):\n    F.scaled_dot_product_attention(q)\ngrouped_sdpa(q)\n"
    assert unnamed_sdpa(ast.parse(text)) == [3]
