"""Training examples of `mini-diffusion`: a prompt and a response block of answer and padding, partly masked."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from mini_text import EOS, FRAME, MULTIKEY_1, SHORT, SINGLE_1, VOCABULARY
from transformers import PreTrainedTokenizerBase

from kvbench.task import Task, encode
from kvbench.tasks.growth import lists, sums
from kvbench.tasks.ruler import niah

MASK, MASK_ID = "<|mask|>", VOCABULARY
IGNORED = -100
FILLER_WEIGHT = 0.1
"""Loss weight of an end of text after the first one, relative to a token of the answer."""
USUAL = 6.0
"""Answer length with loss weight 1; longer answers count more, by the square root of their lengths."""
TASKS: tuple[Task, ...] = (SINGLE_1, niah.NiahSingle2(), MULTIKEY_1, SHORT, sums.RunningSums(), lists.ListCopy())
SHORT_ANSWERS = {task.name for task in TASKS[:4]}
RESPONSE_LENGTHS = (16, 160)
"""Lengths of response blocks of short answers; the tasks allow 128 and 150 tokens."""


@dataclass(frozen=True)
class Stage:
    """shapes: (length, rows) of a batch, one of them per step. rate: from, to. mix: shares of TASKS.

    parts: batches of a step. suffix: share of rows that are masked from one token on. whole: share of short answers of
    which no token is known. layers: of the model. lists: most tokens of a list with its answer; longer rows hold
    needles and pairs.
    """

    name: str
    steps: int
    shapes: tuple[tuple[int, int], ...]
    rate: tuple[float, float]
    mix: tuple[float, ...]
    parts: int = 1
    suffix: float = 0.0
    whole: float = 0.0
    layers: int = 5
    lists: int = 640


Sequence = tuple[list[int], list[int], str]
"""Ids, prompt first; labels of the response block; name of the task."""


def draw(rng: random.Random, length: int, stage: Stage, tokenizer: PreTrainedTokenizerBase) -> Sequence:
    """A prompt, and a response block of answer and ends of text up to the length."""
    while True:
        task = rng.choices(TASKS, stage.mix)[0]
        if isinstance(task, lists.NumberedList) and length > stage.lists:
            continue
        room = length - rng.randint(*RESPONSE_LENGTHS)
        if isinstance(task, lists.NumberedList):
            task_length = length - rng.randint(0, 32)
            example = task.example(rng, id="", length=task_length, turns=rng.choice((1, 1, 2)), tokenizer=tokenizer)
        elif task is SHORT:
            n = max(2, (room - 70) // 11)
            example = task.compose(task.pairs(rng, n), [rng.randrange(n) for _ in range(rng.randint(1, 3))], id="")
        else:
            keys = rng.randint(1, max(1, min(8, room // 60)))
            pairs = task.draw_pairs(rng, keys)
            haystack = task.haystack_for(rng)
            per_unit = 1.27 if task.haystack_id == "noise" else 1.06
            n = max(haystack.least(keys), int((room - 100 - keys * 24) / per_unit))
            example = task.compose(haystack, pairs, [rng.randrange(keys) for _ in range(rng.randint(1, 3))], n, id="")
        encoded = encode(task, example, tokenizer, FRAME)
        asked = rng.randrange(len(encoded.turns))
        prompt = list(encoded.context)
        for i, turn in enumerate(encoded.turns[: asked + 1]):
            prompt += turn.later if i else turn.first
            prompt += turn.answer if i < asked else ()
        answer = [*encoded.turns[asked].answer, EOS]
        if len(prompt) + len(answer) <= length:
            response = answer + [EOS] * (length - len(prompt) - len(answer))
            return prompt + response, [IGNORED] * len(prompt) + response, task.name


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], torch.Tensor, torch.Tensor]
"""Ids with masks, labels where masked, weights, the rows' tasks (indices of TASKS), which labels are filler, and which
positions are of the response."""


def batches(stage: Stage, step: int, tokenizer: PreTrainedTokenizerBase) -> list[Batch]:
    """The batches of a step, of one shape."""
    seed = f"mini-diffusion/train/{stage.name}/{step}"
    shape = random.Random(seed).choice(stage.shapes)
    return [batch(random.Random(f"{seed}/{part}"), stage, shape, tokenizer) for part in range(stage.parts)]


def batch(
    rng: random.Random, stage: Stage, shape: tuple[int, int], tokenizer: PreTrainedTokenizerBase
) -> Batch:
    """Sequences of one length; their shares of masks are spread evenly over 0 to 1."""
    length, rows = shape
    names = [task.name for task in TASKS]
    drawn = [draw(rng, length, stage, tokenizer) for _ in range(rows)]
    ids, labels = (torch.tensor([row[i] for row in drawn]) for i in (0, 1))
    noise = torch.from_numpy(np.random.default_rng(rng.getrandbits(64)).random((rows, length)))
    share = torch.tensor([[(rng.random() + row) / rows] for row in range(rows)])
    response = labels != IGNORED
    filler = (labels == EOS) & ((labels == EOS).cumsum(1) > 1)
    masked = (noise < share.clamp(min=0.02)) & response
    for row in range(rows):
        if rng.random() < stage.suffix:
            places = (response[row] & ~filler[row]).nonzero()[:, 0].tolist()
            masked[row] = response[row] & (torch.arange(length) >= rng.choice(places))
        if drawn[row][2] in SHORT_ANSWERS and rng.random() < stage.whole:
            # The model must decide the last digit without the others, or knowing only the ends of text.
            known = rng.choices((torch.zeros_like(filler[row]), filler[row], labels[row] == EOS), (2, 1, 4))[0]
            masked[row] = response[row] & ~known
    weights = torch.where(filler, FILLER_WEIGHT, 1.0) * masked
    weights = weights / (USUAL * weights.sum(1, keepdim=True).clamp(min=1.0)).sqrt().clamp(min=1.0)
    kinds = [names.index(row[2]) for row in drawn]
    return ids.masked_fill(masked, MASK_ID), labels.masked_fill(~masked, IGNORED), weights, kinds, filler, response
