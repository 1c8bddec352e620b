"""The wheel, built through an sdist: it holds every module and model, and runs outside the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
LINKS = ("kernels", "methods", "tasks")
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
    check=True,
).stdout.splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the sdist of a copy, because a build writes next to the sources; without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in FILES:
        source, target = ROOT / name, folder / "clone" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_file():
            target.write_bytes(source.read_bytes())
    build = "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(folder)], cwd=folder / "clone", capture_output=True,
        check=True,
    )
    (sdist,) = folder.glob("*.tar.gz")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w",
         str(folder), str(sdist)],
        capture_output=True, check=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def test_a_wheel_through_an_sdist_holds_everything(wheel):
    """Every module, as files and not as links, the bundled models, and the data files that commands read."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {x for x in FILES if x.split("/")[0] in {"kvbench", *LINKS} and (ROOT / x).is_file()}
    kinds = {".py", ".json", ".safetensors", ".md", ".toml"}
    packed = {x for x in files if Path(x).suffix in kinds} - {"kernels/README.md"}
    packed.add("kvbench/py.typed")
    assert {x if x.startswith("kvbench/") else f"kvbench/{x}" for x in packed} <= names
    assert not {x for x in names if x.split("/")[0] in {*LINKS, "tests"}}


def test_an_installed_wheel_runs_outside_the_repository(wheel, tmp_path):
    """In a new environment that borrows this one's packages, the demo's command runs with the bundled model."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)],
        check=True,
    )
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True,
        check=True,
    ).stdout.strip()
    (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not followed
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(
        [python, "-c", "import kvbench; print(kvbench.__file__)"], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=True,
    )
    assert found.stdout.strip() == str(Path(site) / "kvbench" / "__init__.py")
    ran = subprocess.run(
        [home / "bin" / "kvbench", "run", "--method", "snapkv", "--task", "niah", "--samples", "2", "--json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    assert (result["status"], result["model"]["id"], result["n_scored"]) == ("ok", "mini", 2)
