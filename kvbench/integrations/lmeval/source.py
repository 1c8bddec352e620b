"""Finds and loads task objects of lm_eval, and refuses tasks that kvbench cannot run."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, first_line
from kvbench.integrations.lmeval.generation import Generation
from kvbench.machine import load_extra

PREFIX = "lm-eval:"
KINDS = ("generate_until", "multiple_choice", "loglikelihood")


@functools.cache
def load_task(where: str) -> Any:
    """Load the task object of lm_eval by name or path of a YAML file.

    Raises:
        UserError: there is none, it is a group, or its data cannot be loaded.
    """
    manager_of = load_extra("lm_eval.tasks", extra="lm-eval", what=f"task '{PREFIX}{where}'").TaskManager
    is_file = where.endswith(".yaml")
    if is_file and not Path(where).expanduser().is_file():
        raise UserError(f"task file '{where}' does not exist. Give the path of a .yaml file of lm_eval, or a name.")
    manager = manager_of(include_defaults=not is_file)  # indexing lm_eval's own tasks takes seconds
    if not is_file and where not in manager.all_subtasks:
        close = ", ".join(difflib.get_close_matches(where, manager.all_subtasks, n=3)) or "nothing"
        reason = "a group, but a run has one task" if where in manager.all_tasks else f"unknown; similar names: {close}"
        raise UserError(
            f"task '{PREFIX}{where}' is {reason}. Give a name of `python -m kvbench.integrations.lmeval ls "
            "subtasks`, or the path of a .yaml file."
        )
    try:
        (found,) = manager.load([where])["tasks"].values()
    except Exception as error:  # from YAML, the task's code or the hub's client
        raise UserError(
            f"task '{PREFIX}{where}' cannot be loaded: {first_line(error)}. If its data set is on the hub, "
            "download it once with a network."
        ) from error
    return found


@functools.cache
def load_docs(where: str) -> Any:
    """The documents to evaluate."""
    return load_task(where).eval_docs


def refuse_task(task: Any, where: str) -> None:
    """Refuse tasks whose score kvbench cannot compute.

    Raises:
        UserError: with the reason.
    """
    reason = None
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        reason = "scores a text from its first token, without a context to compress: use the task ppl-stdlib"
    elif type(task).__name__ != "ConfigurableTask" or task.OUTPUT_TYPE not in KINDS:
        reason = f"is not a plain configuration of output type {', '.join(KINDS)}"
    elif getattr(task, "MULTIMODAL", False):
        reason = "has images or sound"
    elif getattr(task, "UNSAFE_CODE", False):
        reason = "runs code that the model wrote, which kvbench does not"
    elif getattr(task, "multiple_input", 0):
        reason = "has a separate context for every choice"
    elif "acc_mutual_info" in task.aggregation():
        reason = "also scores its choices without the context"
    elif not mean_metrics(task):
        reason = f"has no metric that is a mean over documents; it has {', '.join(task.aggregation())}"
    if reason is not None:
        raise UserError(
            f"task '{PREFIX}{where}' {reason}. `python -m kvbench.integrations.lmeval` may be able to run it."
        )
    if task.OUTPUT_TYPE == "generate_until":
        Generation.read(task.config.generation_kwargs)


def mean_metrics(task: Any) -> list[str]:
    """Metrics that are means over documents and can be recomputed from a journal.

    A journal does not record whether a choice is the greedy one, so `exact_match` of choices is excluded.
    """
    mean = load_extra("lm_eval.api.metrics", extra="lm-eval", what="lm-eval").mean
    unknown = {"exact_match"} if task.OUTPUT_TYPE == "multiple_choice" else set()
    return [metric for metric, found in task.aggregation().items() if found is mean and metric not in unknown]


def hash_doc(doc: Any) -> str:
    """Short hash of a document's content."""
    return hashlib.sha256(json.dumps(doc, sort_keys=True, default=str).encode()).hexdigest()[:16]
