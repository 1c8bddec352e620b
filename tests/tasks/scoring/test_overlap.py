"""ROUGE, BLEU and edit similarity by hand, and against the packages whose numbers the suites report."""

from __future__ import annotations

import itertools
import math

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu
from rapidfuzz import fuzz
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

from kvbench.tasks.scoring.overlap import align, bleu, difflib_similarity, edit_similarity, rouge_l, rouge_lsum

FEW = st.lists(st.sampled_from(["a", "b", "c", "D", "d"]), max_size=12)
PIECES = st.sampled_from(["a", "b", "c", "D", " ", ".", ". ", "\n", "x1-y", "é"])
TEXTS = st.lists(PIECES, max_size=24).map(" ".join) | st.text(max_size=30)


@given(first=FEW, second=FEW)
def test_align_pairs_equal_elements_in_order(first, second):
    """As many as rapidfuzz's insertions and deletions leave."""
    pairs = align(first, second)
    assert all(first[i] == second[j] for i, j in pairs)
    assert all(i < k and j < n for (i, j), (k, n) in itertools.pairwise(pairs))
    ratio = fuzz.ratio("".join(first), "".join(second)) / 100
    assert 2 * len(pairs) == pytest.approx(ratio * (len(first) + len(second)))


def test_rouge_l_by_hand():
    """`a c` is common; the prediction has 3 different words, the reference 4: 2 * (2/3 * 2/4) / (2/3 + 2/4)."""
    assert rouge_l("a b b c", "a x c y") == pytest.approx(4 / 7, abs=1e-6)


def test_rouge_l_unites_sentences():
    """`a b` and `c` come from two sentences of the prediction: 3 of 4 words, of 3."""
    assert rouge_l("a b. c", "a b c d") == pytest.approx(6 / 7, abs=1e-6)


@pytest.mark.slow
@given(prediction=TEXTS, reference=TEXTS)
def test_rouge_l_is_that_of_rouge(prediction, reference):
    """Where the package raises, for texts without sentences, LongBench counts 0."""
    try:
        expected = Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except ValueError:
        expected = 0.0
    assert rouge_l(prediction, reference) == pytest.approx(expected)


def test_rouge_l_of_long_sentences():
    """Where the package's recursion ends in an error, the score is still that of the texts."""
    text = " ".join(map(str, range(1100)))
    with pytest.raises(RecursionError):
        Rouge().get_scores([text], ["0"])
    assert rouge_l(text, "0") == pytest.approx(2 / 1101)


def test_rouge_lsum_by_hand():
    """Over lines: `the cat` and `sat` are common, 3 of 3 words and of 5."""
    assert rouge_lsum("The cat\nsat", "the cat\non mats sat") == pytest.approx(6 / 8)


@given(prediction=TEXTS, reference=TEXTS)
def test_rouge_lsum_is_that_of_rouge_score(prediction, reference):
    """Without stemming, as Hugging Face's `rouge` calls it by default."""
    expected = RougeScorer(["rougeLsum"]).score(reference, prediction)["rougeLsum"].fmeasure
    assert rouge_lsum(prediction, reference) == pytest.approx(expected)


def test_the_two_rouges_differ():
    """Repeated words count once in the one and each time in the other."""
    assert rouge_l("a a b", "a b") == pytest.approx(1.0)
    assert rouge_lsum("a a b", "a b") == pytest.approx(4 / 5)


def test_bleu_by_hand():
    """All orders match and one word is missing: the brevity penalty alone, exp(1 - 5/4)."""
    assert bleu("a b c d", "a b c d e") == pytest.approx(math.exp(-1 / 4))


def test_bleu_smoothed_by_hand():
    """Two words: the orders 3 and 4 count as ln 2 / 10 and ln 2 / 20 matches of one."""
    assert bleu("a b", "a b") == pytest.approx((math.log(2) / 10 * math.log(2) / 20) ** (1 / 4))


@given(prediction=FEW, reference=FEW)
def test_bleu_is_nltks(prediction, reference):
    """With smoothing method 4."""
    expected = sentence_bleu([reference], prediction, smoothing_function=SmoothingFunction().method4)
    assert bleu(" ".join(prediction), " \n".join(reference)) == pytest.approx(expected)


@given(before=st.tuples(FEW, FEW), after=st.tuples(FEW, FEW))
def test_bleu_is_sacrebleus_where_nothing_is_smoothed(before, after):
    """Four words in a row in both texts: every order has a match."""
    one, other = (" ".join([*head, *"wxyz", *tail]) for head, tail in zip(before, after, strict=True))
    expected = sacrebleu.sentence_bleu(one, [other], smooth_method="none", tokenize="none").score / 100
    assert bleu(one, other) == pytest.approx(expected)


def test_difflib_similarity_by_hand():
    """The longest common block first: `bcd` of 4 and 4 characters; 2/3 is 67 percent."""
    assert difflib_similarity("abcd", "bcda") == 0.75
    assert difflib_similarity("ab", "abcd") == 0.67
    assert difflib_similarity("", "") == 1.0
    assert difflib_similarity("", "a") == 0.0


def test_difflib_similarity_is_no_edit_similarity():
    """The longest block may hide two longer ones: of `tide` and `diet` difflib finds one character, editing keeps 2."""
    assert difflib_similarity("tide", "diet") == 0.25
    assert edit_similarity("tide", "diet") == 0.5


@given(prediction=TEXTS, reference=TEXTS)
def test_edit_similarity_is_rapidfuzzs(prediction, reference):
    """Its `ratio`, which is python-Levenshtein's."""
    assert edit_similarity(prediction, reference) == pytest.approx(fuzz.ratio(prediction, reference) / 100)
