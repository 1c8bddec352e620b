"""Runs cells on a Ray cluster, one task each; a task whose node is lost restarts from its saved samples.

Tasks that give no times share a GPU, by fractions, as far as the predicted memory allows.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import DeviceLostError, UserError, describe_error, is_whole, unknown
from kvbench.log import say
from kvbench.machine import load_extra
from kvbench.sweep.cell import CellReport, LineWriter, ModelCache, SweepCell, group_cells, run_group
from kvbench.sweep.gpu import count_beside, gives_times

if TYPE_CHECKING:
    from kvbench.runs.options import Request
    from kvbench.sweep.progress import SweepProgress

RETRIES = 3
"""How often Ray restarts a cell whose node or process was lost."""
REACH = 5.0
"""Seconds to wait for a connection to a cluster."""
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""An empty HTTP/2 SETTINGS frame. Ray replies with one; Redis, which uses the same port, does not."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS
PARTS = 10_000
"""Ray divides a GPU into ten-thousandths."""
LISTEN = 0.5
"""Seconds between updates of the progress."""
MODEL_CACHE = ModelCache()
"""The model cache of a Ray worker process, which lasts from one task to the next."""


def load_ray() -> Any:
    """The package ray.

    Raises:
        UserError: ray is not installed.
    """
    return load_extra("ray", extra="ray", what="--executor ray")


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to a cluster, or to a temporary one on this machine.

    Raises:
        UserError: ray is not installed, or the address does not respond.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    ray = load_ray()
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address not in ("local", "auto"):
        _check_address(address)
    dashboard = False if address == "local" else None  # None: Ray's default
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=dashboard)
    except Exception as error:
        raise UserError(
            f"Ray at '{address}' cannot be used: {describe_error(error).rstrip('.')}. Check it with `ray status`; a "
            "cluster with token authentication needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here, too."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def find_device(request: Request) -> str:
    """The device of a cell on the cluster; default: cuda if it has GPUs.

    Raises:
        UserError: an unknown device, no GPU on the cluster, or a device map.
    """
    asked = request.device
    if request.device_map is not None:
        raise UserError("a cell on Ray has one GPU, and a device map needs several. Use --executor local.")
    gpus = load_ray().cluster_resources().get("GPU", 0)
    if asked not in (None, "cpu", "cuda"):
        raise unknown("device", asked, ["cpu", "cuda"])
    if asked == "cuda" and not gpus:
        raise UserError("device 'cuda' is not available: this Ray cluster has no GPU. Use cpu, or add nodes with GPUs.")
    return asked or ("cuda" if gpus else "cpu")


def run_ray(
    cells: Sequence[SweepCell], workers: int | None, progress: SweepProgress, *, share: bool = False
) -> None:
    """Run every cell, or group of cells, as a task and report to `progress`.

    Args:
        cells: all cells of the sweep.
        workers: most tasks in parallel; None: as many as fit on the cluster.
        progress: of the sweep.
        share: run the prefills of the same contexts once, in one task.
    """
    ray = load_ray()
    cells = [replace(x, request=replace(x.request, out=x.request.out.absolute())) for x in cells]
    queue = _make_queue()
    waiting = group_cells(cells, workers or 1, share=share)
    memory = _find_memory() if any(x[0].request.device == "cuda" and not gives_times(x) for x in waiting) else 0
    running: dict[Any, list[SweepCell]] = {}
    while waiting or running:
        while waiting and (workers is None or len(running) < workers):
            group = waiting.pop(0)
            running[_task(group, memory).remote(group, Path.cwd(), queue)] = group
        ended, _ = ray.wait(list(running), timeout=LISTEN)
        _pass_on(queue, cells, progress)
        for reference in ended:
            group = running.pop(reference)
            reports = _collect(reference, group)
            if reports is None:
                waiting[:0] = [[x] for x in group]  # alone, so that a cell that kills its process fails alone
            for report in reports or ():
                progress.finish(report)
    _pass_on(queue, cells, progress)
    unseen = [x for x in progress.reports.values() if x.folder is not None and not x.folder.exists()]
    if unseen:
        say(
            f"warning: {len(unseen)} run folders were written to nodes that do not share {cells[0].request.out} with "
            "this one. Set `out` to a folder that every node sees under the same path."
        )


def gpu_bytes() -> int:
    """Bytes of the GPU that a task sees."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def work(group: Sequence[SweepCell], folder: Path, queue: Any) -> list[CellReport]:
    """Run cells on a node, in the sweep's working directory so that relative paths agree."""
    if folder.is_dir():
        os.chdir(folder)
    with redirect_stderr(LineWriter(partial(queue.put.remote, group[0].index))):
        try:
            return list(run_group(group, MODEL_CACHE, lambda cell, done: queue.put.remote(cell.index, done)))
        except DeviceLostError as error:
            say(str(error))
            os._exit(error.exit_code)  # Ray starts the task again in another process


