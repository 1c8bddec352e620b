"""Checks what the runs of a plan need on this machine: weights, data, a GPU and memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kvbench.errors import UserError
from kvbench.log import say
from kvbench.registry import find_task
from kvbench.reproduce.plan import ClaimPlan, Missing
from kvbench.runs.options import Request
from kvbench.runs.request import check
from kvbench.settings import configure, parse_pairs

if TYPE_CHECKING:
    from kvbench.hf import ModelSize

T = TypeVar("T")
LARGE = 1e9
"""Parameters above which a model runs on a GPU only; on a CPU a paper's table would take months."""
PATIENCE = 3.0
"""Timeout in seconds of the one connection attempt to the hub."""


def look_around(plans: Sequence[ClaimPlan]) -> list[ClaimPlan]:
    """Add missing requirements and predicted memory to the plans."""
    if any(x.requests for x in plans):
        _reach_hub()
    seen = _Seen()
    return [_look(x, seen) for x in plans]


class _Seen:
    """Caches results and errors of checks."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], object] = {}

    def once(self, find: Callable[..., T], *about: object) -> T | UserError:
        """The result of `find`, or the UserError that it raised, computed once."""
        key = (find, *about)
        if key not in self._found:
            try:
                self._found[key] = find(*about)
            except UserError as error:
                self._found[key] = error
        return self._found[key]  # type: ignore[return-value]  # the type belongs to this find


def _look(plan: ClaimPlan, seen: _Seen) -> ClaimPlan:
    found = {x: None for request in plan.requests for x in _missing(request, seen)}
    if plan.timing is not None and not has_gpu():
        found[Missing("GPU", "a speed is measured on a GPU, and this machine has none")] = None
    sizes = [_predicted(plan, x, seen) for x in plan.requests]
    most = max((x for x in sizes if x is not None), default=None)
    return replace(plan, missing=(*plan.missing, *found), predicted_bytes=most)


def has_gpu() -> bool:
    """True if this machine has a GPU; printed speeds are not compared with those of a CPU."""
    import torch

    return torch.cuda.is_available()


def _missing(request: Request, seen: _Seen) -> Iterator[Missing]:
    data = seen.once(_open_data, request.task, request.task_settings)
    if isinstance(data, UserError):
        yield Missing("data", _first(data))
    elif isinstance(refused := seen.once(check, replace(request, model="mini")), UserError):
        yield Missing("run", str(refused))
    size = seen.once(_predict, request.model, request.dtype)
    if isinstance(size, UserError):
        yield Missing("weights", _first(size))
        return
    from kvbench.machine import GB, free_bytes
    from kvbench.runs.prepare import find_device

    device = find_device(request)
    need = _bytes(size, request)
    if device == "cpu" and size.params > LARGE:
        yield Missing("GPU", (
            f"{request.model} has {size.params / 1e9:.1f} billion parameters, and this machine has no GPU"
        ))
    elif need > free_bytes(device):
        yield Missing("memory", (
            f"{request.model} needs about {need / GB:.1f} GB for weights and a full cache, and "
            f"{free_bytes(device) / GB:.1f} GB are free on {device}"
        ))


def _predicted(plan: ClaimPlan, request: Request, seen: _Seen) -> int | None:
    """Bytes from the model's own configuration, or from an architecture of the same shape."""
    names = [request.model, *([f"random:{plan.claim.block.shape}"] if plan.claim.block.shape else [])]
    sizes = (seen.once(_predict, x, request.dtype) for x in names)
    return next((_bytes(x, request) for x in sizes if not isinstance(x, UserError)), None)


def _predict(model: str, dtype: str | None) -> ModelSize:
    from kvbench.hf import predict_memory

    return predict_memory(model, dtype)


def _bytes(size: ModelSize, request: Request) -> int:
    """Bytes of the weights and a full cache at the greatest length."""
    length = request.length or find_task(request.task).default_length
    return size.weight_bytes + replace(size.shape, length=length).full_bytes


def _open_data(name: str, settings: tuple[str, ...]) -> str | None:
    task = configure(find_task(name), parse_pairs(settings, "--task-set"), "--task-set", name)
    return task.dataset_revision


def _first(error: UserError) -> str:
    """The first part of an error, without the hub client's message and hints (docs/reproducing.md has them)."""
    return str(error).partition(" (")[0]


def _reach_hub() -> None:
    """Set HF_HUB_OFFLINE if the hub cannot be reached; otherwise its client retries every file for half a minute."""
    if "HF_HUB_OFFLINE" in os.environ:
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    host = hub.hostname or ""
    if {hub.scheme, "all"} & getproxies().keys() and not proxy_bypass(host):
        return  # its client connects to the proxy
    try:
        socket.create_connection((host, hub.port or (80 if hub.scheme == "http" else 443)), PATIENCE).close()
    except (OSError, ValueError) as error:  # ValueError: the port is no number
        say(f"{hub.netloc} cannot be reached ({error}): only its local cache is used.")
        os.environ["HF_HUB_OFFLINE"] = "1"
