"""Tasks of lm_eval in runs of kvbench: its prompts as contexts, its scoring of each document.

lm_eval has one prompt per document, without a boundary between context and question. The whole prompt becomes the
context, and the question is empty.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from kvbench.errors import UserError, first_line
from kvbench.integrations.lmeval.generation import Generation
from kvbench.integrations.lmeval.source import PREFIX, hash_doc, load_docs, load_task, mean_metrics, refuse_task
from kvbench.log import count
from kvbench.machine import find_version, load_extra
from kvbench.task import Example, Mode, Scorer, Split, Task, Turn, encode, prompt_tokens
from kvbench.text.template import Frame
from kvbench.text.tokens import tokenize_on

FEWSHOT_SEED = 1234
"""lm_eval's default."""
VERSION = find_version("lm_eval")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Memory address in the name of a function, which changes from process to process."""


@dataclass(frozen=True)
class LmEvalTask(Task):
    """One task of lm_eval; `find_task("lm-eval:<name>")` makes the subclass.

    num_fewshot: few-shot examples before each document; None: the task's default.
    """

    num_fewshot: int | None = None

    source: ClassVar[str]
    """A task name of lm_eval, or the path of a YAML file."""
    own_shots: ClassVar[int | None]
    """The task's own `num_fewshot`."""
    suite: ClassVar[str] = "lm-eval"
    modes: ClassVar[tuple[Mode, ...]] = (Mode.SINGLE,)
    default_length: ClassVar[int] = 2048
    default_turns: ClassVar[int] = 1
    joint: ClassVar[str] = ""
    fixed_examples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a number of few-shot examples that lm_eval would ignore."""
        if self.num_fewshot is not None and (self.num_fewshot < 0 or self.own_shots == 0):
            reason = "the task is defined without few-shot examples" if self.own_shots == 0 else "it must be 0 or more"
            raise UserError(f"--task-set num_fewshot={self.num_fewshot}: {reason}. Leave it out.")

    @property
    def shots(self) -> int:
        """Few-shot examples before each document."""
        return (self.own_shots or 0) if self.num_fewshot is None else self.num_fewshot

    @property
    def prompt_id(self) -> str:
        """Hash of lm_eval's task configuration without file paths, and lm_eval's version."""
        config = load_task(self.source).dump_config()
        for key in ("dataset_kwargs", "metadata", "num_fewshot"):  # paths; version and shots are in the spec
            config.pop(key, None)
        text = ADDRESS.sub("", json.dumps(config, sort_keys=True, default=_source))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{self.name}/{self.shots}-shot/{digest[:12]}@lm-eval-{VERSION}"

    @property
    def dataset_revision(self) -> str:
        """The revision that the task names, or a hash of its documents and few-shot documents."""
        task = load_task(self.source)
        named = (task.config.dataset_kwargs or {}).get("revision")
        if named is not None:
            return str(named)
        total = hashlib.sha256()
        for doc in (*load_docs(self.source), *(task.fewshot_docs() if self.shots else ())):
            total.update(hash_doc(doc).encode())
        return f"sha256:{total.hexdigest()}"

    def frame(self, tokenizer: Any) -> Frame:
        """Plain text, lm_eval's default."""
        del tokenizer
        return Frame.plain()

    def stop_ids(self, tokenizer: Any) -> frozenset[int]:
        """Stop texts that are one token; scorers cut answers at the others."""
        task = load_task(self.source)
        if task.OUTPUT_TYPE != "generate_until":
            return frozenset()
        return Generation.read(task.config.generation_kwargs).stop_ids(tokenizer)

    def empty_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """The token that begins a text, or the one that ends it, as in lm_eval.

        Raises:
            UserError: the tokenizer has neither.
        """
        token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if token is None:
            raise UserError(
                f"a prompt of {self.name} is empty, and the tokenizer has no token that begins or ends a text. Use "
                "another model, or --task-set num_fewshot=N."
            )
        return (int(token),)

    def minimum_length(self, turns: int, tokenizer: Any) -> int:
        """Unknown before the documents are read; `examples` checks the length."""
        del turns, tokenizer
        return 1

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode, tokenizer: Any
    ) -> Iterator[Example]:
        """The first documents in lm_eval's order.

        seed: 0 draws few-shot examples as lm_eval does by default, any other number as lm_eval's `--seed` does.

        Raises:
            UserError: the split is dev, there are fewer documents, or one of them does not fit the length.
        """
        del turns, mode
        task = load_task(self.source)
        self.refuse_dev(split)
        total = len(load_docs(self.source))
        if n > total:
            raise UserError(f"{self.name} has {total} documents: ask for --samples {total} or fewer.")
        frame, most, made = self.frame(tokenizer), 0, []
        for doc_id, requests in self._requests(n, seed or FEWSHOT_SEED).items():
            example = _compose(task, doc_id, requests, tokenizer)
            encoded = encode(self, example, tokenizer, frame)
            turn = example.turns[0]
            most = max(most, prompt_tokens(encoded) + max([turn.max_new_tokens, *map(len, encoded.turns[0].choices)]))
            made.append(example)
        if most > length:
            raise UserError(
                f"the longest of {n} documents of {self.name} has {most} tokens, which exceeds length {length}, and "
                f"kvbench does not cut documents. Use --length {most} or more."
            )
        yield from made

    def _requests(self, n: int, fewshot_seed: int) -> dict[int, list[Any]]:
        """lm_eval's requests for the first documents, by document: one text, or one per choice.

        Raises:
            UserError: lm_eval cannot build a prompt, as with more few-shot examples than there are documents for them.
        """
        task = load_task(self.source)
        task.set_config("num_fewshot", self.shots)
        task.set_fewshot_seed(fewshot_seed)  # documents draw from one sequence
        try:
            task.build_all_requests(limit=n)
        except Exception as error:  # from lm_eval, or the task's templates and code
            reason = first_line(error)
            shots = (
                f" with {count(self.shots, 'few-shot example')}, for which it has "
                f"{count(len(task.fewshot_docs()), 'document')}" if self.shots else ""
            )
            step = "Use a smaller --task-set num_fewshot, or correct the task" if self.shots else "Correct the task"
            raise UserError(f"the prompts of {self.name} cannot be built{shots}: {reason}. {step}.") from error
        found: dict[int, list[Any]] = {}
        for request in task.instances:
            found.setdefault(request.doc_id, []).append(request)
        return found