def _task(group: Sequence[SweepCell], memory: int) -> Any:
    """The Ray task of a group. Ray runs each task with a GPU in its own process, which frees the GPU memory.

    memory: bytes of a GPU, of which the task takes its part.
    """
    parts = count_beside(group, memory)
    gpus = 0 if group[0].request.device != "cuda" else 1 if parts == 1 else PARTS // parts / PARTS
    return load_ray().remote(num_cpus=1, num_gpus=gpus, max_retries=RETRIES)(work)


def _stay_on(node: str) -> Any:
    """A strategy to run a task on this node alone."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node, soft=False)


def _find_memory() -> int:
    """Bytes of the smallest GPU of the cluster, asked of every node that has one."""
    ray = load_ray()
    nodes = [x["NodeID"] for x in ray.nodes() if x["Alive"] and x["Resources"].get("GPU")]
    ask = [
        ray.remote(num_cpus=0, num_gpus=1 / PARTS, scheduling_strategy=_stay_on(node))(gpu_bytes).remote()
        for node in nodes
    ]
    return int(min(ray.get(ask)))


def _collect(reference: Any, group: Sequence[SweepCell]) -> list[CellReport] | None:
    """The reports of a task that has ended; None: it was lost, and its cells may still run alone."""
    ray = load_ray()
    try:
        reports: list[CellReport] = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = f"lost {RETRIES + 1} times: {describe_error(error)}"
        if len(group) > 1:
            say(f"{len(group)} cells that shared prefills were {reason}. Each is run alone.")
            return None
        return [CellReport(cell, "failed", f"{reason}. Finished samples are saved.") for cell in group]
    return reports


def _pass_on(queue: Any, cells: Sequence[SweepCell], progress: SweepProgress) -> None:
    for index, message in load_ray().get(queue.take.remote()):
        if isinstance(message, str):
            say(message)
        else:
            progress.receive(cells[index], message)


class MessageQueue:
    """Collects messages from the nodes: numbers of finished samples and log lines."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, int | str]] = []

    def put(self, index: int, message: int | str) -> None:
        """Add a message of a cell."""
        self._messages.append((index, message))

    def take(self) -> list[tuple[int, int | str]]:
        """Return and remove all messages."""
        messages, self._messages = self._messages, []
        return messages


def _make_queue() -> Any:
    """A queue on the node of the sweep itself, because other nodes can be lost."""
    ray = load_ray()
    here = _stay_on(ray.get_runtime_context().get_node_id())
    return ray.remote(num_cpus=0, scheduling_strategy=here)(MessageQueue).remote()


def _check_address(address: str) -> None:
    """Fail fast if no cluster responds at the address; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not is_whole(port):
        raise UserError(f"Ray address '{address}' is not HOST:PORT. Use for example --address 10.0.0.1:6379.")
    hint = "Start one with `ray start --head`, or leave out --address to start a cluster on this machine."
    try:
        with socket.create_connection((host, int(port)), timeout=REACH) as line:
            line.sendall(HELLO)
            answer = line.recv(len(SETTINGS))
    except (OSError, OverflowError) as error:
        raise UserError(f"Ray at '{address}' cannot be reached: {error}. {hint}") from error
    if answer[3:4] != SETTINGS[3:4]:
        raise UserError(f"the server at '{address}' is not Ray. {hint}")
