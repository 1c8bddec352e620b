"""A run without the chat template of its model's tokenizer is the run of a model that has none."""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from kvbench.errors import UserError
from kvbench.hf import load_model
from kvbench.registry import find_task
from kvbench.runs.examples import make_examples
from kvbench.runs.files import read_lines
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.settings import configure
from kvbench.task import Example, Turn, encode, find_frame
from kvbench.text.template import Frame, Template

TOY = f"{Path(__file__).parents[1] / 'toys' / 'toy.py'}:Toy"
CHAT = (
    "{{ bos_token }}{% for x in messages %}[{{ x.role }}]{{ x.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NIAH = ["--task", "niah", "--length", "384", "--samples", "2"]


@pytest.fixture(scope="module")
def model(model_folder):
    """Its tokenizer has one token per byte, puts a token before all text, and has a chat template that does so too."""
    inner = Tokenizer.from_str(AutoTokenizer.from_pretrained(model_folder).backend_tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<end>", eos_token="<end>", chat_template=CHAT
    )
    return replace(load_model(str(model_folder)), tokenizer=tokenizer)


@pytest.fixture
def job_of(model, tmp_path):
    """A job of the toy task with three turns."""

    def make(model=model, **options):
        return prepare(Request("full", TOY, mode="multi-turn", samples=1, out=tmp_path, **options), model)

    return make


def shown(job) -> list[str]:
    """The text of the first example: its context, every turn as the first question, and as a later one."""
    ((_, _, encoded),) = make_examples(job, [0])
    parts = [encoded.context, *(x.first for x in encoded.turns), *(x.later for x in encoded.turns)]
    return [job.model.tokenizer.decode(x) for x in parts]


def test_prompts_byte_for_byte(job_of):
    """In the template the user's message is closed and opened again between turns; without one the text is all."""
    own, none = job_of(), job_of(template="none")
    context = next(make_examples(none, [0]))[1].context
    assert shown(own) == [
        f"<end>[user]{context}",
        *(f"\nq{i}?[end][assistant]=" for i in range(3)),
        *(f"[end][user]q{i}?[end][assistant]=" for i in range(3)),
    ]
    assert shown(none) == [f"<end>{context}", *2 * [f"\nq{i}?=" for i in range(3)]]
    assert (own.spec.task.bos, none.spec.task.bos) == ("template", "tokenizer")


@pytest.mark.parametrize(("opened", "written", "lead"), [
    ("[assistant]", "[assistant]", ""), ("[assistant]", "[assistant] ", " "), ("[assistant]<think>", "[assistant]", ""),
    ("[assistant]", "[assistant]<think></think>", ""),
])
def test_answers_follow_the_header_as_the_template_writes_them(model, opened, written, lead):
    """A space before messages of the assistant precedes answers and choices, but not after a prefix."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = (
        "{% for x in messages %}{% if x.role == 'user' %}[user]{{ x.content }}[end]{% else %}" + written
        + "{{ x.content }}[end]{% endif %}{% endfor %}{% if add_generation_prompt %}" + opened + "{% endif %}"
    )
    frame = Frame.of(tokenizer)
    assert (frame.tail, frame.lead) == (f"[end]{opened}", lead)
    turns = tuple(Turn("q", x, " yes", ("yes",), 0, (" yes", "no")) for x in ("", "="))
    one, two = encode(find_task(TOY)(), Example("x", "c", turns), tokenizer, frame).turns
    shown = [[tokenizer.decode(y) for y in (x.answer, *x.choices)] for x in (one, two)]
    assert shown == [[" yes", " yes", f"{lead}no"], [" yes", " yes", "no"]]
    assert (frame.sha == plain_sha(tokenizer, frame)) is not bool(lead)


def plain_sha(tokenizer, frame) -> str:
    """The hash of a template whose header is the same before a message and before a new answer."""
    texts = (tokenizer.chat_template, frame.head, frame.middle, frame.tail)
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def test_whether_the_template_is_used_is_part_of_the_identity(job_of):
    """By the template's hash, or its absence, and by the source of the first token."""
    own, none = (job_of(template=x).spec for x in ("own", "none"))
    assert own == job_of().spec
    assert none == own.model_copy(update={
        "task": own.task.model_copy(update={"chat_template_sha": None, "bos": "tokenizer"})
    })
    assert own.run_id != none.run_id


DATED = "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"


@pytest.mark.parametrize(
    ("date", "same"), [(DATED + "{{ date_string }}", True), ("{{ strftime_now('%d %b %Y') }}", False)]
)
def test_a_run_has_one_date(model, job_of, monkeypatch, date, same):
    """As Llama-3.2 writes it the date is pinned; where it cannot be, another day is another run, never a mixed one."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = date + CHAT
    jobs = []
    for day in (1, 2):

        class Clock(dt.datetime):
            @classmethod
            def now(cls, tz=None, day=day):
                return dt.datetime(2026, 5, day, tzinfo=tz)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        jobs.append(job_of(replace(model, tokenizer=tokenizer)))
    assert (shown(jobs[0]) == shown(jobs[1])) is same
    assert (jobs[0].spec.run_id == jobs[1].spec.run_id) is same
    assert ("26 Jul 2024" in shown(jobs[0])[0]) is same


def test_without_a_template_there_is_nothing_to_leave_out(job_of, model_folder):
    """It is the same run."""
    plain = load_model(str(model_folder))
    assert job_of(plain, template="none").spec.run_id == job_of(plain).spec.run_id


def test_a_tokenizer_that_ends_every_text_is_refused_without_a_template(model, job_of):
    """The context would end in a stop token before the question; a chat template says itself what it adds."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", 0)]
    )
    ending = replace(model, tokenizer=tokenizer)
    with pytest.raises(UserError, match="the model's tokenizer puts '<end>' after every text"):
        job_of(ending, template="none")
    assert shown(job_of(ending)) == shown(job_of())


