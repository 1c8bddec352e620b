"""lm_eval on our models and methods, and its tasks in our runs; the full cache is checked against transformers."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from kvbench.engine.agreement import force_answer
from kvbench.engine.session import Session
from kvbench.errors import UserError
from kvbench.integrations.lmeval.__main__ import main
from kvbench.integrations.lmeval.generation import Generation
from kvbench.integrations.lmeval.model import KvbenchModel
from kvbench.integrations.lmeval.tally import NotMeasuredError
from kvbench.method import Budget
from kvbench.methods.baseline.full import Full
from kvbench.registry import find_method, find_task
from kvbench.runs.files import read_lines
from kvbench.task import Split, encode
from kvbench.tasks.prose import sentences

ROOT = Path(__file__).parents[2]
MINI, DOCS = ROOT / "kvbench" / "models" / "mini", ROOT / "docs"

GENERATED = """\
task: needles
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}/test.jsonl, train: {data}/train.jsonl}}, cache_dir: {data}/cache}}
training_split: train
fewshot_split: train
test_split: test
output_type: generate_until
description: "Answer.\\n\\n"
doc_to_text: "{{{{text}}}}\\nWhat is the {{{{asked}}}}? The {{{{asked}}}} is"
doc_to_target: "{{{{number}}}}"
generation_kwargs: {{until: [".", "More text"], max_gen_toks: 12}}
filter_list:
  - {{name: trimmed, filter: [{{function: remove_whitespace}}, {{function: take_first}}]}}
  - {{name: digits, filter: [{{function: regex, regex_pattern: "(\\\\d+)"}}, {{function: take_first}}]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 3}}
