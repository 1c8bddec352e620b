"""Metrics for short answers: words in common with the reference, and the number, letter or option that is named."""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Sequence

from kvbench.machine import load_extra

ARTICLE = re.compile(r"\b(a|an|the)\b")
WESTERN = str.maketrans("", "", string.punctuation)
CHINESE = str.maketrans("", "", string.punctuation + (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
))
"""Punctuation that LongBench and InfiniteBench remove; 《 and 〈〉 are not part of it."""
UNSIGNED = re.compile(r"\d+\.\d+|\d+")
SIGNED = re.compile(r"(?:(?<!\w)-)?(?:\d+\.\d+|\d+)")
NO_NOUN = (
    "and|are|as|at|because|but|by|could|did|does|for|from|had|has|he|i|if|in|is|it|of|on|or|seems|she|should|since|"
    "that|the|they|this|to|was|we|were|which|with|would|you"
)
"""Words that cannot follow an article."""
CHOSEN = rf"[ \t]+(?:(?i:{NO_NOUN})(?:n['’]t)?(?![\w-])|[A-Z\d]\S*(?:[ \t]+[A-Z\d]\S*)*[ \t]*(?:\n|$))"  # noqa: RUF001
"""Text after an A that is not an article: one of these words, or only names and numbers up to the end of the line."""
END = r"(?![\w'’-])"  # noqa: RUF001  # not the beginning of a word
LETTER = rf"(A(?={CHOSEN}|(?![ \t]+\w))|[B-G]){END}"
LETTERS = (
    re.compile(rf"^\W*{LETTER}"),
    re.compile(rf"(?i:answer(?:\s+is)?|(?:option|choice)\s+is)\W*{LETTER}"),
    re.compile(rf"(?i:option|choice)\W*([A-G]){END}"),
    re.compile(r"\(([A-G])\)"),
)


def normalize(text: str) -> str:
    """Lower-cased words without ASCII punctuation and articles, separated by single spaces (as in SQuAD)."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(WESTERN)).split())


def normalize_chinese(text: str) -> str:
    """Lower-cased text without punctuation and white space."""
    return "".join(text.lower().translate(CHINESE).split())


def segment(text: str) -> list[str]:
    """Segment Chinese text into words with jieba.

    Raises:
        UserError: jieba is not installed.
    """
    jieba = load_extra("jieba", extra="data", what="a scorer of Chinese text")
    jieba.setLogLevel(logging.WARNING)  # it reports on loading its dictionary
    return list(jieba.cut(text))


def f1(prediction: Sequence[str], gold: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the tokens as multisets."""
    common = (Counter(prediction) & Counter(gold)).total()
    return 2 * common / (len(prediction) + len(gold)) if common else 0.0


def word_f1(prediction: str, gold: str) -> float:
    """F1 of normalized words."""
    return f1(normalize(prediction).split(), normalize(gold).split())


def character_f1(prediction: str, gold: str) -> float:
    """F1 of characters without punctuation and white space."""
    return f1(normalize_chinese(prediction), normalize_chinese(gold))


def contains_words(prediction: str, gold: str) -> bool:
    """Whether the prediction contains the normalized words of the reference as consecutive whole words.

    If the reference has only articles (`A`) or punctuation, normalization is reduced, so that something is left.
    """
    for clean in (normalize, lambda x: " ".join(x.translate(WESTERN).split()), str.strip):
        if words := clean(gold):
            return f" {words} " in f" {clean(prediction)} "
    return False


def first_number(text: str, pattern: re.Pattern[str] = UNSIGNED) -> float | None:
    """The first integer or decimal."""
    found = pattern.search(text)
    return None if found is None else float(found[0])


def find_letter(text: str) -> str | None:
    """The letter from A to G that an answer begins with, announces (`the answer is B`, `option B`) or has in brackets.

    The patterns are tried in this order. An A before a word that may follow an article (`A man left`) is an article,
    except in `option A`.
    """
    return next((found[1] for pattern in LETTERS if (found := pattern.search(text))), None)


def find_option(text: str, options: Sequence[str]) -> str | None:
    """The letter of the option in an answer: the letter that is named, else that of the option named first.

    Of options that begin at the same place, the longest counts. A letter that begins an option's text (`A Tale of Two
    Cities`, `C. S. Lewis`) names no option.
    """
    plain = text
    for option in options:
        if re.match(r"[A-G]\W", option):
            plain = re.sub(re.escape(option), "", plain, flags=re.IGNORECASE)
    said = f" {normalize(text)} "
    places = {i: said.find(f" {normalize(option)} ") for i, option in enumerate(options) if normalize(option)}
    named = [(place, -len(options[i]), i) for i, place in places.items() if place >= 0]
    return find_letter(plain) or (string.ascii_uppercase[min(named)[2]] if named else None)
