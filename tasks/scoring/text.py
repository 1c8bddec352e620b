"""Measures of a short answer: words in common with the gold, and which number, letter or option it names."""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Sequence

from kvbench.extras import load_extra

ARTICLE = re.compile(r"\b(a|an|the)\b")
WESTERN = str.maketrans("", "", string.punctuation)
CHINESE = str.maketrans("", "", string.punctuation + (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
))
"""The marks that LongBench and InfiniteBench leave out; 《 and 〈〉 are not among them."""
UNSIGNED = re.compile(r"\d+\.\d+|\d+")
SIGNED = re.compile(r"(?:(?<!\w)-)?(?:\d+\.\d+|\d+)")
NO_NOUN = (
    "and|are|as|at|because|but|by|could|did|does|for|from|had|has|he|i|if|in|is|it|of|on|or|seems|she|should|since|"
    "that|the|they|this|to|was|we|were|which|with|would|you"
)
"""Words that no article stands before."""
CHOSEN = rf"[ \t]+(?:(?i:{NO_NOUN})(?:n['’]t)?(?![\w-])|[A-Z\d]\S*(?:[ \t]+[A-Z\d]\S*)*[ \t]*(?:\n|$))"  # noqa: RUF001
"""What follows an A that is no article: one of these words, or names and numbers alone up to the end of the line."""
END = r"(?![\w'’-])"  # noqa: RUF001  # no beginning of a word
LETTER = rf"(A(?={CHOSEN}|(?![ \t]+\w))|[B-G]){END}"
LETTERS = (
    re.compile(rf"^\W*{LETTER}"),
    re.compile(rf"(?i:answer(?:\s+is)?|(?:option|choice)\s+is)\W*{LETTER}"),
    re.compile(rf"(?i:option|choice)\W*([A-G]){END}"),
    re.compile(r"\(([A-G])\)"),
)


def normalize(text: str) -> str:
    """Lower case without ASCII punctuation and articles, words one space apart (as SQuAD's evaluation)."""
    return " ".join(ARTICLE.sub(" ", text.lower().translate(WESTERN)).split())


def normalize_chinese(text: str) -> str:
    """Lower case without punctuation and white space."""
    return "".join(text.lower().translate(CHINESE).split())


def segment(text: str) -> list[str]:
    """Chinese words, found by jieba.

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
    """F1 of characters but punctuation and white space."""
    return f1(normalize_chinese(prediction), normalize_chinese(gold))


def contains_words(prediction: str, gold: str) -> bool:
    """Whether the gold's normalized words stand in the prediction as whole words, one after the other.

    Of a gold that is all articles (`A`) or punctuation nothing would be left, so those count there, and so does case.
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

    What comes first in this list counts first. An A before a word that an article may stand before (`A man left`) is
    one, but in `option A`.
    """
    return next((found[1] for pattern in LETTERS if (found := pattern.search(text))), None)


def find_option(text: str, options: Sequence[str]) -> str | None:
    """The letter of the option that an answer means: by its letter, else by the option that it names first.

    Of options that begin at one place the longest is meant. The A of an option's own text (`A Tale of Two Cities`) is
    none of the letters.
    """
    plain = text
    for option in options:
        if re.match("[A-G] ", option):
            plain = re.sub(re.escape(option), "", plain, flags=re.IGNORECASE)
    said = f" {normalize(text)} "
    places = {i: said.find(f" {normalize(option)} ") for i, option in enumerate(options) if normalize(option)}
    named = [(place, -len(options[i]), i) for i, place in places.items() if place >= 0]
    return find_letter(plain) or (string.ascii_uppercase[min(named)[2]] if named else None)
