"""Level L0: honest runs pass, and each forgery is refused for the right reason."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import make_dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest

from kvbench.errors import UserError
from kvbench.leaderboard.submission.bundle import open_bundle
from kvbench.leaderboard.submission.deliver import put_in_folder
from kvbench.leaderboard.submission.outcome import RefusedError
from kvbench.leaderboard.submission.records import MANIFEST, RESULT, VERIFICATION
from kvbench.leaderboard.verification import lookup, repository
from kvbench.leaderboard.verification.lookup import (
    UnverifiableError,
    check_card,
    check_method_name,
    check_model,
    check_source,
    find_known_method,
    find_known_task,
    find_known_tokenizer,
    is_known_full,
    is_tuned_on_test,
)
from kvbench.leaderboard.verification.measurements import LATER
from kvbench.leaderboard.verification.repository import Repository
from kvbench.leaderboard.verification.verify import verify
from kvbench.methods.merging.kvmerger import KVMerger
from kvbench.registry import MODELS, find_method, find_task
from kvbench.runs.files import write_record
from kvbench.runs.stats import bootstrap_interval
from kvbench.task import Mode

from .conftest import as_own_method, edit, edit_spec, make_run, on_gpu
from .test_forgeries import LOSSLESS, in_spec


def test_an_honest_run_reaches_l0(snapkv, check):
    assert check(snapkv.files) == {
        "files": "ok", "split": "ok", "machine": "ok", "measurements": "ok", "method": "ok", "code": "ok",
        "model": "ok", "prompts": "ok", "answers": "ok", "scores": "ok", "summary": "ok", "bytes": "ok",
        "baseline": "flag", "copies": "ok",
        "level": "L0", "refused": "",
    }


def test_the_bytes_of_a_context_are_compared_once(snapkv):
    """Both turns of a sample have them."""
    (found,) = (x.reason for x in verify(snapkv.files, Repository()).checks if x.name == "bytes")
    assert found == "stored bytes of 4 samples equal those that snapkv declares"


def test_a_folder_from_outside_without_manifest_is_refused(snapkv, check):
    files = {name: data for name, data in snapkv.files.items() if name != MANIFEST}
    assert check(files)["refused"].startswith("files: no manifest: pack the run with kvbench submit")


def test_a_run_of_the_users_own_needs_no_manifest(snapkv):
    record = verify(snapkv.folder, Repository(), own=True).conclude()
    assert (record.level, record.checks[0].outcome) == ("L0", "flag")


def test_a_changed_score_in_the_result_is_refused_with_both_numbers(snapkv, check):
    true = snapkv.bundle.result.score.mean
    found = check(edit(snapkv.files, RESULT, lambda x: x["score"].update(mean=1.0, partial_mean=1.0)))
    assert found["refused"] == f"scores: its score.mean is 1.0, its journal gives {true}"


def test_a_run_from_before_a_task_had_a_strict_scorer_is_verified(snapkv, check):
    """Scorers that no line of the journal has are not asked for; the run's own scorer always is."""
    name = "ruler-string-match-all@1"
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={"scores": {name: x.scores[name]}}))
    files = edit(files, RESULT, lambda x: x.update(scores={name: x["scores"][name]}))
    found = check(in_spec("sources", "task", value="1" * 64)(files))
    assert (found["refused"], found["level"]) == ("", "L0")


def test_a_run_of_kvbench_0_1_is_verified(snapkv, check):
    """Without the later fields of lines and result, and with the interval of its time."""
    def age(_, line):
        memory = line.bytes.model_copy(update=dict.fromkeys(LATER["bytes"]))
        tokens = line.tokens.model_copy(update={"reference": None})
        return line.model_copy(update={"bytes": memory, "tokens": tokens, "question": None})

    def age_result(result):
        scores = [[x.score for x in snapkv.bundle.lines if x.index == i] for i in range(result["n_samples"])]
        result["score"].update(ci95=list(bootstrap_interval(scores)), interval="bootstrap")
        result["output"]["reference_tokens"] = None
        result["memory"].update(dict.fromkeys(LATER["bytes"]))

    files = in_spec("sources", "harness", value="1" * 64)(edit(snapkv.with_lines(age), RESULT, age_result))
    found = check(files)
    assert (found["refused"], found["level"]) == ("", "L0")
    narrow = edit(files, RESULT, lambda x: x["score"].update(ci95=[0.4, 0.6]))
    assert "score.ci95" in check(narrow)["refused"]


