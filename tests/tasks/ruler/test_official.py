"""RULER's published generator: the same prompts and answers, byte for byte, and what it cannot do.

The hashes were made with the scripts themselves (NVIDIA/RULER, scripts/data/synthetic at c3f5e3b4), run unchanged: with
wonderwords 3.0.1, mini's tokenizer as `hf`, templates and prefixes of constants.py, the arguments of synthetic.yaml,
four samples of seed 42 and three of seed 7. Essays and files of questions are those of conftest.py. Only NLTK's
`sent_tokenize` was replaced, by the function below, because its model is a download.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.task import Mode, Split
from kvbench.tasks.ruler.documents import read_squad
from kvbench.tasks.ruler.haystack import read_sentences
from kvbench.tasks.ruler.official import niah, vt
from kvbench.tasks.ruler.official.counts import OfficialCwe, OfficialFwe, read_words
from kvbench.tasks.ruler.official.niah import OfficialNiah, Pairs
from kvbench.tasks.ruler.official.qa import OfficialQa
from kvbench.tasks.ruler.official.script import Run, ScriptError, find_size, guess_high
from kvbench.tasks.ruler.official.vt import OfficialVt

PUBLISHED = {
    ("cwe", 2048, 42, 0): "afbf4cdd9483db2151afd8fbd0ca3043",
    ("cwe", 4096, 42, 0): "0c814fab30f78ec5082848fccc0614ad",
    ("cwe", 4096, 7, 37): "3424a4e5e7488d447fc27fc9247eb4c0",
    ("fwe", 1024, 42, 0): "da38b97c6cbb8401d72fefbda755e8f2",
    ("fwe", 4096, 42, 0): "126220a26e8febc1f47ca3be54723472",
    ("fwe", 4096, 7, 37): "2faa19769ce68416acf706996d2dc335",
    ("niah_multikey_1", 1024, 42, 0): "145479b0927a78a2b130badfa3b021a3",
    ("niah_multikey_1", 4096, 42, 0): "fe51cffc0545d2814e9690cff43f7be9",
    ("niah_multikey_2", 1024, 42, 0): "7b6af32bfff74420741fa652955b5992",
    ("niah_multikey_2", 4096, 42, 0): "07c86a18806b8d95160fea813e276ed9",
    ("niah_multikey_3", 1024, 42, 0): "53accdbd80ddb5af56abfaf57155b7a2",
    ("niah_multikey_3", 4096, 42, 0): "afad10754bd3bb56fe649756ae3df4eb",
    ("niah_multiquery", 1024, 42, 0): "e93c98ed379dbca53aa75d004fdea6f7",
    ("niah_multiquery", 4096, 42, 0): "5fd666209bd15f028d9882174021d9a8",
    ("niah_multivalue", 1024, 42, 0): "afc4c0b5db78240d8a5cb72d6ebde435",
    ("niah_multivalue", 4096, 42, 0): "74db7f5a52b480f14111da576906a3e8",
    ("niah_single_1", 1024, 42, 0): "af5bd6056c54127c60894e6e73f0f49e",
    ("niah_single_1", 4096, 42, 0): "6615f2aceb19cb5754c9e63b48fddf63",
    ("niah_single_1", 4096, 7, 37): "47b40df4390b87986acf7eba4f42a047",
    ("niah_single_2", 1024, 42, 0): "5e28988bdf2bf9e62ce8b2cbf85b1372",
    ("niah_single_2", 4096, 42, 0): "09f75686ee5df8eeae8efe0a48f9c1b9",
    ("niah_single_3", 1024, 42, 0): "4e8ed6987743b06e312404800af71760",
    ("niah_single_3", 4096, 42, 0): "bf5f7437c3ee440a97790f4ee3da7a55",
    ("qa_1", 1024, 42, 0): "c885b454bdc50e29ab9e948a964bbf86",
    ("qa_1", 4096, 42, 0): "0d36cea7487506bc2b9ac5f654aba34f",
    ("qa_1", 4096, 7, 37): "7a0a2bae35d80c179e727b3190a92938",
    ("qa_2", 4096, 42, 0): "32b2b79f2a25e9d09a76e2e0d40b8ae5",
    ("vt", 1024, 42, 0): "72ea6400f7356dc09877f98d9eb1825a",
    ("vt", 4096, 42, 0): "c2d9bdb171be3cb778291265e6738ca5",
    ("vt", 4096, 7, 37): "c4eaa4c8c6f414193a88f4e455da9ba7",
}
"""Beginning of the sha256 of prompts and answers, by task, length, seed and tokens of the chat template."""


def split_sentences(text):
    return re.split(r"(?<=[.!?]) ", text)


@pytest.fixture
def make(essays, squad, hotpot, monkeypatch):
    """The official task of one of RULER's names."""
    monkeypatch.setattr(niah, "split_sentences", split_sentences)
    niah.cut_essays.cache_clear()
    made = {
        "vt": OfficialVt(), "cwe": OfficialCwe(), "fwe": OfficialFwe(), "qa_1": OfficialQa(task="qa_1", data=squad),
        "qa_2": OfficialQa(task="qa_2", data=hotpot),
    }
    yield lambda name: made[name] if name in made else OfficialNiah(task=name, haystack=essays)
    niah.cut_essays.cache_clear()


