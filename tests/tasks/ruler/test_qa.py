"""RULER's questions about documents: wording, which documents are there and where, and files that are no data."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.ruler.documents import LARGEST, read_hotpot, read_squad
from kvbench.tasks.ruler.facts import FactsQa, draw_documents
from kvbench.tasks.ruler.qa import HotpotQa, Pile, SquadQa, count_words, gather
from kvbench.tasks.ruler.scoring import STRING_MATCH_PART

GOLDEN = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n"
    "Document 1:\nThe cat sat.\n\n"
    "Document 2:\nTitle\nA dog ran.\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: Who sat? Answer:"
)
LATER = (
    " the cat\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: Who ran? Answer: a dog"
)
TWO = Pile(
    (("Who sat?", ("the cat", "cat")), ("Who ran?", ("a dog",))), ("The cat sat.", "Title\nA dog ran."), (), seed=0
)


def some(task, tokenizer, **changes):
    request = {"seed": 0, "split": Split.TEST, "n": 8, "length": 2000, "turns": 1, "mode": Mode.MULTI_TURN}
    return list(task.examples(**{**request, **changes}, tokenizer=tokenizer))


def shown(example):
    """The documents of a context in order."""
    text = example.context.split("given documents.\n\n")[1]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", text)
    assert parts[1::2] == [str(i) for i in range(1, len(parts) // 2 + 1)]
    return parts[2::2]


def test_questions_are_rulers_prompt(chars):
    """The text without a chat template is RULER's to the byte, and a second question repeats its own part."""
    example = FactsQa().compose(TWO, 6, id="x")
    encoded = encode(FactsQa(), example, chars)
    one, two = encoded.turns
    assert chars.decode(encoded.context + one.first) == GOLDEN
    assert chars.decode(one.answer + two.later + two.answer) == LATER
    assert [(x.references, x.max_new_tokens) for x in example.turns] == [(("the cat", "cat"), 32), (("a dog",), 32)]
    assert example.facts == {"documents": 2, "gold": [1, 2]}


def test_documents_are_cut_to_whole_words():
    """The last document ends after a word; one of which nothing is left is not there."""
    documents = ["a b c", "d\ne f", "g"]
    assert count_words(documents) == 6
    assert [gather(documents, n) for n in (3, 4, 5, 6)] == [
        ["a b c"], ["a b c", "d\ne"], ["a b c", "d\ne f"], ["a b c", "d\ne f", "g"],
    ]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(index=st.integers(0, 7), turns=st.integers(1, 5), extra=st.integers(0, 4000))
def test_squad_fills_the_length_around_whole_gold_documents(squad, mini_tokenizer, index, turns, extra):
    """Prompt and limit come within a word of the length; each question's paragraph is there whole, at its rank."""
    task = SquadQa(data=squad)
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = some(task, mini_tokenizer, n=index + 1, length=length, turns=turns)[index]
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + 32
    assert length - 16 <= used <= length
    data = json.loads(Path(squad).read_text())["data"]
    found = shown(example)
    gold = []
    for turn in example.turns:
        a, p, q = map(int, re.search(r"What is (\d)-(\d)-(\d)\?", turn.question).groups())
        paragraph = data[a]["paragraphs"][p]
        assert turn.references == tuple(x["text"] for x in paragraph["qas"][q]["answers"])
        gold.append(paragraph["context"])
    assert [found[rank - 1] for rank in example.facts["gold"]] == list(dict.fromkeys(gold))
    assert len(found) == example.facts["documents"]


def test_the_same_article_comes_first(squad, mini_tokenizer):
    """Where few documents fit they are of the question's article."""
    data = json.loads(Path(squad).read_text())["data"]
    titles = {x["context"]: i for i, article in enumerate(data) for x in article["paragraphs"]}
    for example in some(SquadQa(data=squad), mini_tokenizer, length=600):
        own = int(re.search(r"What is (\d)-", example.turns[0].question)[1])
        found = [next(i for context, i in titles.items() if context.startswith(x)) for x in shown(example)]
        assert 2 <= len(found) <= 8 and set(found) == {own}


def test_hotpot_keeps_both_supporting_paragraphs(hotpot, mini_tokenizer):
    """Both are there whole; the question's other eight are taken before those of other questions."""
    task = HotpotQa(data=hotpot)
    for length in (400, 1500):
        for example in some(task, mini_tokenizer, length=length):
            (own,) = re.findall(r"Which one is (\d+)\?", example.turns[0].question)
            found = shown(example)
            assert [found[rank - 1].split("\n")[0] for rank in example.facts["gold"]] == [
                f"Title {own}-2", f"Title {own}-7",
            ]
            of_question = [x for x in found if x.startswith(f"Title {own}-")]
            assert len(of_question) == (10 if length == 1500 else len(found))
            assert example.turns[0].references == (f"answer {own}",)


@pytest.mark.slow
def test_no_question_comes_twice_and_dev_has_its_own(squad, mini_tokenizer):
    """Each fifth question of the file is of the split dev; a seed orders a split's questions without repeating one."""
    task = SquadQa(data=squad)
    every = [x.text for x in read_squad(squad).questions]
    asked = [x.turns[0].question.split("Question: ")[1] for x in some(task, mini_tokenizer, n=52, length=300)]
    dev = [
        turn.question.split("Question: ")[1]
        for x in some(task, mini_tokenizer, n=6, turns=2, length=600, split=Split.DEV) for turn in x.turns
    ]
    assert sorted(asked) == sorted(set(every) - set(every[4::5])) and len(set(asked)) == 52
    assert sorted(dev) == sorted(every[4::5])
    again = [x.turns[0].question.split("Question: ")[1] for x in some(task, mini_tokenizer, n=8, seed=1)]
    assert again != asked[:8]
    with pytest.raises(UserError, match=r"has 52 questions for split test, too few for 53 about one context\. Use"):
        some(SquadQa(data=squad), mini_tokenizer, turns=53)
    with pytest.raises(UserError, match="has 52 questions for split test: use --samples 26 or fewer with 2 turns"):
        some(task, mini_tokenizer, n=27, turns=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SquadQa, FactsQa], ids=lambda kind: kind.name)