def test_a_changed_score_in_the_journal_is_refused_with_both_numbers(snapkv, check):
    wrong = next(i for i, x in enumerate(snapkv.bundle.lines) if x.score == 0)
    better = {"score": 1.0, "scores": {**snapkv.bundle.lines[wrong].scores, "ruler-string-match-all@1": 1.0}}
    files = snapkv.with_lines(lambda i, x: x.model_copy(update=better) if i == wrong else x)
    assert "its ruler-string-match-all@1 is 1.0, recomputed 0.0" in check(files)["refused"].replace("'", "")


def test_a_text_that_is_not_of_its_token_ids_is_refused(snapkv, check):
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={
        "prediction": x.references[0], "score": 1.0, "scores": {"ruler-string-match-all@1": 1.0},
    }))
    assert check(files)["refused"].startswith("answers: sample 0 turn 0: its text")


def test_changed_reference_answers_are_refused(snapkv, check):
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={"references": ("",), "score": 1.0}))
    assert check(files)["refused"] == "prompts: sample 0 turn 0: its reference answers differ from the task's"


@pytest.mark.parametrize(("change", "reason"), [
    ({"facts": {}}, "prompts: sample 0 turn 0: its facts differ from the task's"),
    ({"prompt_hash": "0" * 16}, "prompts: sample 0 turn 0: its prompt hash is '0000000000000000', the task's"),
    ({"sample": "<script>"}, "prompts: sample 0 turn 0: its sample is '<script>' with 2 turns, the task's is"),
    ({"ids": (2**31,)}, "answers: sample 0 turn 0 has a token id outside the vocabulary of 4096"),
    ({"stop_reason": "length"}, "answers: sample 0 turn 0: its token counts or its stop reason"),
    ({"effect": None}, "answers: sample 0 turn 0 has an answer, but lacks tokens, bytes or effect"),
])
def test_a_line_that_contradicts_its_question_is_refused(snapkv, check, change, reason):
    files = snapkv.with_lines(lambda i, x: x.model_copy(update=change) if i == 0 else x)
    assert check(files)["refused"].startswith(reason)


@pytest.mark.slow
def test_samples_of_another_seed_are_refused(snapkv, check, tmp_path):
    other = make_run(tmp_path, "snapkv", seed=1)
    files = edit_spec(other.files, lambda x: x.update(seed=0))
    assert "it answers another prompt" in check(files)["refused"]


@pytest.mark.parametrize("name", ["stored_bytes", "full_bytes", "host_bytes"])
def test_bytes_other_than_the_declared_ones_are_refused(snapkv, check, name):
    def lower(_, line):
        return line.model_copy(update={"bytes": line.bytes.model_copy(update={name: getattr(line.bytes, name) + 8})})

    assert check(snapkv.with_lines(lower))["bytes"] == "refused"


@pytest.mark.slow
def test_a_run_with_recompress_reaches_l0(check, tmp_path):
    found = check(make_run(tmp_path, "snapkv", recompress=True).files)
    assert (found["level"], found["refused"]) == ("L0", "")


def test_a_changed_budget_is_refused(snapkv, check):
    """The run has the bytes of 25 %; at 50 % the method declares twice as many."""
    files = edit_spec(snapkv.files, lambda x: x.update(budget="50%"))
    assert check(files)["refused"].startswith("bytes: sample 0 turn 0: snapkv declares")


