"""Training text of `mini`: its tokenizer, examples of the tasks, and simpler forms for the curriculum.

Tasks make the text (`compose`), and `kvbench.task.encode` encodes it as in evaluation: single questions, and several
with reference history. The loss covers answers only. After the last token of an answer the label is the end of text,
even if the conversation continues, so that generation stops by itself. Questions draw keys with replacement, and there
are more keys than questions; otherwise the model would answer by elimination.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvbench.task import Encoded, Example, Task, Turn, encode
from kvbench.tasks.growth import lists
from kvbench.tasks.ruler import niah
from kvbench.tasks.scbench import kv
from kvbench.tasks.words import draw_keys, draw_numbers, words
from kvbench.text.template import Frame

VOCABULARY = 4096
END, EOS = "<|endoftext|>", 0
# Llama-3's pre-tokenizer: words with their leading sign, digits in groups of up to three.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONGEST = 4608
"""Positions the model is shown, skipped or real."""
FRAME = Frame("", "", None, None, special=False)
SINGLE_1, MULTIKEY_1, SHORT = niah.NiahSingle1(), niah.NiahMultikey1(), kv.KeyValueShort()
Mix = tuple[tuple[Task, float], ...]
"""Tasks and their shares."""
FIRST: Mix = ((SINGLE_1, 1), (MULTIKEY_1, 2), (SHORT, 3))
"""The three tasks that it learns first."""
EVERY: Mix = (
    *((SHORT, 8.0), (kv.KeyValueUuid(), 2.0), (SINGLE_1, 2.0), (MULTIKEY_1, 3.0)),
    *((niah.NiahSingle3(), 1.5), (niah.NiahMultikey2(), 2.0), (niah.NiahMultikey3(), 1.5)),
    *((niah.NiahMultivalue(), 1.5), (niah.NiahMultiquery(), 1.5), (lists.ListCopy(), 1.0), (lists.ListReverse(), 1.0)),
)
"""All of them; niah_single_2 is what niah_multikey_1 is with one key."""
LAST: Mix = (
    *((SHORT, 12.0), (kv.KeyValueUuid(), 2.0), (SINGLE_1, 2.5), (MULTIKEY_1, 4.0)),
    *((niah.NiahSingle3(), 1.5), (niah.NiahMultikey2(), 1.5), (niah.NiahMultikey3(), 1.5)),
    *((lists.ListCopy(), 1.0), (lists.ListReverse(), 1.0)),
)
"""Questions that it can learn, mostly those of the default runs: four values at once are too many for it."""
SHARP: Mix = (
    *((SHORT, 14.0), (kv.KeyValueUuid(), 1.0), (SINGLE_1, 1.5), (MULTIKEY_1, 2.5)),
    *((niah.NiahSingle3(), 1.0), (niah.NiahMultikey2(), 1.0), (niah.NiahMultikey3(), 1.0), (lists.ListCopy(), 0.5)),
)
"""Mostly what is hardest among the default runs: one key of 185."""


def corpus() -> Iterator[str]:
    """Text of every kind that the tasks show, and the words and numbers their keys and values are made of."""
    rng = random.Random("mini/tokenizer")
    for _ in range(100):
        # Every group of three digits becomes one token, so that a value is three tokens whatever its digits.
        yield " ".join([f"{n:03d}" for n in range(1000)] + [f"{n:02d}" for n in range(100)])
    for _ in range(400):
        for task, n in ((SINGLE_1, 100), (MULTIKEY_1, 300)):
            pairs = list(zip(draw_keys(rng, 4), draw_numbers(rng, 4), strict=True))
            yield show(task.compose(task.haystack_for(rng), pairs, [0, 1], n, id=""))
        yield show(SHORT.compose(SHORT.pairs(rng, 20), [0, 1, 2], id=""))
    for _ in range(3):
        yield "\n".join(f" {word}" for word in words("adjective"))
        yield "\n".join(f"-{word}" for word in words("noun"))
    for _ in range(50):
        for word in words("adjective", kv.SHORT):
            yield f' "{word} {word}'
        for word in words("noun", kv.SHORT):
            yield f"-{word}"


def show(example: Example) -> str:
    """An example and its reference answers as one text."""
    return example.context + "".join(f"\n{turn.question}{turn.prefix}{turn.answer}" for turn in example.turns)


def train_tokenizer(folder: Path) -> None:
    """Byte-level BPE on the tasks' text, saved as a fast tokenizer without a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, model_max_length=8192).save_pretrained(folder)


