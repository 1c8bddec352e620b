"""A strict scorer: the first value named counts, so that a copy of the context is not an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvbench.analysis.doubts import find_strict, group_doubts, list_doubts
from kvbench.registry import find_task
from kvbench.runs.pooling import warn_of_pooling
from kvbench.runs.results import Output, Score
from kvbench.task import Encoded, EncodedTurn, Example, Turn
from kvbench.text.scorers import CONTAINS, MATCH_ALL, find_form, make_strict, match_first

UUIDS = ["3f2a1b7c-1d2e-4f3a-9b8c-1234567890ab", "00000000-1111-2222-3333-444444444444"]


@pytest.mark.parametrize(("prediction", "references", "score"), [
    (" 1234567.", ["1234567"], 1.0),
    ("7654321, 1234567", ["1234567"], 0.0),
    ('{"calm-cat": 7654321, "brave-dog": 1234567}', ["1234567"], 0.0),
    ("The 1 value is 1234567", ["1234567"], 1.0),
    ("12345670 1234567", ["1234567"], 0.0),
    (UUIDS[0], UUIDS[:1], 1.0),
    (f'"{UUIDS[1]}": "{UUIDS[0]}"', UUIDS[:1], 0.0),
    ("brave-dog", ["brave-dog"], 1.0), ("calm-cat brave-dog", ["brave-dog"], 0.0),
    ("It is Paris.", ["Paris"], 1.0), ("Rome is old. Paris is new.", ["Paris"], 0.0), ("Rome\nParis", ["Paris"], 0.0),
    ("I know it.", ["no"], 0.0), ("It is rome", ["Paris", "Rome"], 1.0), ("", ["1234567"], 0.0),
])
def test_the_first_value_counts(prediction, references, score):
    """Numbers, ids and codes by their form; other answers by the first sentence, as whole words."""
    assert match_first(prediction, references, every=False) == score


@pytest.mark.parametrize(("prediction", "reference", "score"), [
    ("St. Louis", "St. Louis", 1.0), ("I live in St. Louis. So do I.", "St. Louis", 1.0),
    ("Rome is old. St. Louis is new.", "St. Louis", 0.0), ("St. Paul\nSt. Louis", "St. Louis", 0.0),
    ("at 5 p.m. today", "p.m.", 1.0),
    ("Mr. Darcy", "Darcy", 1.0), ("It was Dr. Watson.", "Watson", 1.0), ("Mrs. Reed did.", "Reed", 1.0),
    ("J. Smith", "Smith", 1.0), ("É. Zola", "Zola", 1.0), ("Dr. Watson left. Darcy came.", "Darcy", 0.0),
])
def test_an_abbreviation_does_not_end_a_sentence(prediction, reference, score):
    """Neither one in the reference, nor a title or an initial before a name."""
    assert match_first(prediction, [reference], every=False) == score


@pytest.mark.parametrize(("prediction", "references", "score"), [
    ("Ace", ["ACE"], 1.0), ("It is the ace.", ["ACE"], 1.0), ("ESA, cia", ["CIA"], 0.0), ("Esa, cia", ["CIA"], 1.0),
])
def test_a_code_in_capitals_may_be_answered_in_lower_case(prediction, references, score):
    """Other words in lower case are no codes."""
    assert match_first(prediction, references, every=False) == score


@pytest.mark.parametrize(("prediction", "reference", "score"), [
    ("", "+", 0.0), ("-", "+", 0.0), ("1 + 1", "+", 0.0), (" +\nmore", "+", 1.0),
    ("12.5", "12", 0.0), ("12,5", "12", 0.0), ("12.5kg", "12", 0.0), ("It is 12.", "12", 1.0), ("12.5.", "12.5", 1.0),
    ("839,367", "839", 0.0), ("839,367", "367", 0.0), ("839,367", "839,367", 1.0), ("1, 839", "839", 1.0),
    ("-5", "5", 0.0), ("5", "-5", 0.0), ("It is -5", "-5", 1.0), ("-12.5", "12.5", 0.0), ("key-5", "5", 1.0),
    ("1111111,2222222", "1111111", 1.0), ("1111111,2222222", "2222222", 0.0), ("1111111.007", "1111111", 1.0),
])
def test_a_value_counts_as_a_whole(prediction, reference, score):
    """A longer number, another sign or nothing is another value; a comma without a space may separate long numbers."""
    assert match_first(prediction, [reference], every=False) == score


@pytest.mark.parametrize(("published", "every"), [(CONTAINS, False), (MATCH_ALL, True)])
@pytest.mark.parametrize(("prediction", "reference"), [
    ("AbCdE", "aBcDe"), ("it is paris", "Paris"), ("C", "C++"), ("St Louis", "St. Louis"), ("UV-9", "uv-9"),
])
def test_a_strict_score_is_never_above_the_published_one(published, every, prediction, reference):
    """Case counts where it does for the published scorer."""
    strict = make_strict(published, every=every)
    assert strict(prediction, (reference,), {}) <= published(prediction, (reference,), {})


@pytest.mark.parametrize(("prediction", "score"), [
    ("The 2 numbers are 1111111 and 2222222.", 1.0), ("2222222, 1111111, 3333333", 1.0),
    ("3333333, 1111111, 2222222", 0.5), ("3333333 4444444 1111111 2222222", 0.0), ("1111111", 0.5),
])
def test_as_many_values_count_as_are_asked_for(prediction, score):
    """In any order; each further value costs one."""
    assert match_first(prediction, ["1111111", "2222222"], every=True) == score


@given(st.one_of(st.text(min_size=1, max_size=8), st.text("aZé7²٣ .,-:_'", min_size=1, max_size=8)).map(str.strip))
def test_the_reference_itself_is_right(reference):
    """In any alphabet, with any digits: `é7`, `m²`."""
    assume(reference)
    assert match_first(reference, [reference], every=False) == 1.0


def test_a_list_of_words_has_no_form():
    """The scorer then does not apply."""
    assert match_first("tree, stone", ["tree", "stone"], every=True) is None
    assert [find_form(x) for x in ("tree", "Jane Roe")] == [None, None]


@pytest.mark.parametrize("name", ["niah", "kv-short", "kv", "vt", "qa_1", "scbench_kv", "infinitebench_kv_retrieval"])
def test_a_dump_of_the_context_passes_the_published_scorer_only(name):
    """The published scorer keeps its id and its place; the strict one stands next to it."""
    task = find_task(name)
    published = task.scorers[0]
    strict = next(x for x in task.scorers if x.id == f"{published.id.partition('@')[0]}-strict@1")
    right = {"vt": "ABCDE", "qa_1": "Paris"}.get(name, UUIDS[0] if name.endswith(("kv", "retrieval")) else "1234567")
    other = {"ABCDE": "VWXYZ", "Paris": "Rome is old.", "1234567": "7654321"}.get(right, UUIDS[1])
    assert published(f"{other} {right}", (right,), {}) == 1.0
    assert (strict(f"{other} {right}", (right,), {}), strict(right, (right,), {})) == (0.0, 1.0)


def doubt(mean, **facts):
    """The doubts of a run with these scores and stop reasons."""
    return list(list_doubts(made_run(mean, **facts)))


def made_run(
    mean, *, strict=None, stop=10, length=0, full=True, kernel=None, tokens=None, asked=None, kl=0.1, n=0,
    kind="autoregressive", reused=None, higher=True, answered=50, visibility="visible", stages=("compression",),
    choice=0,
):
    """The parts of a result that doubts are drawn from."""
    score = Score(metric="contains", higher_is_better=higher, mean=mean, partial_mean=mean, ci95=None, by_turn=())
    return SimpleNamespace(
        model=SimpleNamespace(kind=kind), score=score,
        scores={} if strict is None else {"kv-strict@1": strict}, task=SimpleNamespace(scorer="kv@1"),
        output=Output(
            tokens=answered, stop_reasons={"choice": choice} if choice else {"stop": stop, "length": length},
            reference_tokens=tokens,
        ),
        n_questions=10, visibility=visibility,
        method=SimpleNamespace(settings={} if kernel is None else {"kernel": kernel}, card={"stages": stages}),
        budget=SimpleNamespace(kind="none" if full else "stored", trained=None, asked=asked),
        effect=SimpleNamespace(n=n, n_identity=10 - n), agreement=SimpleNamespace(kl=kl), lossless=None,
        reuse=None if reused is None else SimpleNamespace(reused_share=reused),
    )


def test_doubts_about_a_run():
    """A task that the full cache fails, answers that name other values first, and answers that are cut."""
    assert doubt(1.0, strict=1.0) == doubt(0.2, full=False) == doubt(None) == []
    assert "the full cache itself scores 0.200: the model fails this task" in doubt(0.2)[0]
    assert "the model itself scores 0.200 without a cache: the model fails" in doubt(0.2, kind="diffusion")[0]
    (found,) = doubt(1.0, strict=0.3)
    assert found.startswith("contains gives 1.000, but 0.300 if the first value named counts")
    assert doubt(1.0, stop=4, length=6) == ["the length limit cut 60% of the answers."]
    assert [len(doubt(x)) for x in (0.49, 0.5)] == [1, 0]  # below one half
    assert doubt(0.2, higher=False) == []  # an error rate
    assert [len(doubt(1.0, strict=x)) for x in (0.89, 0.91)] == [1, 0]
    assert [len(doubt(1.0, stop=10 - x, length=x)) for x in (5, 4)] == [1, 0]  # one half of the answers
    strict = SimpleNamespace(scores={"kv-strict@1": 0.0}, task=SimpleNamespace(scorer="kv@1"))
    assert find_strict(strict) == 0.0


def test_a_budget_that_holds_the_whole_context_is_a_doubt():
    """Not where a part of the contexts was compressed, or where the method drops entries while it decodes."""
    (found,) = doubt(1.0, full=False, asked="1024", kl=0.0)
    assert found.startswith("the budget holds the whole context, so the method changed nothing")
    assert doubt(1.0, full=False, asked="1024", kl=0.0, n=1) == doubt(1.0, full=False, asked="192") == []
    assert doubt(1.0, kl=0.0) == []  # the full cache has no budget


def test_reuse_of_no_entry_is_a_doubt():
    """Every document was computed, so the score is a full prefill's."""
    assert doubt(1.0, full=False, reused=0.0) == [
        "no entry of an earlier prompt was reused, so this is the score of a full prefill."
    ]
    assert doubt(1.0, full=False, reused=0.5) == doubt(1.0, full=False, reused=0.0, n=1) == []