@pytest.mark.parametrize("name", ["memory", "latency", "output", "effect", "agreement"])
def test_a_result_that_contradicts_its_journal_is_refused(snapkv, check, name):
    def change(result):
        key = next(key for key, value in result[name].items() if isinstance(value, int | float))
        result[name][key] = 7

    found = check(edit(snapkv.files, RESULT, change))
    assert found["refused"].startswith(f"summary: its {name}.")


@pytest.mark.slow
def test_summed_distinct_codes_are_flagged(check, tmp_path):
    """Old results sum them over samples, new ones take the maximum; other numbers are refused."""
    done = make_run(tmp_path, "full-int8", samples=2)
    codes = [x.effect.facts["distinct_codes"] for x in done.bundle.lines if x.turn == 1]
    assert "facts" not in check(done.files)
    old, wrong = (
        check(edit(done.files, RESULT, lambda x, count=count: x["effect"]["facts"].update(distinct_codes=count)))
        for count in (sum(codes), 7)
    )
    assert (old["facts"], old["level"]) == ("flag", "L0")
    assert wrong["refused"] == f"summary: its effect.facts.distinct_codes is 7, its journal gives {max(codes)}"


def test_a_changed_run_id_is_refused(snapkv, check):
    found = check(edit(snapkv.files, RESULT, lambda x: x.update(run_id="x-0")))
    assert found["refused"] == "schema: result.json: its run_id differs from spec.json"


def test_uncommitted_code_is_refused(snapkv, check):
    found = check(edit(snapkv.files, RESULT, lambda x: x["environment"]["git"].update(dirty=True)))
    assert found["refused"].startswith("machine: it ran uncommitted code on top of commit")
    assert found["scores"] == "ok", "the rest is still looked at"


@pytest.fixture
def no_gpu(monkeypatch):
    """A machine without a GPU, where asking for one is an error."""
    def refuse():
        raise AssertionError("the verifier looked at its own GPU")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.get_device_name", refuse)


def test_a_run_of_a_gpu_is_verified_without_one(snapkv, check, no_gpu):
    found = check(on_gpu(snapkv))
    assert (found["level"], found["machine"], found["summary"], found["refused"]) == ("L0", "ok", "ok", "")


@pytest.mark.parametrize(("device", "gpu"), [("cpu", "NVIDIA H200"), ("cuda", None)])
def test_a_device_without_its_hardware_is_refused(snapkv, check, device, gpu):
    files = edit_spec(snapkv.files, lambda x: x.update(device=device))
    found = check(edit(files, RESULT, lambda x: x["environment"].update(gpu=gpu)))
    assert found["refused"] == f"machine: it ran on device '{device}', its environment names GPU {gpu!r}"


def test_another_machine_than_the_journals_is_refused(snapkv, check):
    found = check(edit(snapkv.files, RESULT, lambda x: x["environment"].update(cpu="other")))
    assert found["refused"].startswith("machine: its result names 'other with 1 threads', its journal ")


def test_runs_on_the_dev_split_are_refused(snapkv, check):
    assert check(edit_spec(snapkv.files, lambda x: x.update(split="dev")))["split"] == "refused"


@pytest.mark.parametrize(("said", "outcome"), [
    ("niah_multikey_1:test", "flag"), ("niah_multikey_1", "flag"), ("niah", "flag"), ("niah:test", "flag"),
    ("niah:dev", "ok"), ("niah_single_1", "ok"),
])
def test_tuning_on_the_test_split_is_flagged(snapkv, check, said, outcome):
    """Under every alias of the task."""
    files = edit(snapkv.files, MANIFEST, lambda x: x.update(tuned_on=["kv:dev", said]))
    assert check(files)["split"] == outcome