Item = tuple[list[int], list[int], int]
"""Token ids, labels and tokens of context of one sequence; a label is the id that comes next, or -100 (no loss)."""


def item(encoded: Encoded) -> Item:
    """A conversation with reference history as ids, with labels on the answers and the end of text after each."""
    ids, labels = list(encoded.context), [-100] * len(encoded.context)
    for i, turn in enumerate(encoded.turns):
        asked = turn.first if i == 0 else turn.later
        ids += asked + turn.answer
        labels += [-100] * (len(asked) - 1) + [*turn.answer, EOS]
    return ids, labels, len(encoded.context)


def segments(rng: random.Random, length: int, pool: int) -> Item:
    """Short segments of random tokens that recur at varying distances, with labels inside those seen before."""
    tokens = rng.sample(range(1, pool), 64)
    parts: list[list[int]] = []
    ids: list[int] = []
    labels: list[int] = []
    while len(ids) < length:
        again = bool(parts) and rng.random() < 0.5
        part = rng.choice(parts) if again else rng.choices(tokens, k=rng.randint(4, 11))
        if not again:
            parts.append(part)
        ids += part
        labels += [*part[1:], -100] if again else [-100] * len(part)
    return ids[:length], labels[:length], 0


def pick(rng: random.Random, keys: int, questions: int) -> list[int]:
    """Which pairs are asked for: with replacement."""
    return [rng.randrange(keys) for _ in range(questions)]


def tail(text: str, words: int) -> str:
    """The last words of a question: the further the key is from where its value is asked for, the harder."""
    return " ".join(text.split()[-words:])


NEEDLE, PREFIX = MULTIKEY_1.needle("{key}", "{value}"), MULTIKEY_1.word(niah.PREFIX, "{key}", singular=True)
FILLERS = ("", "", ":", "=", " ", ": ", " is ", " is: ")
BARE = (
    *(
        (f"{{key}}{filler}{{value}},", f"{{key}}{filler}", "", "", 8 + len(filler), 7 + len(filler))
        for filler in FILLERS
    ),
    *((NEEDLE, " {key} " + tail(PREFIX, n), " ", ".", 19, 11 + n) for n in range(1, 7)),
    (NEEDLE, PREFIX, " ", ".", 19, 21),
    *(('"{key}": "{value}",', '"{key}"\n' + tail(kv.QUESTION, n) + " ", "", "", 12, 11 + n) for n in range(1, 9)),
)
"""The beginners' forms, from easy to hard: a line of the context, a question, what stands around the answer's value,
and about how many tokens a line and a question take."""