"""
CHOSEN = """\
task: needle_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}/test.jsonl}}, cache_dir: {data}/cache}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}\\nWhat is the {{{{asked}}}}? The {{{{asked}}}} is"
doc_to_choice: "{{{{[number, wrong, wrong + wrong]}}}}"
doc_to_target: 0
metadata: {{version: 1}}
"""


def document(rng: random.Random, key: str) -> dict[str, str]:
    """A needle in generated prose, a question for it, and a wrong answer."""
    text = [sentence for _, sentence in zip(range(24), sentences(rng), strict=False)]
    number, wrong = (str(rng.randrange(10**6, 10**7)) for _ in range(2))
    text.insert(rng.randrange(20), f"One of the special magic numbers for {key} is: {number}.")
    asked = f"special magic number for {key} mentioned in the provided text"
    return {"text": " ".join(text), "asked": asked, "number": number, "wrong": wrong}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A task that generates, one that chooses, and their documents."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, n in (("test", 4), ("train", 3)):
        rng = random.Random(name)
        docs = [document(rng, key) for key in ("tall-river", "old-garden", "glib-flan", "wee-baseline")[:n]]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in docs))
    (folder / "needles.yaml").write_text(GENERATED.format(data=folder))
    (folder / "choices.yaml").write_text(CHOSEN.format(data=folder, kind="multiple_choice"))
    return folder


@pytest.fixture(scope="module")
def docs(folder):
    return [json.loads(x) for x in (folder / "test.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def full():
    return KvbenchModel(method="full", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def snapkv():
    return KvbenchModel(method="snapkv", budget="25%", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def plain():
    """The bundled model without kvbench."""
    return AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32), AutoTokenizer.from_pretrained(MINI)


def ask(kind: str, *arguments: tuple[object, ...]) -> list[Instance]:
    return [Instance(kind, {}, x, 0, (None, i, 1)) for i, x in enumerate(arguments)]


def evaluate(model, *tasks: Path, **options: object):
    manager = TaskManager(include_defaults=False)
    return simple_evaluate(
        model=model, tasks=[str(x) for x in tasks], task_manager=manager, bootstrap_iters=0, **options
    )


def prompt(doc: dict[str, str]) -> str:
    """As the tasks above word it."""
    return f"{doc['text']}\nWhat is the {doc['asked']}? The {doc['asked']} is"


# lm_eval on our models


@pytest.mark.slow
def test_full_cache_scores_as_one_forward_pass(full, plain, docs):
    """Log-likelihoods of the full cache are those of a plain pass over context and continuation, greedy or not."""
    module, tokenizer = plain
    pairs = [(prompt(doc), f" {doc[key]}.") for doc in docs for key in ("number", "wrong")] + [("", "The river rose.")]
    found = full.loglikelihood(ask("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (logprob, greedy) in zip(pairs, found, strict=True):
        before = tokenizer(context).input_ids or [tokenizer.eos_token_id]
        after = tokenizer(continuation, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = module(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        assert logprob == pytest.approx(logits[range(len(after)), after].sum().item(), abs=1e-3)
        assert greedy == (logits.argmax(-1).tolist() == after)
    assert [greedy for _, greedy in found] == [True, False] * 4 + [False]  # it knows the needles


def test_context_is_compressed_before_a_continuation_is_scored(snapkv, docs):
    """Scores under a method are those after its own prefill, and requests on one context share it."""
    context, choices = prompt(docs[0]), [f" {docs[0]['number']}", f" {docs[0]['wrong']}"]
    found = snapkv.loglikelihood(ask("loglikelihood", *((context, x) for x in choices)), disable_tqdm=True)
    ids = snapkv.tok_encode(context)
    method = find_method("snapkv")().fit(Budget.parse("25%"), snapkv.model.shape(len(ids)))
    with Session(snapkv.model, method) as session:
        session.prefill(ids)
        for choice, (logprob, _) in zip(choices, found, strict=True):
            after = snapkv.tok_encode(choice, add_special_tokens=False)
            expected = force_answer(session, after).log_softmax(-1)[range(len(after)), after].sum()
            assert logprob == pytest.approx(expected.item(), abs=1e-4)
    tally = snapkv.tallies["loglikelihood"]
    assert (tally.requests, tally.acted, tally.uncompressed, tally.cut) == (2, 2, 0, 0)
    assert tally.full_bytes == snapkv.model.shape(len(ids)).full_bytes
    assert tally.stored_bytes / tally.full_bytes == pytest.approx(0.25, abs=0.01)


def test_one_token_does_not_depend_on_the_method(snapkv, docs, capsys):
    """The prefill predicts it with the exact cache, so a task of such tokens, as letters are, measures no method."""
    one = ask("loglikelihood", (prompt(docs[0]), str(docs[0]["number"])[0]))
    assert len(snapkv.tok_encode(one[0].args[1], add_special_tokens=False)) == 1
    for call, asked in (
        ("loglikelihood", one),
        ("generate_until", ask("generate_until", (prompt(docs[0]), {"max_gen_toks": 1}))),
    ):
        with pytest.raises(NotMeasuredError, match=f"snapkv acted in none of 1 {call} requests"):
            getattr(snapkv, call)(asked, disable_tqdm=True)
        assert "1 have one token, which the prefill predicts" in capsys.readouterr().err
        sparse = KvbenchModel(method="minference", device="cpu")  # changes the prefill
        assert len(getattr(sparse, call)(asked, disable_tqdm=True)) == 1


def test_answers_are_greedy_and_end_at_their_texts(full, plain, docs):
    """Generation gives what transformers' does, up to the first stop text, wherever tokens begin."""
    module, tokenizer = plain
    context = prompt(docs[1])
    ids = tokenizer(context, return_tensors="pt").input_ids
    made = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    assert docs[1]["number"] in text
    middle = docs[1]["number"][2:5]
    asked = [{"until": [], "max_gen_toks": 12}, {"until": ["never", middle]}, {"until": middle, "max_gen_toks": 3}]
    answers = full.generate_until(ask("generate_until", *((context, x) for x in asked)), disable_tqdm=True)
    assert answers[:2] == [text, text[: text.index(middle)]]
    assert text.startswith(answers[2]) and middle not in answers[2]


def test_answers_of_nan_logits_are_refused(full, docs, monkeypatch):
    """They are no answers of the model, although each has a token."""
    monkeypatch.setattr(Full, "attend", lambda self, kv, step: torch.full_like(step.query, torch.nan))
    with pytest.raises(UserError, match="NaN"):
        full.generate_until(ask("generate_until", (prompt(docs[0]), {"max_gen_toks": 2})), disable_tqdm=True)


