"""Files that visitors of the repository meet first: their forms are valid, and they agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted(x for x in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if x.name != "config.yml")
KINDS = {"input", "textarea", "dropdown", "checkboxes", "markdown"}
PROSE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"]
PAGES = [*(ROOT / x for x in PROSE), *(ROOT / "docs").glob("*.md"), *(ROOT / "kvbench" / "models").glob("*/README.md")]


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
