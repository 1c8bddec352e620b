"""Metrics for longer texts: two implementations of ROUGE-L, BLEU, and two edit similarities."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

SMOOTHING = 5
"""The constant of Chen and Cherry's smoothing method 4, NLTK's default."""


def align(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence; of several, the one whose last elements are latest in `second`.

    The choice matters for ROUGE scores that take the union of subsequences of several sentences.
    """
    table = [[0] * (len(second) + 1)]
    for one in first:
        above, row = table[-1], [0]
        for j, other in enumerate(second):
            row.append(above[j] + 1 if one == other else max(above[j + 1], row[j]))
        table.append(row)
    pairs, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            pairs.append((i, j))
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return pairs[::-1]


def rouge_l(prediction: str, reference: str) -> float:
    """The F score of ROUGE-L as in PyPI's `rouge` 1.0.1, which LongBench and benchmarks based on it report.

    Sentences end at a full stop, words at a space, and case matters. Every distinct word counts once: the union of the
    common subsequences of all pairs of sentences is divided by the distinct words of either text. White space between
    two full stops makes an empty word. If two sentences have about 1,000 words together, the package's recursion fails,
    which LongBench counts as 0; here they are scored.
    """
    ours, theirs = ([x.split() or [""] for x in text.split(".") if x] for text in (prediction, reference))
    if not ours or not theirs:
        return 0.0
    common = {one[i] for one in ours for other in theirs for i, _ in align(one, other)}
    precision, recall = (len(common) / len(set(chain(*text))) for text in (ours, theirs))
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_lsum(prediction: str, reference: str) -> float:
    """The F score of rougeLsum as in Google's `rouge_score` (and Hugging Face's `rouge`), without stemming.

    Sentences end at a line break, and words are sequences of lower-cased ASCII letters and digits, so a Chinese text
    has none. A word counts at most as often as it occurs in both texts.
    """
    ours, theirs = (
        [re.findall("[a-z0-9]+", line.lower()) for line in text.split("\n")] for text in (prediction, reference)
    )
    ours_left, theirs_left = Counter(chain(*ours)), Counter(chain(*theirs))
    size, hits = ours_left.total() + theirs_left.total(), 0
    for sentence in theirs:
        for i in sorted({i for other in ours for i, _ in align(sentence, other)}):
            word = sentence[i]
            if ours_left[word] and theirs_left[word]:
                hits += 1
                ours_left[word] -= 1
                theirs_left[word] -= 1
    return 2 * hits / size if hits else 0.0


def bleu(prediction: str, reference: str) -> float:
    """BLEU with up to 4-grams of words split at white space, and Chen and Cherry's smoothing 4 as in NLTK 3.10.

    The j-th order without a match counts as ln(words of the prediction) / (5 * 2^j) matches; a prediction of one word
    has only one order.
    """
    words, gold = prediction.split(), reference.split()
    logs, misses = [], 0
    for n in range(1, 5):
        ours, theirs = (Counter(zip(*(x[i:] for i in range(n)), strict=False)) for x in (words, gold))
        hits: float = (ours & theirs).total()
        if not hits and n == 1:
            return 0.0
        if not hits:
            misses += 1
            hits = math.log(len(words)) / (SMOOTHING * 2**misses)
        if hits:
            logs.append(math.log(hits / max(1, ours.total())) / 4)
    return min(1.0, math.exp(1 - len(gold) / len(words))) * math.exp(math.fsum(logs))


def difflib_similarity(prediction: str, reference: str) -> float:
    """fuzzywuzzy's `ratio` without python-Levenshtein: difflib's ratio in whole percent, from 0 to 1."""
    return round(100 * difflib.SequenceMatcher(None, prediction, reference).ratio()) / 100


def edit_similarity(prediction: str, reference: str) -> float:
    """1 minus insertions and deletions per character of both texts: `ratio` of python-Levenshtein and rapidfuzz."""
    size = len(prediction) + len(reference)
    return 2 * len(align(prediction, reference)) / size if size else 1.0
