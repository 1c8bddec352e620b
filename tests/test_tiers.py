"""`make test` leaves most cases out, and still runs every method, task, kernel operation and command."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvbench.cli import app
from kvbench.kernels import __path__ as KERNELS
from kvbench.registry import list_entries

HERE = Path(__file__).parent


@pytest.fixture
def fast(request):
    """The tests of `make test`, as this process collected them; xdist's workers collect all of them too."""
    options = request.config.option
    if [Path(x).resolve() for x in request.config.args] != [HERE] or options.keyword or options.markexpr == "slow":
        pytest.skip("only a run of the whole folder sees what is in `make test`")
    found = [x for x in request.session.items if not x.get_closest_marker("slow") and not x.get_closest_marker("gpu")]
    return lambda folder="": [x for x in found if x.path.is_relative_to(HERE / folder)]


@functools.cache
def source(function):
    """The text of a function and of those of its module that it calls."""
    function = inspect.unwrap(function)
    text = inspect.getsource(function)
    called = (function.__globals__.get(x) for x in function.__code__.co_names)
    return text + "".join(
        inspect.getsource(x) for x in called if inspect.isfunction(x) and x.__module__ == function.__module__
    )


def text_of(item):
    """The text of a test, with its helpers and fixtures."""
    fixtures = [x.func for defined in item._fixtureinfo.name2fixturedefs.values() for x in defined]
    return "".join(source(x) for x in (item.function, *fixtures) if inspect.isfunction(inspect.unwrap(x)))


def values(items):
    """Arguments of the tests: names, and the names of objects that have one."""
    given = [x for item in items if hasattr(item, "callspec") for x in item.callspec.params.values()]
    parts = [part for x in given for part in (x if isinstance(x, tuple) else (x,))]
    return {x if isinstance(x, str) else getattr(x, "name", getattr(x, "__name__", None)) for x in parts}


def test_every_method_keeps_its_claims(fast):
    """Each registered method is in the conformance run of caches or in that of diffusion policies."""
    for models, place in (("autoregressive", "methods/test_conformance.py"), ("diffusion", "diffusion/test_claims.py")):
        wanted = {x.name for x in list_entries("method") if x.models == models}
        assert wanted - values(fast(place)) == set()


def test_every_task_is_made(fast):
    """Each registered task is what a test of tests/tasks is run with, or stands in one by its name or class."""
    items = fast("tasks")
    words = set(re.findall(r"[\w-]+", "".join({text_of(x) for x in items}))) | values(items)
    words |= {f"{x.path.parent.name}_{value}" for x in items for value in values([x])}  # longbench_ + lcc
    words |= {f"{x}_e" for x in words if x and x.startswith("longbench_")}  # the same tasks with another file
    assert [x.name for x in list_entries("task") if not {x.name, x.class_name, *x.aliases} & words] == []


def test_every_operation_runs_as_triton(fast):
    """Each operation of kernels/<op> is called in tests/kernels/test_<op>.py, with Triton where it is Triton's."""
    lost = []
    for path in sorted(Path(KERNELS[0]).glob("*/__init__.py")):
        op = path.parent.name
        package, kernels = (importlib.import_module(f"kvbench.kernels.{op}{x}") for x in ("", ".triton"))
        for name in [name for name, x in vars(package).items() if hasattr(x, "__wrapped__")]:
            triton = getattr(kernels, name).__module__ == kernels.__name__
            items = [x for x in fast(f"kernels/test_{op}.py") if not triton or "triton" in x.fixturenames]
            called = name in values(items) or any(re.search(rf"\b{name}\b", text_of(x)) for x in items)
            lost += [] if called else [f"{op}.{name}"]
    assert lost == []


def commands(group, *before):
    """The words of every command."""
    for name, command in group.commands.items():
        yield from commands(command, *before, name) if hasattr(command, "commands") else [(*before, name)]


def lines(item):
    """The beginnings of the command lines of a test: words in the text, and those of a case's arguments after them."""
    given = getattr(item, "callspec", None)
    for words, name in re.findall(r'kvbench\(\s*((?:"[a-z-]+",?\s*)+)(?:\*(\w+))?', text_of(item)):
        more = given.params.get(name) if given else ()
        more = map(str, more) if isinstance(more, list | tuple) else ()
        yield " ".join((*re.findall(r'"([a-z-]+)"', words), *more, ""))


def test_every_command_is_called(fast):
    """Each is the beginning of a command line that a test, a helper of it or a fixture calls."""
    called = {line for x in fast() if "kvbench" in x.fixturenames for line in lines(x)}
    wanted = [" ".join((*x, "")) for x in commands(typer.main.get_command(app))]
    assert [x for x in wanted if not any(line.startswith(x) for line in called)] == []


@pytest.mark.slow
def test_a_run_with_a_limit_of_time_skips_what_is_left():
    """`--minutes 0` runs nothing, and an hour runs everything."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "test_language.py"]
    for minutes, outcome in ((0, "skipped"), (60, "passed")):
        done = subprocess.run([*command, "--minutes", str(minutes)], capture_output=True, text=True, check=True)
        assert re.fullmatch(rf"\d+ {outcome} in .*", done.stdout.splitlines()[-1])