@pytest.mark.parametrize(("change", "reason"), [
    (lambda x: x["model"].update(tokenizer_sha256="0" * 64), "tokenizer: the tokenizer of 'mini' is"),
    (lambda x: x["task"].update(chat_template_sha="0" * 16), "tokenizer: the chat template of 'mini' is None"),
    (lambda x: x["model"].update(params=1), "model: mini has 4001152 parameters, not 1"),
    (lambda x: x["model"].update(kind="diffusion"), "measurements: sample 0 turn 0: a diffusion model, and no record"),
    (lambda x: x["model"].update(dtype="float4"), "model: mini in 'float4'"),
    (lambda x: x.update(visibility="first-turn"), "prompts: sample 0 turn 0: "),
    (lambda x: x["task"].update(prompt_id="mine"), "task: its prompt_id does not fit niah_multikey_1"),
    (lambda x: x["model"].update(params=10**9), "model: mini has 4001152 parameters, not 1000000000"),
    (lambda x: x["task"].update(settings={}), "task: its settings does not fit niah_multikey_1"),
    (lambda x: x["task"].update(suite="mine"), "task: its suite does not fit niah_multikey_1"),
    (lambda x: x["task"].update(truncation="middle"), "task: its truncation does not fit niah_multikey_1"),
    (lambda x: x["task"].update(scorer="mine@1"), "task: its scorer does not fit niah_multikey_1"),
    (lambda x: x["method"].update(settings={"window": -1}), "method: snapkv does not accept its settings"),
])
def test_wrong_statements_about_registered_names_are_refused(snapkv, check, change, reason):
    assert check(edit_spec(snapkv.files, change))["refused"].startswith(reason)


@pytest.mark.parametrize("name", [
    "SnapKV", "snap-kv", "h20", "fu11", "kivl", "rninference", "vvindowkv", "kivi+SnapKV", "snapkv\u200b",
    "\u0455napkv", " snapkv", "my\tmethod", "",
])
def test_confusable_method_names_are_refused(snapkv, check, name):
    files = edit_spec(snapkv.files, lambda x: x["method"].update(name=name))
    files = edit(files, RESULT, lambda x: x["method"]["card"].update(name=name))
    assert check(files)["refused"].startswith("method: its name ")


@pytest.mark.parametrize("name", ["snapkv-plus", "fullest", "snapkv+mine"])
def test_a_name_may_begin_with_a_registered_one(name):
    check_method_name(name)


@pytest.mark.parametrize("change", [{"version": "0"}, {"version": "99"}, {"code": "f" * 64}])
def test_another_version_or_file_is_not_the_registered_method(snapkv, change):
    spec = snapkv.bundle.spec
    with pytest.raises(UnverifiableError):
        find_known_method(spec.model_copy(update={"method": spec.method.model_copy(update=change)}))


def test_a_run_of_the_users_own_needs_no_source(snapkv):
    own = open_bundle(as_own_method(snapkv.files))
    assert check_source(own).outcome == "ok"
    assert check_source(replace(own, manifest=None)) is None


def test_a_users_own_file_is_not_the_registered_method(snapkv, check):
    found = check(as_own_method(snapkv.files, name="snapkv"))
    assert found["refused"].startswith("source: a method of the submitter's own has the registered name 'snapkv'")


@pytest.mark.parametrize("change", [
    lambda x: x["task"].update(name="theirs"),
    lambda x: x["task"].update(version="7"),
    lambda x: x["task"].update(version="0"),
    lambda x: x["task"].update(dataset_revision="a" * 40),
    lambda x: x["task"].update(name="/tmp/theirs.py:Task"),
    lambda x: x["task"].update(settings={"haystack": "/etc/passwd"}),
    lambda x: x["model"].update(id="/etc"),
    lambda x: x["model"].update(id="org/model", revision="a" * 40),
    lambda x: x["model"].update(id="org/..", revision="../../.."),
])
def test_unknown_names_and_paths_are_not_followed_and_not_verified(snapkv, check, change):
    found = check(edit_spec(snapkv.files, change))
    assert (found["prompts"], found["level"], found["refused"]) == ("flag", None, "")