def test_the_answer_moves(kind, squad, mini_tokenizer):
    """Gold documents stand at ranks all over; RULER's own stand at one rank for a number of documents."""
    task = kind(data=squad) if kind is SquadQa else kind()
    depths = [x.facts["gold"][0] / x.facts["documents"] for x in some(task, mini_tokenizer, n=30)]
    assert min(depths) < 0.2 and max(depths) > 0.8 and len(set(depths)) > 10


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), turns=st.integers(1, 5), extra=st.integers(60, 3000))
def test_facts_have_one_answer_in_one_document(mini_tokenizer, seed, turns, extra):
    """Prompt and limit come within a word of the length; the fact asked for stands once, and its person too."""
    task = FactsQa()
    length = task.minimum_length(turns, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=turns, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + 32
    assert length - 16 <= used <= length
    found = shown(example)
    for turn, rank in zip(example.turns, example.facts["gold"], strict=True):
        what = re.search(r"Who is (the [a-z]+ of the [a-z]+ in [A-Z][a-z]+)\?", turn.question)[1]
        (person,) = turn.references
        assert f"{what[0].upper()}{what[1:]} is {person}." in found[rank - 1]
        assert example.context.count(f"{what[1:]} is ") == example.context.count(person) == 1
        assert turn.answer == f" {person}"


def test_generated_documents_never_tell_of_the_same_twice():
    """Of 3,000 documents no two have a fact about the same, and the first three people come once."""
    drawn = [fact for fact, _ in itertools.islice(draw_documents(random.Random(0), 3), 3000)]
    assert len({(x["role"], x["place"], x["town"]) for x in drawn}) == 3000
    assert not {x["person"] for x in drawn[:3]} & {x["person"] for x in drawn[3:]}


def test_prompt_ids_and_revisions_name_the_data(squad, hotpot):
    """The wording and the data set by name, the file by its hash."""
    one, two = SquadQa(data=squad), HotpotQa(data=hotpot)
    assert [x.prompt_id for x in (one, two, FactsQa())] == [
        "ruler-qa/squad@1", "ruler-qa/hotpotqa@1", "ruler-qa/facts@1",
    ]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", one.dataset_revision) and FactsQa().dataset_revision is None
    assert one.dataset_revision != two.dataset_revision


@pytest.mark.parametrize("kind", [SquadQa, HotpotQa], ids=lambda kind: kind.name)
def test_without_data_the_next_step_is_named(kind, mini_tokenizer):
    """The message names what is missing, where it is, and what to use offline."""
    with pytest.raises(UserError, match=rf"{kind.name} needs .*--task-set data=PATH of .*https.*use qa-facts"):
        kind().minimum_length(1, mini_tokenizer)


@pytest.mark.parametrize("text", [
    None, b"\xff\xfe", b"", b"[" * 100_000, b"[]", b"{}", b'{"data": [{"paragraphs": [{"context": "x"}]}]}',
    b'[{"question": "q", "answer": "", "context": [["t", ["s"]]], "supporting_facts": []}]',
    b'[{"question": "q", "answer": 3, "context": [["t", ["s"]]], "supporting_facts": []}]',
    b'[{"question": "q", "answer": "a", "context": [], "supporting_facts": []}]',
    b'{"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "", "is_impossible": false, "answers": []}]}]}]}',
])
def test_files_that_are_no_data_are_the_users_mistake(tmp_path, text):
    """Missing, broken, too deep, empty, or of another form: one line with the path and what it should be."""
    path = tmp_path / "data.json"
    if text is not None:
        path.write_bytes(text)
    for read in (read_squad, read_hotpot):
        with pytest.raises(UserError, match=r"data\.json' .*dev set") as caught:
            read(str(path))
        assert "\n" not in str(caught.value)


def test_a_file_too_large_is_not_read(tmp_path):
    """A sparse file beyond the limit is refused by its size."""
    path = tmp_path / "data.json"
    with path.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(UserError, match=r"has 1\.1 GB"):
        read_squad(str(path))


@pytest.mark.parametrize("turns", [1, 3])
def test_the_minimum_length_of_facts_covers_every_sample(mini_tokenizer, turns):
    """Documents differ in length by a factor of ten, and a run must not stop at its longest sample."""
    task = FactsQa()
    least = task.minimum_length(turns, mini_tokenizer)
    sizes = [task.measure(task.pile(random.Random(f"x{i}"), turns, most=0), mini_tokenizer) for i in range(100)]
    assert max(sizes) <= least <= 2 * min(sizes) + 200


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        (" Normans", ["Norman", "the Normans"], 1.0),
        ("the\x00NORMANS", ["the\nnormans"], 1.0),
        ("not at all", ["no"], 1.0),
        ("yes", ["no", "never"], 0.0),
        ("", ["no"], 0.0),
    ],
)
def test_string_match_part(prediction, references, score):
    """RULER's score: whether any reference is inside the cleaned prediction, also inside a word."""
    assert STRING_MATCH_PART.score(prediction, references) == score
