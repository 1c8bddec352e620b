"""Generated questions have one right answer, found again from the text alone; scorers reject similar ones."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.tasks.scbench.generated.articles import ArticleSummary
from kvbench.tasks.scbench.generated.functions import ACTIONS, draw_functions, write
from kvbench.tasks.scbench.generated.hops import MultiHop
from kvbench.tasks.scbench.generated.numbers import GeneratedMathFind
from kvbench.tasks.scbench.generated.repository import RepoFunction
from kvbench.tasks.scbench.generated.shots import ManyShot
from kvbench.tasks.scbench.generated.strings import PrefixSuffixCharacters, PrefixSuffixShort
from kvbench.tasks.scoring.overlap import bleu

seeded = given(seed=st.integers(0, 10**6), turns=st.integers(1, 6))
few = settings(max_examples=8, deadline=None)


def make(task, tokenizer, *, seed, turns, length=1800):
    return task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=tokenizer)


def follow(text: str) -> dict[str, str]:
    """The value of every variable, assignment by assignment."""
    values: dict[str, str] = {}
    for name, source in re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE):
        values[name] = values.get(source, source)
    return values


@few
@seeded
def test_one_string_has_both_ends(mini_tokenizer, seed, turns):
    """Of all strings only the reference begins and ends as the question says; no string is asked for twice."""
    for task in (PrefixSuffixCharacters(), PrefixSuffixShort()):
        example = make(task, mini_tokenizer, seed=seed, turns=turns)
        strings = example.context.split("\n\n")[1].split("\n")
        assert len(strings) == example.facts["strings"] == len(set(strings))
        assert len({turn.references for turn in example.turns}) == turns
        for turn in example.turns:
            prefix, suffix = re.findall('"(.*)"', turn.question)
            assert tuple(x for x in strings if x.startswith(prefix) and x.endswith(suffix)) == turn.references


def test_strings_look_as_scbenchs(mini_tokenizer):
    """25 characters of codes 65 to 122, backslash apart; in the short variant a number between two words."""
    (long,) = make(PrefixSuffixCharacters(), mini_tokenizer, seed=0, turns=1).turns[0].references
    assert re.fullmatch(r"[A-Z\[\]^_`a-z]{25}", long)
    (short,) = make(PrefixSuffixShort(), mini_tokenizer, seed=0, turns=1).turns[0].references
    assert re.fullmatch(r"[a-z]{3,6}-[0-9]{7}-[a-z]{3,6}", short)


@few
@seeded
def test_variables_lead_to_the_value(mini_tokenizer, seed, turns):
    """Following the assignments gives each question's names; a chain more than asked for holds a value of its own."""
    example = make(MultiHop(), mini_tokenizer, seed=seed, turns=turns)
    values = follow(example.context)
    assert len(values) == 3 * (turns + 1) == 3 * example.facts["chains"]
    assert len(set(example.facts["keys"])) == turns == len(set(values.values())) - 1
    for key, turn in zip(example.facts["keys"], example.turns, strict=True):
        assert f"the value {key} in the text above" in turn.question
        assert turn.references == tuple(name for name, value in values.items() if value == key)


@few
@seeded
def test_numbers_have_their_ranks(mini_tokenizer, seed, turns):
    """Each answer is the number of its rank; no number comes twice, and no target."""
    example = make(GeneratedMathFind(), mini_tokenizer, seed=seed, turns=turns)
    numbers = json.loads(example.context)
    assert len(numbers) == len(set(numbers)) == example.facts["numbers"]
    assert len(set(example.facts["targets"])) == turns
    low, high = sorted(numbers)[:3], sorted(numbers, reverse=True)[:3]
    right = {"median": statistics.median(numbers)}
    for rank, largest, smallest in zip(("", "second ", "third "), high, low, strict=True):
        right |= {f"{rank}largest number": largest, f"{rank}smallest number": smallest}
    for target, turn in zip(example.facts["targets"], example.turns, strict=True):
        assert turn.question.endswith(f"The {target} of the list is: ")
        assert turn.references == (str(right[target]),)


def test_a_list_has_seven_questions(mini_tokenizer):
    """More turns than targets are the user's mistake."""
    with pytest.raises(UserError, match=r"^math-find has 7 questions for a list, not 8\. Use fewer --turns\.$"):
        make(GeneratedMathFind(), mini_tokenizer, seed=0, turns=8)


@few
@seeded
def test_endings_tell_the_group(mini_tokenizer, seed, turns):
    """The longest ending shared with an example leads to the right letter, and no word of a question is an example."""
    example = make(ManyShot(), mini_tokenizer, seed=seed, turns=turns)
    options = "".join(rf"\({letter}\) (\w+)\n" for letter in "ABCD")
    pattern = rf'word "(\w+)" belong to\?\nOptions:\n{options}A:(?: \((\w)\))?'
    shots = re.findall(pattern, example.context)
    groups = {word: options["ABCD".index(letter)] for word, *options, letter in shots}
    assert len(groups) == len(shots) == example.facts["shots"]
    assert len(set(groups.values())) == 4
    for turn in example.turns:
        ((word, *options, _),) = re.findall(pattern, turn.question)
        assert word not in groups
        nearest = max(groups, key=lambda x: next(i for i in range(20) if x[len(x) - i :] != word[len(word) - i :]))
        assert turn.references == ("ABCD"[options.index(groups[nearest])], groups[nearest])


