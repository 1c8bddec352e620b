"""Cells side by side on a GPU: as many as the predicted memory allows, and none next to one that gives times."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest

from kvbench.errors import UserError
from kvbench.hf import predict_memory
from kvbench.runs.options import Request
from kvbench.sweep import ray as executor
from kvbench.sweep.cell import CellReport, SweepCell
from kvbench.sweep.gpu import check_beside, choose_workers, count_beside, gives_times, predict_group
from kvbench.sweep.local import WorkerPool, WorkerProcess
from kvbench.sweep.progress import SweepProgress

GB = 1_000_000_000
MODEL = "random:llama-3.1-8b"
NUMBER = itertools.count()


def make_cell(batch: str | None = "4", **options):
    """A cell on a GPU."""
    options = {"method": "snapkv", "task": "niah", "model": MODEL, "length": 4096, "device": "cuda"} | options
    number = next(NUMBER)
    return SweepCell(number, f"cell {number}", Request(batch=batch, **options), {})


def test_cells_share_a_gpu_as_far_as_its_memory_goes():
    """The number is the memory over the predicted bytes, which count weights, both caches and CUDA's own part."""
    cell = make_cell()
    need = predict_group([cell], 80 * GB)
    size = predict_memory(MODEL, length=4096)
    assert need > size.weight_bytes + 5 * size.shape.full_bytes  # 4 answers and the full cache
    assert [count_beside([cell], x) for x in (need - 1, need, 2 * need - 1, 2 * need, 5 * need)] == [1, 1, 1, 2, 5]


def test_a_larger_batch_leaves_room_for_fewer():
    """Every answer of a batch is counted."""
    needs = [predict_group([make_cell(str(x))], 80 * GB) for x in (2, 8, 32)]
    assert needs == sorted(set(needs))


def test_a_cell_that_gives_times_has_the_gpu_to_itself():
    """However large the GPU is; what gives no times shares it."""
    for batch in (None, "1"):
        assert gives_times([make_cell(batch)])
        assert count_beside([make_cell(batch)], 10_000 * GB) == 1
    assert not gives_times([make_cell("2")])
    assert not gives_times([make_cell(None), make_cell(None)])  # one process shares their prefills


def test_shared_prefills_and_automatic_batches_take_their_part_of_the_gpu():
    """A recorded prefill may take a quarter of it, and a batch `auto` half of what the weights leave."""
    memory = 200 * GB
    alone, several = (predict_group([make_cell()] * x, memory) for x in (1, 3))
    assert several - alone == memory // 4
    weights = predict_memory(MODEL, length=4096).weight_bytes
    assert predict_group([make_cell("auto")], memory) > weights + (memory - weights) // 2
    assert count_beside([make_cell("auto")], memory) == 1


def test_cells_that_cannot_be_predicted_run_alone():
    """An unknown model fails with its reason when it runs, not here."""
    cell = make_cell(model="/no/such/folder")
    assert predict_group([cell], 80 * GB) is None
    assert count_beside([cell], 80 * GB) == 1


