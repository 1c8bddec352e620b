"""SCBench's scorers (microsoft/MInference at fb56c917, scbench/compute_scores.py), and corrected versions.

The official scorers reproduce the published code, including its faults, turn by turn. The reference is the turn's
`answer` as text; scbench_vt has several names, scbench_choice_eng the option's text. Facts of a turn or its example:

mode: `single`, `multi-turn` or `multi-request` (scbench_repoqa_and_kv).
task: task of a turn of a mixed task: scbench_summary, scbench_passkey, scbench_repoqa or scbench_kv.
options, letter: the texts of the four options, and the letter of the right one.
lang: programming language of the repository.
name: name of the function; any text for a kv turn of a mixed task.
functions: name and source of the requested functions of this repository in the evaluated records.
functions_all: the same over all records of the data set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvbench.errors import unknown
from kvbench.task import Mode, Scorer
from kvbench.tasks.scoring.infinitebench import (
    QA_F1,
    best,
    choose_fixed,
    choose_official,
    mentions,
    starts_with_digits,
)
from kvbench.tasks.scoring.overlap import rouge_lsum
from kvbench.tasks.scoring.repoqa import passes
from kvbench.tasks.scoring.text import SIGNED, character_f1, find_letter, first_number
from kvbench.text.scorers import make_strict


def contains(prediction: str, references: Sequence[str]) -> float:
    """Whether the prediction contains the reference."""
    return float(references[0] in prediction)


def names_official(prediction: str, references: Sequence[str]) -> float:
    """Share of names in the prediction, case-insensitive. Fault: rounded to 2 decimals. Fixed in `names_fixed`."""
    return round(names_fixed(prediction, references), 2)


def names_fixed(prediction: str, references: Sequence[str]) -> float:
    """Share of names that the prediction contains, case-insensitive."""
    text = prediction.lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def mentions_official(prediction: str, references: Sequence[str]) -> float:
    """Whether the prediction contains the answer, case-insensitive; InfiniteBench scores the same questions by F1.

    Fault: the answer may be a part of a word (`no` in `know`). Fixed in `mentions`: whole words.
    """
    return float(references[0].upper() in prediction.strip().upper())


def chinese_official(prediction: str, references: Sequence[str]) -> float:
    """Character F1. Fault: compares with single characters of the answer. Fixed in `character_f1`: the whole answer."""
    return max(character_f1(prediction, character) for character in references[0])


def number_official(prediction: str, references: Sequence[str]) -> float:
    """Whether the first number is the answer. Fault: ignores sign and decimals. Fixed in `number_fixed`."""
    found, gold = first_number(prediction), int(references[0])
    return float(found is not None and gold <= found < gold + 1)


def number_fixed(prediction: str, references: Sequence[str]) -> float:
    """Whether the first number, with sign and decimals, is the answer."""
    return float(first_number(prediction, SIGNED) == int(references[0]))


def letter_official(prediction: str, references: Sequence[str]) -> float:
    """Whether the upper-cased prediction contains the answer's letter anywhere.

    Fault: `The answer is (B)` contains an A. Fixed in `letter_fixed`.
    """
    text = prediction.upper()
    return float(any(character.upper() in text for character in references[0]))


def letter_fixed(prediction: str, references: Sequence[str]) -> float:
    """Whether the letter that the prediction begins with, announces or has in brackets is the answer's."""
    return float(find_letter(prediction) == references[0])


def repeats_official(
    prediction: str, references: Sequence[str], lang: str, name: str, functions: Mapping[str, str]  # noqa: ARG001
) -> float:
    """Whether the function is repeated (`passes`).

    Fault: only the functions of the evaluated records are compared, so that fewer records are easier. Fixed in
    `repeats_fixed`: all functions of the data set.
    """
    return float(passes(prediction, lang, name, functions))


def repeats_fixed(
    prediction: str, references: Sequence[str], lang: str, name: str, functions_all: Mapping[str, str]  # noqa: ARG001
) -> float:
    """Whether the function is repeated, compared with all functions of the data set."""
    return float(passes(prediction, lang, name, functions_all))


