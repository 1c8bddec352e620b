"""Hashes of the code that a run depends on, recorded as provenance.

Imports of the harness, the method and the task are followed statically from file to file, also inside functions and
into helper files next to a user's own file. Imports for type checking and installed packages are not followed: the spec
has the versions of torch and transformers.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from kvbench.errors import FILE_MODULE
from kvbench.method import Method
from kvbench.runs.spec import Sources
from kvbench.task import Task

RUN = "kvbench.runs.runner"
"""The module that runs a job. It and its imports are the harness of a run."""
IGNORED = {"kvbench.errors", "kvbench.log", "kvbench.machine", "kvbench.registry", "kvbench.settings"}
"""Modules of a run that cannot change its outcome: messages, and lookups whose results are in the spec."""
KERNELS = "kvbench.kernels"
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""
OWN = Path(__file__).parents[1]
"""The folder of the package that runs."""
LIBRARIES = [Path(sysconfig.get_path(x)) for x in ("stdlib", "platstdlib")]
HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)
"""Syntax nodes that can contain an import."""


def find_sources(method: type[Method], task: type[Task], tree: Path | None = None) -> Sources:
    """SHA-256 per component. A file of several components counts for the harness, a kernel file for the kernels.

    tree: another checkout of kvbench, whose files are read in place of those that run.
    """
    harness = _follow([RUN], tree=tree)
    of_method, of_task = (_follow(_modules(x), known=harness, tree=tree) for x in (method, task))
    kernels = {name: path for name, path in (harness | of_method | of_task).items() if _within(name, KERNELS)}
    return Sources(
        method=_hash(of_method, but=kernels), task=_hash(of_task, but=kernels),
        kernels=_hash(kernels), harness=_hash(harness, but=kernels),
    )


def hash_own_code(kind: type[Method | Task]) -> str | None:
    """SHA-256 of a user's own file and of what it imports outside kvbench; None: the class is registered.

    A registered class has a version that its maintainers raise. A file that its author is still writing has not, so
    this hash is a part of the run's identity.
    """
    modules = list(_modules(kind))
    if not any(x.startswith(FILE_MODULE) for x in modules):
        return None
    return _hash({name: path for name, path in _follow(modules).items() if _root(name) != "kvbench"})


def find_files(method: type[Method]) -> list[Path]:
    """The files of a method and of what it imports from kvbench."""
    return list(_follow(_modules(method)).values())


def find_ops(method: type[Method]) -> set[str]:
    """Names of the kernel operations that a run of this method imports."""
    files = _follow([RUN, *_modules(method)])
    return {name.split(".")[2] for name in files if name.startswith(f"{KERNELS}.")}


def _modules(cls: type) -> Iterator[str]:
    """Modules of a method or task, of its base classes and of the classes that it composes."""
    for base in cls.__mro__:
        if issubclass(base, Method | Task):
            yield base.__module__
            inner = (x for x in vars(base).values() if isinstance(x, type) and issubclass(x, Method | Task))
            yield from (name for x in inner if x is not base for name in _modules(x))


def _follow(modules: Iterable[str], known: Collection[str] = (), tree: Path | None = None) -> dict[str, Path]:
    """Files of these modules and of all that they import, within kvbench and the modules' own packages.

    kvbench imports only itself and installed packages. Modules in `known` are left out with what they import.
    """
    queue = list(modules)
    roots = {"kvbench", *(_root(x) for x in queue)}
    files: dict[str, Path] = {}
    while queue:
        name = queue.pop()
        if name in files or name in known or name in IGNORED or _root(name) not in roots:
            continue
        path = _locate(name, tree)
        if path is None:
            continue
        files[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        imported = _imports(_read(path), package)
        queue += [package, name.rpartition(".")[0], *imported]
        if _root(name) != "kvbench":
            roots |= {x for x in map(_root, imported) if not _is_installed(x)}
        if package.startswith(f"{KERNELS}."):  # the implementation is chosen at run time
            queue += [f"{package}.{x.stem}" for x in path.parent.glob("*.py") if x.stem != "__init__"]
    return files


def _read(path: Path) -> bytes:
    """The content of a source file; of the package that runs, as this process first read it."""
    return _read_own(path) if path.is_relative_to(OWN) else path.read_bytes()


@functools.cache  # the process runs the code that it imported, also where the checkout changes during a sweep
def _read_own(path: Path) -> bytes:
    return path.read_bytes()


def _locate(name: str, tree: Path | None) -> Path | None:
    """The file of a module; None: no module of that name has a Python file."""
    root, *inner = name.split(".")
    if tree is not None and root == "kvbench":
        return _search([str(tree / root)], inner)
    folders, own = _find_top(root)
    if not folders:
        return Path(own) if own and not inner else None
    return _locate_own(tuple(folders), *inner) if root == "kvbench" else _search(folders, inner)


@functools.cache  # a sweep asks for the same few hundred files in every cell
def _locate_own(folders: tuple[str, ...], *inner: str) -> Path | None:
    return _search(folders, inner)


def _search(folders: Iterable[str], inner: Iterable[str]) -> Path | None:
    places = [Path(x, *inner) for x in folders]
    found = [y for x in places for y in (x / "__init__.py", x.with_name(f"{x.name}.py")) if y.is_file()]
    return found[0] if found else None


def _find_top(root: str) -> tuple[list[str], str | None]:
    """The folders of a top-level package, or the file of a top-level module."""
    module = sys.modules.get(root)
    if module is not None:
        return list(getattr(module, "__path__", ())), getattr(module, "__file__", None)
    spec = importlib.util.find_spec(root) if root else None
    return ([], None) if spec is None else (list(spec.submodule_search_locations or ()), spec.origin)


def _is_installed(root: str) -> bool:
    """Whether a top-level name is of the standard library or an installed package, or is not found."""
    folders, own = _find_top(root)
    places = [Path(x) for x in folders] or ([Path(own)] if own else [])
    return root in sys.stdlib_module_names or not places or any(
        not INSTALLED.isdisjoint(x.parts) or any(map(x.is_relative_to, LIBRARIES)) for x in places
    )


@functools.cache
def _imports(source: bytes, package: str) -> frozenset[str]:
    """Names that a module imports at run time: of modules, or of objects in them."""
    names: set[str] = set()
    queue: list[ast.AST] = [ast.parse(source)]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            names.update(x.name for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                start = importlib.util.resolve_name("." * node.level + start, package)
            names.update((start, *(f"{start}.{x.name}" for x in node.names)))
        elif isinstance(node, ast.If) and _is_for_types(node.test):
            queue += node.orelse
        else:  # expressions contain no imports
            queue += (x for x in ast.iter_child_nodes(node) if isinstance(x, HOLDERS))
    return frozenset(names)


def _is_for_types(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _hash(files: dict[str, Path], but: Iterable[str] = ()) -> str:
    """SHA-256 over names and contents. A file given by its path counts by its file name, not its folder."""
    left = {name: files[name] for name in files.keys() - set(but)}
    return hash_contents((name if "." in name else x.name, _read(x)) for name, x in left.items())


def hash_contents(files: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over the names and contents of source files."""
    total = hashlib.sha256()
    for label, content in sorted(files):
        total.update(label.encode() + b"\0" + content + b"\0")
    return total.hexdigest()


def _root(name: str) -> str:
    return name.partition(".")[0]


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")
