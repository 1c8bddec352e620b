"""Find methods and tasks by name: in kvbench's folders, in installed packages, or in a file given by its path.

The files of kvbench's folders are parsed, not imported: a class is listed if its body has a literal name. Listing is
therefore fast, a run imports only its own method, and a broken file does not affect the others.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Literal, cast

from pydantic import ValidationError

from kvbench.constraints import setting_types
from kvbench.custom.task import read_task
from kvbench.errors import FILE_MODULE, UserError, find_line, suggest_file, unknown
from kvbench.method import Method
from kvbench.task import Scorer, Task
from kvbench.toml import explain_all

HERE = Path(__file__).parent
MODELS = HERE / "models"
ARCHITECTURES = MODELS / "random"
Kind = Literal["method", "task"]
BASES: dict[Kind, type] = {"method": Method, "task": Task}
MARKS: dict[Kind, str] = {"method": "card", "task": "name"}
"""The class variable that a listed class must have; abstract base classes have none."""
FACTS = ("title", "arxiv", "year", "budget", "calibration", "models", "summary", "needs")


@dataclass(frozen=True)
class Entry:
    """The place of a method or task, and the facts in its source."""

    kind: Kind
    name: str
    module: str
    class_name: str
    path: Path | None = None
    """None: an entry point of an installed package."""
    aliases: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    """Literals of the card or class: `family` (the folder), and FACTS."""

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and its aliases."""
        return self.name, *self.aliases

    @property
    def models(self) -> str:
        """The kind of model that a method supports."""
        return self.facts.get("models", "autoregressive")

    def load(self) -> type:
        """Import the class.

        Raises:
            UserError: its module cannot be imported, or the object is not such a class.
        """
        try:
            found = getattr(importlib.import_module(self.module), self.class_name)
        except (Exception, SystemExit) as error:
            raise _broken(f"{self.kind} '{self.name}'", self.path, error) from error
        if not _defines(found, self.kind):
            raise UserError(f"{self.kind} '{self.name}' ({self.module}:{self.class_name}) is not a {self.kind} class.")
        return cast("type", found)


@functools.cache
def list_entries(kind: Kind, part: str = "") -> tuple[Entry, ...]:
    """All methods or tasks, sorted by name; read once per process.

    part: read only files that contain this text, which takes a tenth of the time.

    Raises:
        UserError: two of them share a name.
    """
    folder = HERE / f"{kind}s"
    entries = [x for path, text in _texts(folder).items() if part in text for x in _entries(text, path, kind, folder)]
    for point in importlib.metadata.entry_points(group=f"kvbench.{kind}s"):
        package = point.dist.name if point.dist is not None else point.module
        entries.append(Entry(kind, point.name, point.module, point.attr, facts={"family": package}))
    owners: dict[str, Entry] = {}
    for entry in entries:
        for name in entry.names:
            if name in owners:
                raise UserError(
                    f"two {kind}s are called '{name}': {owners[name].module} and {entry.module}. Rename or remove one."
                )
            owners[name] = entry
    return tuple(sorted(entries, key=lambda x: x.name))


def find_method(name: str) -> type[Method]:
    """The class of a method by its name, by `path/to/file.py:Class`, or as a composition `inner+outer`.

    Raises:
        UserError: there is none, its file is broken, or the two cannot be composed.
    """
    inner, plus, outer = name.rpartition("+")
    if plus and "/" not in outer and ".py" not in outer:
        if not inner or not outer:
            raise UserError(f"method '{name}' lacks a name beside its '+'. Write two, for example 'snapkv+kivi'.")
        return find_method(outer).over(find_method(inner))
    return cast("type[Method]", _find("method", name))


def find_task(name: str) -> type[Task]:
    """The class of a task by its name, by `path/to/file.py:Class`, `path/to/task.toml` or `lm-eval:<name>`.

    Raises:
        UserError: there is none, or its file is broken.
    """
    if name.endswith(".toml"):
        task = read_task(Path(name), find_scorer)
        refuse_taken_name("task", task.name, Path(name))
        return task
    if name.startswith("lm-eval:"):
        from kvbench.integrations.lmeval.task import make_task

        return make_task(name)
    return cast("type[Task]", _find("task", name))


def is_registered(kind: Kind, name: str) -> bool:
    """Whether a name, an alias, or each part of a composition of methods is registered."""
    known = {alias for x in list_entries(kind) for alias in x.names}
    return known.issuperset(name.split("+") if kind == "method" else [name])


