"""`kvbench bench` and `kvbench plan`: what takes how long, and what will."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.options import Json
from kvbench.cli.output import print_json
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.bench.forecast import Plan

Text = str | None
Methods = Annotated[
    list[str], typer.Option("--method", metavar="NAME", help="Repeatable; all: every method. Anchors come beside them.")
]
Budget = Annotated[Text, typer.Option(help="For methods that are given one: a share, rows, or paper; default: 25%.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the one method; repeatable.")
]
ModelName = Annotated[
    str, typer.Option(help="A bundled model, a folder, a hub id, or a shape such as random:llama-3.1-8b.")
]
Chunk = Annotated[int | None, typer.Option(help="Most prompt tokens per forward pass; default: all.")]
Dtype = Annotated[Text, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")]


def bench_command(
    *,
    method: Methods,
    model: ModelName = "mini",
    length: Annotated[str, typer.Option(help="Tokens of the context: 4096, or 4096,32768.")] = "4096",
    batch: Annotated[str, typer.Option(help="Sequences: 1, or 1,4,max; max: as many as plan says fit.")] = "1",
    clock: Annotated[str, typer.Option(help="Of kernel, step and user, which are never mixed.")] = "kernel,step,user",
    state: Annotated[str, typer.Option(help="prefill, or synthetic: stores filled without running the prompt.")] = (
        "prefill"
    ),
    budget: Budget = None,
    settings: Settings = None,
    kernels: Annotated[str, typer.Option(help="torch, triton or flash.")] = "torch",
    chunk: Chunk = None,
    rounds: Annotated[int | None, typer.Option(help="Default: 16; of the user clock 5.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB to fill with weights and caches; default: what is free.")] = (
        None
    ),
    seconds: Annotated[float | None, typer.Option(help="Begin nothing more after so many.")] = None,
    device: Annotated[Text, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    dtype: Dtype = None,
    out: Annotated[Path | None, typer.Option(help="File for the result, written anew after every cell.")] = None,
    as_json: Json = False,
) -> int:
    """Time methods beside the dense cache: one attention, one decode step, or whole answers (docs/timing.md)."""
    from kvbench.analysis.formatting import print_table
    from kvbench.bench.forecast import ANCHORS
    from kvbench.bench.run import Request, run_bench
    from kvbench.bench.table import make_table

    found = run_bench(Request(
        methods=tuple(method), model=model, lengths=_numbers(length, "--length"), batches=_split(batch),
        clocks=_split(clock), state=state, budget=budget, settings=tuple(settings or ()), kernels=kernels, chunk=chunk,
        rounds=rounds, memory=memory, seconds=seconds, device=device, dtype=dtype, out=out,
    ))
    where = found.environment.gpu or f"{found.environment.cpu}, {found.environment.threads} thread(s)"
    rows = "" if state == "prefill" else "; stores filled with made-up rows, no prompt was run"
    print_table(
        f"{found.model.id} ({found.model.dtype}, {found.kernels} kernels) on {where}; a copy moves "
        f"{found.ruler.before / 1e9:,.0f} GB/s{rows}", *make_table(found),
    )
    if as_json:
        print_json(found.model_dump(mode="json"))
    anchors = ANCHORS[found.model.kind]
    asked = {x.outcome for x in found.cells if x.method.name not in anchors}
    return 1 if asked == {"refused"} or any(x.outcome == "failed" for x in found.cells) else 0


def plan_command(
    *,
    method: Methods,
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
    """Predict bytes, the floor of a decode step and the largest batch, before a GPU is paid for."""
    from kvbench.bench.forecast import make_plan
    from kvbench.settings import parse_pairs

    plan = make_plan(
        model, method, gpu=gpu, length=length, batch=batch, budget=budget,
        settings=parse_pairs(settings or (), "--set"), chunk=chunk, dtype=dtype,
    )
    _print_plan(plan)
    if as_json:
        print_json(plan.model_dump(mode="json"))


def _print_plan(plan: Plan) -> None:
    from kvbench.analysis.formatting import format_bytes, print_table
    from kvbench.bench.forecast import KERNEL_SECONDS, PYTHON_SECONDS, VISIBLE
    from kvbench.bench.table import format_seconds
    from kvbench.log import say

    def seen(gain: float | None) -> str:
        if gain is None:
            return "no graph"
        return f"{gain:.2f}" if gain >= VISIBLE or gain <= 1 / VISIBLE else "no"

    print_table(
        f"{plan.model}, {plan.length:,} tokens x {plan.batch} on {plan.gpu}: {format_bytes(plan.weight_bytes)} of "
        f"weights, {format_bytes(plan.full_bytes)} of dense caches, {format_bytes(plan.bandwidth)}/s",
        ("method", "held", "caches", "on the host", "+ answer", "peak", "fits", "step reads", "floor", "gain",
         "as a graph", "from Python", "most", "prefilled"),
        [[
            x.method, f"{x.held:.1%}", format_bytes(x.stored_bytes),
            format_bytes(x.host_bytes) if x.host_bytes else "-",
            format_bytes(x.spare_bytes), format_bytes(x.peak_bytes), "yes" if x.fits else "no",
            format_bytes(x.step_bytes), format_seconds(x.floor_s), f"{x.gain:.2f}", seen(x.gain_captured),
            seen(x.gain_python), str(x.largest_batch), str(x.largest_batch_prefill),
        ] for x in plan.forecasts],
    )
    say(
        f"peak: with weights, while all prompts are run together. gain: over full, of floors; whether it is seen where "
        f"an attention takes {KERNEL_SECONDS * 1e6:.0f} us at least, and where Python takes {PYTHON_SECONDS * 1e3:.2f} "
        "ms per layer to launch. most: the largest batch, and with prompts run together (docs/timing.md)."
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(x.strip() for x in text.split(","))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = _split(text)
    if not all(x.isdecimal() for x in parts):
        raise UserError(f"{option} '{text}' must be whole numbers, such as 4096 or 4096,32768.")
    return tuple(int(x) for x in parts)
