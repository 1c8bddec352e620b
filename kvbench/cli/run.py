"""`kvbench run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.output import print_json

Text = str | None


def run_command(
    *,
    method: Annotated[str, typer.Option(help="A name of `kvbench list methods`, or path/to/file.py:Class.")],
    task: Annotated[str, typer.Option(help="A name of `kvbench list tasks`.")],
    model: Annotated[
        str, typer.Option(help="A bundled model, a local folder, a hub id, or random: before one.")
    ] = "mini",
    budget: Annotated[Text, typer.Option(help="A share such as 25%, rows per KV head such as 1024, or paper.")] = None,
    mode: Annotated[str, typer.Option(help="single, multi-turn or multi-request.")] = "single",
    visibility: Annotated[
        Text, typer.Option(help="What the method sees when it compresses: visible, hidden or first-turn.")
    ] = None,
    history: Annotated[Text, typer.Option(help="Earlier answers of multi-turn: golden or own.")] = None,
    recompress: Annotated[bool, typer.Option("--recompress", help="Compress again at every turn.")] = False,
    scorer: Annotated[Text, typer.Option(help="A scorer of the task; see `kvbench show TASK`.")] = None,
    split: Annotated[str, typer.Option(help="test, or dev to choose settings on.")] = "test",
    length: Annotated[int | None, typer.Option(help="Tokens of prompt and answer; default: the task's.")] = None,
    samples: Annotated[int, typer.Option(help="Contexts.")] = 20,
    turns: Annotated[int | None, typer.Option(help="Questions per context; default: the task's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the method; repeatable.")
    ] = None,
    task_settings: Annotated[
        list[str] | None, typer.Option("--task-set", metavar="KEY=VALUE", help="A setting of the task; repeatable.")
    ] = None,
    gen: Annotated[
        list[str] | None, typer.Option("--gen", metavar="KEY=VALUE", help="limit=N caps new tokens per turn.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Most prompt tokens per forward pass.")] = None,
    kernels: Annotated[str, typer.Option(help="torch or triton.")] = "torch",
    device: Annotated[Text, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    device_map: Annotated[
        Text, typer.Option(help="Spread a model over GPUs, memory and disk: auto, balanced, ... or a .json file.")
    ] = None,
    dtype: Annotated[Text, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log the result to Weights & Biases.")] = False,
    trackio: Annotated[bool, typer.Option("--trackio", help="Log the result to Trackio.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    as_json: Annotated[
        bool, typer.Option("--json", help="End standard output with the result as one JSON line.")
    ] = False,
) -> int:
    """Run a task under a method; again, it goes on where it stopped."""
    from kvbench.job import prepare
    from kvbench.log import say
    from kvbench.request import Request
    from kvbench.table import print_result
    from kvbench.trackers import log_result

    trackers = tuple(name for name, wanted in (("wandb", wandb), ("trackio", trackio)) if wanted)
    job = prepare(Request(
        method=method, task=task, model=model, budget=budget, mode=mode, visibility=visibility, history=history,
        recompress=recompress, scorer=scorer, split=split, length=length, samples=samples, turns=turns, seed=seed,
        method_settings=tuple(settings or ()), task_settings=tuple(task_settings or ()), generation=tuple(gen or ()),
        chunk=chunk, kernels=kernels, device=device, device_map=device_map, dtype=dtype,
        trackers=trackers, out=out,
    ))
    from kvbench.progress import show_progress  # these import torch, which a wrong request need not wait for
    from kvbench.runner import run

    with show_progress(job.spec.samples) as progress:
        outcome = run(job, progress)
    if outcome.existing:
        say(f"this run was already finished: reporting {outcome.folder}. Delete the folder to run it again.")
    print_result(outcome.result, outcome.folder)
    refused = [x for x in trackers if not log_result(x, outcome.result)]
    if as_json:
        print_json(outcome.result.model_dump(mode="json"))
    return 0 if outcome.result.status == "ok" and not refused else 1
