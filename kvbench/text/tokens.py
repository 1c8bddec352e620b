"""Tokenization of contexts, cached in memory, and truncation of contexts that are too long.

The cache pays because a search for an exact length, a run and the next cell of a sweep tokenize the same texts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvbench.errors import UserError

Tokenizer = Callable[..., Any]
"""A tokenizer of transformers, as far as it is called here."""
KEPT_IDS = 16 * 2**20
"""Most token ids cached per tokenizer, four bytes each; the least recently used texts are dropped first."""
KEPT_TEXTS = 4096
PROBES = ("\n", "=", "x")
"""Texts put before a continuation to tokenize it; the first merges with the fewest continuations."""
_kept: WeakKeyDictionary[Tokenizer, OrderedDict[tuple[bytes, bool], array[int]]] = WeakKeyDictionary()
_spaced: WeakKeyDictionary[Tokenizer, bool] = WeakKeyDictionary()


def tokenize(tokenizer: Tokenizer, text: str, *, special: bool) -> tuple[int, ...]:
    """Token ids of a text, from the cache if it has them; an empty text has none.

    special: whether the tokenizer adds its special tokens.
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
    """Token ids of a text that continues another one.

    Tokenizers such as Llama-2's put a space before every text, which a continuation must not have. For these, the text
    is tokenized after a probe, and the probe's ids are removed.

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
    raise UserError(
        f"the tokenizer merges {text[:20]!r} with any text before it, so it cannot continue a conversation. Use a "
        "model with another tokenizer."
    )


def _puts_space(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a space before every text; tried once per tokenizer."""
    if tokenizer not in _spaced:
        first = tokenizer(PROBES[-1], add_special_tokens=False).input_ids[:1]
        _spaced[tokenizer] = any(str(x).startswith(("▁", "Ġ")) for x in tokenizer.convert_ids_to_tokens(first))
    return _spaced[tokenizer]


def find_last(ids: Sequence[int], part: Sequence[int]) -> int | None:
    """The place at which some ids stand last among others; None: they do not, or there are none."""
    places = range(len(ids) - len(part), -1, -1) if part else ()
    return next((i for i in places if tuple(ids[i : i + len(part)]) == tuple(part)), None)


def cut_middle(tokenizer: Any, text: str, most: int, count: Callable[[str], int] | None = None) -> tuple[str, int]:
    """Cut tokens out of the middle of a text until it fits; return the text and the number of tokens cut.

    Both halves are decoded and joined without a mark. The joined text may have more tokens than its halves, so it is
    measured and shortened until it fits. If nothing fits, the text is empty.

    most: tokens allowed.
    count: tokens of the prompt with a given text; None: tokens of the text alone.
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