def test_a_file_named_by_a_setting_is_not_read(snapkv, tmp_path):
    """Some methods read such files in their constructor."""
    (tmp_path / "gates.tsv").write_text("secret")
    stated = {"name": "duo-attention", "version": find_method("duo-attention").card.version, "family": "heads"}
    settings = {"gates": str(tmp_path / "gates.tsv")}
    files = edit_spec(snapkv.files, lambda x: x["method"].update(**stated, settings=settings))
    found = verify(edit(files, RESULT, lambda x: x["method"]["card"].update(stated)), Repository()).conclude()
    method = next(x for x in found.checks if x.name == "method")
    assert (method.outcome, "setting gates of duo-attention may name a file" in method.reason) == ("flag", True)
    assert not found.refused


def test_other_weights_under_the_same_name_are_flagged(snapkv, check):
    found = check(edit_spec(snapkv.files, lambda x: x["model"].update(sha256="0" * 64)))
    assert (found["weights"], found["level"]) == ("flag", "L0")


def test_the_submitters_code_is_never_run(snapkv, check, tmp_path):
    found = check(as_own_method(snapkv.files, f"open({str(tmp_path / 'ran')!r}, 'w')".encode()))
    assert (found["source"], found["method"], found["scores"], found["bytes"]) == ("ok", "flag", "ok", "flag")
    assert (found["level"], found["refused"]) == ("L0", "")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("name", "value"), [("budget", "none"), ("models", "diffusion"), ("name", "knorm")])
def test_a_card_with_other_budget_kind_models_or_name_is_refused(snapkv, check, name, value):
    found = check(edit(snapkv.files, RESULT, lambda x: x["method"]["card"].update({name: value})))
    assert found["refused"].startswith("method: ")


@pytest.mark.parametrize(("name", "value"), [("version", "9"), ("family", "heads")])
def test_a_card_is_that_of_the_method_in_the_result(snapkv, check, name, value):
    files = edit(as_own_method(snapkv.files), RESULT, lambda x: x["method"]["card"].update({name: value}))
    assert check(files)["refused"].startswith("method: its card describes 'mine' version ")


def test_a_registered_method_keeps_its_family(snapkv, check):
    files = edit_spec(snapkv.files, lambda x: x["method"].update(family="heads"))
    found = check(edit(files, RESULT, lambda x: x["method"]["card"].update(family="heads")))
    assert found["refused"] == "method: family on its card is 'heads', not eviction"


def test_the_card_of_a_registered_method_is_ours(snapkv):
    """A field of theirs that differs is named."""
    method, _ = find_known_method(snapkv.bundle.spec)
    card, same = check_card(snapkv.bundle.result, method)
    assert card == method.own_card
    assert same.reason == f"snapkv version {card.version} is registered"
    other = edit(snapkv.files, RESULT, lambda x: x["method"]["card"].update(idea="the best. of all."))
    card, changed = check_card(open_bundle(other).result, method)
    assert card == method.own_card
    assert changed.reason == f"{same.reason}; its card has changed since in idea"


def test_a_card_may_name_the_kind_of_budget_of_its_settings():
    """A threshold takes the place of the budget that the method has otherwise."""
    method = KVMerger(mode="eps")
    card = method.own_card
    for kind in (card.budget, method.budget_kind):
        stated = {"name": card.name, "version": card.version, "family": card.family}
        written = card.model_copy(update={"budget": kind}).model_dump()
        assert check_card(SimpleNamespace(method=SimpleNamespace(card=written, **stated)), method)[1].outcome == "ok"
    assert card.budget != method.budget_kind


def test_only_a_registered_method_that_keeps_all_bytes_is_the_full_cache(runs, snapkv):
    """Nothing is stored between the passes of a diffusion model."""
    full = runs["full"].bundle.result
    half = full.memory.model_copy(update={"ratio_total": 0.5})
    gift = full.spec.method.model_copy(update={"settings": {"gift": 1}})
    assert is_known_full(full)
    diffusion = full.model.model_copy(update={"kind": "diffusion"})
    assert is_known_full(full.model_copy(update={"model": diffusion, "memory": None}))
    for change in (
        {"memory": half}, {"memory": None}, {"spec": snapkv.bundle.spec}, {"lossless": LOSSLESS},
        {"spec": full.spec.model_copy(update={"method": gift})},
    ):
        assert not is_known_full(full.model_copy(update=change))


