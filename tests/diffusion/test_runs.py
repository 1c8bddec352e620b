"""Runs on a diffusion model from the command line: what is measured, prompts, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.analysis.load import load_run
from kvbench.diffusion import sample
from kvbench.errors import UserError
from kvbench.hf import load_model, load_tokenizer
from kvbench.leaderboard.verification.plausibility import check_plausibility
from kvbench.runs.journal import Line
from kvbench.runs.options import Request
from kvbench.runs.prepare import prepare
from kvbench.runs.results import BaselineResult, DiffusionResult

from .conftest import END, TOYS, read_lines

CHOICES = Path(__file__).parents[1] / "toys" / "choices.py"


@pytest.fixture
def filled(monkeypatch):
    """Every answer that was made: the policy's name, the prompt, and all else that `denoise` was given."""
    seen = []
    denoise = sample.denoise

    def spy(model, method, prompt, answer, sampling, seed, never_first):
        seen.append((method.card.name, list(prompt), answer, sampling, seed, list(never_first)))
        return denoise(model, method, prompt, answer, sampling, seed, never_first)

    monkeypatch.setattr(sample, "denoise", spy)
    return seen


def test_a_run_measures_what_it_computes(kvbench, arguments, tmp_path):
    """Rows and passes as the policy's rule gives them, with effect and baselines."""
    answer = kvbench(*arguments, "--method", "dkv-cache-decode", "--gen", "steps=8")
    assert answer.code == 0, answer.err
    result = answer.json
    found = result["diffusion"]
    n = 60  # letters, question and canvas fill the length: one token per byte
    rows = 2 * n + sum(range(2, 8))  # two full passes, then the masks of the step before
    assert (found["steps"], found["block"], found["response_length"], found["nfe"]) == (8, 8, 8, 8)
    assert (found["remasking"], found["threshold"], found["temperature"]) == ("low-confidence", None, 0)
    assert found["computed_tokens_per_step"] == pytest.approx(rows / 8)
    assert found["computed_share"] == pytest.approx(rows / (8 * n))
    assert found["recomputed_tokens"] == pytest.approx(rows - n)
    assert result["effect"]["n_acted"] == result["effect"]["n"] == 4
    assert result["effect"]["facts"] == {"tokens_skipped": 4 * (8 * n - rows), "entries_unread": 0, "tokens_early": 0}
    bytes_per_row = 2 * 2 * 8 * 4 * 2  # keys and values, 2 heads of 8, float32, 2 layers
    assert result["memory"]["stored_bytes"] == result["memory"]["full_bytes"] == n * bytes_per_row
    assert result["memory"]["read_bytes_per_step"] == n * bytes_per_row
    assert result["memory"]["bytes_per_token"] == bytes_per_row
    assert (result["model"]["kind"], result["visibility"], result["agreement"]) == ("diffusion", "visible", None)
    assert set(found) == set(DiffusionResult.model_fields)
    assert found["baselines"].keys() == {"none", "half-steps"}
    assert {name: x["nfe"] for name, x in found["baselines"].items()} == {"none": 8, "half-steps": 4}
    assert all(set(x) == set(BaselineResult.model_fields) for x in found["baselines"].values())
    lines = read_lines(tmp_path / "runs")
    for name, x in found["baselines"].items():
        took = sum(line["denoising"]["baselines"][name]["seconds"] for line in lines)
        assert x["speedup"] == pytest.approx(took / sum(line["times"]["decode_s"] for line in lines))
        committed = sum(line["denoising"]["baselines"][name]["committed_tokens"] for line in lines)
        assert x["tokens_per_s"] == pytest.approx(committed / took)
    assert found["committed_tokens"] == sum(len(line["ids"]) for line in lines) / 4
    assert "8 tokens in blocks of 8, 8 steps, low-confidence" in answer.out