def test_contexts_are_cut_on_the_left_and_counted(full, docs, capsys):
    """A context that leaves no room loses its first tokens, as in lm_eval, and the log says how many."""
    short = KvbenchModel(method="full", device="cpu", dtype="float32", max_length=100)
    context, after = prompt(docs[0]), f" {docs[0]['number']}"
    ids, more = short.tok_encode(context), len(short.tok_encode(after, add_special_tokens=False))
    capsys.readouterr()
    (found,) = short.loglikelihood(ask("loglikelihood", (context, after)), disable_tqdm=True)
    with Session(full.model, full.method) as session:
        session.prefill(ids[more - 100 :])
        assert found[0] == pytest.approx(session.score(short.tok_encode(after, add_special_tokens=False)).sum().item())
    assert f"1 contexts lost {len(ids) + more - 100} tokens on their left" in capsys.readouterr().err
    with pytest.raises(UserError, match="both together may have 100"):
        short.generate_until(ask("generate_until", (context, {"max_gen_toks": 100})))


def test_a_method_that_never_acts_fails_the_run(full, capsys):
    """Contexts too short for a budget are kept in full and counted; if all are, there is no score."""
    short = ask("loglikelihood", ("Two words", " more"), ("", "One"))
    lazy = KvbenchModel(method="snapkv", budget="25%", device="cpu")
    with pytest.raises(NotMeasuredError, match="snapkv acted in none of 2 loglikelihood requests") as caught:
        lazy.loglikelihood(short, disable_tqdm=True)
    assert caught.value.exit_code == 1
    assert "2 contexts were too short for the budget and were kept in full" in capsys.readouterr().err
    assert len(full.loglikelihood(short, disable_tqdm=True)) == 2
    declared = KvbenchModel(method="snapkv", budget="100%", device="cpu")
    assert len(declared.loglikelihood(short, disable_tqdm=True)) == 2


