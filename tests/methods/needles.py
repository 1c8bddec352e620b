"""Short needle prompts of texts that no trained part has seen."""

from __future__ import annotations

import random

from kvbench.tasks.ruler import niah
from kvbench.tasks.words import draw_keys, draw_numbers


def draw_asked(model, seed):
    """Two keys among noise, with a question for the first: context, question and answer as ids.

    seed: a text.
    """
    rng, task = random.Random(seed), niah.NiahMultikey1()
    pairs = list(zip(draw_keys(rng, 2), draw_numbers(rng, 2), strict=True))
    example = task.compose(task.haystack_for(rng), pairs, [0], 400, id="")
    turn = example.turns[0]
    texts = f"{example.context}{task.joint}", f"{turn.question}{turn.prefix}", turn.answer
    return tuple(model.tokenizer(x, add_special_tokens=False).input_ids for x in texts)
