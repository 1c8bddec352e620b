"""The environment of a run, for its result: hardware, package versions and the git commit."""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess

from kvbench import __version__
from kvbench.machine import cpu_name, find_version
from kvbench.registry import HERE
from kvbench.runs.journal import Machine
from kvbench.runs.results import Environment, Git
from kvbench.runs.spec import Versions

CODE = ("kvbench", "methods", "tasks", "kernels")
"""Folders of the repository whose uncommitted changes make a run dirty."""


@functools.cache  # the imported code stays the same when the checkout changes
def find_git() -> Git | None:
    """The commit that kvbench runs from, and whether its code differs from it; None: not a checkout.

    A copy of a checkout without .git, or with that of an earlier commit, is named by the variable KVBENCH_COMMIT: a
    hash, followed by -dirty if it differs.
    """
    return _read_commit(os.environ.get("KVBENCH_COMMIT", "")) or _ask_git()


def _read_commit(text: str) -> Git | None:
    commit, _, rest = text.partition("-")
    return Git(commit=commit, dirty=rest == "dirty") if re.fullmatch("[0-9a-f]{40}", commit) else None


def _ask_git() -> Git | None:
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*args: str) -> str | None:
        done = subprocess.run(  # noqa: S603  # fixed arguments
            [git, "-C", str(HERE.parent), *args], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    # A checkout around a virtual environment is another project's: the commit counts only if it tracks this package.
    commit = ask("ls-files", "--error-unmatch", "kvbench/machine.py") and ask("rev-parse", "HEAD")
    if not commit:
        return None
    return Git(commit=commit, dirty=bool(ask("status", "--porcelain", "--", *CODE)))


def find_machine(device: str) -> Machine:
    """The hardware that times depend on. device: `cpu` or `cuda`."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return Machine(cpu=cpu_name(), gpu=gpu, threads=torch.get_num_threads())


def find_versions() -> Versions:
    """The versions of the packages that compute results, in this process."""
    import torch

    return Versions(
        kvbench=__version__, torch=torch.__version__, transformers=find_version("transformers") or "unknown"
    )


def find_environment(
    device: str, *, started: str, seconds: float, device_map: dict[str, str] | None = None
) -> Environment:
    """The environment record of a result. started: ISO time. seconds: of all samples."""
    return Environment(
        python=platform.python_version(), **find_versions().model_dump(), triton=find_version("triton"), git=find_git(),
        **find_machine(device).model_dump(), device_map=device_map, started=started, seconds=seconds,
    )