def test_answers_of_one_token_to_a_visible_question_are_a_doubt():
    """The prefill predicts the first token with the exact cache; not of a method that changes the prefill."""
    one = {"full": False, "tokens": 1.0}
    (found,) = doubt(1.0, **one)
    assert found.startswith("answers have 1.0 tokens, and the prefill predicts the first one before")
    assert doubt(1.0, full=False, tokens=5.0, answered=10) == [found]  # answers that are cut
    assert doubt(1.0, **one, visibility="hidden") == doubt(1.0, **one, stages=("generation",)) == []
    assert doubt(1.0, **one, reused=0.5) == doubt(1.0, tokens=1.0) == doubt(1.0, **one, kind="diffusion") == []
    assert [len(doubt(1.0, full=False, tokens=x)) for x in (1.4, 1.5)] == [1, 0]
    choices = {"full": False, "choice": 10, "answered": 0}
    assert [len(doubt(1.0, **choices, tokens=x)) for x in (1.0, 2.0)] == [1, 0]


def test_runs_with_the_same_doubt_share_a_sentence():
    """Runs without one are not named."""
    cut, fine = made_run(1.0, stop=4, length=6), made_run(1.0)
    assert group_doubts([("a 25%", cut), ("b", fine), ("a 50%", cut)]) == [
        "a 25%, a 50%: the length limit cut 60% of the answers."
    ]


