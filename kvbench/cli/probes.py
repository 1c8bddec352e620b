"""The checks of `kvbench doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine import cache_folder, cpu_name, find_version, free_bytes, has_bfloat16_units
from kvbench.registry import HERE, list_models

GB = 1e9
LEAST_DISK = 1.0
"""GB that a few runs with a small model need."""


@dataclass(frozen=True)
class Probe:
    """The result of one check."""

    name: str
    ok: bool
    found: str


def examine() -> list[Probe]:
    """All checks: packages, hardware, disk, cache and bundled models."""
    return [
        _python(), _package("torch", (2, 11)), _package("transformers", (5, 17)), _triton(), _gpu(), _threads(),
        _bfloat16(), _memory(), _disk(), _writable_cache(), *_models(), _shadowed(),
    ]


def _python() -> Probe:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Probe("python", ok, platform.python_version() + ("" if ok else ": kvbench needs 3.11 to 3.13"))


def _package(name: str, least: tuple[int, int]) -> Probe:
    version = find_version(name)
    need = ".".join(map(str, least))
    if version is None:
        return Probe(name, False, f"not installed: pip install '{name}>={need}'")
    ok = tuple(int(x) for x in version.split("+")[0].split(".")[:2]) >= least
    return Probe(name, ok, version if ok else f"{version}: kvbench needs {need} or newer")


def _triton() -> Probe:
    return Probe("triton", True, find_version("triton") or "not installed (only --kernels triton needs it)")


def _gpu() -> Probe:
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken install raises anything
        return Probe("gpu", False, f"torch cannot be imported: {error}")
    if not torch.cuda.is_available():
        return Probe("gpu", True, "none (runs use the CPU)")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Probe("gpu", True, ", ".join(names))


def _threads() -> Probe:
    usable = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS")
    ok = asked is None or not asked.isdecimal() or int(asked) <= usable
    text = f"{usable} of {os.cpu_count()} usable, {cpu_name()}"
    if asked is not None:
        text += f", OMP_NUM_THREADS={asked}" + ("" if ok else ": more threads than cores slow every run down")
    return Probe("threads", ok, text)


def _bfloat16() -> Probe:
    if has_bfloat16_units():
        return Probe("bfloat16", True, "computed by the CPU itself")
    text = "no units in this CPU: --dtype auto (the default) computes in float32, and --dtype bfloat16 is slow here"
    return Probe("bfloat16", True, text)


def _memory() -> Probe:
    return Probe("memory", True, f"{free_bytes('cpu') / GB:.1f} GB free")


def _disk() -> Probe:
    free = shutil.disk_usage(Path.cwd()).free / GB
    ok = free >= LEAST_DISK and os.access(Path.cwd(), os.W_OK)
    text = f"{free:.1f} GB free in {Path.cwd()}"
    return Probe("disk", ok, text + ("" if ok else ": too little, or not writable"))


def _writable_cache() -> Probe:
    folder = cache_folder().parent
    here = folder
    while not here.exists():
        here = here.parent
    ok = os.access(here, os.W_OK)
    return Probe("cache", ok, str(folder) + ("" if ok else ": not writable, so every run hashes its files again"))


def _models() -> list[Probe]:
    found = []
    for name in list_models():
        folder = HERE / "models" / name
        missing = [x for x in ("tokenizer.json",) if not (folder / x).is_file()]
        weights = sorted(folder.glob("*.safetensors"))
        # A checkout without git-lfs leaves a pointer of a few lines where the weights should be.
        if not weights or any(x.stat().st_size < 1000 for x in weights):
            missing.append("weights")
        size = sum(x.stat().st_size for x in weights) / 1e6
        text = f"{size:.1f} MB of weights" if not missing else f"missing: {', '.join(missing)}"
        found.append(Probe(f"model {name}", not missing, text))
    return found or [Probe("models", False, "no bundled model found: install kvbench again, or use --model FOLDER")]


def _shadowed() -> Probe:
    """Whether kvbench's folder `kernels` shadows Hugging Face's package of that name in the working directory."""
    spec = importlib.util.find_spec("kernels")
    origin = spec.origin if spec is not None else None
    installed = find_version("kernels")
    if origin is None:
        return Probe("kernels", True, "not installed (not needed)")
    ours = Path(origin).resolve().is_relative_to((HERE / "kernels").resolve())
    if ours and installed is not None:
        text = f"{origin} shadows the installed package kernels {installed}: start in another folder"
        return Probe("kernels", False, text)
    version = f", version {installed}" if installed else " (kvbench's folder)"
    return Probe("kernels", True, f"{origin}{version}")