def refuse_unregistered(kind: Kind, name: str, hint: str) -> None:
    """Refuse a name that a run's files state unless it is registered: it could name a file, and code would run.

    Args:
        kind: method or task.
        name: a name, an alias, or a composition of methods.
        hint: the next step, for the error message.

    Raises:
        UserError: it is anything else.
    """
    if not is_registered(kind, name):
        raise UserError(
            f"{kind} {name!a} of the run is not registered, and kvbench executes no file that a run names. {hint}"
        )


def find_either(name: str) -> type[Method | Task]:
    """The class of a method or task, by any form of its name.

    Raises:
        UserError: there is neither, or its file is broken.
    """
    if ".py" in name.rpartition("+")[2]:
        return cast("type[Method | Task]", _load_file(name, "method", "task"))
    tasks = [alias for x in list_entries("task") for alias in x.names]
    if name in tasks or name.endswith(".toml") or name.startswith("lm-eval:"):
        return find_task(name)
    if "/" in name:
        return cast("type[Method | Task]", _load_file(name, "method", "task"))
    methods = [x.name for x in list_entries("method")]
    if name in methods or "+" in name:
        return find_method(name)
    raise unknown("method or task", name, methods + tasks, "See `kvbench list methods` and `kvbench list tasks`.")


def find_scorer(scorer_id: str, others: Iterable[str] = ()) -> tuple[Scorer, type[Task]]:
    """A scorer of any registered task, with the first task by name that has it. Broken tasks are skipped and reported.

    others: further allowed ids, for the error message.

    Raises:
        UserError: no task has it.
    """
    known: dict[str, tuple[Scorer, type[Task]]] = {}
    broken = []
    for entry in list_entries("task"):
        try:
            task = cast("type[Task]", entry.load())
            known = {**{x.id: (x, task) for x in task.scorers}, **known}
        except UserError as error:
            broken.append(f"Not searched: {error}")
    if scorer_id not in known:
        hint = " ".join(["`kvbench show TASK` lists those of a task.", *broken])
        raise unknown("scorer", scorer_id, [*others, *known], hint)
    return known[scorer_id]


def list_models() -> list[str]:
    """Names of the bundled models."""
    return sorted(x.parent.name for x in MODELS.glob("*/config.json"))


def list_architectures() -> list[str]:
    """Names of the published architectures that `random:` builds with random weights and no tokenizer."""
    return sorted(x.parent.name for x in ARCHITECTURES.glob("*/config.json"))


@functools.cache  # the verification asks for every line of a journal
def list_ops() -> dict[str, list[str]]:
    """Kernel operations by name, with their implementations.

    A folder with a reference implementation, `naive.py`, is an operation; other folders hold shared code.
    """
    return {
        folder.name: sorted({x.stem for x in folder.glob("*.py")} - {"__init__", "naive"})
        for folder in sorted((HERE / "kernels").iterdir()) if (folder / "naive.py").is_file()
    }


def _find(kind: Kind, name: str) -> type:
    if ".py" in name or "/" in name:
        return _load_file(name, kind)
    return _find_registered(kind, name)


@functools.cache  # a sweep looks up the names of every cell
def _find_registered(kind: Kind, name: str) -> type:
    for entry in list_entries(kind, name):
        if name in entry.names:
            return entry.load()
    names = [x for entry in list_entries(kind) for x in entry.names]
    raise unknown(kind, name, names, f"See `kvbench list {kind}s`, or give path/to/file.py:Class.")


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now: bytecode on disk is trusted for a second after an edit of equal length."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the source, whatever is cached."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _load_file(text: str, *kinds: Kind) -> type:
    kind = " or ".join(kinds)
    location, _, class_name = text.partition(".py:")
    path = Path(location if location.endswith(".py") else f"{location}.py").expanduser()
    if not path.is_file():
        typed = path if ".py" in text else text
        exists = Path(text).expanduser().is_file()
        fault = "is not a Python file." if exists else f"does not exist.{suggest_file(path)}"
        raise UserError(
            f"{kind} file '{typed}' {fault} Give path/to/file.py:Class, "
            f"{'path/to/file.toml, ' if 'task' in kinds else ''}or a name of `kvbench list {kinds[0]}s`."
        )
    # The name is a hash of the path, so that two files of one name are two modules. Dataclasses need it in sys.modules.
    name = f"{FILE_MODULE}{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    file = path.absolute()  # in frames as in the module's `__file__`
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(f"{kind} file '{path}'", path, error) from error
    found = {
        x.__name__: x for x in vars(module).values() if any(_defines(x, y) for y in kinds) and x.__module__ == name
    }
    found = {x: y for x, y in found.items() if not _left_open(y)} or found
    if not found:
        needs = " or ".join(f"a subclass of {BASES[x].__module__}.{x.capitalize()} with a `{MARKS[x]}`" for x in kinds)
        raise UserError(f"{kind} file '{path}' defines no {kind}: it needs {needs}. See docs/adding_a_{kinds[0]}.md.")
    if class_name and class_name not in found:
        raise unknown(f"{kind} class", class_name, found, f"In {path}.")
    if not class_name and len(found) > 1:
        names = ", ".join(sorted(found))
        several = " and ".join(f"{x}s" for x in kinds)
        raise UserError(f"{kind} file '{path}' defines several {several}: {names}. Choose one: {path}:Class.")
    chosen = found[class_name] if class_name else next(iter(found.values()))
    _refuse_unusable(chosen, next(x for x in kinds if _defines(chosen, x)), path)
    return cast("type", chosen)