def test_a_sweep_fills_the_gpus_unless_told_otherwise():
    """As many workers as fit, at most one per cell and per core; one for cells with times or on a CPU."""
    cells = [make_cell() for _ in range(8)]
    memory = 2 * predict_group(cells[:1], 80 * GB)
    assert choose_workers(cells, [memory], 16, share=False) == 2
    assert choose_workers(cells, [memory, memory], 16, share=False) == 4
    assert choose_workers(cells, [memory, memory], 3, share=False) == 3
    assert choose_workers(cells[:3], [memory, memory], 16, share=False) == 3
    assert choose_workers([*cells, make_cell(None)], [memory], 16, share=False) == 1
    assert choose_workers([*cells, make_cell(device="cpu")], [memory], 16, share=False) == 1
    assert choose_workers(cells, [], 16, share=False) == 1
    assert choose_workers(cells, [memory, memory // 2], 16, share=False) == 2  # each holds one
    assert choose_workers([*cells, make_cell("64")], [memory, memory], 16, share=False) == 2  # as the largest does


def test_more_workers_than_the_memory_holds_are_refused():
    """The message names the number, the memory and the largest number that fits, which is accepted."""
    groups = [[make_cell()] for _ in range(8)]
    memory = int(2.5 * predict_group(groups[0], 80 * GB))
    refused = r"--workers 6 runs 3 cells side by side on a GPU of .* Use --workers 4 or less"
    with pytest.raises(UserError, match=refused):
        check_beside(groups, 6, [memory, memory])
    check_beside(groups, 4, [memory, memory])
    check_beside(groups[:4], 6, [memory, memory, memory])
    check_beside([[make_cell(device="cpu")]] * 8, 8, [])
    with pytest.raises(UserError, match="Use --workers 2 or less"):
        check_beside(groups, 4, [memory, memory // 2])  # the smaller one holds one
    large, beside = make_cell("64"), [make_cell() for _ in range(3)]
    with pytest.raises(UserError, match=f"cell '{large.name}' alone needs"):
        check_beside([*([x] for x in beside), [large]], 2, [predict_group([large], 80 * GB)])


def test_workers_beside_a_cell_that_gives_times_are_refused():
    """Where they would share a GPU: fewer cells than GPUs, or a worker for each GPU, leave every cell alone."""
    timed, untimed = make_cell(None), make_cell()
    memory = 100 * predict_group([untimed], 80 * GB)
    for groups in ([[timed], [timed]], [[untimed], [timed]]):
        refused = f"--workers 2 runs 2 cells side by side on a GPU, and cell '{timed.name}' gives times.*--workers 1,"
        with pytest.raises(UserError, match=refused):
            check_beside(groups, 2, [memory])
        check_beside(groups, 1, [memory])
        check_beside(groups, 4, [memory, memory])
    check_beside([[untimed], [untimed]], 2, [memory])
    check_beside([[timed, timed], [timed, timed]], 2, [memory])  # each process shares its prefills


def test_cells_of_a_lost_worker_give_no_times_beside_others():
    """They shared prefills and so had no GPU to themselves; when they run again alone, another worker still uses it."""
    cells = [make_cell(None) for _ in range(2)]
    pool, sent = WorkerPool([cells], 2, SweepProgress(cells, lambda _: None)), []

    def start():
        connection = SimpleNamespace(send=sent.append, close=lambda: None)
        process = SimpleNamespace(join=lambda: None, exitcode=-9)
        pool.workers.append(WorkerProcess(len(pool.workers), process, connection))
        return pool.workers[-1]

    pool._start_worker = start
    pool._assign()
    pool._remove(pool.workers[0])
    pool._assign()
    assert sent == [(cells, True), (cells[:1], True), (cells[1:], True)]


@pytest.fixture
def asked(monkeypatch):
    """Resources asked of Ray for each task, with a fake Ray."""
    seen = []

    def remote(**options):
        seen.append(options)
        return lambda work: SimpleNamespace(remote=lambda *_: work)

    monkeypatch.setattr(executor, "load_ray", lambda: SimpleNamespace(remote=remote))
    return seen


def test_ray_gets_fractions_that_fill_a_gpu(asked):
    """Three fit and a fourth does not; cells with times ask for a whole GPU, cells on a CPU for none."""
    cell = make_cell()
    executor._task([cell], int(3.5 * predict_group([cell], 80 * GB)))
    fraction = asked[0]["num_gpus"]
    assert 3 * fraction <= 1 < 4 * fraction
    executor._task([make_cell(None)], 10_000 * GB)
    executor._task([make_cell(device="cpu")], 0)
    assert [x["num_gpus"] for x in asked[1:]] == [1, 0]


def test_a_cell_that_kills_its_process_fails_alone_on_ray(monkeypatch, capsys):
    """The cells that shared its task are run again, each in a task of its own."""
    first, killer, last = cells = [make_cell(device="cpu") for _ in range(3)]

    def get(numbers):
        if killer.index in numbers:
            raise OSError("out of memory")
        return [CellReport(x, "ok") for x in cells if x.index in numbers]

    lost = SimpleNamespace(RayError=OSError)
    fake = SimpleNamespace(get=get, wait=lambda tasks, timeout: (tasks, []), exceptions=lost)
    monkeypatch.setattr(executor, "load_ray", lambda: fake)
    task = SimpleNamespace(remote=lambda group, *_: tuple(x.index for x in group))
    monkeypatch.setattr(executor, "_task", lambda *_: task)
    monkeypatch.setattr(executor, "_make_queue", lambda: None)
    monkeypatch.setattr(executor, "_pass_on", lambda *_: None)
    progress = SweepProgress(cells, lambda _: None)
    executor.run_ray(cells, None, progress, share=True)
    assert {x.index: progress.reports[x.index].status for x in cells} == {
        first.index: "ok", killer.index: "failed", last.index: "ok"
    }
    assert "3 cells that shared prefills were lost 4 times: OSError: out of memory. Each is run alone." in (
        capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray_runs_fractions_side_by_side(monkeypatch):
    """On a cluster with one GPU by name, two of four tasks overlap at a time, and never three."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'kvbench[ray]'")
    cell = make_cell()
    memory = 2 * predict_group([cell], 80 * GB)

    def note(*_):
        begun = time.time()
        time.sleep(2)
        return begun, time.time()

    monkeypatch.setattr(executor, "work", note)
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        spans = ray.get([executor._task([cell], memory).remote() for _ in range(4)])
    finally:
        ray.shutdown()
    running = [sum(a <= begun < b for a, b in spans) for begun, _ in spans]
    assert max(running) == 2
