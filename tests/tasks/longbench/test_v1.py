"""LongBench v1: cuts, facts, the tasks, their averages, data and refusals."""

from __future__ import annotations

import json
import zipfile

import huggingface_hub
import pytest
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.registry import find_task, list_entries
from kvbench.sweep.suite import find_suite
from kvbench.task import encode, prompt_tokens
from kvbench.tasks.longbench import hub

KINDS = (
    "narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "hotpotqa", "2wikimqa", "musique", "dureader",
    "gov_report", "qmsum", "multi_news", "vcsum", "trec", "triviaqa", "samsum", "lsht", "passage_count",
    "passage_retrieval_en", "passage_retrieval_zh", "lcc", "repobench-p",
)
CHINESE = {"multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh"}
EXTENDED = {
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
}
REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"


def text(example) -> str:
    (turn,) = example.turns
    return f"{example.context}{example.joint}{turn.question}{turn.prefix}"


def cut_officially(tokenizer, prompt: str, most: int) -> str:
    """The published procedure: first and last half of the tokens, decoded apart."""
    ids, half = tokenizer(prompt).input_ids, most // 2
    if len(ids) <= most:
        return prompt
    return "".join(tokenizer.decode(x, skip_special_tokens=True) for x in (ids[:half], ids[-half:]))


@pytest.mark.parametrize("kind", ["lcc", "multifieldqa_zh", "hotpotqa"])
@pytest.mark.parametrize("most", [700, 702, 800, 1_000, 1_100])
def test_a_long_prompt_is_cut_as_officially(open_task, make, octets, chatty, kind, most):
    """Half of the room is the end's, whatever the question takes; the chat template is put around afterwards."""
    task = open_task(kind, context="文a" * 50 + "0123456789" * 80 + "Ende")
    whole = make(task, octets)
    wrapped = 0 if kind == "lcc" else len("<user><assistant>")
    example = make(task, octets if kind == "lcc" else chatty, most + wrapped + whole.turns[0].max_new_tokens)
    assert text(example) == cut_officially(octets, text(whole), most)
    assert example.facts["cut_tokens"] == max(0, len(octets(text(whole)).input_ids) - most)


@pytest.mark.parametrize("length", range(440, 460))
def test_a_cut_prompt_fills_the_length(open_task, make, mini_tokenizer, length):
    """With tokens of several characters, what is decoded and tokenized again never takes more than the length."""
    task = open_task("qasper", context="The same words again, " * 400)
    example = make(task, mini_tokenizer, length)
    used = prompt_tokens(encode(task, example, mini_tokenizer)) + 128
    assert length - 4 <= used <= length
    assert example.facts["cut_tokens"] > 0


@pytest.mark.parametrize("asked", ["Cafe\u0301?", "What does <s> mean?"], ids=["normalized", "special token"])
@pytest.mark.parametrize("length", [1000, 1001])
def test_a_question_that_decoding_changes_is_kept(open_task, make, octets, asked, length):
    """By its place in the text: a tokenizer may normalize it or skip its special tokens."""
    inner = Tokenizer.from_str(octets.backend_tokenizer.to_str())
    inner.normalizer = normalizers.NFC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    task = open_task("hotpotqa", input=asked, context="0123456789" * 200)
    (whole,), example = make(task, tokenizer).turns, make(task, tokenizer, length)
    assert example.turns == (whole,) and asked in whole.question
    used = prompt_tokens(encode(task, example, tokenizer)) + whole.max_new_tokens
    assert length - 2 <= used <= length
    assert example.context.endswith("6789") and example.facts["cut_tokens"] > 0
    with pytest.raises(UserError, match="the question must stand whole"):
        make(task, tokenizer, 200)


@pytest.mark.parametrize(("asked", "message"), [
    ("What does <s> mean?", "the tokenizer changes its question and has no offsets"),
    ("What?", "the question must stand whole"),
])
def test_a_tokenizer_without_offsets_says_what_it_lacks(open_task, make, octets, monkeypatch, asked, message):
    """Where it changes the question; where the cut reaches the question, that is said."""
    monkeypatch.setattr(type(octets), "is_fast", False)
    task = open_task("hotpotqa", input=asked, context="0123456789" * 200)
    with pytest.raises(UserError, match=message):
        make(task, octets, 200)


def test_a_cut_that_would_reach_the_question_is_refused(open_task, make, octets):
    """lcc's end takes 19 tokens: the last half of 38 holds it, that of 37 does not; 64 more are generated.

    The first half is the token before all and 18 of the text's.
    """
    task = open_task("lcc", context="x" * 500)
    assert text(make(task, octets, 64 + 38)) == "Please complete th" + "Next line of code:\n"
    with pytest.raises(UserError, match="row-0 of longbench_lcc cannot be cut to 101 tokens: the question must stand"):
        make(task, octets, 64 + 37)


@pytest.mark.parametrize(
    ("length", "bucket"), [(0, "0-4k"), (3999, "0-4k"), (4000, "4-8k"), (7999, "4-8k"), (8000, "8k+")]
)
def test_facts(open_task, make, octets, length, bucket):
    """Facts hold the fields that a scorer needs, and the bucket of the length."""
    task = open_task("trec", length=length)
    assert make(task, octets).facts == {
        "_id": "abc", "length": length, "language": "en", "bucket": bucket, "all_classes": ["One", "Two"],
        "cut_tokens": 0,
    }