def _refuse_unusable(found: type, kind: Kind, path: Path) -> None:
    """Refuse a class that would fail in a run, or whose results would be taken for another's (`UserError`)."""
    if missing := _left_open(found):
        raise UserError(
            f"{path}: {found.__name__} does not define {', '.join(missing)}, which its base class leaves to it. See "
            f"docs/adding_a_{kind}.md."
        )
    try:
        setting_types(found)
    except Exception as error:  # a type of a field that the file does not import
        raise _broken(f"{kind} file '{path}'", path, error) from error
    refuse_taken_name(kind, found.card.name if issubclass(found, Method) else cast("type[Task]", found).name, path)


def refuse_taken_name(kind: Kind, name: str, path: Path) -> None:
    """Refuse a file's method or task whose results would be taken for those of another one.

    Raises:
        UserError: a method, a composition of methods or a task that is registered has the name.
    """
    parts = name.split("+") if kind == "method" else [name]
    owners = [x for part in parts for x in list_entries(kind, part) if part in x.names]
    if len(owners) == len(parts) and all(x.path is None or x.path.resolve() != path.resolve() for x in owners):
        raise UserError(f"{path} names its {kind} '{name}', which is a {kind} of kvbench. Give it another name.")


def _broken(what: str, path: Path | None, error: Exception | SystemExit) -> UserError:
    """The error for a failed import, with the line of the user's file."""
    own = None if path is None else str(path.absolute())
    line = error.lineno if isinstance(error, SyntaxError) else find_line(error, own)
    where = f" (line {line})" if line is not None else ""
    detail = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if isinstance(error, ValidationError):  # of a card
        detail = f"{error.title}: {'; '.join(explain_all(error))}"
    return UserError(f"{what} cannot be imported{where}: {detail}. Correct the file.")


def _defines(found: object, kind: Kind) -> bool:
    return isinstance(found, type) and issubclass(found, BASES[kind]) and hasattr(found, MARKS[kind])


def _left_open(found: type) -> list[str]:
    """Names that a class must define and does not. Methods have no metaclass that refuses such a class."""
    return [x for x in dir(found) if getattr(getattr(found, x, None), "__isabstractmethod__", False)]


@functools.cache  # a sweep finds its methods one by one
def _texts(folder: Path) -> dict[Path, str]:
    """The text of each of kvbench's files in a folder that can be read as text."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        with contextlib.suppress(UnicodeDecodeError):
            found[path] = path.read_text(encoding="utf-8")
    return found


@functools.cache  # a name stands in many files, which are parsed once
def _entries(text: str, path: Path, kind: Kind, folder: Path) -> tuple[Entry, ...]:
    """Entries of one of kvbench's files, from its syntax tree; none if it does not parse."""
    inner = path.relative_to(folder).with_suffix("")
    module = ".".join(("kvbench", f"{kind}s", *inner.parts))
    found = []
    try:
        classes = [x for x in ast.parse(text).body if isinstance(x, ast.ClassDef)]
    except SyntaxError:
        return ()
    for node in classes:
        values = {name: value for x in node.body for name, value in _assigned(x)}
        mark = values.get(MARKS[kind])
        if kind == "method":
            values = {x.arg: x.value for x in mark.keywords if x.arg} if isinstance(mark, ast.Call) else {}
        name = _literal(values.get("name"))
        if isinstance(name, str):
            aliases = cast("tuple[str, ...]", _literal(values.get("aliases")) or ())
            facts = {key: str(_literal(values[key])) for key in FACTS if _literal(values.get(key)) is not None}
            facts = {"family": inner.parts[0], **facts}
            found.append(Entry(kind, name, module, node.name, path, tuple(aliases), facts))
    return tuple(found)


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        yield node.target.id, node.value
    elif isinstance(node, ast.Assign):
        yield from ((x.id, node.value) for x in node.targets if isinstance(x, ast.Name))


def _literal(node: ast.expr | None) -> object:
    if isinstance(node, ast.Attribute):
        return node.attr.lower()  # BudgetKind.STORED
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
