"""Token ids of contexts, and what is left of a context that is too long.

Ids are kept in this process, because a search for a length, a run and the next cell ask for the same texts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from kvbench.errors import UserError

Tokenizer = Callable[..., Any]
"""One of transformers', as far as it is called here."""
KEPT_IDS = 16 * 2**20
"""Most ids that are kept per tokenizer, four bytes each; the texts asked for longest ago go first."""
KEPT_TEXTS = 4096
PROBES = ("\n", "=", "x")
"""Texts to put before another one that goes on; the first is the one that merges with the fewest."""
_kept: WeakKeyDictionary[Tokenizer, OrderedDict[tuple[bytes, bool], array[int]]] = WeakKeyDictionary()
_spaced: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()


def tokenize(tokenizer: Tokenizer, text: str, *, special: bool) -> tuple[int, ...]:
    """The ids of a text, tokenized unless they are still known; none of an empty one.

    special: whether the tokenizer adds its own special tokens.
    """
    if not text:
        return ()
    kept = _kept.setdefault(tokenizer, OrderedDict())
    key = hashlib.sha256(text.encode()).digest(), special
    if key in kept:
        kept.move_to_end(key)
        return tuple(kept[key])
    ids = tuple(tokenizer(text, add_special_tokens=special).input_ids)
    kept[key] = array("i", ids)
    while len(kept) > KEPT_TEXTS or sum(map(len, kept.values())) > KEPT_IDS:
        kept.popitem(last=False)
    return ids


def tokenize_on(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of a text that goes on from another one.

    Tokenizers as Llama-2's put a space before all that they are given; before what goes on there is none. So there a
    probe stands before the text, and its ids are left out.

    Raises:
        UserError: every probe merges with the text.
    """
    if not text:
        return ()
    if not _puts_space(tokenizer):
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)
    for probe in PROBES:
        head, whole = (tuple(tokenizer(x, add_special_tokens=False).input_ids) for x in (probe, probe + text))
        if whole[: len(head)] == head:
            return whole[len(head) :]
    raise UserError(f"the tokenizer merges {text[:20]!r} with whatever stands before it. Use a model with another one.")


def _puts_space(tokenizer: Any) -> bool:
    """Whether a text that is tokenized alone begins with a space of the tokenizer's own; tried once for each."""
    if tokenizer not in _spaced:
        first = tokenizer(PROBES[-1], add_special_tokens=False).input_ids[:1]
        _spaced[tokenizer] = any(str(x).startswith(("▁", "Ġ")) for x in tokenizer.convert_ids_to_tokens(first))
    return _spaced[tokenizer]


def cut_middle(tokenizer: Any, text: str, most: int, count: Callable[[str], int] | None = None) -> tuple[str, int]:
    """The text without as many tokens of its middle as are too many, and their number; empty where nothing fits.

    Both halves are decoded and joined without a mark. What they come to is measured, and shrinks until it fits:
    text that is put together anew may take more tokens.

    most: tokens allowed.
    count: tokens of the prompt that a text makes; None: those of the text alone.
    """
    count = count or (lambda text: len(tokenize(tokenizer, text, special=False)))
    if count(text) <= most:
        return text, 0
    ids = tokenize(tokenizer, text, special=False)
    keep = min(len(ids), most - count(""))
    while keep > 0:
        kept = text
        if keep < len(ids):
            first = keep - keep // 2
            halves = ids[:first], ids[len(ids) - keep + first :]
            kept = "".join(str(tokenizer.decode(list(x), clean_up_tokenization_spaces=False)) for x in halves)
        over = count(kept) - most
        if over <= 0:
            return kept, len(ids) - keep
        keep -= over
    return "", len(ids)
