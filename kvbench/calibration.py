"""Text that every machine has, for methods that measure something on the model before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.log import say

if TYPE_CHECKING:
    from kvbench.hf import Model

LEAST_TOKENS = 16


def calibration_ids(model: Model, tokens: int) -> Tensor:
    """The first tokens of the topics of Python's own manual (`pydoc_data`), at most as many as the model takes. [1, T]

    The text differs between versions of Python, so results should record a hash of what was measured. A tokenizer that
    cannot split text, such as that of a tiny model, gives random tokens instead, with a message.

    Raises:
        UserError: the model takes too few tokens.
    """
    from pydoc_data.topics import topics  # half a megabyte of prose, read only when it is needed

    count = min(tokens, model.max_length)
    if count < LEAST_TOKENS:
        raise UserError(
            f"{model.id} takes {model.max_length} positions, too few to calibrate a method on {tokens} tokens of text. "
            "Use a method without calibration."
        )
    text = "\n".join(topics[name] for name in sorted(topics))[: 16 * count]
    ids = model.tokenizer(text, add_special_tokens=False).input_ids[:count]
    if len(ids) < count:
        say(f"the tokenizer of {model.id} makes {len(ids)} tokens of the manual: random tokens are used instead.")
        vocabulary = model.module.get_input_embeddings().weight
        assert isinstance(vocabulary, Tensor)
        ids = torch.randint(vocabulary.shape[0], (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([ids], device=model.device)
