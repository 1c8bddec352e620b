"""Texts that parts are trained on (`train_part`): functions of the step, with seeds apart from the tasks' splits."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from mini_text import FIRST, FRAME, SHORT, Item, item, real
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.hf import Model
from kvbench.task import encode
from kvbench.techniques.calibration import calibration_ids

RECENT_PAIRS = 5
"""Pairs of a short JSON object."""
FORMATTED_PAIRS, FORMATTED_ROWS = (4, 13), 8
"""Fewest and most pairs of an object whose values are asked for in another format, and questions of a batch."""
Text = tuple[Tensor, Tensor, int]
"""Ids [1, T]; the id to predict at every place, -100 elsewhere [1, T]; tokens of context."""


def as_text(one: Item) -> Text:
    """An item as tensors."""
    ids, labels, context = one
    return torch.tensor([ids]), torch.tensor([labels]), context


def draw_retrieval(rng: random.Random, length: int, model: Model) -> Text:
    """A task's prompt, whose answer may be anywhere in it."""
    return as_text(real(rng, length, model.tokenizer, FIRST)[1])


def draw_recent(rng: random.Random, length: int, model: Model) -> Text:
    """A piece of Python's manual, then a short JSON object and a question: the answer is among the last tokens.

    It stands for a chat, whose last message is about the message before.
    """
    asked = SHORT.compose(SHORT.pairs(rng, RECENT_PAIRS), [rng.randrange(RECENT_PAIRS)], id="")
    more, labels, last = item(encode(SHORT, asked, model.tokenizer, FRAME))
    manual = calibration_ids(model, model.max_length)[0].tolist()
    start, count = rng.randrange(len(manual) - length), length - len(more)
    before = [*manual[start : start + count], *model.tokenizer("\n", add_special_tokens=False).input_ids]
    return as_text((before + more, [-100] * len(before) + labels, len(before) + last))


def draw_routed(model: Model, kind: str, step: int) -> list[Text]:
    """A prompt of each sort; the router sees the context, in every other step with the question."""
    rng = random.Random(f"flux/{kind}/{step}")
    length = rng.choice((384, 512, 640))
    texts = [draw(rng, length, model) for draw in (draw_retrieval, draw_recent)]
    if step % 2:
        return texts
    return [(ids, labels, int((labels[0] >= 0).nonzero()[0]) + 1) for ids, labels, _ in texts]


def draw_skipped(model: Model, kind: str, step: int) -> Text:
    """A task's prompt, of which tokens may be skipped: the context, in every other step with the question."""
    rng = random.Random(f"ftp/{kind}/{step}")
    ids, labels, context = draw_retrieval(rng, rng.choice((256, 384, 512)), model)
    return ids, labels, context if step % 2 else int((labels[0] >= 0).nonzero()[0]) + 1


def draw_asked(model: Model, kind: str, step: int) -> Text:
    """A task's prompt, whose entries are chosen before its questions."""
    rng = random.Random(f"nosa/{kind}/{step}")
    return draw_retrieval(rng, rng.choice((384, 512, 640)), model)


def draw_formatted(rng: random.Random, pairs: int, model: Model) -> Text:
    """A question about a short JSON object, whose answer is given in the needle tasks' format: ` 1234567.`"""
    example = SHORT.compose(SHORT.pairs(rng, pairs), [rng.randrange(pairs)], id="")
    turn = example.turns[0]
    answered = replace(example, turns=(replace(turn, answer=f" {turn.answer}."),))
    return as_text(item(encode(SHORT, answered, model.tokenizer, FRAME)))


def draw_batch(model: Model, kind: str, step: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of several such questions, padded at the end. [B, T] each"""
    rng = random.Random(f"reasoncache/{kind}/{step}")
    texts = [draw_formatted(rng, rng.randint(*FORMATTED_PAIRS), model) for _ in range(FORMATTED_ROWS)]
    ids, labels = (
        pad_sequence([x[part][0] for x in texts], batch_first=True, padding_value=filler)
        for part, filler in ((0, 0), (1, -100))
    )
    return ids, labels