def test_passes_and_a_scaffold_give_all_tokens_of_an_answer(kvbench, arguments, tmp_path):
    """Two tokens are fixed and six passes commit one each, after one over the prompt: verification accepts them."""
    answer = kvbench(*arguments, "--method", "fast-ddrive", "--set", "scaffold=ab", "--gen", "steps=8")
    assert answer.code == 0, answer.err
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [Line.model_validate(x) for x in read_lines(tmp_path / "runs")]
    assert {(x.denoising.nfe, x.effect.facts["tokens_early"]) for x in lines} == {(7, 2)}
    assert check_plausibility(load_run(folder).result.spec, lines).outcome == "ok"


def test_no_cache_is_its_own_baseline(kvbench, arguments):
    """The same tokens and scores; it is its declared identity, so nothing is to be proved."""
    result = kvbench(*arguments, "--method", "none").json
    beside = result["diffusion"]["baselines"]["none"]
    assert (result["status"], result["effect"]["n"], result["effect"]["n_identity"]) == ("ok", 0, 4)
    assert (beside["same_tokens"], beside["mean"]) == (1.0, result["score"]["mean"])
    assert (result["diffusion"]["computed_share"], result["memory"]["stored_bytes"]) == (1.0, 0)
    assert result["memory"]["read_bytes_per_step"] == result["memory"]["full_bytes"]


@pytest.mark.parametrize(("other", "same"), [
    ([5, 6], 0), ([3, 6], 0.5), ([3, 4], 1), ([3, 4, END], 1), ([3, 4, 5], 2 / 3), ([4, 3], 0), ([3, END], 0.5),
    ([END], 0), ([], 0),
])
def test_likeness_is_the_share_of_the_longer_answers_places(other, same):
    """Compared with 3 4; a stop token is no part of an answer, and two empty answers are the same."""
    stop = frozenset({END})
    assert sample._likeness([3, 4, END], other, stop) == sample._likeness(other, [3, 4, END], stop) == same
    assert sample._likeness([END], [], stop) == 1


@pytest.mark.slow
def test_what_fills_the_canvas_behind_two_answers_is_no_likeness(kvbench, arguments, monkeypatch):
    """3 4 and 5 6 have no token in common, and six places after their ends."""
    denoise = sample.denoise

    def fixed(model, method, *rest, **more):
        ids = [3, 4] if method.card.name == "dkv-cache-decode" else [5, 6]
        return replace(denoise(model, method, *rest, **more), ids=[ids + [END] * 6])

    monkeypatch.setattr(sample, "denoise", fixed)
    found = kvbench(*arguments, "--method", "dkv-cache-decode").json["diffusion"]["baselines"]["none"]
    assert found["same_tokens"] == 0


@pytest.mark.few
@pytest.mark.parametrize("history", ["reference", "own"])
def test_a_prompt_holds_the_whole_conversation(kvbench, arguments, filled, folder, tmp_path, history):
    """Context, questions, and reference answers or the model's own up to their ends, rebuilt by hand."""
    assert kvbench(*arguments, "--method", "none", "--mode", "multi-turn", "--history", history).code == 0
    tokenizer = load_tokenizer(str(folder))
    prompts = [prompt for name, prompt, *_ in filled if name == "none"]
    lines = read_lines(tmp_path / "runs")
    assert len(prompts) == len(lines) == 4 * 3

    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids  # a token per byte, so parts may stand alone

    for line, prompt in zip(lines, prompts, strict=True):
        turn = line["turn"]
        own = [[x for x in other["ids"] if x != END] for other in lines if other["index"] == line["index"]]
        wanted = ids("\nq0?=")
        for i in range(turn):
            wanted += (own[i] if history == "own" else ids(f" sky{i}")) + ids(f"\nq{i + 1}?=")
        assert prompt[-len(wanted) :] == wanted
        assert len(prompt) == 47 + len(wanted) == line["tokens"]["context"]
        assert set(prompt[:47]) <= set(ids("abcdefgh "))


def test_who_goes_first_changes(kvbench, arguments, filled):
    """From sample to sample, so that a first call's costs are not always the method's."""
    kvbench(*arguments, "--method", "dkv-cache-decode")
    assert [x[0] for x in filled[::3]] == ["dkv-cache-decode", *["uncached-reference"] * 2, "dkv-cache-decode"]
    assert [x[3].steps for x in filled[::3]] == [8, 8, 4, 8]


