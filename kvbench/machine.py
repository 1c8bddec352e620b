"""Facts about the machine, and its installed packages."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import os
import platform
import warnings
from pathlib import Path
from typing import Any

from kvbench.errors import UserError

GB = 1e9
"""Bytes."""
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def cache_folder() -> Path:
    """The folder of kvbench in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbench"


@functools.cache
def find_version(package: str) -> str | None:
    """The version of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_extra(module: str, *, extra: str, what: str) -> Any:
    """Import a module of an optional package, without the warnings of its import.

    what: the feature that needs it, as the subject of the error message.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise UserError(
            f"{what} needs the package {package} ({error}). Install it: pip install 'kvbench[{extra}]'"
        ) from error


def cpu_name() -> str:
    """The model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def find_file_system(path: Path) -> str | None:
    """The type of the file system that holds a path, as Linux names it; None: not known."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    rows = [x.split() for x in mounts]  # device, place, type; a later row covers an earlier one
    kinds = {Path(place.replace("\\040", " ")): kind for _, place, kind, *_ in rows}
    holding = [x for x in kinds if path.resolve().is_relative_to(x)]
    return kinds[max(holding, key=lambda x: len(x.parts))] if holding else None


def has_bfloat16_units() -> bool:
    """Whether the CPU multiplies in bfloat16 itself; others convert every number and are several times slower.

    True where the system does not list the CPU's instructions.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return True
    for line in lines:
        key, _, flags = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, ARM
            return not BFLOAT16_FLAGS.isdisjoint(flags.split())
    return True


def is_device_lost() -> bool:
    """Whether an error has made the CUDA context unusable, such as an illegal address: every later call raises it."""
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def ram_bytes() -> int:
    """Bytes of physical memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: str) -> int:
    """Bytes of free memory on a device, `cpu` or `cuda`; there with the blocks that torch holds and does not use."""
    if device == "cuda":
        import torch

        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + unused
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return ram_bytes()