@pytest.mark.parametrize("template", ["own", "none"])
def test_a_task_that_never_uses_the_template_is_the_same_run(model, template: Template):
    """Its method sees the model's own tokenizer either way: LongBench's tasks of worked examples."""
    task = configure(find_task("longbench_trec"), {}, "--task-set", "longbench_trec")
    assert find_frame(task, model.tokenizer, template) == (model.tokenizer, Frame.plain())


def test_a_job_leaves_the_model_as_it_was(job_of, model):
    """Another run on it has its template; texts that were tokenized without one stay known."""
    none = job_of(template="none")
    assert none.loaded is model
    assert (none.model.tokenizer.chat_template, model.tokenizer.chat_template) == (None, CHAT)
    assert job_of(none.loaded).frame.sha is not None
    assert job_of(template="none").model.tokenizer is none.model.tokenizer


@pytest.mark.slow
def test_it_runs_as_a_model_without_a_template(kvbench, chat_mini, tmp_path):
    """Prompts, answers and all that is held, under a method that has its own use for the template."""
    asked = ["run", "--method", "kvzip", *NIAH, "--visibility", "hidden", "--json"]
    for name, options in {
        "chat": ["--model", chat_mini, "--template", "none"], "mini": ["--model", "mini"],
        "own": ["--model", chat_mini],
    }.items():
        answer = kvbench(*asked, *options, "--out", tmp_path / name)
        assert answer.code == 0, answer.err
        assert ("in the chat template" in answer.out) == (name == "own")
    chat, mini, own = (
        [
            (x.prompt_hash, x.ids, x.tokens, x.bytes, x.effect)
            for path in (tmp_path / name).glob("*/samples.jsonl") for x in read_lines(path)
        ]
        for name in ("chat", "mini", "own")
    )
    assert chat == mini
    assert [x[0] for x in own] != [x[0] for x in chat]


