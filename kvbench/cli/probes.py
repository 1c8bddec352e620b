"""The checks of `kvbench doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from kvbench.machine import GB, cache_folder, cpu_name, find_version, free_bytes, has_bfloat16_units
from kvbench.registry import HERE, list_models
from kvbench.runs.request import GPU_KERNELS

NO_GPU = "none"
LEAST_DISK = 1.0
"""GB that a few runs with a small model need."""


EXTRAS = {
    "accelerate": ("accelerate", "--device-map, which spreads a model over several GPUs, memory and disk"),
    "data": ("datasets", "tasks from data sets, such as LongBench"),
    "gguf": ("gguf", "`kvbench models add`, and --model file.gguf"),
    "lm-eval": ("lm_eval", "tasks of lm-evaluation-harness"),
    "postgresql": ("psycopg", "`kvbench leaderboard serve --db postgresql+psycopg://...`"),
    "query": ("duckdb", "`kvbench query`"),
    "ray": ("ray", "`kvbench sweep --executor ray`"),
    "report": ("altair", "`kvbench report`, and the leaderboard's site"),
    "server": ("fastapi", "`kvbench leaderboard serve`"),
    "trackio": ("trackio", "`kvbench run --trackio`"),
    "triton": ("triton", "--kernels triton"),
    "wandb": ("wandb", "`kvbench run --wandb`"),
}
"""Extras of pyproject.toml: a package of each, and the features that need it."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check."""

    name: str
    ok: bool
    found: str
    hint: str | None = None
    """Of a check that passed: what is slow or missing here, and what to type."""

    @property
    def state(self) -> str:
        """The result in a word."""
        return "WRONG" if not self.ok else "ok" if self.hint is None else "note"


def examine() -> list[Diagnosis]:
    """All checks: packages, hardware, disk, cache and bundled models."""
    gpu = _gpu()
    return [
        _python(), _package("torch", (2, 11)), _package("transformers", (5, 17)), gpu,
        _flash(has_gpu=gpu.ok and gpu.found != NO_GPU),
        _threads(), _bfloat16(), _memory(), _disk(), _writable_cache(), *_models(), _shadowed(), *_extras(),
    ]


def _python() -> Diagnosis:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Diagnosis("python", ok, platform.python_version() + ("" if ok else ": kvbench needs 3.11 to 3.13"))


def _package(name: str, least: tuple[int, int]) -> Diagnosis:
    version = find_version(name)
    need = ".".join(map(str, least))
    if version is None:
        return Diagnosis(name, False, f"not installed: pip install '{name}>={need}'")
    ok = tuple(int(x) for x in version.split("+")[0].split(".")[:2]) >= least
    return Diagnosis(name, ok, version if ok else f"{version}: kvbench needs {need} or newer")


def _extras() -> list[Diagnosis]:
    """One line for each extra that is missing, after one for those that are installed."""
    found = {extra: find_version(package) for extra, (package, _) in EXTRAS.items()}
    there = [extra for extra, version in found.items() if version is not None]
    return [Diagnosis("extras", True, f"installed: {', '.join(there) or 'none'}"), *(
        Diagnosis(
            extra, True, "not installed", f"{EXTRAS[extra][1]} is not available; pip install 'kvbench[{extra}]'"
        )
        for extra, version in found.items() if version is None
    )]


def _gpu() -> Diagnosis:
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken install raises anything
        return Diagnosis("gpu", False, f"torch cannot be imported: {error}")
    if not torch.cuda.is_available():
        return Diagnosis("gpu", True, NO_GPU, (
            "runs use the CPU, which is slow for models of more than about 100 M parameters: use --model mini, or "
            "`kvbench models add smollm2-135m` and few --samples"
        ))
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Diagnosis("gpu", True, ", ".join(names), GPU_KERNELS)


def _flash(*, has_gpu: bool) -> Diagnosis:
    version = find_version("flash-attn")
    if version is not None:
        return Diagnosis("flash-attn", True, version)
    if not has_gpu:
        return Diagnosis("flash-attn", True, "not installed (--kernels flash needs a GPU)")
    hint = "prompts run with torch's own attention; for --kernels flash, pip install 'kvbench[flash]'"
    return Diagnosis("flash-attn", True, "not installed", hint)


def _threads() -> Diagnosis:
    usable = len(os.sched_getaffinity(0))
    asked = os.environ.get("OMP_NUM_THREADS")
    ok = asked is None or not asked.isdecimal() or int(asked) <= usable
    text = f"{usable} of {os.cpu_count()} usable, {cpu_name()}"
    if asked is not None:
        text += f", OMP_NUM_THREADS={asked}" + ("" if ok else ": more threads than cores slow every run down")
    return Diagnosis("threads", ok, text)


def _bfloat16() -> Diagnosis:
    if has_bfloat16_units():
        return Diagnosis("bfloat16", True, "computed by the CPU itself")
    return Diagnosis("bfloat16", True, "this CPU has no units for it", (
        "--dtype bfloat16 is slow here; leave --dtype out (auto computes in float32), or type --dtype float32"
    ))


def _memory() -> Diagnosis:
    return Diagnosis("memory", True, f"{free_bytes('cpu') / GB:.1f} GB free")


def _disk() -> Diagnosis:
    free = shutil.disk_usage(Path.cwd()).free / GB
    ok = free >= LEAST_DISK and os.access(Path.cwd(), os.W_OK)
    text = f"{free:.1f} GB free in {Path.cwd()}"
    return Diagnosis("disk", ok, text + ("" if ok else ": too little, or not writable"))


def _writable_cache() -> Diagnosis:
    folder = cache_folder().parent
    here = folder
    while not here.exists():
        here = here.parent
    ok = os.access(here, os.W_OK)
    return Diagnosis("cache", ok, str(folder) + ("" if ok else ": not writable, so every run hashes its files again"))


def _models() -> list[Diagnosis]:
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
        found.append(Diagnosis(f"model {name}", not missing, text))
    return found or [Diagnosis("models", False, "no bundled model found: install kvbench again, or use --model FOLDER")]


def _shadowed() -> Diagnosis:
    """Whether kvbench's folder `kernels` shadows Hugging Face's package of that name in the working directory."""
    spec = importlib.util.find_spec("kernels")
    origin = spec.origin if spec is not None else None
    installed = find_version("kernels")
    if origin is None:
        return Diagnosis("kernels", True, "not installed (not needed)")
    ours = Path(origin).resolve().is_relative_to((HERE / "kernels").resolve())
    if ours and installed is not None:
        text = f"{origin} shadows the installed package kernels {installed}: start in another folder"
        return Diagnosis("kernels", False, text)
    version = f", version {installed}" if installed else " (kvbench's folder)"
    return Diagnosis("kernels", True, f"{origin}{version}")
