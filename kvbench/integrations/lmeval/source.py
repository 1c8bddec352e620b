"""The task objects of lm_eval: found, loaded, and refused where a row of kvbench could not say truly what it scores."""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.extras import load_extra
from kvbench.integrations.lmeval.generation import Generation

PREFIX = "lm-eval:"
KINDS = ("generate_until", "multiple_choice", "loglikelihood")


@functools.cache
def load_task(where: str) -> Any:
    """The task object of lm_eval by its name or the path of its YAML file.

    Raises:
        UserError: there is none, it is a group, or its data cannot be had.
    """
    manager_of = load_extra("lm_eval.tasks", extra="lm-eval", what=f"task '{PREFIX}{where}'").TaskManager
    is_file = where.endswith(".yaml")
    if is_file and not Path(where).expanduser().is_file():
        raise UserError(f"task file '{where}' does not exist. Give the path of a YAML file of lm_eval, or a name.")
    manager = manager_of(include_defaults=not is_file)  # to index all of its own takes it seconds
    if not is_file and where not in manager.all_subtasks:
        close = ", ".join(difflib.get_close_matches(where, manager.all_subtasks, n=3)) or "nothing"
        reason = "a group, and a run is of one task" if where in manager.all_tasks else f"unknown; near it is {close}"
        raise UserError(
            f"task '{PREFIX}{where}' is {reason}. Give a name of `python -m kvbench.integrations.lmeval ls "
            "subtasks`, or the path "
            "of a YAML file."
        )
    try:
        (found,) = manager.load([where])["tasks"].values()
    except Exception as error:  # of YAML, of the task's own code, of the hub's clients
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"task '{PREFIX}{where}' cannot be loaded: {first}. Where its data set is on the hub, fetch it once with "
            "a network."
        ) from error
    return found


@functools.cache
def load_docs(where: str) -> Any:
    """The documents that are evaluated."""
    return load_task(where).eval_docs


def refuse_task(task: Any, where: str) -> None:
    """Refuse what a row of kvbench would not truly say.

    Raises:
        UserError: the reason.
    """
    reason = None
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        reason = "scores a text from its first token on, without a context to compress: use the task ppl-stdlib"
    elif type(task).__name__ != "ConfigurableTask" or task.OUTPUT_TYPE not in KINDS:
        reason = f"is no plain configuration of output type {', '.join(KINDS)}"
    elif getattr(task, "MULTIMODAL", False):
        reason = "has images or sound"
    elif getattr(task, "UNSAFE_CODE", False):
        reason = "runs code that the model wrote, which kvbench does not"
    elif getattr(task, "multiple_input", 0):
        reason = "has a context of its own for every choice"
    elif "acc_mutual_info" in task.aggregation():
        reason = "weighs its choices without the context too"
    elif not mean_metrics(task):
        reason = f"has no metric that is a mean over documents; it has {', '.join(task.aggregation())}"
    if reason is not None:
        raise UserError(
            f"task '{PREFIX}{where}' {reason}. Use `python -m kvbench.integrations.lmeval` where that can run it."
        )
    if task.OUTPUT_TYPE == "generate_until":
        Generation.read(task.config.generation_kwargs)


def mean_metrics(task: Any) -> list[str]:
    """Metrics whose number for the task is the mean of numbers of its documents, and that a journal tells enough for.

    Whether a choice is what greedy decoding would give is in no journal, so `exact_match` of choices is left out.
    """
    mean = load_extra("lm_eval.api.metrics", extra="lm-eval", what="lm-eval").mean
    unknown = {"exact_match"} if task.OUTPUT_TYPE == "multiple_choice" else set()
    return [metric for metric, found in task.aggregation().items() if found is mean and metric not in unknown]


def hash_doc(doc: Any) -> str:
    """Names the content of a document."""
    return hashlib.sha256(json.dumps(doc, sort_keys=True, default=str).encode()).hexdigest()[:16]