def draw(task, tokenizer, *, n=1, length=2048, seed=42, template=0):
    """The first samples of a run, and how they are written."""
    run = Run(seed, length, template, tokenizer, task.joint)
    return run, list(itertools.islice(task.draw_samples(run), n))


def some(task, tokenizer, **changes):
    request = {"seed": 42, "split": Split.TEST, "n": 1, "length": 2048, "turns": 1, "mode": Mode.SINGLE}
    return list(task.examples(**{**request, **changes}, tokenizer=tokenizer))


def digest(samples):
    """The beginning of the sha256 of prompts and answers."""
    return hashlib.sha256(json.dumps(samples).encode()).hexdigest()[:32]


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "length", "seed", "template"), PUBLISHED)
def test_samples_are_the_published_ones(make, mini_tokenizer, name, length, seed, template):
    """Prompts and answers are those that RULER's script writes, to the byte."""
    n = 4 if seed == 42 else 3
    run, samples = draw(make(name), mini_tokenizer, n=n, length=length, seed=seed, template=template)
    assert digest([[run.text(x), list(x.references)] for x in samples]) == PUBLISHED[name, length, seed, template]


def test_an_example_is_the_sample_in_parts(make, mini_tokenizer):
    """Context, question, prefix and answers stand where a turn has them; the chat template's tokens are left free."""
    for name, limit in {"vt": 30, "fwe": 50, "qa_1": 32, "niah_multivalue": 128}.items():
        task = make(name)
        _, samples = draw(task, mini_tokenizer, n=2)
        examples = some(task, mini_tokenizer, n=2)
        assert [x.id for x in examples] == ["test-42-0", "test-42-1"]
        for example, sample in zip(examples, samples, strict=True):
            (turn,) = example.turns
            assert (example.context, turn.question, turn.prefix) == (sample.context, sample.question, sample.prefix)
            assert (turn.references, turn.max_new_tokens) == (sample.references, limit)


def test_samples_say_which_generator_made_them(make):
    """Name, prompt_id and revision are unlike those of our own generator."""
    assert {x: make(x).prompt_id for x in ("niah_single_1", "vt", "cwe", "fwe", "qa_1")} == {
        x: f"ruler-official/{x}@c3f5e3b4" for x in ("niah_single_1", "vt", "cwe", "fwe", "qa_1")
    }
    assert make("niah_single_1").dataset_revision == make("cwe").dataset_revision == "wonderwords==3.0.1"
    assert re.fullmatch(
        r"wonderwords==3\.0\.1; nltk==[\d.]+; sha256:[0-9a-f]{64}", make("niah_single_2").dataset_revision
    )
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", make("qa_2").dataset_revision)


