"""Which finished runs are those of a number: asked as the paper asked, and nothing near to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.analysis.load import FinishedRun
from kvbench.errors import UserError
from kvbench.registry import find_task
from kvbench.reproduce.claims import find_claims
from kvbench.reproduce.plan import plan_claim
from kvbench.reproduce.standing import _answers, _find_runs, list_judgments
from kvbench.runs.options import Request
from kvbench.runs.spec import DenoisingSpec, GenerationSpec, MethodSpec, ModelSpec, RunSpec, Sources, TaskSpec, Versions
from kvbench.task import Mode

WANTED = plan_claim(find_claims("snapkv:longbench/mistral-7b-v0.2/snapkv-1024/qasper")[0]).requests[0]
BARE = replace(WANTED, method_settings=("window=32",), dtype=None)
SCORER = find_task("longbench_qasper").scorers[0].id
SNAPKV = {"window": 32, "kernel": 7, "pool": "max"}


def make_spec(**changes: Any) -> RunSpec:
    """The spec of the paper's run, with what was left to defaults; `method.settings` and the like by dotted names."""
    spec = RunSpec(
        suite="longbench-16@1", method=MethodSpec(name="snapkv", version="1", family="eviction", settings=SNAPKV),
        task=TaskSpec(
            name="longbench_qasper", version="1", suite="longbench", settings={"data": ""}, length=31_628,
            scorer=SCORER, dataset_revision=None, prompt_id="x", chat_template_sha=None, bos="tokenizer",
            stop=(2,),
        ),
        model=ModelSpec(
            id=WANTED.model, revision=None, kind="autoregressive", dtype="float16", params=1, sha256="x",
            tokenizer_sha256="x",
        ),
        mode=Mode.SINGLE, visibility="visible", history="reference", recompress=False, budget="1024", split="test",
        seed=0,
        samples=200, turns=1, chunk=None, kernels="torch", device="cpu", generation=GenerationSpec(),
        versions=Versions(kvbench="0", torch="0", transformers="0"),
        sources=Sources(method="x", task="x", kernels="x", harness="x"),
    )
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        spec = spec.model_copy(update={part: getattr(spec, part).model_copy(update={inner: value}) if inner else value})
    return spec


def test_a_run_answers_what_was_asked():
    """Also on another device, in chunks, with other kernels; and where kvbench is asked from another folder."""
    assert _answers(make_spec(), WANTED)
    assert _answers(make_spec(device="cuda", chunk=4096, kernels="triton"), replace(WANTED, out=Path("elsewhere")))


@pytest.mark.parametrize("change", [
    {"samples": 100}, {"task__length": 32_768}, {"budget": "25%"}, {"visibility": "hidden"}, {"seed": 1},
    {"split": "dev"}, {"suite": None}, {"method__settings": SNAPKV | {"window": 64}}, {"model__dtype": "bfloat16"},
    {"task__chat_template_sha": "x"}, {"method__code": "x"}, {"task__code": "x"},
])
def test_a_run_that_was_asked_otherwise_does_not(change):
    """For every field that may differ."""
    assert not _answers(make_spec(**change), WANTED)


@pytest.mark.parametrize("change", [
    {"method__settings": SNAPKV | {"kernel": 9}}, {"task__settings": {"data": "mine.jsonl"}},
    {"task__scorer": "another@1"}, {"generation": GenerationSpec(max_new_tokens=4)}, {"model__dtype": "float32"},
    {"mode": Mode.MULTI_TURN}, {"turns": 5}, {"history": "own"}, {"recompress": True},
])
def test_what_was_left_out_is_at_its_default(change):
    """The paper's run says nothing of these, so nothing but the default answers it."""
    assert not _answers(make_spec(**change), BARE)
    assert _answers(make_spec(), BARE)


def test_a_length_and_a_budget_that_were_left_out_are_the_own_ones():
    """The task's length and kvbench's quarter; mini's own type is bfloat16."""
    wanted = replace(BARE, model="mini", length=None, budget=None)
    mini = {"model__id": "mini", "model__dtype": "bfloat16", "task__length": 32_768, "budget": "25%"}
    assert _answers(make_spec(**mini), wanted)
    for change in ({"task__length": 4096}, {"budget": "50%"}, {"model__dtype": "float16"}):
        assert not _answers(make_spec(**mini | change), wanted)


def test_a_run_with_the_tokenizer_s_template_or_without_one_answers_what_asks_for_its_own():
    """Some have none: the verdict names what that changes."""
    for sha in (None, "x"):
        assert _answers(make_spec(task__chat_template_sha=sha), replace(WANTED, template="own"))


def test_of_a_diffusion_model_the_tokens_at_a_time_are_its_own():
    """All else of how an answer is filled in is asked for, or at its default."""
    wanted = replace(WANTED, method="none", method_settings=(), budget=None, generation=("steps=64",))
    filling = DenoisingSpec(steps=64, tokens_per_step=2)
    made = {"method__settings": {}, "budget": None}
    for denoising, same in ((filling, True), (filling.model_copy(update={"threshold": 0.9}), False)):
        generation = GenerationSpec(decoding="denoising", denoising=denoising)
        assert _answers(make_spec(**made, generation=generation), wanted) is same


def test_what_kvbench_would_refuse_now_has_no_run():
    """Nothing of then stands for it."""
    assert not _answers(make_spec(), Request(method="snapkv", task="longbench_qasper", visibility="never"))


def test_the_last_run_counts_whatever_it_says_of_its_start():
    """Callers know which run is trusted most; its files are not read again."""
    runs = [
        FinishedRun(Path(x), SimpleNamespace(spec=make_spec(), environment=SimpleNamespace(started=x)), {})
        for x in ("9999-01-01", "2026-01-01")
    ]
    assert _find_runs(runs, {WANTED}) == {WANTED: runs[1]}


def test_a_damaged_file_of_times_hides_no_other_verdict(tmp_path, monkeypatch):
    """The reason stands at its own numbers."""
    def fail(*_):
        raise UserError("damaged")

    monkeypatch.setattr("kvbench.reproduce.standing.find_timed", fail)
    found = list_judgments(tmp_path, [])
    reasons = [y.why for x in found for y in x.missing]
    assert "damaged" in reasons and "there is no run of it in this folder" in reasons
