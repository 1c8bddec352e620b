"""RULER's counting tasks: wording, how often words come, lengths, and that the answers move."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split, encode, prompt_tokens
from kvbench.tasks.ruler.counts import CommonWords, FrequentWords, Repeats, count_coded, draw_listed, vocabulary

CWE, FWE = CommonWords(), FrequentWords()
LETTERS = [f"{x}{x}" for x in "abcdefghij"]
GOLDEN_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
    "1. {} 2. {} 3. {} 4. {} 5. {} 6. {} 7. {} 8. {} 9. {} 10. {}\n"
    "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in "
    "the list are: 1. aa 2. bb 3. cc 4. dd 5. ee 6. ff 7. gg 8. hh 9. ii 10. jj\n"
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
    "1. {} 2. {} 3. {} 4. {} 5. {} 6. {} 7. {} 8. {} 9. {} 10. {} 11. {}\n"
    "Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in "
    "the list are:"
)
GOLDEN_FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
    "appeared words are:"
)


def some(task, tokenizer, **changes):
    request = {"seed": 0, "split": Split.TEST, "n": 20, "length": 4096, "turns": 1, "mode": Mode.SINGLE}
    return list(task.examples(**{**request, **changes}, tokenizer=tokenizer))


def entries(text):
    """The words of a numbered list."""
    parts = re.split(r"(?:^| )(\d+)\. ", text)
    assert parts[0] == "" and parts[1::2] == [str(i) for i in range(1, len(parts) // 2 + 1)]
    return parts[2::2]


def test_common_words_are_rulers_prompt(chars):
    """The text without a chat template is RULER's to the byte: a solved list, a line break, the list and question."""
    repeats = Repeats(common=1, rare=1, shot_words=10, shot_common=1, shot_rare=1)
    example = CWE.compose(LETTERS, [*LETTERS[::-1], "kk"], repeats, seed=3, id="x")
    encoded = encode(CWE, example, chars)
    text = chars.decode(encoded.context + encoded.turns[0].first)
    listed = re.findall(r"\d+\. (\w\w)", text)
    assert text == GOLDEN_CWE.format(*listed[:10], *listed[20:])
    assert sorted(listed[:10]) == LETTERS and sorted(listed[20:]) == [*LETTERS, "kk"]
    (turn,) = example.turns
    assert turn.answer == " 1. jj 2. ii 3. hh 4. gg 5. ff 6. ee 7. dd 8. cc 9. bb 10. aa"
    assert (turn.references, turn.max_new_tokens) == (tuple(LETTERS[::-1]), 120)


def test_frequent_words_are_rulers_prompt(chars):
    """The text without a chat template is RULER's to the byte; at 74 words the counts are 44, 11, 4, 2, 1 and 1."""
    coded = ["...", "aaaaaa", "bbbbbb", "cccccc", "dddddd", "eeeeee", "ffffff"]
    example = FWE.compose(coded, 74, seed=0, id="x")
    encoded = encode(FWE, example, chars)
    text = chars.decode(encoded.context + encoded.turns[0].first)
    words = re.findall(r"\.\.\.(?= )|\b([a-f])\1{5}\b", text.split("coded words. ")[1].split("\n")[0] + " ")
    assert Counter(words) == {"": 44, "a": 11, "b": 4, "c": 2, "d": 1, "e": 1}
    assert text == GOLDEN_FWE.format(" ".join(x * 6 or "..." for x in words))
    (turn,) = example.turns
    assert (turn.answer, turn.references, turn.max_new_tokens) == (
        " aaaaaa, bbbbbb, cccccc.", ("aaaaaa", "bbbbbb", "cccccc"), 50,
    )


def test_counts_are_a_zeta_distribution_rounded_down():
    """Of 1,000 words the shares are 6 / (pi k)^2: 607.9, 151.98, 67.5, 37.995, 24.3, 16.9, 12.4."""
    assert [count_coded(1000, k) for k in range(1, 8)] == [607, 151, 67, 37, 24, 16, 12]
    assert all(count_coded(n, 3) > count_coded(n, 4) > count_coded(n, 5) for n in range(74, 3000))


