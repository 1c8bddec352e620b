"""`kvbench bench` and `kvbench plan`: measure and predict speed and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json, expand_home
from kvbench.cli.output import echo, print_json
from kvbench.errors import MOST, InterruptionError, UserError, is_whole

if TYPE_CHECKING:
    from kvbench.bench.forecast import Forecast, MethodForecast

Text = str | None
Methods = Annotated[
    list[str], typer.Option("--method", metavar="NAME", help=(
        "Repeatable; all: every method. Added for comparison: the full cache and its 8-bit form, or on diffusion "
        "models no cache."
    ))
]
Budget = Annotated[Text, typer.Option(help=(
    "25% (the default), 1024 (tokens per KV head), or paper; ignored by methods without one."
))]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the one method; repeatable.")
]
ModelName = Annotated[
    str, typer.Option(help="A bundled model, a folder, a hub id, or random:llama-3.1-8b for random weights.")
]
Chunk = Annotated[int | None, typer.Option(help="Prompt tokens per forward pass; default: all.")]
Dtype = Annotated[Text, typer.Option(help="float32, bfloat16, float16, or auto as in `kvbench run`.")]


def bench_command(
    *,
    method: Methods,
    model: ModelName = "mini",
    length: Annotated[str, typer.Option(help="Tokens of the context: 4096, or 4096,32768.")] = "4096",
    batch: Annotated[str, typer.Option(help="Sequences: 1, or 1,4,max; max: the largest that fits by forecast.")] = "1",
    timing: Annotated[str, typer.Option(help="Timing levels: kernel, step, end-to-end.")] = "kernel,step,end-to-end",
    state: Annotated[str, typer.Option(help="prefill, or synthetic: random KV entries instead of a prefill.")] = (
        "prefill"
    ),
    budget: Budget = None,
    settings: Settings = None,
    kernels: Annotated[str, typer.Option(help="torch, triton or flash.")] = "torch",
    chunk: Chunk = None,
    rounds: Annotated[int | None, typer.Option(help="Default: 16; for end-to-end timing 5.")] = None,
    memory: Annotated[
        float | None, typer.Option(help="GB for weights and caches; default: all free memory, 60 % on a CPU.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Start no cell after this many seconds.")] = None,
    device: Annotated[Text, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the result, rewritten after every cell.", callback=expand_home)
    ] = None,
    as_json: Json = False,
) -> int:
    """Time attention kernels, decode steps or whole answers.

    The full cache is timed next to the methods (docs/timing.md).
    """
    from kvbench.analysis.formatting import print_table
    from kvbench.bench.forecast import ANCHORS
    from kvbench.bench.run import BenchRequest, run_bench
    from kvbench.bench.table import describe, make_tables

    request = BenchRequest(
        methods=tuple(method), model=model, lengths=_numbers(length, "--length"), batches=_split(batch),
        timings=_split(timing), state=state, budget=budget, settings=tuple(settings or ()), kernels=kernels,
        chunk=chunk, rounds=rounds, memory=memory, seconds=seconds, device=device, dtype=dtype, out=out,
    )
    try:
        found = run_bench(request)
    except KeyboardInterrupt:
        if out is None or not out.exists():
            raise
        said = f"interrupted: finished cells are in {out}. Run the same command to continue."
        raise InterruptionError(said) from None
    echo(describe(found))
    for table in make_tables(found):
        print_table(*table)
    if as_json:
        print_json(found.model_dump(mode="json"))
    anchors = ANCHORS[found.model.kind]
    asked = {x.outcome for x in found.cells if x.method.name not in anchors}
    return 1 if asked == {"refused"} or any(x.outcome == "failed" for x in found.cells) else 0


def plan_command(
    *,
    method: Annotated[list[str], typer.Option(metavar="NAME", help=(
        "Repeatable; all: every method. Added for comparison: the full cache and its 8-bit form."
    ))],
    model: ModelName = "random:llama-3.1-8b",
    length: Annotated[int, typer.Option(help="Tokens of the context.")] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    gpu: Annotated[str, typer.Option(help="h200, h100, h100-pcie, a100, a100-40gb, l40s or rtx-4090.")] = "h200",
    budget: Budget = None,
    settings: Settings = None,
    chunk: Chunk = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Predict memory, step time and largest batch; nothing runs.

    The step is the fastest that the GPU's memory bandwidth allows.
    """
    from kvbench.bench.forecast import make_forecast
    from kvbench.settings import parse_pairs

    plan = make_forecast(
        model, method, gpu=gpu, length=length, batch=batch, budget=budget,
        settings=parse_pairs(settings or (), "--set"), chunk=chunk, dtype=dtype,
    )
    _print_plan(plan)
    if as_json:
        print_json(plan.model_dump(mode="json"))