@pytest.mark.slow
def test_the_noise_of_a_turn_is_its_own(kvbench, arguments, filled):
    """Seeds are a function of the run's seed, sample and turn: shared by the baselines, and never met twice."""
    kvbench(*arguments, "--method", "dkv-cache-decode", "--mode", "multi-turn", "--gen", "temperature=0.5")
    seeds = [x[4] for x in filled]
    turns = [seeds[i : i + 3] for i in range(0, len(seeds), 3)]
    assert all(len(set(x)) == 1 for x in turns)
    assert len(set(seeds)) == 12


def test_a_response_block_may_be_longer_than_an_answer(kvbench, arguments, tmp_path):
    """Nine tokens in blocks of three, of which an answer is the first eight."""
    longer = ("--gen", "block=3", "--gen", "response_length=9")
    found = kvbench(*arguments, "--method", "fast-dllm-dual", *longer).json["diffusion"]
    assert (found["response_length"], found["block"], found["steps"]) == (9, 3, 9)
    assert {len(x["ids"]) for x in read_lines(tmp_path / "runs")} == {8}


def test_a_user_error_in_one_sample_fails_it_alone(kvbench, arguments, monkeypatch, tmp_path):
    """As with autoregressive models: a score that is not finite, for example."""
    score = sample.score_answer

    def refuse(job, example, *rest):
        if example.id == second:
            raise UserError("scorer s gave nan")
        return score(job, example, *rest)

    kvbench(*arguments, "--method", "none")
    second = read_lines(tmp_path / "runs")[1]["sample"]
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.setattr(sample, "score_answer", refuse)
    answer = kvbench(*arguments, "--method", "none")
    assert answer.code == 1
    errors = [x["error"] for x in read_lines(tmp_path / "runs")]
    assert [x is None for x in errors] == [True, False, True, True]
    assert "scorer s gave nan" in errors[1]


@pytest.mark.slow
def test_an_answer_that_may_not_be_empty_begins_with_no_end(kvbench, arguments, filled):
    """A task says so; others may answer nothing."""
    kvbench(*arguments, "--method", "none")
    assert {tuple(x[5]) for x in filled} == {()}
    filled.clear()
    arguments[2] = f"{TOYS}:Wordy"
    kvbench(*arguments, "--method", "none")
    assert {tuple(x[5]) for x in filled} == {(END,)}