def test_a_mode_that_the_task_lacks_is_refused(snapkv, monkeypatch):
    monkeypatch.setattr(find_task(snapkv.bundle.spec.task.name), "modes", (Mode.SINGLE,))
    with pytest.raises(RefusedError, match="its mode does not fit niah_multikey_1"):
        find_known_task(snapkv.bundle.spec)


def test_settings_are_compared_by_value_and_type_and_not_by_order():
    assert lookup._write({"a": 1, "b": 2}) == lookup._write({"b": 2, "a": 1})
    assert len({lookup._write(x) for x in (1, 1.0, True)}) == 3


def test_the_split_of_tuning_data_stands_behind_the_last_colon():
    """The name of a task in a file has one, too."""
    assert is_tuned_on_test("mine.py:Task:test", "mine.py:Task")
    assert not is_tuned_on_test("mine.py:Task:dev", "mine.py:Task")


def test_a_tokenizer_that_cannot_be_loaded_is_not_verified(snapkv, monkeypatch):
    def fail(_):
        raise UserError("no tokenizer")

    monkeypatch.setattr(lookup, "_load", fail)
    with pytest.raises(UnverifiableError, match="no tokenizer"):
        find_known_tokenizer(snapkv.bundle.spec, find_known_task(snapkv.bundle.spec))