def test_the_answer_stands_at_one_rank_in_all_samples(make, mini_tokenizer):
    """The artifact: of 20 documents the gold one is the 19th; in lists of one size common words have the same slots."""
    task = make("qa_1")
    run = Run(42, 4096, 0, mini_tokenizer, task.joint)
    for index, asked in enumerate(task.library.questions[:12]):
        documents = re.split(r"\n?\n?Document \d+:\n", task.draw(run, index, 20).context)[1:]
        assert documents.index(task.library.documents[asked.gold[0]]) == 18
    slots = {}
    for sample in draw(make("cwe"), mini_tokenizer, n=8, length=2048)[1]:
        words = re.split(r" ?\d+\. ", sample.context.rsplit("\n", 1)[1])[1:]
        found = tuple(i for i, word in enumerate(words) if word in sample.references)
        assert slots.setdefault(len(words), found) == found
    assert len(slots) < 8


def test_a_search_probes_the_middle_and_keeps_what_fits():
    """Sizes in the order of a binary search; the last that fitted, or the least where none does."""
    probed = []

    def count(n):
        probed.append(n)
        return 10 * n

    assert (find_size(count, 205, 5, 60), probed) == (20, [32, 18, 25, 21, 19, 20])
    assert find_size(lambda _: 9, 5, 5, 60) == 5
    assert [guess_high(500, 25, 4096), guess_high(500, 25, 100)] == [614, 50]


@given(
    adjectives=st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=8),
    nouns=st.lists(st.text("ab- ", min_size=1, max_size=3), min_size=1, max_size=6),
)
def test_pairs_are_the_sorted_set_of_all(adjectives, nouns):
    """Also where a hyphen in an adjective makes pairs of two adjectives mix or fall together."""
    assert list(Pairs(adjectives, nouns)) == sorted({f"{x}-{y}" for x in adjectives for y in nouns})


def test_all_pairs_of_the_real_lists():
    """Six million of them; around every adjective's first and last they are in order."""
    pairs = niah.find_pairs()
    assert len(pairs) == 910 * 6782
    places = sorted({min(max(0, start + i), len(pairs) - 1) for start in pairs.starts for i in (-1, 0, 1)})
    assert all(pairs[i] < pairs[j] for i, j in itertools.pairwise(places))
    assert random.Random(0).choice(pairs) == pairs[random.Random(0)._randbelow(len(pairs))]


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("vt", {"split": Split.DEV}, "only a test split"),
        ("vt", {"seed": 35}, "drew a variable twice"),  # RULER's script ends with an IndexError there
        ("vt", {"length": 600}, "does not fit at the smallest size"),
        ("niah_single_1", {"length": 200}, "does not fit at the smallest size"),
        ("qa_2", {"length": 1024, "n": 4}, "does not fit at the smallest size"),  # RULER's script does not end there
        ("qa_2", {"n": 13}, "has 12 questions"),
        ("fwe", {"length": 150}, "2 coded words, too few"),
        ("cwe", {"length": 200_000}, "tries a list of .* words here, and wonderwords has 8166.*english_words=PATH"),
    ],
)
def test_what_rulers_script_cannot_do_is_said(make, mini_tokenizer, name, request_, message):
    """Where it fails, or would draw again without end, or needs a file: one line."""
    with pytest.raises(UserError, match=message) as caught:
        some(make(name), mini_tokenizer, **request_)
    assert "\n" not in str(caught.value)