@pytest.mark.parametrize(
    ("length", "common", "rare", "shot"), [(4096, 30, 3, {10: 10, 3: 30}), (2048, 6, 1, {3: 10, 1: 10})]
)
def test_words_come_as_often_as_rulers(mini_tokenizer, length, common, rare, shot):
    """Ten words come 30 times and the others 3 times, below 4,096 tokens 6 and once; so in the solved list."""
    for example in some(CWE, mini_tokenizer, n=4, length=length):
        solved, text = example.context.removeprefix("Below").split("Below")
        counts = Counter(entries(text.split("\n")[1]))
        assert {x for x, n in counts.items() if n == common} == set(example.turns[0].references)
        assert set(counts.values()) == {common, rare} and len(counts) == example.facts["words"]
        of_shot = Counter(entries(solved.split("\n")[1]))
        assert Counter(of_shot.values()) == shot
        assert not set(of_shot) & set(counts)
        assert {*entries(solved.split("are: ")[1].strip())} == {x for x, _ in of_shot.most_common(10)}


def test_the_three_most_frequent_words_are_the_answer(mini_tokenizer):
    """Counting the text gives the dots, then the references in order; the vocabulary is a word for 50 tokens."""
    for example in some(FWE, mini_tokenizer, n=5, length=4096):
        counts = Counter(example.context.split("coded words. ")[1].split(" "))
        first = [x for x, _ in counts.most_common(4)]
        assert first == ["...", *example.turns[0].references]
        assert len(counts) <= (4096 - 50) // 50 == 80
        assert all(re.fullmatch(r"[a-z]{6}", x) for x in counts if x != "...")
        assert sum(counts.values()) == example.facts["words"]


@pytest.mark.few
@pytest.mark.parametrize(("task", "slack"), [(CWE, 45), (FWE, 60)], ids=lambda x: getattr(x, "name", ""))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), extra=st.integers(0, 5000))
def test_prompt_fills_the_length(task, slack, mini_tokenizer, seed, extra):
    """Prompt and limit never exceed the length and come within a word of the list, or a few of the coded text."""
    length = task.minimum_length(1, mini_tokenizer) + extra
    example = task.example(random.Random(seed), id="x", length=length, turns=1, tokenizer=mini_tokenizer)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + example.turns[0].max_new_tokens
    assert length - slack <= used <= length


def test_a_list_longer_than_the_vocabulary_goes_on_with_keys():
    """Beyond RULER's 8,166 words there are adjective-noun pairs; no word comes twice."""
    assert len(vocabulary()) == 8166
    shot, items = draw_listed(random.Random(0), 40, 9000)
    assert len({*shot, *items}) == 40 + len(items) == 9040
    assert {*shot, *items[:8126]} == {*vocabulary()} and all("-" in x for x in items[8126:])
    assert len(draw_listed(random.Random(0), 40, 10)[1]) == 8126


@pytest.mark.slow
def test_the_answers_move(mini_tokenizer):
    """A slot of the list holds a common word in some samples only; RULER's own slots are the same in all."""
    hits = Counter()
    for example in some(CWE, mini_tokenizer, n=20, length=2048):
        listed = entries(example.context.rsplit("\n", 1)[1])
        hits.update(i for i in range(60) if listed[i] in example.turns[0].references)
    assert len(hits) == 60 and max(hits.values()) < 20
    dots = [
        tuple(x == "..." for x in example.context.split("coded words. ")[1].split(" ")[:40])
        for example in some(FWE, mini_tokenizer, n=20, length=1000)
    ]
    assert len(set(dots)) == 20


@pytest.mark.parametrize("task", [CWE, FWE], ids=lambda task: task.name)
def test_too_short_a_length_is_the_users_mistake(task, mini_tokenizer):
    """A length that cannot hold the fewest words is refused."""
    with pytest.raises(UserError, match=rf"{task.name} needs \d+ tokens at least"):
        some(task, mini_tokenizer, length=400)