def test_a_model_without_its_weights_is_flagged(snapkv, tmp_path):
    """Its other files are compared."""
    method, _ = find_known_method(snapkv.bundle.spec)
    folder = tmp_path / "mini"
    shutil.copytree(MODELS / "mini", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    found = check_model(snapkv.bundle.spec, method.card, folder)[1]
    assert (found.outcome, found.reason) == ("flag", "the weights of mini are not on this machine: not compared")


@pytest.mark.parametrize(("length", "turns", "reason"), [
    (8192, 2, ""), (8193, 2, "need 8193"), (384, 8192, ""), (384, 8193, "need 8193"),
])
def test_contexts_and_turns_fit_the_model(snapkv, length, turns, reason):
    """A turn has at least one token."""
    spec, (method, _) = snapkv.bundle.spec, find_known_method(snapkv.bundle.spec)
    spec = spec.model_copy(update={"task": spec.task.model_copy(update={"length": length}), "turns": turns})
    with pytest.raises(RefusedError, match=reason) if reason else nullcontext():
        assert check_model(spec, method.card, MODELS / "mini")[1].outcome == "ok"


def test_a_method_for_the_other_kind_of_model_is_refused(snapkv):
    method, _ = find_known_method(snapkv.bundle.spec)
    card = method.card.model_copy(update={"models": "diffusion"})
    with pytest.raises(RefusedError, match="snapkv is for diffusion models, and its model is autoregressive"):
        check_model(snapkv.bundle.spec, card, MODELS / "mini")


@pytest.mark.parametrize(("kind", "text"), [
    (str, True), (Path | None, True), (tuple[str, ...], True), (Annotated[str, "a name"], True), (int | None, False),
    (Literal["max", "avg"] | None, False),
])
def test_a_setting_that_takes_any_text_may_be_a_path(kind, text):
    assert lookup._is_text(kind) is text
    made = make_dataclass("Made", [("file", kind, "max"), ("rows", int, 7)])
    assert lookup._find_path_setting(made, {"rows": 8, "gift": "x", "file": "y"}) == ("file" if text else None)
    assert lookup._find_path_setting(made, {"file": "max"}) is None  # the default
    assert lookup._find_path_setting(made, {"file": None}) is None


def test_the_full_cache_reaches_l0_without_an_effect(runs, check):
    assert check(runs["full"].files)["level"] == "L0"


def test_the_full_cache_of_the_same_protocol_is_the_baseline(snapkv, runs, check, tmp_path):
    full = runs["full"]
    put_in_folder(full.files, full.bundle.manifest, tmp_path)
    assert check(snapkv.files, Repository([tmp_path]))["baseline"] == "ok"
    elsewhere = edit(snapkv.files, RESULT, lambda x: x["environment"].update(cpu="another"))
    assert check(elsewhere, Repository([tmp_path]))["baseline"] == "ok"
    other = edit_spec(snapkv.files, lambda x: x.update(recompress=True))
    assert check(other, Repository([tmp_path]))["baseline"] == "flag"


def test_an_unregistered_lossless_method_is_not_a_baseline(snapkv, runs, check, tmp_path):
    full = runs["full"]
    files = as_own_method(full.files)
    put_in_folder(files, open_bundle(files).manifest, tmp_path)
    assert check(snapkv.files, Repository([tmp_path]))["baseline"] == "flag"
    assert check(files)["baseline"] == "flag"


def test_a_copy_under_another_name_is_refused(snapkv, check, tmp_path):
    put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    assert check(snapkv.files, Repository([tmp_path]))["copies"] == "ok", "it is no copy of itself"
    files = edit(snapkv.files, MANIFEST, lambda x: x.update(submitter="eve"))
    found = check(files, Repository([tmp_path]))
    assert found["refused"] == f"copies: its times equal those of {snapkv.bundle.spec.run_id} by ada: it is a copy"


def test_a_copy_of_a_run_without_times_is_refused(snapkv, tmp_path):
    """Its samples began at the same seconds and took as long."""
    files = snapkv.with_lines(lambda _, x: x.model_copy(update={"times": None, "shared_prefill": True}))
    put_in_folder(files, open_bundle(files).manifest, tmp_path)
    copy = open_bundle(edit(files, MANIFEST, lambda x: x.update(submitter="eve")))
    found = Repository([tmp_path]).check_copies(copy)
    assert found.reason == f"its times equal those of {snapkv.bundle.spec.run_id} by ada: it is a copy"
    lines = tuple(x.model_copy(update={"seconds": x.seconds + 1 + x.index}) for x in copy.lines)
    assert Repository([tmp_path]).check_copies(replace(copy, lines=lines)).outcome == "ok"


def test_a_run_that_reached_no_level_is_evidence_of_no_copy(snapkv, tmp_path):
    """Its journal is not even read: anyone can send large ones."""
    folder = put_in_folder(snapkv.files, snapkv.bundle.manifest, tmp_path)
    copy = open_bundle(edit(snapkv.files, MANIFEST, lambda x: x.update(submitter="eve")))
    record = verify(snapkv.files, Repository()).conclude()
    for level, outcome in (("L0", "refused"), (None, "ok")):
        write_record(folder / VERIFICATION, record.model_copy(update={"level": level}))
        known = Repository([tmp_path])
        assert (known.check_copies(copy).outcome, len(known._fingerprints)) == (outcome, int(level is not None))


def test_a_failed_run_is_flagged_and_has_no_score(snapkv, check):
    """The time of a failure is taken apart, and may be a second before that of the turns before it."""
    def fail(_, line):
        if (line.index, line.turn) != (3, 1):
            return line
        names = ("prediction", "score", "tokens", "stop_reason", "times", "bytes", "effect", "agreement")
        gone = {**dict.fromkeys(names), "ids": (), "scores": {}}
        before = (datetime.fromisoformat(line.started) - timedelta(seconds=1)).isoformat()
        return line.model_copy(update={**gone, "error": "OutOfMemoryError: none left", "started": before})

    files = snapkv.with_lines(fail)
    found = check(files)
    assert (found["status"], found["level"]) == ("flag", "L0")
    assert json.loads(files[RESULT])["score"]["mean"] is None


def test_fingerprints_of_choices_include_log_probabilities(snapkv):
    """With a single choice all methods give the same answer."""

    def weigh(value):
        lines = [x.model_copy(update={"score": 0.0, "facts": {"logprobs": [[value]]}}) for x in snapkv.bundle.lines]
        return repository.JournalFingerprint.of(replace(snapkv.bundle, lines=tuple(lines))).wrong

    assert weigh(-1.0) == weigh(-1.0) != weigh(-2.0)
