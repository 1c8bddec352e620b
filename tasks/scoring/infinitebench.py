"""InfiniteBench's scorers (OpenBMB/InfiniteBench at 88b3daa6, src/compute_scores.py), and corrected versions.

References are the data set's `answer`: several if any of them is right, or all numbers of `math_calc`, as text. For
`longbook_choice_eng` and `code_debug`, the reference is the option's text, and the turn has the facts

letter: the letter of the right option;
options: the texts of the four options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from kvbench.task import Scorer
from kvbench.tasks.scoring.overlap import rouge_lsum
from kvbench.tasks.scoring.text import character_f1, contains_words, find_option, first_number, word_f1
from kvbench.text.scorers import make_strict


def best(measure: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """A scorer that takes the maximum of a measure over all references."""
    return lambda prediction, references: max(measure(prediction, reference) for reference in references)


def starts_with_digits(prediction: str, references: Sequence[str]) -> float:
    """Whether the first sequence of digits is the reference."""
    return float(re.findall("[0-9]+", prediction)[:1] == [references[0]])


def has_word(prediction: str, references: Sequence[str]) -> float:
    """Whether the first reference is one of the words, with some punctuation replaced by spaces."""
    return float(references[0] in _split(prediction))


def has_upper_word(prediction: str, references: Sequence[str]) -> float:
    """Whether the first reference is one of the upper-cased words.

    Faults: a reference of two words, or with a full stop, is never found, and further references do not count. Fixed
    in `mentions`: any reference, as whole words.
    """
    return float(references[0] in _split(prediction.upper()))


def mentions(prediction: str, references: Sequence[str]) -> float:
    """Whether the prediction contains the words of any reference."""
    return float(any(contains_words(prediction, reference) for reference in references))


def choose_official(prediction: str, references: Sequence[str], letter: str) -> float:
    """The official parser of a chosen option.

    Faults: a first character from A to D counts as the answer (`Because ...` is B); the text after `answer is` must
    start with the letter or the option's text after exactly one character (`answer is (B)` and `answer is **B**` are
    wrong, `answer is Dr. No` is D); punctuation is removed from the prediction but not from the option's text. Fixed in
    `choose_fixed`.
    """
    text, right = prediction.strip(), (*references, letter)
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in right)
    if text in right:
        return 1.0
    text = re.sub(" +", " ", re.sub(r"""[\n"'.,?!{}]""", " ", text))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        if prefix in text:
            return float(text.partition(prefix)[2][1:].startswith(right))
    word = next((word for word in text.split() if word in "ABCD"), None)
    return float(word in right)


def choose_fixed(prediction: str, references: Sequence[str], letter: str, options: Sequence[str]) -> float:  # noqa: ARG001
    """Whether the option found in the prediction (`find_option`) is the right one."""
    return float(find_option(prediction, options) == letter)


def debug_official(prediction: str, references: Sequence[str], letter: str) -> float:
    """Whether the prediction starts with the letter and a full stop or colon, or announces the letter or the function.

    Fault: a letter alone is wrong, although the task asks for it. Fixed in `choose_fixed`.
    """
    text = prediction.strip()
    if text[:2] in {f"{letter}.", f"{letter}:"}:
        return 1.0
    text = re.sub(" +", " ", re.sub("[\n`'\"*-]|[Oo]ption", " ", text))
    for prefix in ("answer is:", "is:", "answer:"):
        if prefix in text:
            return float(text.partition(prefix)[2][1:].startswith((letter, references[0])))
    return 0.0


def ends_with_number(prediction: str, references: Sequence[str]) -> float:
    """Whether the last word, with some punctuation replaced by spaces, is the reference as an integer."""
    words, gold = re.sub("[\n.`'\":]", " ", prediction).split(), int(references[0])
    try:
        return float(int(words[-1]) == gold)
    except (IndexError, ValueError):
        return 0.0


def starts_with_number(prediction: str, references: Sequence[str]) -> float:
    """Whether the first number is the reference; the official code fails if it is not an integer."""
    return float(first_number(prediction) == float(references[0]))


def count_official(prediction: str, references: Sequence[str]) -> float:
    """Share of the reference's numbers that the prediction begins with.

    Fault: signs are removed from the prediction and not from the reference, so that nothing counts after the first
    negative number. Fixed in `count_fixed`.
    """
    return _shared_start(re.findall("[0-9]+", prediction), references)


def count_fixed(prediction: str, references: Sequence[str]) -> float:
    """Share of the reference's numbers that the prediction begins with, signs included."""
    return _shared_start(re.findall("-?[0-9]+", prediction), references)


def _split(text: str) -> list[str]:
    return re.sub(r"""[\n:"'.,?!{}]""", " ", text).split()


def _shared_start(found: Sequence[str], references: Sequence[str]) -> float:
    same = [float(one) == float(other) for one, other in zip(found, references, strict=False)]
    return (same.index(False) if False in same else len(same)) / len(references)


def _official(rule: str, metric: str, score: Callable[..., float], *facts: str) -> Scorer:
    return Scorer(f"infinitebench-official-{rule}@88b3daa6", metric, score, facts=facts)


def _fixed(rule: str, metric: str, score: Callable[..., float], *facts: str, version: int = 1) -> Scorer:
    return Scorer(f"infinitebench-fixed-{rule}@{version}", metric, score, facts=facts)


QA_F1 = _official("qa-f1", "word_f1", best(word_f1))
KV = _official("kv", "accuracy", has_word)
DIALOGUE = _official("dialogue", "accuracy", has_upper_word)
SCORERS: Mapping[str, tuple[Scorer, ...]] = {
    **dict.fromkeys(("passkey", "number_string"), (_official("digits", "accuracy", starts_with_digits),)),
    "kv_retrieval": (KV, make_strict(KV, every=False)),
    "longbook_sum_eng": (_official("summary", "rougeLsum", best(rouge_lsum)),),
    "longbook_qa_eng": (QA_F1,),
    "longbook_qa_chn": (_official("qa-chn-f1", "character_f1", best(character_f1)),),
    "longbook_choice_eng": (
        _official("choice", "accuracy", choose_official, "letter"),
        _fixed("choice", "accuracy", choose_fixed, "letter", "options", version=3),
    ),
    "longdialogue_qa_eng": (
        DIALOGUE, _fixed("dialogue", "accuracy", mentions, version=2), make_strict(DIALOGUE, every=False),
    ),
    "math_find": (_official("math-find", "accuracy", starts_with_number),),
    "math_calc": (
        _official("math-calc", "shared_start", count_official), _fixed("math-calc", "shared_start", count_fixed),
    ),
    "code_run": (_official("code-run", "accuracy", ends_with_number),),
    "code_debug": (
        _official("code-debug", "accuracy", debug_official, "letter"),
        _fixed("code-debug", "accuracy", choose_fixed, "letter", "options", version=3),
    ),
}
"""Scorers of the twelve tasks, the official one first; a single scorer has no known fault."""