@pytest.mark.parametrize(("kernel", "tokens", "warned"), [(7, 7, True), (15, 7, False), (7, 3, False), (1, 7, False)])
def test_a_narrow_kernel_gives_a_warning(kernel, tokens, warned):
    """Seven digits are seven tokens in one tokenizer and three in another; a kernel of 1 does not pool."""
    spec = SimpleNamespace(
        method=SimpleNamespace(name="snapkv", settings={"kernel": kernel}), task=SimpleNamespace(name="kv-short")
    )
    answer = tuple(range(tokens))
    encoded = Encoded((1,), (EncodedTurn((2,), (2,), answer),))
    example = Example("x", "c", (Turn("q", "", "1234567", ("1234567",), 20),))
    found = warn_of_pooling(spec, example, encoded)
    assert (found is not None) == warned
    assert found is None or (f"a value of kv-short has {tokens}" in found and "--set kernel=13" in found)
    later = doubt(1.0, strict=1.0, full=False, kernel=kernel, tokens=float(tokens))
    said = f"scores are pooled over 7 tokens, and the values of an answer have {tokens} in all under this tokenizer: "
    assert later == [f"{said}only part of a value may be kept."] * warned
    prose = Example("x", "c", (Turn("q", "", "a long story", ("a long story",), 20),))
    assert warn_of_pooling(spec, prose, encoded) is None
    assert doubt(1.0, full=False, kernel=kernel, tokens=float(tokens)) == []  # no strict score: no values


def test_a_kernel_need_not_span_all_values_of_an_answer():
    """Four values of nine tokens stand at four places; a kernel of 17 spans each of them, and 7 spans none."""
    values = ("1234567", "2345678", "3456789", "4567890")
    example = Example("x", "c", (Turn("q", "", f" {', '.join(values)}", values, 80),))
    encoded = Encoded((1,), (EncodedTurn((2,), (2,), tuple(range(36))),))

    def warn(kernel):
        method = SimpleNamespace(name="snapkv", settings={"kernel": kernel})
        return warn_of_pooling(SimpleNamespace(method=method, task=SimpleNamespace(name="mv")), example, encoded)

    assert warn(17) is None
    assert "a value of mv has 9 under this tokenizer" in warn(7) and "--set kernel=17" in warn(7)


@pytest.mark.parametrize(("sizes", "others", "found"), [((36, 27), (), 9), ((27, 36), (), 9), ((33,), (), 9),
                                                        ((36,), ("a story",), None)])
def test_the_longest_value_of_a_context_counts(sizes, others, found):
    """Of all its questions, in whole tokens: 33 tokens for four values are up to 9. Nothing counts besides values."""
    values = ("1234567", "2345678", "3456789", "4567890")
    turn = Turn("q", "", f" {', '.join(values)}", (*values, *others), 80)
    encoded = Encoded((1,), tuple(EncodedTurn((2,), (2,), tuple(range(x))) for x in sizes))
    method = SimpleNamespace(name="snapkv", settings={"kernel": 7})
    spec = SimpleNamespace(method=method, task=SimpleNamespace(name="mv"))
    said = warn_of_pooling(spec, Example("x", "c", (turn,) * len(sizes)), encoded)
    assert said is None if found is None else f"a value of mv has {found} under" in said