REFUSED = [
    ("none", "--mode multi-request", "mode multi-request has no meaning on a diffusion model"),
    ("none", "--visibility hidden", "leave --visibility, --recompress and --chunk out"),
    ("none", "--mode multi-turn --recompress", "leave --visibility, --recompress and --chunk out"),
    ("none", "--chunk 16", "leave --visibility, --recompress and --chunk out"),
    ("none", "--budget 25%", "none takes no budget"),
    ("none", "--gen steps=0", "--gen steps=0 must be a whole number, 1 or more"),
    ("none", "--gen steps=two", "--gen steps=two must be a whole number"),
    ("none", "--gen steps=2 --gen block=2", "steps=2 is less than one step for each of 4 blocks of 2 tokens"),
    ("none", "--gen remasking=high", "unknown remasking 'high'"),
    ("none", "--gen temperature=-1", "--gen temperature=-1 must be a number from 0 on"),
    ("none", "--gen threshold=1.5", "--gen threshold=1.5 must be a number from 0 to 1"),
    ("none", "--gen threshold=0.9 --gen steps=4", "--gen steps cannot be combined with threshold"),
    ("none", "--gen threshold=0.9 --gen remasking=random", "--gen threshold needs confidences"),
    ("none", "--gen beams=4", "unknown generation setting 'beams'"),
    ("none", "--device-map auto", "which no device map supports"),
    ("none", "--length 256 --gen response_length=9", "needs up to 257 tokens, and model"),
    ("none", "--gen block=3", "=3 does not divide a response block of 8 tokens. Use one of [1, 2, 4, 8], or --gen"),
    ("none", "--gen block=32", "does not divide a response block of 8 tokens. Use one of [1, 2, 4, 8], or --gen resp"),
    ("none", f"--task {TOYS}:Uneven --gen block=16", "block=16 does not divide a response block of 8"),
    ("none", "--gen response_length=7", "length=7 is shorter than an answer, which may have 8 tokens. Use 8 or"),
    ("none", "--gen response_length=0", "--gen response_length=0 must be a whole number, 1 or more"),
    ("dkv-cache-greedy", "", "add --gen remasking=random"),
    ("local-leap", "", "--gen threshold=0.9"),
    ("window-diffusion", "--gen block=4", "leave --gen block out"),
    ("elastic-cache", "--gen block=4", "leave --gen block out"),
    ("fast-ddrive", "--set scaffold={9}", "the scaffold has 9 tokens, and the answer 8. Use a shorter scaffold"),
    ("dkv-cache-decode", "--set first=0", "dkv-cache-decode: first must be 1 or more, got 0"),
    ("dkv-cache-decode", "--set shift=right", "shift must be one of un, un_right, got right"),
    ("dkv-cache-decode", "--model mini-diffusion-prefix --task kv-short --length 300",
     "dkv-cache-decode computes prompts that attend to the answer, and mini-diffusion-prefix is trained with prompts"),
    ("snapkv", "", "snapkv needs an autoregressive model; "),
    ("full", "", "is a diffusion model. Use --model mini, or another method (`kvbench list methods`); to run"),
    ("none", f"--task {TOYS}:Uneven --gen steps=2 --gen block=4",
     "less than one step for each of 4 blocks of 4 tokens"),
    ("none", f"--task {CHOICES}:Mixed", "mixed compares choices by log-probability"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize(("method", "options", "message"), REFUSED, ids=[f"{a} {b}"[:60] for a, b, _ in REFUSED])
def test_what_has_no_meaning_is_refused(kvbench, arguments, tmp_path, method, options, message):
    """Exit code 2, one line with the next step, and nothing written."""
    answer = kvbench(*arguments, "--method", method, *options.split())
    assert answer.code == 2, answer.out
    assert message in answer.err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_a_method_of_diffusion_models_is_refused_on_others(kvbench, arguments, plain_folder, tmp_path):
    """With what the model is, and where to look."""
    arguments[4] = plain_folder
    answer = kvbench(*arguments, "--method", "dkv-cache-decode")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith(
        f"kvbench: dkv-cache-decode needs a diffusion model; {plain_folder} is autoregressive. "
    )
    assert not (tmp_path / "runs").exists()


def test_every_setting_of_generation_is_another_run(folder, tmp_path):
    """The regime is a part of a run's identity; what a default stands for is its own."""
    model = load_model(str(folder))

    def spec(*generation, method="none"):
        return prepare(Request(
            method, f"{TOYS}:Letters", str(folder), generation=generation, samples=1, out=tmp_path, device="cpu"
        ), model).spec

    settings = ["steps=4", "steps=2", "block=4", "remasking=random", "temperature=0.5", "threshold=0.9",
                "max_new_tokens=4"]
    assert len({spec(*x).run_id for x in [(), *([y] for y in settings)]}) == len(settings) + 1
    assert spec("steps=4", "max_new_tokens=4").run_id == spec("max_new_tokens=4", "steps=4").run_id
    assert spec().generation.decoding == "denoising"
    assert spec().generation.denoising.tokens_per_step == 1


def test_a_task_bounds_the_tokens_of_a_step(tmp_path):
    """Where each token of an answer follows from the one before, one at a time; a model's own number elsewhere."""
    model = load_model("mini-diffusion")

    def regime(task, *generation):
        return prepare(Request(
            "none", task, model.id, generation=generation, samples=1, length=512, out=tmp_path, device="cpu"
        ), model).spec.generation.denoising

    assert model.masking.tokens_per_step == regime("niah_multikey_1").tokens_per_step == 4
    assert regime("running-sums").tokens_per_step == 1
    assert regime("running-sums", "steps=8").steps == 8