def mixed_contains_official(prediction: str, references: Sequence[str], mode: str) -> float:
    """The kv turns of scbench_repoqa_and_kv.

    Fault: with multi-request, the code searches for the reference among the keys of the prediction's record instead of
    in its text, and never finds it. Fixed in `contains`.
    """
    return 0.0 if mode == Mode.MULTI_REQUEST else contains(prediction, references)


def official(rule: str, metric: str, score: Callable[..., float | None], *facts: str) -> Scorer:
    """A scorer with an official rule."""
    return Scorer(f"scbench-official-{rule}@fb56c917", metric, score, facts=facts)


def fixed(rule: str, metric: str, score: Callable[..., float | None], *facts: str, version: int = 1) -> Scorer:
    """A scorer with a corrected rule."""
    return Scorer(f"scbench-fixed-{rule}@{version}", metric, score, facts=facts)


def mixed(make: Callable[..., Scorer], rule: str, parts: Mapping[str, Scorer]) -> tuple[Scorer, ...]:
    """Scorers of a mixed task: first over all turns, which SCBench does not report, then for each part's turns."""
    facts = tuple(dict.fromkeys(("task", *(fact for part in parts.values() for fact in part.facts))))

    def judge(prediction: str, references: Sequence[str], **known: object) -> float | None:
        task = str(known["task"])
        if task not in parts:
            raise unknown("task of a mixed turn", task, parts)
        return parts[task](prediction, references, known)

    def alone(name: str, part: Scorer) -> Scorer:
        def judge(prediction: str, references: Sequence[str], **known: object) -> float | None:
            return part(prediction, references, known) if known["task"] == name else None

        return make(f"{rule}-{name.removeprefix('scbench_')}", part.metric, judge, "task", *part.facts)

    return make(rule, "mean", judge, *facts), *(alone(name, part) for name, part in parts.items())


STRING = official("string", "contains", contains)
STRING_STRICT = make_strict(STRING, every=False)
VT = official("vt", "string_match_all", names_official)
QA = official("qa-eng", "contains", mentions_official)
SUMMARY = official("summary", "rougeLsum", best(rouge_lsum))
PASSKEY = official("passkey", "accuracy", starts_with_digits)
REPOQA = official("repoqa", "pass@1", repeats_official, "lang", "name", "functions")
REPOQA_FIXED = fixed("repoqa", "pass@1", repeats_fixed, "lang", "name", "functions_all")
MIXED_KV = official("mixed-kv", "contains", mixed_contains_official, "mode")
SCORERS: Mapping[str, tuple[Scorer, ...]] = {
    "scbench_kv": (STRING, STRING_STRICT),
    "scbench_prefix_suffix": (STRING, STRING_STRICT),
    "scbench_vt": (VT, fixed("vt", "string_match_all", names_fixed), make_strict(VT, every=True)),
    "scbench_repoqa": (REPOQA, REPOQA_FIXED),
    "scbench_qa_eng": (
        QA, fixed("qa-eng", "contains", mentions, version=2), QA_F1, make_strict(QA, every=False),
    ),
    "scbench_qa_chn": (
        official("qa-chn", "character_f1", chinese_official), fixed("qa-chn", "character_f1", best(character_f1)),
    ),
    "scbench_choice_eng": (
        official("choice", "accuracy", choose_official, "letter"),
        fixed("choice", "accuracy", choose_fixed, "letter", "options", version=3),
    ),
    "scbench_mf": (official("mf", "accuracy", number_official), fixed("mf", "accuracy", number_fixed)),
    "scbench_many_shot": (
        official("many-shot", "accuracy", letter_official), fixed("many-shot", "accuracy", letter_fixed, version=2),
    ),
    "scbench_summary": (SUMMARY,),
    "scbench_summary_with_needles": mixed(
        official, "summary-with-needles", {"scbench_summary": SUMMARY, "scbench_passkey": PASSKEY}
    ),
    "scbench_repoqa_and_kv": (
        *mixed(official, "repoqa-and-kv", {"scbench_repoqa": REPOQA, "scbench_kv": MIXED_KV}),
        *mixed(fixed, "repoqa-and-kv", {"scbench_repoqa": REPOQA_FIXED, "scbench_kv": STRING}),
    ),
}
"""Scorers of the twelve tasks, the official one first; a single scorer has no known fault."""