@pytest.mark.parametrize(("arguments", "message"), [
    ({"method": "full", "color": 1}, "unknown model argument 'color'"),
    ({"method": "snapkv", "set.color": 1}, "unknown setting of snapkv 'color'"),
    ({"method": "snapkv", "set.window": "x"}, "window must be a whole number, 1 or more, got x"),
    ({"method": "snapkv", "budget": "250%"}, "is above 100%"),
    ({"method": "full", "budget": "25%"}, "full takes no budget"),
    ({"method": "full", "batch_size": "auto"}, "kvbench never pads"),
    ({"method": "full", "max_length": 10**6}, "max_length=1000000 exceeds the maximum"),
    ({"method": "full", "chunk": 0}, "chunk=0 must be"),
    ({"method": "full", "pretrained": "nothing"}, "unknown model 'nothing'"),
    ({"method": "full", "pretrained": "random:mini"}, "is random"),
    ({"method": "nothing"}, "unknown method 'nothing'"),
    ({"method": "none"}, "none needs a diffusion model"),
    ({"method": "cacheblend"}, "cacheblend reuses the parts of a prompt, and lm_eval's prompts name none"),
    ({}, "needs a method"),
])
def test_wrong_arguments_are_refused(arguments, message):
    """Each with one line that names it."""
    with pytest.raises(UserError, match=message) as caught:
        KvbenchModel(device="cpu", **arguments)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_ends_every_text_is_refused(tmp_path):
    """The continuation would follow its token, and lose its own last one."""
    shutil.copytree(MINI, tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    end = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.save(str(file))
    with pytest.raises(UserError, match=r"puts '<\|endoftext\|>' after every text"):
        KvbenchModel(pretrained=str(tmp_path / "model"), method="full", device="cpu")


def test_a_tokenizer_without_special_tokens_scores(full):
    """Only an empty context needs one."""
    model = KvbenchModel(method="full", device="cpu", dtype="float32")
    asked = ask("loglikelihood", ("The old river was", " long."))
    model.tokenizer.eos_token = None
    assert model.loglikelihood(asked, disable_tqdm=True) == full.loglikelihood(asked, disable_tqdm=True)
    with pytest.raises(UserError, match="names no token that ends a text"):
        model.loglikelihood(ask("loglikelihood", ("", "The river")), disable_tqdm=True)


def test_settings_come_as_lm_eval_reads_them():
    """`set.` names settings of the method, and its arguments go before lm_eval's options."""
    made = KvbenchModel.create_from_arg_string(
        "pretrained=mini,method=snapkv,budget=64,set.window=16,set.pool=avg,device=cpu,dtype=float32",
        {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"},
    )
    assert (made.method.window, made.method.pool, str(made.budget)) == (16, "avg", "64")
    assert str(made.device) == "cpu"
    assert made.get_model_info()["kvbench"]["settings"]["window"] == 16


@pytest.mark.parametrize(("asked", "message"), [
    ({"do_sample": True}, "decodes greedily"),
    ({"temperature": 0.7}, "decodes greedily"),
    ({"num_beams": 4}, "unknown generation setting 'num_beams'"),
])
def test_sampling_is_refused(asked, message):
    """Only greedy decoding is the same twice."""
    with pytest.raises(UserError, match=message):
        Generation.read(asked)


def test_generation_settings_have_lm_evals_defaults():
    """256 new tokens; a text is cut before whichever stop text comes first."""
    assert Generation.read({"until": "\n", "temperature": 0.0, "do_sample": False}) == Generation(("\n",), 256)
    assert Generation.read({"until": ["a", ""], "max_new_tokens": 3}) == Generation(("a",), 3)
    assert Generation(("cd", "b"), 1).cut("abcd") == "a"
    assert Generation((), 1).cut("abcd") == "abcd"


def test_rolling_likelihood_is_refused(full):
    """It has no context; the message names what does the same after compression."""
    with pytest.raises(UserError, match="ppl-stdlib"):
        full.loglikelihood_rolling(ask("loglikelihood_rolling", ("text",)))


def test_a_cache_of_answers_is_refused(full, folder, tmp_path):
    """It would hand one method's answers to another."""
    with pytest.raises(UserError, match="--use_cache"):
        evaluate(full, folder / "needles.yaml", use_cache=str(tmp_path / "cache"))


def test_chat_template_goes_before_an_answer_that_is_begun():
    """Without a template it is refused; with one, the last message is gone on with after the assistant's header."""
    model = KvbenchModel(method="full", device="cpu")
    talk = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UserError, match="has no chat template"):
        model.apply_chat_template(talk)
    model.tokenizer.chat_template = (
        "{% for x in messages %}[{{x.role}}]{{x.content}}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert model.apply_chat_template(talk) == "[user]Hi[assistant]"
    begun = [*talk, {"role": "assistant", "content": "So"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False) == "[user]Hi[assistant]So"


def test_a_template_without_system_messages_loses_them(capsys):
    """Gemma's template refuses them, and lm_eval makes one of a task's description. One line says so."""
    model = KvbenchModel(method="full", device="cpu")
    model.tokenizer.chat_template = (
        "{% for x in messages %}{% if x.role in ['system', 'tool'] %}{{ raise_exception('Role not supported') }}"
        "{% endif %}[{{x.role}}]{{x.content}}{% endfor %}"
    )
    talk = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Hi"}]
    capsys.readouterr()
    assert [model.apply_chat_template(talk) for _ in range(2)] == ["[user]Hi", "[user]Hi"]
    assert capsys.readouterr().err.count("Role not supported") == 1
    with pytest.raises(UserError, match="Role not supported"):
        model.apply_chat_template([{"role": "tool", "content": "1"}])


# Its tasks in our runs


@pytest.fixture
def run(kvbench, folder, tmp_path):
    """Calls `kvbench run` on a task file of the folder."""

    def call(file: str, *options: object):
        task = f"lm-eval:{folder / file}"
        return kvbench("run", "--task", task, "--samples", 4, "--device", "cpu", "--out", tmp_path, "--json", *options)

    return call


def test_prompts_are_lm_evals_own(folder, docs, mini_tokenizer):
    """A document's context is the text that lm_eval builds, including its few-shot examples."""
    plain = find_task(f"lm-eval:{folder / 'needles.yaml'}")()
    made = examples(plain, mini_tokenizer)
    assert [x.context for x in made] == ["Answer.\n\n" + prompt(x) for x in docs]
    (turn,) = made[0].turns
    assert (turn.question, turn.prefix, turn.answer) == ("", "", f" {docs[0]['number']}")
    assert (turn.references, turn.max_new_tokens, turn.choices) == ((docs[0]["number"],), 12, ())

    (task,) = TaskManager(include_defaults=False).load([str(folder / "needles.yaml")])["tasks"].values()
    for seed, theirs in ((0, 1234), (7, 7)):
        task.set_config("num_fewshot", 2)
        task.set_fewshot_seed(theirs)
        task.build_all_requests(limit=4)
        shown = type(plain)(num_fewshot=2)
        expected = [x.args[0] for x in task.instances]
        assert [x.context for x in examples(shown, mini_tokenizer, seed=seed)] == expected
        assert all(x.count("special magic numbers for") == 3 for x in expected)


def examples(task, tokenizer, **changes):
    asked = {"seed": 0, "split": Split.TEST, "n": 4, "length": 4096, "turns": 1, "mode": task.modes[0]}
    return list(task.examples(**{**asked, **changes}, tokenizer=tokenizer))


@pytest.fixture(scope="module")
def mini_tokenizer():
    return AutoTokenizer.from_pretrained(MINI)


def test_the_task_file_of_the_page_works(tmp_path, monkeypatch, mini_tokenizer):
    """docs/lm_eval.md, with one document."""
    (shown,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "lm_eval.md").read_text(), re.DOTALL)
    data, cache = "{data_files: {test: my_tasks/test.jsonl}", f", cache_dir: {tmp_path}"
    assert data in shown
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "my_task.yaml").write_text(shown.replace(data, data + cache))
    line = {"text": "The door is red.", "question": "What color is the door?", "answer": "red"}
    (tmp_path / "my_tasks" / "test.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    (made,) = examples(find_task("lm-eval:my_tasks/my_task.yaml")(), mini_tokenizer, n=1)
    assert made.context == "The door is red.\nQuestion: What color is the door?\nAnswer:"
    assert (made.turns[0].answer, made.turns[0].max_new_tokens) == (" red", 32)


def test_choices_are_lm_evals_own(folder, docs, mini_tokenizer):
    """Every choice comes with its delimiter, and the right one is the reference."""
    (turn,) = examples(find_task(f"lm-eval:{folder / 'choices.yaml'}")(), mini_tokenizer)[2].turns
    number, wrong = docs[2]["number"], docs[2]["wrong"]
    assert turn.choices == (f" {number}", f" {wrong}", f" {wrong}{wrong}")
    assert (turn.references, turn.answer, turn.max_new_tokens) == ((f" {number}",), f" {number}", 0)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "metrics"), [
    ("needles.yaml", {"lm-eval-trimmed-exact_match": "exact_match,trimmed", "lm-eval-digits-exact_match":
                      "exact_match,digits"}),
    ("choices.yaml", {"lm-eval-acc": "acc,none", "lm-eval-acc_norm": "acc_norm,none"}),
])
def test_both_directions_come_to_the_same_scores(run, folder, snapkv, file, metrics):
    """Under snapkv, lm_eval's own aggregates and the scores of a run are the same, and so they are scored again."""
    theirs = evaluate(snapkv, folder / file)
    (results,) = theirs["results"].values()
    answer = run(file, "--method", "snapkv", "--budget", "25%", "--dtype", "float32")
    assert answer.code == 0, answer.err
    found = answer.json
    assert found["effect"]["n_acted"] == 4
    assert {name.split("@")[0]: value for name, value in found["scores"].items()} == {
        ours: results[name] for ours, name in metrics.items()
    }
    assert found["task"]["scorer"].startswith(next(iter(metrics)))
    assert found["task"]["dataset_revision"].startswith("sha256:")
    assert theirs["config"]["kvbench"]["requests"].popitem()[1]["cut"] == 0


