"""The repository's pages and forms: links, paths and commands in them exist, and they agree with pyproject.toml."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from kvbench.cli import app

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted(x for x in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if x.name != "config.yml")
FOLDERS = ("docs", "examples", "kernels", "kvbench", "methods", "results", "scripts", "tasks", "tests")
KINDS = {"input", "textarea", "dropdown", "checkboxes", "markdown"}
PROSE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"]
PAGES = [*(ROOT / x for x in PROSE), *(ROOT / "docs").glob("*.md"), *(ROOT / "kvbench" / "models").glob("*/README.md")]


FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def list_commands() -> list[str]:
    """Every command of ours in a block of a page; its lines go on after a backslash or within a quotation."""
    found = []
    for page in PAGES:
        for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
            text = "" if kind else block.replace("\\\n", " ")
            for start in re.finditer(r"^(?:KVBENCH_TOKEN=\S+ )?(kvbench .*)$", text, re.MULTILINE):
                command = start[1]
                if command.count('"') % 2:
                    command = text[start.start(1) : text.index("\n", text.index('"', start.end()))]
                found.append(command)
    return sorted(set(found))


@functools.cache  # building it takes longer than parsing
def parser():
    """The command line's own parser."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", list_commands())
def test_a_command_is_one_that_kvbench_takes(command):
    """Parsed by the command line's own parser, and not run."""
    _, *rest = shlex.split(command, comments=True)
    found, context = parser(), None
    while hasattr(found, "resolve_command"):
        context = found.make_context("kvbench", list(rest), parent=context)
        _, found, rest = found.resolve_command(context, [*context._protected_args, *context.args])
    assert found is not None
    found.make_context("kvbench", rest, parent=context)


def test_a_command_that_is_wrong_would_be_found():
    """An option that is not there is no command, also below a group."""
    with pytest.raises(Exception, match="--levels"):
        test_a_command_is_one_that_kvbench_takes("kvbench leaderboard verify NAME/RUN --levels 1")


def anchor(heading: str) -> str:
    """The address that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Every relative link names a file of the repository, and a heading of it where there is one."""
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, place = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            lost.append(target)
        elif place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            lost += [] if place in map(anchor, headings) else [target]
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_paths_are_there(page):
    """A path in backticks that begins with one of our folders, unless it has a <blank> or a * in it."""
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", page.read_text(encoding="utf-8"))
    assert [x for x in named if not (ROOT / x).exists()] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda x: x.stem)
def test_issue_forms_are_forms(path):
    """As GitHub wants them: a name, a description, and fields of its kinds with ids of their own."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"] and form["description"]
    assert {x["type"] for x in form["body"]} <= KINDS
    ids = [x["id"] for x in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(x["attributes"]["label"] for x in form["body"])


def test_continuous_integration_runs_every_python_that_is_promised():
    """The versions of the workflow are those of the classifiers, and its targets are those of the Makefile."""
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    promised = [x.rsplit(" ", 1)[1] for x in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", x)]
    assert jobs["test"]["strategy"]["matrix"]["python"] == promised
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets


def test_the_version_is_one():
    """pyproject.toml, the changelog's newest release with its date, and the citation agree."""
    released = re.search(r"^## \[(\d\S*)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released is not None
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["version"] == released[1] == cited["version"]
    assert str(cited["date-released"]) == released[2]
