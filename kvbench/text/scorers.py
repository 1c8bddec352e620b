"""Scorers for tasks without code (`kvbench.custom`), and strict scorers, which a dump of the context does not pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from kvbench.task import Scorer

WORD = r"[^\W_]+"
SENTENCE_END = re.compile(r"\n|(?<=[.!?])(?<!\b[^\W\d_]\.)(?<!\b(?:mr|ms|dr|st)\.)(?<!\bmrs\.)\s")
"""In lower-case text. A full stop after an initial or a title ends no sentence."""
LEAST_DIGITS = 2
"""A number that is named has at least the reference's digits divided by this, so that counts and list numbers do not
stand for the value."""
JOINT = r"(?:(?<![0-9]{7})\.|(?<![0-9]{4}),|,(?=[0-9]{1,3}(?![0-9])))(?=[0-9])"
"""A point or comma inside a number. A comma between two numbers of four digits or more separates them, and a point
after seven digits ends a number: recorded scores of RULER's seven digits depend on it."""


def contains(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction contains one of the references, case-sensitive."""
    return float(any(x in prediction for x in references))


def exact(prediction: str, references: Sequence[str]) -> float:
    """1.0 if the prediction equals one of the references after stripping white space."""
    return float(prediction.strip() in {x.strip() for x in references})


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that the prediction contains, case-insensitive."""
    return sum(x.lower() in prediction.lower() for x in references) / len(references)


def match_first(prediction: str, references: Sequence[str], *, every: bool) -> float | None:
    """Score the first value that the prediction names, or as many as there are references.

    A value has the form of the references: a number, a code in capitals, or words and digits joined in the same way
    (`key-value`, a UUID). A number includes its sign, points and commas. References of another form, such as names,
    must stand in the first sentence, as whole words; those without a word, such as `+`, must be the first sentence.

    Args:
        prediction: the answer.
        references: the right values; not empty.
        every: all of them are asked for, and the score is the share that is named; else any of them is right.

    Returns:
        None for several references of another form, because a list of words has no form.
    """
    wanted = [x.strip().lower() for x in references]
    forms = [find_form(x.strip()) for x in references]
    if any(x is None for x in forms):
        if every and len(wanted) > 1:
            return None
        first = _cut_sentence(prediction.strip().lower(), wanted)
        return float(any(_split(x) in _split(first) if re.search(WORD, x) else x == first for x in wanted))
    form = "|".join(dict.fromkeys(f"(?:{x})" for x in forms))
    named = list(dict.fromkeys(x.lower() for x in re.findall(rf"(?<![^\W_])(?:{form})(?![^\W_])", prediction)))
    if not every:
        return float(named[:1] != [] and named[0] in wanted)
    return sum(x in named[: len(set(wanted))] for x in wanted) / len(wanted)


def _cut_sentence(text: str, wanted: Sequence[str]) -> str:
    """The first sentence of a text. A reference in it is read as a whole: `St. Louis` does not end after `St.`."""
    whole = [x.span() for y in wanted for x in re.finditer(rf"(?<![^\W_]){re.escape(y)}(?![^\W_])", text)]
    ends = (x.start() for x in SENTENCE_END.finditer(text))
    return text[: next((x for x in ends if not any(start <= x < stop for start, stop in whole)), None)].strip()


def _split(text: str) -> str:
    """The words of a text, each between two spaces."""
    return f" {' '.join(re.findall(WORD, text))} "


def find_form(reference: str) -> str | None:
    """A regular expression for the form of a value; None for a word or a text, which has none."""
    if re.fullmatch(r"-?[0-9]+([.,][0-9]+)*", reference):
        least = -(-len(re.findall("[0-9]", reference)) // LEAST_DIGITS)
        return rf"(?<![0-9]\.)-?(?:[0-9](?:{JOINT})?){{{least},}}(?!{JOINT})"
    if re.fullmatch(r"[A-Z]{2,}", reference):
        return f"[A-Z]{{{len(reference)}}}|(?i:{reference})"
    if re.fullmatch(rf"{WORD}([^\w\s]{WORD})+", reference):
        return "".join(WORD if i % 2 else re.escape(x) for i, x in enumerate(re.split(f"({WORD})", reference)))
    form = rf"(?=[a-zA-Z]*[0-9]){WORD}" if reference.isascii() else rf"(?=[^\W\d_]*\d){WORD}"
    return form if re.fullmatch(form, reference) else None


def make_strict(scorer: Scorer, *, every: bool) -> Scorer:
    """The strict scorer to show next to a scorer that counts a reference anywhere in the answer; never above it."""
    score = partial(_score_first, scorer, every)
    return Scorer(name_strict(scorer.id), f"{scorer.metric}, first value", score, facts=scorer.facts)


def _score_first(
    scorer: Scorer, every: bool, prediction: str, references: Sequence[str], **facts: object  # noqa: FBT001  # partial
) -> float | None:
    """`match_first`, or the published score if that is less, as for a value in another case."""
    first, published = match_first(prediction, references, every=every), scorer(prediction, references, facts)
    return None if first is None or published is None else min(first, published)


def name_strict(scorer_id: str) -> str:
    """The id of the strict scorer of a scorer."""
    return f"{scorer_id.partition('@')[0]}-strict@1"


def _publish(name: str, score: Callable[..., float]) -> Scorer:
    return Scorer(f"{name}@1", name, score)


CONTAINS, EXACT, MATCH_ALL = (
    _publish(name, score)
    for name, score in (("contains", contains), ("exact", exact), ("string-match-all", string_match_all))
)
SCORERS = {
    x.id: x for x in (
        CONTAINS, EXACT, MATCH_ALL, make_strict(CONTAINS, every=False), make_strict(MATCH_ALL, every=True),
    )
}
"""Scorers for tasks without code; `kvbench show TASK` lists the ids of all other scorers."""
