"""Facts about the machine and the software on it, for the result and for `kvbench doctor`."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from kvbench import __version__
from kvbench.runs.journal import Machine
from kvbench.runs.results import Environment, Git

SOURCE = Path(__file__).resolve().parent.parent
CODE = ("kvbench", "methods", "tasks", "kernels")


def find_version(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache  # what runs is what was imported, whatever becomes of the checkout
def find_git() -> Git | None:
    """Commit of the checkout that kvbench runs from; None where it is not one. Dirty: code differs from the commit."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*args: str) -> str | None:
        done = subprocess.run(  # noqa: S603  # fixed arguments
            [git, "-C", str(SOURCE), *args], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else None

    # A checkout around a virtual environment is not ours: this file must be tracked by it.
    commit = ask("ls-files", "--error-unmatch", "kvbench/machine.py") and ask("rev-parse", "HEAD")
    if not commit:
        return None
    return Git(commit=commit, dirty=bool(ask("status", "--porcelain", "--", *CODE)))


def find_machine(device: str) -> Machine:
    """What this machine, for a kind of device, tells from another whose seconds are others."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return Machine(cpu=cpu_name(), gpu=gpu, threads=torch.get_num_threads())


def find_environment(
    device: str, *, started: str, seconds: float, device_map: dict[str, str] | None = None
) -> Environment:
    """Where something ran on a kind of device, when, and for how long."""
    import torch

    return Environment(
        python=platform.python_version(), torch=torch.__version__,
        transformers=find_version("transformers") or "unknown", triton=find_version("triton"), kvbench=__version__,
        git=find_git(), **find_machine(device).model_dump(), device_map=device_map, started=started, seconds=seconds,
    )


def cpu_name() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def ram_bytes() -> int:
    """Physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: str) -> int:
    """Memory that is free on the device now."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return ram_bytes()