@functools.cache
def make_task(name_or_path: str) -> type[LmEvalTask]:
    """The class of `lm-eval:<name>` or `lm-eval:<path of a YAML file>`; loads its data.

    Raises:
        UserError: there is none, its data cannot be loaded, or kvbench cannot run it.
    """
    where = name_or_path.removeprefix(PREFIX)
    task = load_task(where)
    refuse_task(task, where)
    facts = ("doc_id", "doc_sha", *(("logprobs",) if task.OUTPUT_TYPE == "multiple_choice" else ()))
    better = task.higher_is_better()

    class Found(LmEvalTask):
        name = PREFIX + task.config.task
        version = str(task.VERSION)
        source = where
        own_shots = task.config.num_fewshot
        summary = f"{task.config.task} of lm_eval {VERSION}"
        scorers = tuple(
            Scorer(
                f"lm-eval-{metric if ensemble.name == 'none' else f'{ensemble.name}-{metric}'}@{VERSION}", metric,
                functools.partial(_score, where, ensemble.name, metric), bool(better.get(metric, True)), facts,
            )
            for ensemble in task._filters for metric in mean_metrics(task)  # noqa: SLF001  # lm_eval has no public access
        )

    return Found


def _compose(task: Any, doc_id: int, requests: Sequence[Any], tokenizer: Any) -> Example:
    """The example of one document: its prompt as the context, and one empty question."""
    context, follows = requests[0].arguments
    doc = requests[0].doc
    target = _target(task, doc)
    facts = {"doc_id": doc_id, "doc_sha": hash_doc(doc)}
    if task.OUTPUT_TYPE == "generate_until":
        limit = Generation.read(follows).max_new_tokens
        turn = Turn("", "", f"{task.config.target_delimiter}{target}", (str(target),), limit)
        return Example(str(doc_id), context, (turn,), facts)
    # As in lm_eval: trailing spaces of the context move to the continuation before tokenization.
    space = context[len(context.rstrip()) :]
    choices = tuple(space + x.arguments[1] for x in requests)
    if task.OUTPUT_TYPE == "loglikelihood":
        # The only metric that is a mean over documents: whether greedy decoding produces the target.
        ids = list(tokenize_on(tokenizer, choices[0]))
        turn = Turn("", "", choices[0], (str(tokenizer.decode(ids, skip_special_tokens=True)),), len(ids))
    else:
        if not (isinstance(target, int) and 0 <= target < len(choices)):
            raise UserError(f"document {doc_id} of task {task.config.task} has no correct choice: it cannot be scored.")
        turn = Turn("", "", choices[target], (choices[target],), 0, choices)
    return Example(str(doc_id), context.rstrip(), (turn,), facts)


def _target(task: Any, doc: Any) -> str | int:
    """The first reference answer of a document, or the index of the correct choice."""
    target = task.doc_to_target(doc)
    if isinstance(target, list) and target:
        target = target[0]
    if task.config.doc_to_choice is None:
        return str(target)
    choices = task.doc_to_choice(doc)
    if isinstance(target, str) and target in choices:
        target = choices.index(target)
    if task.OUTPUT_TYPE == "multiple_choice":
        return cast("int", target)
    return str(choices[target] if isinstance(target, int) else target)


def _score(
    where: str, ensemble: str, metric: str, prediction: str, references: Sequence[str], *, doc_id: int, doc_sha: str,
    logprobs: Sequence[Sequence[float]] = (),
) -> float | None:
    """lm_eval's score of one document, from its own filters and `process_results`."""
    task = load_task(where)
    doc = load_docs(where)[doc_id]
    if hash_doc(doc) != doc_sha:
        raise UserError(
            f"document {doc_id} of task {task.config.task} has changed since the run. Use the data set of the run."
        )
    answers: list[object]
    if task.OUTPUT_TYPE == "multiple_choice":
        answers = [(sum(x), False) for x in logprobs]  # no offered metric uses the greedy flag
    elif task.OUTPUT_TYPE == "loglikelihood":
        answers = [(float("nan"), prediction == references[0])]
    else:
        answers = [Generation.read(task.config.generation_kwargs).cut(prediction)]
    instance = load_extra("lm_eval.api.instance", extra="lm-eval", what="lm-eval").Instance
    requests = [
        instance(request_type=task.OUTPUT_TYPE, doc=doc, arguments=(), idx=i, resps=[x] * task.config.repeats)
        for i, x in enumerate(answers)
    ]
    next(x for x in task._filters if x.name == ensemble).apply(requests)  # noqa: SLF001  # lm_eval has no public access
    found = task.process_results(doc, [x.filtered_resps[ensemble] for x in requests])
    return float(found[metric]) if metric in found else None


def _source(value: object) -> str:
    """Source text of a function in a configuration."""
    try:
        return inspect.getsource(cast("Any", value))
    except (TypeError, OSError):
        return str(value)
