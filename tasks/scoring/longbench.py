"""LongBench's scorers (THUDM/LongBench at 2e00731f: LongBench/metrics.py and eval.py, and pred.py of version 2).

The score is the maximum over all references. Facts of a turn or its example:

all_classes: the names of all classes, of `trec` and `lsht`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from kvbench.task import Scorer
from kvbench.tasks.scoring.overlap import difflib_similarity, edit_similarity, rouge_l
from kvbench.tasks.scoring.text import f1, normalize_chinese, segment, word_f1

Measure = Callable[..., float]
"""A function of a prediction, one reference, and facts as keyword arguments."""


def segmented_f1(prediction: str, reference: str) -> float:
    """F1 of the words found by jieba, without punctuation."""
    ours, theirs = ([x for x in map(normalize_chinese, segment(text)) if x] for text in (prediction, reference))
    return f1(ours, theirs)


def segmented_rouge(prediction: str, reference: str) -> float:
    """ROUGE-L over the words found by jieba."""
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(reference)))


def share_of_numbers(prediction: str, reference: str) -> float:
    """Share of the integers in the prediction that equal the first integer of the reference, as text."""
    found, (gold, *_) = re.findall(r"\d+", prediction), re.findall(r"\d+", reference)
    return found.count(gold) / len(found) if found else 0.0


def classify_official(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """1 divided by the number of classes that the prediction names, if the right one is among them; otherwise 0.

    Names that are part of the right name do not count. Fault: they are removed from the list while iterating over it,
    so that the class after a removed one is skipped. Fixed in `classify_fixed`.
    """
    named = [x for x in all_classes if x in prediction]
    i = 0
    while i < len(named):
        if _inside(named[i], reference):
            del named[i]  # the official code skips the next name here
        i += 1
    return 1 / len(named) if reference in named else 0.0


def classify_fixed(prediction: str, reference: str, all_classes: Sequence[str]) -> float:
    """The official rule, without skipping classes."""
    named = [x for x in all_classes if x in prediction and not _inside(x, reference)]
    return 1 / len(named) if reference in named else 0.0


def compare_code_official(prediction: str, reference: str) -> float:
    """Similarity of the first line without backtick, # and //, by fuzzywuzzy.

    Fault: fuzzywuzzy's result depends on whether python-Levenshtein is installed. LongBench's requirements lack it, so
    this is fuzzywuzzy's result without it: difflib's ratio in whole percent. Fixed in `compare_code_fixed`.
    """
    return difflib_similarity(_code_line(prediction), reference)


def compare_code_fixed(prediction: str, reference: str) -> float:
    """Edit similarity of the first line without backtick, # and //, not rounded."""
    return edit_similarity(_code_line(prediction), reference)


def extract_letter(prediction: str) -> str | None:
    """Version 2: the letter of `The correct answer is (B)`, with or without brackets and asterisks; None: no letter."""
    text = prediction.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", "The correct answer is ([A-D])"):
        if found := re.search(pattern, text):
            return found[1]
    return None


def judge_letter(prediction: str, references: Sequence[str]) -> float:
    """Whether the letter is the reference; no letter is wrong.

    The official code leaves out empty responses, which are failed requests there; here they are wrong.
    """
    return float(extract_letter(prediction) == references[0])


def compensate_letter(prediction: str, references: Sequence[str]) -> float:
    """As `judge_letter`, but no letter scores 0.25, as a guess among four (`compensated` in result.py)."""
    return 0.25 if extract_letter(prediction) is None else judge_letter(prediction, references)


def _inside(name: str, gold: str) -> bool:
    return name in gold and name != gold


def _code_line(prediction: str) -> str:
    lines = prediction.lstrip("\n").split("\n")
    return next((x for x in lines if "`" not in x and "#" not in x and "//" not in x), "")


def _scorer(
    rule: str, metric: str, measure: Measure, *facts: str, first_line: bool = False, version: str = "2e00731f"
) -> Scorer:
    def score(prediction: str, references: Sequence[str], **known: object) -> float:
        text = prediction.lstrip("\n").partition("\n")[0] if first_line else prediction
        return max(measure(text, reference, **known) for reference in references)

    return Scorer(f"longbench-{rule}@{version}", metric, score, facts=facts)


QA_F1 = _scorer("qa-f1", "word_f1", word_f1)
ROUGE = _scorer("rouge-l", "rouge_l", rouge_l)
SEGMENTED_ROUGE = _scorer("rouge-l-zh", "rouge_l", segmented_rouge)
NUMBERS = _scorer("numbers", "share_of_numbers", share_of_numbers)
CLASSES = tuple(
    _scorer(rule, "classification", measure, "all_classes", first_line=True, version=version)
    for rule, measure, version in (
        ("classification", classify_official, "2e00731f"), ("fixed-classification", classify_fixed, "1"),
    )
)
CODE = (
    _scorer("code-similarity", "code_similarity", compare_code_official),
    _scorer("fixed-code-similarity", "code_similarity", compare_code_fixed, version="1"),
)
SCORERS: Mapping[str, tuple[Scorer, ...]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), (QA_F1,)),
    "multifieldqa_zh": (_scorer("qa-f1-zh", "word_f1", segmented_f1),),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), (ROUGE,)),
    **dict.fromkeys(("dureader", "vcsum"), (SEGMENTED_ROUGE,)),
    **dict.fromkeys(("trec", "lsht"), CLASSES),
    "triviaqa": (_scorer("first-line-qa-f1", "word_f1", word_f1, first_line=True),),
    "samsum": (_scorer("first-line-rouge-l", "rouge_l", rouge_l, first_line=True),),
    **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), (NUMBERS,)),
    **dict.fromkeys(("lcc", "repobench-p"), CODE),
}
"""Scorers of the 21 tasks, the official one first; a single scorer has no known fault."""
VERSION_2 = (
    Scorer("longbench2-choice@2e00731f", "accuracy", judge_letter),
    Scorer("longbench2-choice-compensated@2e00731f", "accuracy", compensate_letter),
)