def bare(rng: random.Random, length: int, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Item]:
    """The beginners' form: bare keys and values, or bare needle sentences, and questions without their wording."""
    line, prefix, lead, end, per_line, per_question = rng.choice(BARE)
    n = rng.randint(2, max(3, int(0.6 * length / per_line)))
    questions = max(2, (length - n * per_line) // per_question)
    pairs = list(zip(draw_keys(rng, n, rng.choice((0, kv.SHORT))), draw_numbers(rng, n), strict=True))
    turns = tuple(
        Turn("", prefix.format(key=key), f"{lead}{value}{end}", (value,), 0)
        for key, value in (pairs[i] for i in pick(rng, n, questions))
    )
    context = rng.choice((" ", "\n")).join(line.format(key=key, value=value) for key, value in pairs)
    return "bare", item(encode(SINGLE_1, Example("", context, turns), tokenizer, FRAME))


def near_misses(rng: random.Random, n: int) -> list[tuple[str, str]]:
    """Pairs whose keys share words and whose values share their first digits: what long contexts hold by chance."""
    adjectives = rng.sample(words("adjective", kv.SHORT), 3 + n // 6)
    nouns = rng.sample(words("noun", kv.SHORT), 3 + n // 3)
    keys = rng.sample([f"{adjective}-{noun}" for adjective in adjectives for noun in nouns], min(n, 9))
    while len(keys) < n:
        key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
        if key not in keys:
            keys.append(key)
    heads = [str(rng.randrange(100, 1000)) for _ in range(2 + n // 4)]
    values: dict[str, None] = {}
    while len(values) < n:
        values[f"{rng.choice(heads)}{rng.randrange(10_000):04d}"] = None
    return list(zip(keys, values, strict=True))


Make = Callable[[int], Example]
"""An example of that many units of context."""


def fit(make: Make, n: int, least: int, length: int, task: Task, tokenizer: PreTrainedTokenizerBase) -> Item | None:
    """The example as an item of at most `length` tokens, from `n` units of context downwards; None: not even `least`.

    What is longer would lose the end of its last answers.
    """
    while True:
        one = item(encode(task, make(n), tokenizer, FRAME))
        if len(one[0]) <= length:
            return one
        if n == least:
            return None
        n = max(least, min(n - 1, int(n * length / len(one[0]))))


def pairs_item(rng: random.Random, length: int, task: kv.KeyValue, tokenizer: PreTrainedTokenizerBase) -> Item | None:
    """A JSON object and questions; half of the short ones hold near misses."""
    short = task is SHORT
    per_pair, per_question = (11, 30) if short else (60, 85)
    questions = rng.randint(1, max(1, min(20, length // (2 * per_question))))
    n = max(2, (length - 30 - questions * per_question) // per_pair)
    pairs = near_misses(rng, n) if short and rng.random() < 0.5 else task.pairs(rng, n)
    picked = [rng.random() for _ in range(questions)]
    return fit(
        lambda n: task.compose(pairs[:n], [int(x * n) for x in picked], id=""), n, 2, length, task, tokenizer
    )


def needles_item(rng: random.Random, length: int, task: niah.Niah, tokenizer: PreTrainedTokenizerBase) -> Item | None:
    """Needles and questions, more keys hidden than asked for."""
    uuids = (task.key_kind == "uuids") + (task.value_kind == "uuids")
    per_needle = 24 + 20 * uuids
    per_question = 30 + 22 * task.queries * task.values + 30 * uuids
    questions = max(rng.randint(1, max(1, min(8, length // (2 * per_question)))) for _ in range(2))
    left = length - 36 - questions * per_question
    keys = rng.randint(1, max(1, min(12, left // (per_needle * task.values))))
    pairs = task.draw_pairs(rng, max(task.queries, keys))
    asked = [i for _ in range(questions) for i in rng.sample(range(len(pairs)), task.queries)]
    haystack = task.haystack_for(rng)
    least = haystack.least(len(pairs))
    per_unit = {"noise": 1.27, "needle": per_needle}.get(task.haystack_id, 1.06)
    n = max(least, int((left - len(pairs) * per_needle) / per_unit))
    return fit(lambda n: task.compose(haystack, pairs, asked, n, id=""), n, least, length, task, tokenizer)


def list_item(
    rng: random.Random, length: int, task: lists.NumberedList, tokenizer: PreTrainedTokenizerBase
) -> Item | None:
    """A list, asked for as a whole or by halves."""
    order = [rng.random() for _ in range(rng.choice((1, 1, 2, 4)))]
    n = max(8, int((length - 40) / (9 + 9 * max(1.0, len(order) / 2))))
    items = task.draw_items(rng, n)

    def make(n: int) -> Example:
        size = (n + 1) // 2
        starts = [1 + int(x * (n - size + 1)) for x in order]
        ranges = [(1, n)] if len(order) == 1 else [(start, start + size - 1) for start in starts]
        return task.compose(items[:n], ranges, id="", tokenizer=tokenizer)

    return fit(make, n, 8, length, task, tokenizer)


def real(rng: random.Random, length: int, tokenizer: PreTrainedTokenizerBase, mix: Mix) -> tuple[str, Item]:
    """A task's example of at most `length` tokens with its questions; tasks are drawn by their shares."""
    while True:
        task = rng.choices([task for task, _ in mix], [share for _, share in mix])[0]
        if isinstance(task, kv.KeyValue):
            one = pairs_item(rng, length, task, tokenizer)
        elif isinstance(task, lists.NumberedList):
            one = list_item(rng, length, task, tokenizer)
        else:
            one = needles_item(rng, length, cast("niah.Niah", task), tokenizer)
        if one is not None:
            return task.name, one


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]
"""Ids, labels, position ids, and what each row is."""


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    shapes: (length, rows) of a batch, one of them per step. rate: from, to. layers: of the model; one more than
    before is a local layer in front. pool: ids of the copying stages, 0: text.
    bare, spread: shares of sequences in the beginners' form and with skipped positions. mix: of the others.
    enough: stops early once the share of whole answers (copying: of tokens) over the last 50 steps reaches it.
    """

    name: str
    steps: int
    shapes: tuple[tuple[int, int], ...]
    rate: tuple[float, float] = (3e-3, 3e-3)
    layers: int = 5
    pool: int = 0
    bare: float = 0.0
    spread: float = 0.0
    mix: Mix = FIRST
    enough: float = 0.995


class Batches:
    """The batches of a stage, each a function of its step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        pieces = [tokenizer.decode([i]) for i in range(VOCABULARY)]
        self.ends = np.array([piece.endswith((".", ",", "\n")) for piece in pieces])

    def spread(self, rng: np.random.Generator, ids: np.ndarray, context: int) -> np.ndarray:
        """Position ids that skip ahead after sentences and pairs of the context, up to LONGEST in all.

        It shows short sequences at the distances of long ones.
        """
        jumps = np.zeros(len(ids))
        places = np.flatnonzero(self.ends[ids[:context]]) + 1
        places = places[(places < len(ids)) & (rng.random(len(places)) < rng.random())]
        if len(places):
            share = rng.exponential(size=len(places))
            jumps[places] = share / share.sum() * rng.integers(0, LONGEST - len(ids))
        return np.arange(len(ids)) + np.cumsum(np.floor(jumps)).astype(np.int64)

    def batch(self, stage: Stage, step: int) -> Batch:
        """The batch of one step."""
        rng = random.Random(f"mini/train/{stage.name}/{step}")
        numbers = np.random.default_rng(rng.getrandbits(64))
        length, rows = rng.choice(stage.shapes)
        ids, labels = np.zeros((rows, length), np.int64), np.full((rows, length), -100, np.int64)
        positions = np.tile(np.arange(length), (rows, 1))
        kinds = []
        for row in range(rows):
            if stage.pool:
                kind, one = "copy", segments(rng, length, stage.pool)
            else:
                easy = rng.random() < stage.bare
                kind, one = (
                    bare(rng, length, self.tokenizer) if easy else real(rng, length, self.tokenizer, stage.mix)
                )
            kinds.append(kind)
            n = min(length, len(one[0]))
            ids[row, :n], labels[row, :n] = one[0][:n], one[1][:n]
            if rng.random() < stage.spread:
                positions[row] = self.spread(numbers, ids[row], min(one[2], length))
        return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(positions), kinds