@pytest.mark.slow
def test_a_run_is_scored_again_from_its_journal(run, kvbench, folder, tmp_path):
    """Without a model the score is the same; what stands after a stop text does not count."""
    found = run("needles.yaml", "--method", "full").json
    assert found["score"]["mean"] == 1.0
    lines = read_lines(tmp_path / found["run_id"] / "samples.jsonl")
    assert [x.facts["doc_id"] for x in lines] == [0, 1, 2, 3]
    again = kvbench("score", tmp_path / found["run_id"], "--task", f"lm-eval:{folder / 'needles.yaml'}", "--json")
    assert again.json["score"] == found["score"]
    task = find_task(f"lm-eval:{folder / 'needles.yaml'}")
    for text, score in ((" {}", 1.0), (" {}More text", 1.0), ("{} more text", 0.0), ("It is {}", 0.0)):
        prediction = text.format(lines[2].references[0])
        assert task.scorers[0](prediction, lines[2].references, lines[2].facts) == score
    with pytest.raises(UserError, match="document 1 of task needles has changed"):
        task.scorers[0]("", (), {**lines[2].facts, "doc_id": 1})
    assert found["task"]["name"] == "lm-eval:needles" and found["task"]["version"] == "3"


@pytest.mark.slow
def test_likelihood_of_a_target_is_asked_as_a_greedy_answer(run, folder):
    """lm_eval's accuracy of a target is whether greedy decoding gives it."""
    lines = CHOSEN.format(data=folder, kind="loglikelihood").splitlines(keepends=True)
    text = "".join(x for x in lines if not x.startswith("doc_to_choice"))
    for name in ("number", "wrong"):
        (folder / f"{name}.yaml").write_text(text.replace("doc_to_target: 0", f'doc_to_target: " {{{{{name}}}}}"'))
    for file, expected in (("number.yaml", 1.0), ("wrong.yaml", 0.0)):
        found = run(file, "--method", "full").json
        assert (found["score"]["metric"], found["score"]["mean"]) == ("acc", expected)