def _print_plan(plan: Forecast) -> None:
    """Tables that fit 80 columns, each with its legend; the last one if there are lossless methods."""
    from kvbench.analysis.formatting import format_bytes
    from kvbench.bench.forecast import KERNEL_SECONDS, PYTHON_SECONDS, VISIBLE
    from kvbench.bench.table import format_seconds

    def visible(speedup: float | None) -> str:
        if speedup is None:
            return "no graph"
        return f"{speedup:.2f}" if speedup >= VISIBLE or speedup <= 1 / VISIBLE else "no"

    def host(count: int) -> str:
        return format_bytes(count) if count else "-"

    echo(
        f"{plan.model}, {plan.length:,} tokens x {plan.batch} on {plan.gpu}:\n{format_bytes(plan.weight_bytes)} of "
        f"weights, {format_bytes(plan.full_bytes)} of full caches, {format_bytes(plan.bandwidth)}/s"
    )
    tables: list[tuple[list[str], Callable[[MethodForecast], list[str]], list[str]]] = [
        (["method", "stored", "cache", "host", "spare"], lambda x: [
            x.method, f"{x.stored_share:.1%}", format_bytes(x.stored_bytes), host(x.host_bytes),
            format_bytes(x.spare_bytes),
        ], [
            "stored: compressed context over the full cache. cache, host, spare: its bytes",
            "on the device, in host memory, and room for later tokens.",
        ]),
        (["method", "peak", "fits", "max_batch", "max_batch_prefill"], lambda x: [
            x.method, format_bytes(x.peak_bytes), "yes" if x.fits else "no", str(x.max_batch), str(x.max_batch_prefill),
        ], [
            "peak, fits: weights, caches and work space if all prompts are prefilled",
            "together; whether the GPU holds it. max_batch, max_batch_prefill: the largest",
            "batch with synthetic contexts, and with all prompts prefilled together.",
        ]),
        (["method", "step_reads", "bound", "speedup_bound", "graph", "python"], lambda x: [
            x.method, format_bytes(x.step_bytes), format_seconds(x.bound_s), f"{x.speedup_bound:.2f}",
            visible(x.speedup_graph), visible(x.speedup_python),
        ], [
            "step_reads, bound: bytes that a decode step reads, and its least time at the",
            "bandwidth of a copy. speedup_bound: the full cache's bound over the method's.",
            f"graph, python: the speedup if a layer's attention takes {KERNEL_SECONDS * 1e6:.0f} us or more, and if",
            f"Python takes {PYTHON_SECONDS * 1e3:.2f} ms per layer to launch a step; `no`: below 5 %.",
            "`no graph`: Python has to launch every step, as no CUDA graph can hold it.",
        ]),
    ]
    for columns, list_cells, legend in tables:
        _print_explained(columns, map(list_cells, plan.methods), legend)
    drafts = [
        [x.method, str(x.drafted), f"{x.break_even:.2f}"]
        for x in plan.methods if x.drafted is not None and x.break_even is not None
    ]
    if drafts:
        _print_explained(["method", "drafts", "break_even"], drafts, [
            "Of lossless methods, step_reads and the bounds are those of a token where all",
            "drafts are accepted. break_even: accepted tokens per round at which a token",
            "reads as much as with the full cache; more than it drafts: never.",
        ])


def _print_explained(columns: list[str], rows: Iterable[list[str]], legend: list[str]) -> None:
    """Print a table, and lines that explain its columns."""
    from kvbench.analysis.formatting import print_table
    from kvbench.log import say

    print_table("", columns, rows)
    for line in legend:
        say(line)


def _split(text: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in text.split(","))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = _split(text)
    if not all(map(is_whole, parts)):
        raise UserError(
            f"{option} '{text[:80]}' must be whole numbers from 1 to {MOST:,}, such as 4096 or 4096,32768."
        )
    return tuple(int(x) for x in parts)
