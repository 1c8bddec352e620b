"""What a task is: examples made of one context and several turns, and how they become token ids."""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, ClassVar, Literal
from weakref import WeakKeyDictionary

from kvbench.tokens import tokenize, tokenize_on

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Template = Literal["own", "none"]
"""Prompts in the tokenizer's chat template where it and the task have one, or the text alone."""
_bare: WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase] = WeakKeyDictionary()
"""Tokenizers without their chat templates, each once: what is kept of a tokenizer's texts is kept by object."""
DATE = "26 Jul 2024"
"""What templates show as today that take `date_string`: the default of Llama-3.2's own, so that no day is another."""


class Mode(StrEnum):
    """How the questions of one context are asked (docs/protocol.md)."""

    SINGLE = "single"
    MULTI_TURN = "multi-turn"
    MULTI_REQUEST = "multi-request"


class Split(StrEnum):
    """Settings are chosen on `dev`, rows are reported on `test`: their seeds never meet."""

    DEV = "dev"
    TEST = "test"


@dataclass(frozen=True)
class Turn:
    """One question about the context.

    question: text after the context, without its leading separator.
    prefix: start of the answer, put after the assistant header of a chat template.
    answer: reference continuation of the prefix, as history for the next turn (leading space included).
    references: what the scorer compares with.
    limit: most new tokens; 0 with `choices`, which are weighed in place of generating.
    choices: continuations of the prefix; the prediction is the one with the greatest log-probability, and the
        log-probabilities of all their tokens are the fact `logprobs`.
    facts: free; with the example's own they end in the journal, and a scorer may ask for them by name.
    """

    question: str
    prefix: str
    answer: str
    references: tuple[str, ...]
    limit: int
    choices: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Example:
    """One shared context and its turns; `facts` are free (depths, keys) and end in the journal.

    joint: text between the context and a question that follows it; None: the task's.
    """

    id: str
    context: str
    turns: tuple[Turn, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    joint: str | None = None


@dataclass(frozen=True)
class Scorer:
    """A versioned rule that maps a prediction and its references to a number, in [0, 1] where the metric allows.

    score: takes (prediction, references), and each fact named in `facts` by its name; None where the rule has nothing
        to say about a turn (the other half of a mixed task).
    facts: names of facts of the turn or its example.
    """

    id: str
    metric: str
    score: Callable[..., float | None]
    higher_is_better: bool = True
    facts: tuple[str, ...] = ()

    def __call__(self, prediction: str, references: Sequence[str], facts: Mapping[str, object]) -> float | None:
        """The score of one turn."""
        found = self.score(prediction, references, **{name: facts[name] for name in self.facts})
        return None if found is None else float(found)


@dataclass(frozen=True)
class Task(ABC):
    """A family of examples under one name; a fix is a new version.

    Subclasses are frozen dataclasses: their fields are the task's settings (`--task-set key=value`).
    """

    name: ClassVar[str]
    version: ClassVar[str]
    suite: ClassVar[str]
    summary: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names a request may use; rows always carry `name`."""
    modes: ClassVar[tuple[Mode, ...]] = tuple(Mode)
    scorers: ClassVar[tuple[Scorer, ...]]
    default_length: ClassVar[int] = 1024
    default_turns: ClassVar[int] = 5
    needs: ClassVar[str | None] = None
    """What must be there beside kvbench and its bundled models, e.g. `a larger model` or `SQuAD's file`."""
    truncation: ClassVar[Literal["none", "middle"]] = "none"
    """What becomes of a prompt beyond the length: ours are made to length; data sets are cut in the middle."""
    leak: ClassVar[str | None] = None
    """What of the first question stands in the context where one message has both: it cannot be hidden there."""
    nonempty: ClassVar[bool] = False
    """Whether no stop token may be the first of an answer."""
    tokens_per_step: ClassVar[int | None] = None
    """Most tokens that a diffusion model commits in a step where no steps are asked for: 1 where each follows from the
    one before. None: as its configuration says."""
    joint: ClassVar[str] = "\n"
    """Text between the context and the first question."""
    separator: ClassVar[str] = "\n"
    """Text between an answer and the next question, where there is no chat template."""

    @property
    @abstractmethod
    def prompt_id(self) -> str:
        """Names the exact wording and haystack of the prompts, e.g. `ruler-niah/noise@1`."""

    @property
    def dataset_revision(self) -> str | None:
        """The data by its commit or hash; None: generated."""
        return None

    def frame(self, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """How the text is wrapped: the tokenizer's chat template, but where a task is defined without."""
        return Frame.of(tokenizer)

    def stop_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:  # noqa: ARG002  # some tasks look
        """Tokens that end an answer, beside the model's own."""
        return frozenset()

    @abstractmethod
    def minimum_length(self, turns: int, tokenizer: PreTrainedTokenizerBase) -> int:
        """The fewest tokens (prompt and generation) at which an example fits."""

    def check_samples(self, samples: int) -> None:  # noqa: B027  # most tasks take any number
        """Refuse a number of samples that the task can make nothing of, with a UserError."""

    def examples(
        self, *, seed: int, split: Split, n: int, length: int, turns: int, mode: Mode,  # noqa: ARG002  # data sets look
        tokenizer: PreTrainedTokenizerBase,
    ) -> Iterator[Example]:
        """The first `n` examples of a split: a function of the arguments and nothing else, each reseeded on its own.

        Data sets override this; what is generated overrides `example`.

        length: most tokens of the first prompt and its generation.
        turns: questions of an example; a row of a data set may have fewer.
        mode: some data sets are worded otherwise in one of them.
        """
        for index in range(n):
            yield self.generate(index, seed=seed, split=split, length=length, turns=turns, tokenizer=tokenizer)

    def generate(
        self, index: int, *, seed: int, split: Split, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """The example of this number alone, where `examples` is not overridden."""
        rng = random.Random(f"{self.name}@{self.version}/{split}/{seed}/{length}/{turns}/{index}")
        return self.example(rng, id=f"{split}-{seed}-{index}", length=length, turns=turns, tokenizer=tokenizer)

    def example(
        self, rng: random.Random, *, id: str, length: int, turns: int, tokenizer: PreTrainedTokenizerBase
    ) -> Example:
        """One example whose first prompt and generation fill `length` tokens and never exceed it."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither example nor examples")


@dataclass(frozen=True)
class EncodedTurn:
    """Token ids of one turn: `first` where it follows the context, `later` where it follows an answer."""

    first: tuple[int, ...]
    later: tuple[int, ...]
    answer: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Encoded:
    """Token ids of an example; a conversation is their concatenation and is never re-tokenized."""

    context: tuple[int, ...]
    turns: tuple[EncodedTurn, ...]

    @property
    def prompt_hash(self) -> str:
        """Hash of every id the model can be shown, reference answers included."""
        parts = [
            self.context,
            *(ids for turn in self.turns for ids in (turn.first, turn.later, turn.answer, *turn.choices)),
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Frame:
    """The chat template of a tokenizer, cut where the context, the question and the answer go."""

    head: str
    """Before the context."""
    tail: str
    """Between the question and the answer's prefix (the assistant header)."""
    middle: str | None
    """Between an answer and the next question; None: the task's separator."""
    sha: str | None
    """Hash of the chat template and of what it writes around texts, None without one."""
    special: bool
    """Whether the tokenizer adds its own special tokens to the context (only without a template)."""
    trims: bool = False
    """Whether the template strips white space around messages (Llama-3)."""

    @classmethod
    def plain(cls) -> Frame:
        """The text alone."""
        return cls("", "", None, None, special=True)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Frame:
        """Cut the tokenizer's template with markers; without a template the text stands alone."""
        template = tokenizer.chat_template
        if template is None:
            return cls.plain()
        user, assistant, again = "<kvbench-1>", "<kvbench-2>", "<kvbench-3>"

        def render(*texts: str) -> str:
            talk = [{"role": role, "content": x} for role, x in zip(cycle(("user", "assistant")), texts, strict=False)]
            return str(
                tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, date_string=DATE)
            )

        head, _, tail = render(user).partition(user)
        talk = render(user, assistant, again)
        middle = talk.partition(assistant)[2].partition(again)[0]
        trims = render(*(f"\n {x} \n" for x in (user, assistant, again))) == talk
        sha = hashlib.sha256(repr((str(template), head, middle, tail)).encode()).hexdigest()[:16]
        return cls(head, tail, middle, sha, special=False, trims=trims)


def find_frame(
    task: Task, tokenizer: PreTrainedTokenizerBase, template: Template
) -> tuple[PreTrainedTokenizerBase, Frame]:
    """How a run frames its text, and the tokenizer that its task and method are given.

    Where a chat template is not wanted and would be used, it is the same tokenizer without one.
    """
    frame = task.frame(tokenizer)
    if template == "own" or frame.sha is None:
        return tokenizer, frame
    if tokenizer not in _bare:
        _bare[tokenizer] = copy.copy(tokenizer)
        _bare[tokenizer].chat_template = None
    return _bare[tokenizer], task.frame(_bare[tokenizer])


def encode(task: Task, example: Example, tokenizer: PreTrainedTokenizerBase, frame: Frame | None = None) -> Encoded:
    """Token ids of an example; context and turns are tokenized apart, so that they are equal in every mode."""
    frame = frame or task.frame(tokenizer)
    joint = task.joint if example.joint is None else example.joint
    ids = partial(tokenize_on, tokenizer)
    strip, left, right = (str.strip, str.lstrip, str.rstrip) if frame.trims else (str, str, str)
    middle = task.separator if frame.middle is None else frame.middle
    return Encoded(
        context=tokenize(tokenizer, frame.head + left(example.context), special=frame.special),
        turns=tuple(
            EncodedTurn(
                first=ids(right(joint + turn.question) + frame.tail + turn.prefix),
                later=ids(middle + strip(turn.question) + frame.tail + turn.prefix),
                answer=ids(right(turn.answer) if turn.prefix else strip(turn.answer)),
                choices=tuple(ids(choice) for choice in turn.choices),
            )
            for turn in example.turns
        ),
    )


def count_prompt(task: Task, example: Example, tokenizer: PreTrainedTokenizerBase, frame: Frame) -> int:
    """Tokens of the first prompt, as `prompt_tokens` of the encoded example; the later turns are not looked at."""
    return prompt_tokens(encode(task, replace(example, turns=example.turns[:1]), tokenizer, frame))


def prompt_tokens(encoded: Encoded) -> int:
    """Tokens of the first prompt: what a length in tokens speaks of, generation apart."""
    return len(encoded.context) + len(encoded.turns[0].first)
