"""One pass over text that every machine has, for methods that measure something on the model before a run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.log import count, say
from kvbench.method import Method, Moment

if TYPE_CHECKING:
    from kvbench.hf import Model

CHUNK = 512
LEAST_TOKENS = 16
_FOUND: dict[str, tuple[Tensor, ...]] = {}
"""Measured tensors of every layer by their hash, in this process: too large for a result, which has the hash."""
_MEASURED: dict[tuple[type | Method, str, str, str, int], tuple[str, tuple[Tensor, ...]]] = {}
"""The hash and the tensors of every method, model, element type, placement and number of tokens."""


def calibrate(
    model: Model, recorder: Method, tokens: int, summarize: Callable[[dict[str, Tensor], int], Tensor]
) -> str:
    """Measure a tensor for every layer, once per process, model and recorder; its hash, for `calibrated`.

    recorder: the full cache; leaves sums over the text in the layers' `state`. summarize: of a layer's state and the
    number of tokens.
    """
    return remember(recorder, model, tokens, lambda: measure(model, recorder, tokens, summarize))


def remember(kind: type | Method, model: Model, tokens: int, find: Callable[[], tuple[Tensor, ...]]) -> str:
    """Find a tensor for every layer, once per process, method, loaded model and number of tokens; their hash."""
    key = kind, model.sha256, model.dtype, str(model.device_map or model.device), tokens
    if key not in _MEASURED:
        found = find()
        _MEASURED[key] = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in found)).hexdigest(), found
    sha256, tensors = _MEASURED[key]
    _FOUND[sha256] = tensors  # those of a model on other devices may have the same hash
    return sha256


def calibrated(sha256: str, layer: int) -> Tensor:
    """The tensor of a layer that was measured under this hash."""
    return _FOUND[sha256][layer]


def measure(
    model: Model, recorder: Method, tokens: int, summarize: Callable[[dict[str, Tensor], int], Tensor]
) -> tuple[Tensor, ...]:
    """Run the text with a recorder; what `summarize` makes of each layer's state."""
    ids = calibration_ids(model, tokens)
    with Session(model, recorder, capacity=ids.shape[1]) as session:
        for chunk in ids.split(CHUNK, dim=1):
            session.forward(chunk, Moment.CONTEXT_CHUNK)
        return tuple(summarize(store.state, ids.shape[1]) for store in session.layers)


def calibration_ids(model: Model, tokens: int) -> Tensor:
    """The first tokens of the topics of Python's own manual (`pydoc_data`), at most as many as the model takes. [1, T]

    The text differs between versions of Python, so results should record a hash of what was measured. A tokenizer that
    cannot split text, such as that of a tiny model, gives random tokens instead, with a message.

    Raises:
        UserError: the model takes too few tokens.
    """
    from pydoc_data.topics import topics  # half a megabyte of prose, read only when it is needed

    wanted = min(tokens, model.max_length)
    if tokens < LEAST_TOKENS:
        raise UserError(f"tokens={tokens} is too few to calibrate on. Use --set tokens={LEAST_TOKENS} or more.")
    if wanted < LEAST_TOKENS:
        raise UserError(
            f"{model.id} takes {model.max_length} positions, too few to calibrate a method on {tokens} tokens of text. "
            "Use a method without calibration."
        )
    text = "\n".join(topics[name] for name in sorted(topics))[: 16 * wanted]
    ids = model.tokenizer(text, add_special_tokens=False, truncation=True, max_length=wanted).input_ids
    if len(ids) < wanted:
        say(f"the tokenizer of {model.id} makes {count(len(ids), 'token')} of the manual: random tokens are used "
            "instead.")
        ids = torch.randint(model.vocabulary, (wanted,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([ids], device=model.device)