def test_an_empty_prompt_begins_with_a_token(run, folder, mini_tokenizer):
    """As in lm_eval: the token that begins a text, or else the one that ends it; without either it is refused."""
    text = CHOSEN.format(data=folder, kind="multiple_choice").splitlines(keepends=True)
    lines = ['doc_to_text: ""\n' if x.startswith("doc_to_text") else x for x in text]
    (folder / "empty.yaml").write_text("".join(lines))
    task = find_task(f"lm-eval:{folder / 'empty.yaml'}")()
    (made, *_) = examples(task, mini_tokenizer)
    assert (made.context, mini_tokenizer.bos_token_id) == ("", None)
    assert encode(task, made, mini_tokenizer).context == (mini_tokenizer.eos_token_id,)
    begins = copy.deepcopy(mini_tokenizer)
    begins.bos_token = mini_tokenizer.convert_ids_to_tokens(7)
    assert encode(task, made, begins).context == (7,)
    assert run("empty.yaml", "--method", "full").code == 0
    bare = copy.deepcopy(mini_tokenizer)
    bare.eos_token = None
    with pytest.raises(UserError, match="a prompt of lm-eval:needle_choices is empty, and the tokenizer has no token"):
        examples(task, bare)


def test_a_target_is_compared_by_the_tokens_that_follow_a_prompt(folder):
    """A tokenizer that puts a space before every text puts none before the target, which greedy decoding would miss."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *string.ascii_letters, *string.digits]
    llama = LlamaTokenizer(vocab={x: i for i, x in enumerate(pieces)}, merges=[])
    path = folder / "likelihood.yaml"
    lines = CHOSEN.format(data=folder, kind="loglikelihood").splitlines(keepends=True)
    text = "".join(x for x in lines if not x.startswith("doc_to_choice"))
    path.write_text(text.replace("doc_to_target: 0", 'doc_to_target: "{{number}}"\ntarget_delimiter: ""'))
    task = find_task(f"lm-eval:{path}")()
    (made, *_) = examples(task, llama)
    (turn,), (encoded,) = made.turns, encode(task, made, llama).turns
    assert turn.references == (llama.decode(encoded.answer, skip_special_tokens=True),)
    assert turn.max_new_tokens == len(encoded.answer)
    facts = {**made.facts, **turn.facts}
    assert task.scorers[0](llama.decode(encoded.answer, skip_special_tokens=True), turn.references, facts) == 1.0


@pytest.mark.few(2)
@pytest.mark.parametrize(("options", "message"), [
    (["--length", 64], "exceeds length"),
    (["--samples", 5], "has 4 documents: ask for --samples 4 or fewer"),
    (["--split", "dev"], "has only a test split"),
    (["--visibility", "hidden"], "cannot be hidden"),
    (["--mode", "multi-turn"], "unknown mode for task lm-eval:needles 'multi-turn'"),
    (["--task-set", "num_fewshot=-1"], "must be 0 or more"),
    (["--task-set", "num_fewshot=4"], "cannot be built with 4 few-shot examples, for which it has 3 documents"),
])
def test_what_cannot_be_run_is_refused(run, options, message):
    """One line, exit code 2, nothing written."""
    answer = run("needles.yaml", "--method", "full", *options)
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize(("change", "message"), [
    ({"output_type": "loglikelihood_rolling"}, "without a context to compress: use the task ppl-stdlib"),
    ({"metric_list": "[{metric: f1, aggregation: f1, higher_is_better: true}]"}, "no metric that is a mean"),
    ({"generation_kwargs": "{until: ['.'], do_sample: true, temperature: 0.8}"}, "decodes greedily"),
    ({"unsafe_code": "true"}, "runs code that the model wrote"),
    ({"dataset_path": "nobody/has-this"}, "cannot be loaded"),
])
def test_tasks_that_a_run_cannot_express_are_refused(folder, change, message):
    """With the reason, before any model is loaded."""
    lines = GENERATED.format(data=folder).splitlines()
    kept = [x for x in lines if not x.startswith(tuple(change))]
    path = folder / f"refused-{next(iter(change))}.yaml"
    path.write_text("\n".join(kept + [f"{key}: {value}" for key, value in change.items()]))
    with pytest.raises(UserError, match=message) as caught:
        find_task(f"lm-eval:{path}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """A path is said to be one."""
    with pytest.raises(UserError, match="does not exist"):
        find_task(f"lm-eval:{tmp_path}/none.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "message"), [("gsm8kk", "is unknown; similar names: gsm8k,"), ("mmlu", "is a group")])
def test_a_name_that_is_no_task_is_refused(name, message):
    """Looked up among lm_eval's own, of which there are thousands."""
    with pytest.raises(UserError, match=message):
        find_task(f"lm-eval:{name}")