def test_a_variable_that_is_drawn_twice_takes_two_values(mini_tokenizer, monkeypatch):
    """RULER's script draws one for each of the two chains before it fails, so the next draw has the third."""
    run, other = (Run(42, 1024, 0, mini_tokenizer, "\n") for _ in range(2))
    values = [vt.draw_value(other) for _ in range(3)]
    names = iter(["ABCDE", "ABCDE", "BCDEF", "CDEFG", "DEFGH", "EFGHI"])
    with monkeypatch.context() as patch:
        patch.setattr(vt, "draw_name", lambda *_: next(names))
        with pytest.raises(ScriptError, match="drew a variable twice"):
            vt.draw(run, 5, shot=False)
    assert f"the value {values[2]} in" in vt.draw(run, 5, shot=False).question


def test_a_template_that_alone_is_too_long_is_refused(make, chars):
    """RULER's script would shorten the text without end."""
    with pytest.raises(UserError, match="no text fits"):
        some(make("fwe"), chars, length=300)


def test_without_essays_and_questions_the_next_step_is_named(mini_tokenizer):
    """The message names what is missing, and what to use instead."""
    with pytest.raises(UserError, match=r"niah_multivalue of .* haystack=PATH; or use the task niah_multivalue"):
        some(OfficialNiah(task="niah_multivalue"), mini_tokenizer)
    with pytest.raises(UserError, match=r"HotpotQA's questions.*data=PATH"):
        some(OfficialQa(task="qa_2"), mini_tokenizer)


def test_without_nltks_model_the_next_step_is_named(monkeypatch):
    """A download that is missing is said to be, with how to bring it."""

    def fail(_):
        raise LookupError

    monkeypatch.setattr("nltk.tokenize.sent_tokenize", fail)
    with pytest.raises(UserError, match=r"punkt_tab.*nltk\.downloader"):
        niah.split_sentences("One. Two.")
    monkeypatch.setattr("nltk.tokenize.sent_tokenize", lambda text: text.split(" "))
    assert niah.split_sentences("One. Two.") == ["One.", "Two."]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", b"{"), ("a.json", b"[]"), ("a.json", b'{"text": 3}'), ("a.json", b'{"text": " "}'), ("a.txt", b"\xff"),
     ("a.json", b"[" * 100_000), ("none", None)],
)  # fmt: skip
def test_files_that_are_no_essays_are_the_users_mistake(tmp_path, mini_tokenizer, name, text):
    """Missing, broken, of another form, empty, no text."""
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match="essays"):
        some(OfficialNiah(task="niah_single_2", haystack=str(tmp_path / name)), mini_tokenizer)


def test_essays_are_json_or_plain_text(tmp_path):
    """Both are the same words, white space collapsed; too few are repeated."""
    (tmp_path / "a.json").write_text(json.dumps({"text": "One  two.\nThree"}))
    (tmp_path / "a.txt").write_text("One  two.\nThree")
    words = [niah.read_essays(str(tmp_path / x))[0] for x in ("a.json", "a.txt")]
    assert words == [("One", "two.", "Three")] * 2


@pytest.mark.parametrize("read", [niah.read_essays, read_words, read_sentences, read_squad])
def test_a_path_may_begin_at_the_home_folder(tmp_path, monkeypatch, read):
    """As those of other data: a sweep file, or a shell other than bash, leaves the tilde to kvbench."""
    paragraph = {"context": "c", "qas": [{"question": "q", "is_impossible": False, "answers": [{"text": "c"}]}]}
    (tmp_path / "data.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    (tmp_path / "words.json").write_text(json.dumps({"0": "word", "text": "One two. " * 200}))
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "data.json" if read is read_squad else "words.json"
    assert read(f"~/{name}") == read(str(tmp_path / name))


@pytest.mark.parametrize("text", [b"", b"[]", b'{"0": 3}', b'{"0": "word"}'])
def test_a_larger_list_is_checked(tmp_path, text, mini_tokenizer):
    """Broken, of another form, or too short for the list that is tried."""
    path = tmp_path / "english_words.json"
    path.write_bytes(text)
    with pytest.raises(UserError, match="english_words"):
        some(OfficialCwe(english_words=str(path)), mini_tokenizer, length=200_000)
