"""`Task`, the base class of all tasks: examples of one context and several turns, scorers, and their token ids."""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal
from weakref import WeakKeyDictionary

from kvbench.errors import UserError
from kvbench.text.template import Frame, Template
from kvbench.text.tokens import tokenize, tokenize_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_bare: WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase] = WeakKeyDictionary()
"""Copies of tokenizers without chat template; one copy each, because `text.tokens` caches by tokenizer object."""


class Mode(StrEnum):
    """How the questions of one context are asked (docs/protocol.md)."""

    SINGLE = "single"
    MULTI_TURN = "multi-turn"
    MULTI_REQUEST = "multi-request"


class Split(StrEnum):
    """Settings are chosen on `dev` and results reported on `test`; the two never share a random seed."""

    DEV = "dev"
    TEST = "test"


@dataclass(frozen=True)
class Turn:
    """One question about the context.

    question: text after the context, without the separator before it.
    prefix: start of the answer, placed after the assistant header of a chat template.
    answer: reference answer, which continues the prefix (leading space included) and serves as history.
    references: texts that the scorer compares the prediction with.
    max_new_tokens: most tokens of the answer; 0 with `choices`, because nothing is generated then.
    choices: possible continuations of the prefix; the prediction is the one with the greatest log-probability, and
        the log-probabilities of all their tokens are recorded as the fact `logprobs`.
    facts: any further values; they are written to the journal, and a scorer may request them by name.
    """

    question: str
    prefix: str
    answer: str
    references: tuple[str, ...]
    max_new_tokens: int
    choices: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Example:
    """One context and its turns.

    facts: any further values (depths, keys); they are written to the journal.
    joint: text between the context and a question that follows it; None: the task's `joint`.
    parts: the context as texts that are tokenized one by one: an instruction, then documents. Methods that reuse
        entries across prompts need them; none: such methods cannot run it.
    earlier: prompts that ran before, each as its parts; the entries of a part that occurs in one can be reused.
    """

    id: str
    context: str
    turns: tuple[Turn, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    joint: str | None = None
    parts: tuple[str, ...] = ()
    earlier: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Scorer:
    """A versioned rule that maps a prediction and its references to a number, in [0, 1] if the metric is bounded.

    score: called with (prediction, references) and the facts named in `facts` as keyword arguments; returns None for
        a turn that the rule does not apply to (the other half of a mixed task).
    facts: names of facts of the turn or its example.
    """

    id: str
    metric: str
    score: Callable[..., float | None]
    higher_is_better: bool = True
    facts: tuple[str, ...] = ()

    def __call__(self, prediction: str, references: Sequence[str], facts: Mapping[str, object]) -> float | None:
        """Score one turn; None if the rule does not apply to it."""
        found = self.score(prediction, references, **{name: facts[name] for name in self.facts})
        return None if found is None else float(found)


@dataclass(frozen=True)
class Task(ABC):
    """Base class of tasks. A task is identified by its name and version; a fix that changes results is a new version.

    Subclasses are frozen dataclasses whose fields are the task's settings (`--task-set key=value`).
    """

    name: ClassVar[str]
    version: ClassVar[str]
    suite: ClassVar[str]
    summary: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names accepted in a request; results always carry `name`."""
    modes: ClassVar[tuple[Mode, ...]] = tuple(Mode)
    scorers: ClassVar[tuple[Scorer, ...]]
    default_length: ClassVar[int] = 1024
    default_turns: ClassVar[int] = 5
    needs: ClassVar[str | None] = None
    """Requirements beyond kvbench and its bundled models, e.g. `a larger model` or `SQuAD's file`."""
    truncation: ClassVar[Literal["none", "middle"]] = "none"
    """`middle`: contexts that are too long are cut in the middle; `none`: examples are generated to fit the length."""
    leak: ClassVar[str | None] = None
    """The part of the first question that the context contains, which cannot be hidden from the method; None: none."""
    fixed_examples: ClassVar[bool] = False
    """Whether the examples are those of a data set, in another order under every seed: no seed gives new ones."""
    nonempty: ClassVar[bool] = False
    """If true, the first generated token must not be a stop token (`min_new_tokens=1`)."""
    tokens_per_step: ClassVar[int | None] = None
    """Most tokens that a diffusion model commits per denoising step if the run sets no number of steps; 1 if each token
    depends on the one before. None: the model's default."""
    joint: ClassVar[str] = "\n"
    """Text between the context and the first question."""
    separator: ClassVar[str] = "\n"
    """Text between an answer and the next question, without a chat template."""

    @property
    @abstractmethod
    def prompt_id(self) -> str:
        """Id of the exact wording and haystack of the prompts, e.g. `ruler-niah/noise@1`."""

    @property
    def dataset_revision(self) -> str | None:
        """Commit or hash of the data set; None for generated tasks."""
        return None

    def frame(self, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """The text around messages: the tokenizer's chat template, unless the task is defined without one."""
        return Frame.of(tokenizer)

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:  # noqa: ARG002  # for overrides
        """Tokens that end an answer, in addition to the model's own."""
        return frozenset()

    def empty_ids(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:  # noqa: ARG002  # for overrides
        """Token ids of a context without text; none, unless the task's prompts may be empty."""
        return ()

    @abstractmethod
    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """The fewest tokens (prompt and generation) at which an example fits."""

    def check_samples(self, samples: int) -> None:  # noqa: B027  # most tasks accept any number
        """Raise a UserError if the task cannot provide this number of samples."""

    def check_turns(self, turns: int) -> None:  # noqa: B027  # most tasks accept any number
        """Raise a UserError if a record has fewer turns: a run asks as many questions about every context."""

    def refuse_dev(self, split: Split) -> None:
        """Refuse the dev split (`UserError`), for a task that has none."""
        if split is Split.DEV:
            raise UserError(
                f"{self.name} has only a test split. Choose settings on a generated task (`kvbench list tasks`), or "
                "leave --split out."
            )

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002  # for data sets
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """Yield the first `n` examples of a split.

        The examples depend on the arguments alone, and each has its own random generator. Data sets override this
        method, generated tasks override `example`.

        length: most tokens of the first prompt and its generation.
        turns: turns of an example; a record of a data set may have fewer.
        mode: some data sets have another wording in one of the modes.
        """
        for index in range(n):
            yield self.generate(index, seed=seed, split=split, length=length, turns=turns, tokenizer=tokenizer)

    def outlines(
        self, *, seed: int, n: int, turns: int, mode: Mode, tokenizer: PreTrainedTokenizerBase  # noqa: ARG002
    ) -> Iterator[Example]:
        """Yield the first `n` examples of a data set whose contexts are cut to the length, without contexts; else none.

        A run reads them before it starts: some records may have more questions and answers than the model has room for.
        """
        return iter(())

    def generate(
        self, index: int, *, seed: int, split: Split, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate the example with this index; unused by tasks that override `examples`."""
        rng = random.Random(f"{self.name}@{self.version}/{split}/{seed}/{length}/{turns}/{index}")
        return self.example(rng, id=f"{split}-{seed}-{index}", length=length, turns=turns, tokenizer=tokenizer)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """Generate an example whose first prompt and generation fill `length` tokens and never exceed it."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither example nor examples")


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of one turn: `first` if it follows the context, `later` if it follows an answer."""

    first: tuple[int, ...]
    later: tuple[int, ...]
    answer: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Token ids of an example; a conversation is a concatenation of these and is never tokenized again."""

    context: tuple[int, ...]
    turns: tuple[EncodedTurn, ...]
    parts: tuple[tuple[int, ...], ...] = ()
    """The context by parts, where the example names them."""
    earlier: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """Prompts that ran before, by parts."""

    @property
    def prompt_hash(self) -> str:
        """Hash of all token ids that the model may be given, reference answers included."""
        parts = [
            self.context,
            *(ids for turn in self.turns for ids in (turn.first, turn.later, turn.answer, *turn.choices)),
            *((self.parts, self.earlier) if self.parts else ()),
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def find_frame(
    task: Task, tokenizer: PreTrainedTokenizerBase, template: Template
) -> tuple[PreTrainedTokenizerBase, Frame]:
    """The frame of a run's prompts, and the tokenizer for its task and method.

    If `template` is `none` and the task would use a chat template, the tokenizer is a copy without one.
    """
    frame = task.frame(tokenizer)
    if template == "own" or frame.sha is None:
        return tokenizer, frame
    if tokenizer not in _bare:
        _bare[tokenizer] = copy.copy(tokenizer)
        _bare[tokenizer].chat_template = None
    return _bare[tokenizer], task.frame(_bare[tokenizer])


def encode(task: Task, example: Example, tokenizer: PreTrainedTokenizerBase, frame: Frame | None = None) -> Encoded:
    """Tokenize an example; context and turns are tokenized separately, so their ids are the same in every mode.

    Raises:
        UserError: the parts of the example are not its context, or a reference answer is empty.
    """
    frame = frame or task.frame(tokenizer)
    joint = task.joint if example.joint is None else example.joint
    ids = partial(tokenize_on, tokenizer)
    strip, left, right = (str.strip, str.lstrip, str.rstrip) if frame.trims else (str, str, str)
    middle = task.separator if frame.middle is None else frame.middle
    parts, *earlier = (_split(tokenizer, frame, x) for x in (example.parts, *example.earlier))
    if example.parts and "".join(example.parts) != example.context:
        raise UserError(f"example {example.id}: its parts do not make up its context. Join them without a separator.")

    def follow(answer: str, turn: Turn) -> tuple[int, ...]:
        if turn.prefix:
            return ids(right(answer))
        text = strip(answer)
        return ids(frame.lead + text.lstrip() if frame.lead and text.strip() else text)

    whole = (tokenize(tokenizer, frame.head + left(example.context), special=frame.special),)
    turns = tuple(
        EncodedTurn(
            first=ids(right(joint + turn.question) + frame.tail + turn.prefix),
            later=ids(middle + strip(turn.question) + frame.tail + turn.prefix),
            answer=follow(turn.answer, turn),
            choices=tuple(follow(choice, turn) for choice in turn.choices),
        )
        for turn in example.turns
    )
    if not all(x.answer for x in turns):
        raise UserError(
            f"example {example.id}: a reference answer is empty, and methods are compared on its tokens. Give each "
            "question an answer."
        )
    context = tuple(chain.from_iterable(parts or whole)) or task.empty_ids(tokenizer)
    return Encoded(context, turns, parts, tuple(earlier))


def _split(tokenizer: PreTrainedTokenizerBase, frame: Frame, parts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of the parts of a prompt, the first with what precedes a context."""
    strip = str.lstrip if frame.trims else str
    return tuple(
        tokenize_on(tokenizer, text) if i else tokenize(tokenizer, frame.head + strip(text), special=frame.special)
        for i, text in enumerate(parts)
    )


def count_prompt(task: Task, example: Example, tokenizer: PreTrainedTokenizerBase, frame: Frame) -> int:
    """Count the tokens of the first prompt, as `prompt_tokens` of the encoded example, without encoding later turns."""
    return prompt_tokens(encode(task, replace(example, turns=example.turns[:1]), tokenizer, frame))


def prompt_tokens(encoded: Encoded) -> int:
    """Tokens of the first prompt; a run's length is this number plus max_new_tokens."""
    return len(encoded.context) + len(encoded.turns[0].first)