@pytest.mark.slow
def test_a_grid_of_both_loads_its_model_once(kvbench, chat_mini, tmp_path, monkeypatch):
    """Each cell is the run of its own command, in whatever order they come."""
    loads = []
    monkeypatch.setattr("kvbench.hf.load_model", lambda *x: loads.append(x) or load_model(*x))
    path = tmp_path / "both.toml"
    path.write_text(
        f'out = "{tmp_path / "runs"}"\n[run]\nmodel = "{chat_mini}"\nlength = 384\nsamples = 2\ntask = "niah"\n'
        '[[grid]]\nmethod = ["full", "knorm"]\ntemplate = ["none", "own"]\n'
    )
    answer = kvbench("sweep", path, "--json")
    assert answer.code == 0, answer.err
    assert len(loads) == 1
    found = [json.loads((Path(x["folder"]) / "spec.json").read_text())["task"] for x in answer.json]
    assert [x["chat_template_sha"] is None for x in found] == [True, False, True, False]
    alone = kvbench(
        "run", "--method", "knorm", *NIAH, "--model", chat_mini, "--template", "none", "--out", tmp_path / "runs",
        "--json",
    )
    assert "already finished" in alone.err
    assert alone.json["run_id"] == answer.json[2]["run_id"]


def test_an_unknown_template_is_refused(kvbench, arguments):
    """With the allowed values."""
    answer = kvbench(*arguments, "--method", "full", "--template", "chatml")
    assert answer.code == 2
    assert "unknown template 'chatml'" in answer.err
    assert "Allowed: none, own" in answer.err


@pytest.mark.slow
def test_what_the_template_does_to_a_score_is_explained(kvbench, chat_mini, tmp_path):
    """It is flipped like any option; on a model that has none the flip is said to change nothing."""
    out = ["--out", tmp_path / "runs", "--json"]
    ids = [
        kvbench("run", "--method", "full", *NIAH, *options, *out).json["run_id"]
        for options in (["--model", chat_mini, "--template", "none"], ["--model", chat_mini], ["--model", "mini"])
    ]
    answer = kvbench("explain", *ids[:2], "--run", *out)
    (flip,) = answer.json["differences"]
    assert (flip["name"], flip["first"], flip["other"]) == ("template", "none", "own")
    assert flip["note"].endswith(ids[1])
    answer = kvbench("explain", ids[2], ids[1], "--run", *out)
    notes = {x["name"]: x["note"] for x in answer.json["differences"]}
    assert notes.keys() == {"model", "template"}
    assert notes["template"] == "no effect: the same run"


@pytest.mark.few(2)
@pytest.mark.parametrize(("template", "reason"), [
    ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__' of 'list' object is unsafe"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ("{{ raise_exception('no system role') }}", "no system role"), ("{% for %}", "Expected"),
])
def test_a_template_that_fails_or_is_stopped_is_refused(chat_mini, tmp_path, kvbench, template, reason):
    """With the reason, and the next step."""
    folder = tmp_path / "model"
    shutil.copytree(chat_mini, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    answer = kvbench("run", "--method", "full", "--task", "niah", "--model", folder, "--length", 300, "--samples", 1)
    assert answer.code == 2
    assert "chat template cannot be rendered" in answer.err and reason in answer.err, answer.err


def test_a_template_that_leaves_out_the_text_is_refused(model):
    """Some write lists of texts and images only; the prompt would stand behind the assistant's header."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = CHAT.replace(
        "{{ x.content }}", "{% for y in x.content %}{% if y.type == 'text' %}{{ y.text }}{% endif %}{% endfor %}"
    )
    with pytest.raises(UserError, match="leaves out the text of a message"):
        Frame.of(tokenizer)


@pytest.mark.parametrize("place", [0, -1])
def test_a_template_of_one_message_is_refused(model, place):
    """A second question would stand right behind the answer, without what the template puts between messages."""
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = f"USER: {{{{ messages[{place}].content }}}} ASSISTANT:"
    with pytest.raises(UserError, match="leaves out the text of a message"):
        Frame.of(tokenizer)