def test_without_lm_eval_the_package_is_named(folder, monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    path = folder / "absent.yaml"
    path.write_text(GENERATED.format(data=folder))
    with pytest.raises(UserError, match=r"pip install 'kvbench\[lm-eval\]'"):
        find_task(f"lm-eval:{path}")


def test_kvbench_does_not_import_lm_eval():
    """It takes seconds, and it is an extra."""
    code = "import sys, kvbench.cli, kvbench.runs.request; sys.exit('lm_eval' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The command line


def test_a_wrong_request_is_one_line(monkeypatch, capsys):
    """Mistakes of the user have kvbench's exit codes, and no traceback."""

    def fail():
        raise NotMeasuredError("it acted in none")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", fail)
    assert main() == 1
    assert capsys.readouterr().err == "kvbench: it acted in none\n"


@pytest.mark.slow
def test_lm_evals_command_line_knows_kvbench(folder, tmp_path):
    """Tasks of a folder by name, and a result that says what the method did."""
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.integrations.lmeval", "--model", "kvbench", "--model_args",
         "pretrained=mini,method=snapkv,budget=25%", "--tasks", "needles,needle_choices", "--include_path",
         str(folder), "--device", "cpu", "--output_path", str(tmp_path / "out.json")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "snapkv acted in 12 of 12 loglikelihood requests" in done.stderr
    (path,) = tmp_path.glob("out*.json")
    found = json.loads(path.read_text())
    assert set(found["results"]) == {"needles", "needle_choices"}
    assert found["config"]["kvbench"]["requests"]["generate_until"]["acted"] == 4