def test_all_tasks_are_listed():
    """21 and 13 of LongBench-E, each with what it needs, its own part of the data and the prompt of its kind."""
    entries = {x.name: x for x in list_entries("task") if x.facts["family"] == "longbench"}
    names = {f"longbench_{x}" for x in KINDS}
    extended = {f"longbench_{x}_e" for x in EXTENDED}
    assert set(entries) == names | extended | {"longbench2"}
    for name in names | extended:
        assert entries[name].facts["needs"] == "LongBench's data, a larger model"
        task = entries[name].load()
        assert f"longbench_{task.config}" == name
        assert task().prompt_id == f"longbench/{task.config.removesuffix('_e')}@1"


def test_an_extended_task_reads_its_own_file(tmp_path, write, line):
    """In the folder of the unpacked archive, `qasper_e.jsonl` and not `qasper.jsonl`."""
    write("qasper.jsonl", line(context="short"))
    write("qasper_e.jsonl", line(context="spread"))
    both = [find_task(name)(data=str(tmp_path)) for name in ("longbench_qasper", "longbench_qasper_e")]
    assert [x.record(0)["context"] for x in both] == ["short", "spread"]


def test_averages():
    """16 English tasks, 15 without passage_count, and 9 of them; Chinese ones are in none."""
    sixteen, fifteen, nine = (set(find_suite(f"longbench-{n}").tasks) for n in (16, 15, 9))
    assert (len(sixteen), len(fifteen), len(nine)) == (16, 15, 9)
    assert sixteen - fifteen == {"longbench_passage_count"}
    assert nine < fifteen < sixteen == {f"longbench_{x}" for x in set(KINDS) - CHINESE}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("qasper", {"dataset": "hotpotqa"}, "it is of hotpotqa. Give longbench_qasper the data of THUDM/LongBench"),
        ("qasper", {"answers": []}, "answers must be texts, one at least"),
        ("qasper", {"answers": [None]}, "answers must be texts, one at least"),
        ("trec", {"all_classes": None}, "all_classes must name the classes"),
        ("lsht", {"all_classes": []}, "all_classes must name the classes"),
        ("trec", {"all_classes": ["One", 2]}, "all_classes must be texts"),
        ("passage_count", {"answers": ["seven"]}, "answers must hold the number that is asked for"),
        ("passage_retrieval_en", {"answers": ["Paragraph 1", "One"]}, "answers must hold the number that is asked for"),
        ("qasper", {"input": None}, "column input is NoneType"),
        ("qasper", {"context": " "}, "column context is empty"),
    ],
)
def test_a_wrong_row_is_refused(open_task, make, octets, kind, changes, said):
    """By its number, with what is wrong."""
    with pytest.raises(UserError, match="record 0 of ") as caught:
        make(open_task(kind, **changes), octets)
    assert said in str(caught.value)


@pytest.fixture
def no_memory():
    """Nothing of the hub is remembered between tests."""
    hub.open_archive.cache_clear()
    yield
    hub.open_archive.cache_clear()


def test_the_hub_is_asked_for_the_archive(tmp_path, monkeypatch, line, make, octets, no_memory):
    """`data.zip` at the pinned commit, once; the commit names the data."""
    asked = []
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/qasper.jsonl", json.dumps(line(context="from the archive")) + "\n")

    def fetch(*arguments, **options):
        asked.append((arguments, options))
        return str(tmp_path / "data.zip")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    task = find_task("longbench_qasper")()
    assert "from the archive" in make(task, octets).context
    assert task.dataset_revision == REVISION
    assert asked == [(("THUDM/LongBench", "data.zip"), {"repo_type": "dataset", "revision": REVISION})]
    with pytest.raises(UserError, match=r"cannot be read: .*data/lcc\.jsonl"):
        make(find_task("longbench_lcc")(), octets)


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch, make, octets, no_memory):
    """In one line, with what to do where there is no network."""

    def fail(*_, **__):
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(UserError) as caught:
        make(find_task("longbench_qasper")(), octets)
    assert str(caught.value) == (
        "data.zip of THUDM/LongBench at 5e628be450b7 cannot be fetched from the hub (no route). On a machine with "
        "network access, run: hf download THUDM/LongBench data.zip --repo-type dataset --revision "
        f"{REVISION} --local-dir DIR, unpack data.zip, and give --task-set data=DIR."
    )


def test_a_run(tmp_path, capsys, write, line):
    """Two records of samsum from a folder to scores: cut, stopped at a newline, never empty."""
    write("samsum.jsonl", *(line("samsum", context="Dialogue: a\nSummary: b\n" * 200) for _ in range(2)))
    assert call([
        "run", "--method", "full", "--task", "longbench_samsum", "--task-set", f"data={tmp_path}", "--model", "mini",
        "--length", "400", "--samples", "2", "--device", "cpu", "--out", str(tmp_path / "runs"), "--json",
    ]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (journal,) = (tmp_path / "runs").glob("*/samples.jsonl")
    lines = [json.loads(x) for x in journal.read_text().splitlines()]
    task = result["spec"]["task"]
    assert (result["status"], task["truncation"], task["prompt_id"]) == ("ok", "middle", "longbench/samsum@1")
    assert task["dataset_revision"].startswith("sha256:")
    assert [set(x["scores"]) for x in lines] == [{"longbench-first-line-rouge-l@2e00731f"}] * 2
    assert all(x["facts"]["cut_tokens"] > 0 and len(x["ids"]) > 0 and "\n" not in x["prediction"] for x in lines)


def test_a_run_over_the_wrong_file(tmp_path, capsys, write):
    """One line and exit code 2."""
    path = write("records.jsonl", {"question": "?"})
    assert call([
        "run", "--method", "full", "--task", "longbench_qasper", "--task-set", f"data={path}", "--model", "mini",
        "--length", "400", "--device", "cpu", "--out", str(tmp_path / "runs"),
    ]) == 2
    assert "has no column input, context, answers" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