@pytest.mark.slow
def test_letters_are_equally_often_right(mini_tokenizer):
    """No letter is a good guess."""
    letters = [
        turn.references[0] for seed in range(60)
        for turn in make(ManyShot(), mini_tokenizer, seed=seed, turns=5, length=600).turns
    ]
    assert all(50 < letters.count(letter) < 100 for letter in "ABCD")


def test_a_function_and_its_description():
    """One of them, to the byte."""
    parcels = write(random.Random(3), "parcel", ACTIONS[7], "height")
    assert parcels.source == (
        "def top_parcels(parcels, limit):\n"
        "    best = None\n"
        "    for parcel in parcels:\n"
        "        if parcel.sold:\n"
        "            continue\n"
        "        if parcel.height % limit == 0:\n"
        "            if best is None or parcel.length > best.length:\n"
        "                best = parcel\n"
        "    return best"
    )
    assert parcels.description == (
        "Purpose: Of all parcels whose height is a multiple of a given number, pick the one with the greatest length.\n"
        "Input: The parcels, and the number.\n"
        "Output: an item, or nothing.\n"
        "Procedure: parcels that have a new owner are passed over."
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_two_functions_are_alike(seed):
    """All of them are Python, no name and no description comes twice, and RepoQA's measure tells any two apart."""
    functions = list(draw_functions(random.Random(seed), 3))
    assert len(functions) == 36
    for one in functions:
        (parsed,) = ast.parse(one.source).body
        assert isinstance(parsed, ast.FunctionDef) and parsed.name == one.name
        assert one.name not in one.description
    assert len({x.name for x in functions}) == len({x.description for x in functions}) == 36
    assert max(bleu(a.source, b.source) for a, b in itertools.permutations(functions, 2)) < 0.8


@few
@seeded
def test_functions_are_in_the_context(mini_tokenizer, seed, turns):
    """Each turn describes a function that is shown once."""
    example = make(RepoFunction(), mini_tokenizer, seed=seed, turns=turns, length=2400)
    assert [turn.facts["name"] for turn in example.turns] == list(example.facts["functions"])
    assert example.context.count("def ") == example.facts["shown"]
    for turn in example.turns:
        assert example.context.count(turn.answer) == 1


def test_another_function_is_wrong(mini_tokenizer):
    """The function in a code block counts, whatever stands around it; another function of the context does not."""
    example = make(RepoFunction(), mini_tokenizer, seed=1, turns=2, length=2400)
    passes, similarity = RepoFunction.scorers
    one, two = example.turns
    facts = {**example.facts, **one.facts}
    fenced = f"It is this one:\n```python\n{one.answer}\n```\nIt counts."
    assert passes(fenced, one.references, facts) == similarity(fenced, one.references, facts) == 1.0
    for other in re.split(r"\n\n\n?(?=def )", example.context)[1:]:
        assert passes(other, one.references, facts) == float(other == one.answer)
    assert similarity(two.answer, one.references, facts) < 1.0


@few
@seeded
def test_articles_tell_what_is_asked(mini_tokenizer, seed, turns):
    """Titles differ, one article more than asked for is there, and the summary's sentences stand in it in order."""
    example = make(ArticleSummary(), mini_tokenizer, seed=seed, turns=turns)
    articles = dict(text.split("\n") for text in example.context.split("\n\n"))
    assert len(articles) == example.facts["articles"] > turns == len(set(example.facts["keys"]))
    for title, turn in zip(example.facts["keys"], example.turns, strict=True):
        assert f'the article "{title}"' in turn.question
        places = [articles[title].index(fact) for fact in turn.references[0].split("\n")]
        assert len(places) == 4 and places == sorted(places)
        assert all(detail in turn.answer for detail in turn.facts["details"])


def test_details_tell_articles_apart(mini_tokenizer):
    """The summary of another article has no or few of the details, though ROUGE gives it half."""
    example = make(ArticleSummary(), mini_tokenizer, seed=0, turns=4)
    rouge, details = ArticleSummary.scorers
    for one, other in itertools.permutations(example.turns, 2):
        assert details(other.answer, one.references, one.facts) <= 3 / 7
        assert rouge(other.answer, one.references, one.facts) > 0.4
    assert details("Ada Marsh, in May", ("",), {"details": ["Ada Marsh", "9 weeks", "in May", "costs"]}) == 0.5
    assert details("It takes 13 weeks.", ("",), {"details": ["3 weeks", "13 weeks"]}) == 0.5
