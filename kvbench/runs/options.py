"""The options of a run: the one table from which `kvbench run`, sweep files, requests and command texts are made."""

from __future__ import annotations

import functools
import types
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Help:
    """How the command line presents a field of `Request`.

    numeric: a sweep file may give a number, although the option is text.
    """

    text: str
    flag: str | None = None
    """None: `--` and the field's name with hyphens."""
    numeric: bool = False


@dataclass(frozen=True)
class Request:
    """The options of one run as text, in the order in which `kvbench run --help` lists them; None: the default."""

    method: Annotated[str, Help("A name of `kvbench list methods`, or path/to/file.py:Class.")]
    task: Annotated[str, Help(
        "A name of `kvbench list tasks`, path/to/file.py:Class, path/to/task.toml, or lm-eval:NAME."
    )]
    model: Annotated[str, Help(
        "A bundled or added model, a local folder, a GGUF file, or a hub id; random:NAME gives it random weights "
        "(times and bytes only, no score)."
    )] = "mini"
    budget: Annotated[str | None, Help(
        "What the method may keep or read: a share of the full cache such as 25%, the default of methods with a "
        "budget; tokens per KV head such as 1024; or paper, the paper's own.", numeric=True,
    )] = None
    mode: Annotated[str, Help(
        "single: one question per context; multi-turn: a conversation; multi-request: separate questions about one "
        "compressed context."
    )] = "single"
    visibility: Annotated[str | None, Help(
        "Whether the method sees the question when it compresses: visible (default of single), first-turn (of "
        "multi-turn) or hidden (of multi-request)."
    )] = None
    history: Annotated[str | None, Help("Earlier answers of multi-turn: reference (default) or own.")] = None
    recompress: Annotated[bool, Help("Compress again at every turn.")] = False
    template: Annotated[
        str, Help("own: the tokenizer's chat template, if it has one; none: the text alone.")
    ] = "own"
    scorer: Annotated[str | None, Help("A scorer of the task; see `kvbench show TASK`.")] = None
    split: Annotated[str, Help("test, or dev to choose settings on.")] = "test"
    length: Annotated[int | None, Help("Tokens of prompt and answer; default: the task's.")] = None
    samples: Annotated[int, Help("Number of contexts.")] = 20
    parts: Annotated[int | None, Help(
        "Cut contexts into parts of so many tokens, which earlier prompts had in other orders, for methods that reuse "
        "entries."
    )] = None
    turns: Annotated[int | None, Help("Questions per context; default: the task's.")] = None
    seed: Annotated[int, Help("Seed of the samples.")] = 0
    method_settings: Annotated[tuple[str, ...], Help("A setting of the method; repeatable.", "--set")] = ()
    task_settings: Annotated[tuple[str, ...], Help("A setting of the task; repeatable.", "--task-set")] = ()
    generation: Annotated[
        tuple[str, ...],
        Help("A generation setting: max_new_tokens=N caps each answer; others are in docs/diffusion.md.", "--gen"),
    ] = ()
    chunk: Annotated[int | None, Help("Most prompt tokens per forward pass; default: the whole prompt.")] = None
    batch: Annotated[
        str | None, Help("Answers to decode together: a number, or auto; above 1 the run has no times.", numeric=True)
    ] = None
    kernels: Annotated[str, Help("torch, triton, or flash (torch, with flash-attn for prompts).")] = "torch"
    chunk_store: Annotated[
        str | None, Help("Folder that keeps chunks for later runs, for methods that reuse entries across prompts.")
    ] = None
    device: Annotated[str | None, Help("cpu or cuda; default: cuda if there is a GPU.")] = None
    device_map: Annotated[
        str | None, Help("Spread the model over GPUs, memory and disk: auto, balanced, ... or a .json file.")
    ] = None
    dtype: Annotated[str | None, Help(
        "auto, float32, bfloat16 or float16; auto, the default, is the model's own, or float32 on a CPU without "
        "bfloat16 units."
    )] = None

    suite: str | None = None
    """The suite that this run is a part of, `name@version`."""
    trackers: tuple[str, ...] = ()
    """Packages that log the result: wandb, trackio."""
    out: Path = Path("runs")


@dataclass(frozen=True)
class Option:
    """One option of a run, from the table."""

    name: str
    """The field of `Request`."""
    flag: str
    """On the command line; sweep files use it without the hyphens in front."""
    help: str
    kind: type
    """str, int or bool; of repeatable options str, for key=value."""
    required: bool
    default: Any
    repeatable: bool
    numeric: bool

    @property
    def key(self) -> str:
        """The name in a sweep file."""
        return self.flag.removeprefix("--")


@functools.cache
def list_options() -> tuple[Option, ...]:
    """The fields of `Request` that are options of `kvbench run` and of sweep files, in order."""
    hints = get_type_hints(Request, include_extras=True)
    found = []
    for field in fields(Request):
        hint = hints[field.name]
        if get_origin(hint) is not Annotated:
            continue
        kind, shown = get_args(hint)
        repeatable = get_origin(kind) is tuple
        if isinstance(kind, types.UnionType):
            kind = get_args(kind)[0]
        text, required = shown.text, field.default is MISSING
        if not required and field.default not in (None, ()) and field.default is not False:
            text = f"{text.removesuffix('.')}; default: {field.default}."
        found.append(Option(
            name=field.name, flag=shown.flag or f"--{field.name.replace('_', '-')}", help=text,
            kind=str if repeatable else kind, required=required, default=None if required else field.default,
            repeatable=repeatable, numeric=shown.numeric,
        ))
    return tuple(found)
